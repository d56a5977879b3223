"""The two ends of a reference: the owner's entry, with the object in it, and the handles of those who use it."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.futures import Future
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.services.creator import keep
from actorrpc.services.executor import invoke
from actorrpc.services.forks import OwnerForks
from actorrpc.wire.envelope import Flag
from actorrpc.wire.failures import as_elsewhere, cause_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actorrpc.runtime.cells import MailboxCell
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.services.forks import Id, UserFork
    from actorrpc.services.objects import Objects


class Dressed:
    """A method's name, sent with something to be done around the method's call. To be subclassed.

    Attributes:
        name: the method's.
    """

    name: str

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what is called instead of the object's method, on the owner."""
        raise NotImplementedError


class Entry:
    """The owner's side of a reference: the object, or the error of its creation. It is the cell of the reference's id.

    Attributes:
        id: the reference's id.
        forks: who holds it.
        ready: done when the object, or the error, is there.
        mailbox: the mailbox in front of an actor; None for any other object.
        held: whether the mailbox stays closed until somebody opens it.
        handles: one for each hold of the owner's own; a list, since finalizers may change it without a lock.
        expected: whether a reference has come before the message that makes its object.
        let_go: whether it was said that nobody holds the object any more.
    """

    # A dictionary as well: a recorded actor's place has a `run` of its own.
    __slots__ = (
        "__dict__", "__weakref__", "_door", "_error", "_filled", "_future", "_lets_in", "_service", "_value",
        "_waiting", "expected", "forks", "handles", "held", "id", "let_go", "mailbox", "ready",
    )  # fmt: skip

    def __init__(self, service: Objects, ref: Id, held: bool = False) -> None:
        self.id, self._service, self.held, self.forks = ref, service, held, OwnerForks()
        self.ready = Completion()
        self.mailbox: MailboxCell | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.handles: list[None] = []
        self.expected = self.let_go = self._filled = self._lets_in = False
        self._waiting: list[Message] = []
        self._future: Future[None] | None = None
        self._door = threading.RLock()  # reentrant: a finalizer of the user's may call while the collector runs in it

    @property
    def value(self) -> Any:
        """The object.

        Raises:
            BaseException: what its creation raised.
        """
        self.check()
        return self._value

    def check(self) -> None:
        """Raises what the creation raised, if it is known to have; its cause tells where."""
        if self._error is not None:
            raise _copied(self._error) or self._error.with_traceback(None)

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        if message.flags & Flag.KEEP:
            self._service.reserve(message)
        with self._door:
            if not self._lets_in:
                self._waiting.append(message)
                return None
        return self._job(message)

    def _job(self, message: Message) -> Job | None:
        if self.mailbox is not None:
            return self.mailbox.accept(message)
        return (Lane.HANDLER, self._service.worker.perform, message)

    def fill(self, value: Any, error: BaseException | None = None) -> None:
        """Puts the object, or the error of its creation, in; lets in what has waited for it. The first time counts."""
        service = self._service
        with self._door:
            if self._filled:
                return
            self._filled = True
        self._value = value
        self._error = error = None if error is None else _to_keep(error, str(service.worker))
        if error is None and service.mailbox_for is not None:
            self.mailbox = service.mailbox_for(value, self)
        future = None
        while not self._lets_in:
            with self._door:
                waiting, self._waiting = self._waiting, []
                self._lets_in = not waiting
                future = self._future
            # Without the door: the holders of the locks that this takes may be in a finalizer, which wants the door.
            for message in waiting:
                job = self._job(message)
                if job is not None:
                    service.worker.crew.submit(job)
        service.worker.complete(self.ready)
        if future is not None:
            _settle(service, future, error)
        if self.mailbox is not None and not self.used:  # it was dropped while it was being made
            service.worker.keeper.drop(self)

    def future(self) -> Future[None]:
        """Returns the future of its creation, the same each time: None, or the error."""
        with self._door:
            if self._future is None:
                self._future = Future._of(self._service.worker)
                if self._lets_in:
                    _complete(self._future, self._error)
            return self._future

    @property
    def used(self) -> bool:
        """Whether anybody holds the object."""
        return self.held or bool(self.handles or self.forks.holders)

    def adopt(self, messages: Iterable[Message]) -> None:
        """Takes messages that came before the object's creation did."""
        for message in messages:
            message.cell = self
            self._waiting.append(message)

    def run(self, message: Message) -> None:
        """Runs a method. Instead of its name there may be the name with what is to be done around it, a function to
        call with the object, or None for a copy.
        """
        if message.kept is None:
            self._call(message, message.reply)
        else:
            keep(message, self._call)

    def _call(self, message: Message, give: Callable[[Any], None]) -> None:
        method, args, kwargs = message.load()
        if isinstance(method, str):
            invoke(message, self._method(method), args, kwargs, give)
        elif method is None:
            give(self.value)
        elif isinstance(method, Dressed):
            invoke(message, method.around(self._method(method.name)), args, kwargs, give)
        else:
            give(method(self.value, *args, **kwargs))

    def _method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the object.

        Raises:
            AttributeError: it has no attribute of this name.
            TypeError: it has, but that cannot be called.
        """
        if self._error is not None:
            self.check()
        value = self._value
        method = getattr(value, name)
        if not callable(method):
            raise TypeError(
                f"{name!r} of the {type(value).__qualname__} on {self._service.worker} is a "
                f"{type(method).__qualname__} and cannot be called; to fetch it, have a function run there: "
                f"rpc_sync(ref.owner(), lambda ref: ref.local_value().{name}, args=(ref,))"
            )
        return method  # type: ignore[no-any-return]


class OwnerHandle:
    """The owner's own hold on an object.

    Arguments:
        counted: whether it keeps the object in use; an actor's reference to itself does not.

    Attributes:
        creation: the call that makes the object, where this reference has made it.
    """

    def __init__(self, service: Objects, entry: Entry, counted: bool = True) -> None:
        self.service, self.entry, self._counted = service, entry, counted
        self.ref, self.owner = entry.id, service.worker.id
        self.creation: Call | None = None
        if counted:
            entry.handles.append(None)

    confirmed = True

    def check(self) -> None:
        """Raises what the object's creation is known to have failed of; its time may have run out."""
        call = self.creation
        if call is not None and call.done:
            if call.failure is not None:
                raise self.service.failure_of(call)
            self.creation = None
        self.entry.check()

    def future(self) -> Future[None]:
        """Returns the future of the object's creation."""
        return self.entry.future()

    def __del__(self) -> None:
        entry = self.entry
        if self._counted:
            entry.handles.pop()
            if entry.mailbox is not None and not entry.handles:
                self.service.worker.keeper.drop(entry)


class UserHandle:
    """A user's hold on another worker's object; its end is the fork's.

    Attributes:
        creation: the call that makes the object, or records the fork; None once it is known to have gone well.
        failure: why there is no use in trying, found on this side.
        type: the object's type, where it was asked for.
    """

    __slots__ = ("__weakref__", "_future", "creation", "failure", "fork", "owner", "ref", "service", "type")

    def __init__(self, service: Objects, fork: UserFork) -> None:
        self.service, self.fork = service, fork
        self.ref, self.owner = fork.ref, fork.owner
        self.creation: Call | None = None
        self.failure: ActorRPCError | None = None
        self.type: Future[Any] | None = None
        self._future: Future[None] | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the owner is known to have recorded the fork."""
        return self.fork.confirmed

    def check(self) -> None:
        """Raises what the reference's creation, or its recording, is known to have failed of.

        Each time a fresh exception: one that was raised holds frames, and those this handle.
        """
        call = self.creation
        if call is not None and call.done:
            if call.failed:
                raise self.service.failure_of(call)
            self.creation = None
        if self.failure is not None:
            raise copy.copy(self.failure)

    def future(self) -> Future[None]:
        """Returns the future of the object's creation, or of the recording of the fork; the same each time."""
        with self.service.door:
            if self._future is None:
                self._future = self._made()
            return self._future

    def _made(self) -> Future[None]:
        service, call = self.service, self.creation
        if call is None or self.failure is not None:
            future = Future._of(service.worker)
            _complete(future, copy.copy(self.failure))
            return future
        return _Creation._of_creation(service, call)

    def __del__(self) -> None:
        self.service.worker.keeper.drop(self.fork)


class _Creation(Future[None]):
    """The future of an object's creation, or of a fork's recording: it waits for the call itself."""

    _service: Objects

    @classmethod
    def _of_creation(cls, service: Objects, call: Call) -> _Creation:
        future = cls._of(service.worker, call)
        assert isinstance(future, _Creation)
        future._service = service
        if call.done and not call.failed:
            future._settle_new()
            return future
        call.then = future._finish
        if call.done:  # it came before it could see what hangs on it
            future._settle_here()
        return future

    def _read(self, call: Call) -> None:
        if call.failed:
            raise self._service.failure_of(call)  # a fresh one: the call's own is asked for by the reference, too


def _to_keep(error: BaseException, where: str) -> BaseException:
    """Copies an error without its frames, which refer to all sorts of things, references too; they are kept as text.

    One that cannot be copied is kept itself, as it is.
    """
    error = as_elsewhere(error)
    kept = _copied(error) or error
    kept.__cause__ = cause_here(error, where)
    return kept


def _copied(error: BaseException) -> BaseException | None:
    try:
        made = copy.copy(error)
    except Exception:  # a class of the user's whose __init__ takes something else than its args
        return None
    if type(made) is not type(error):
        return None
    made.__cause__ = error.__cause__
    return made.with_traceback(None)


def _settle(service: Objects, future: Future[None], error: BaseException | None) -> None:
    """Completes a future of a creation, on a thread on which callbacks may run; at the end there are none any more."""
    worker = service.worker
    if worker.open and not service.closing:
        worker.crew.submit((Lane.FREE, lambda _: _complete(future, error), None))
    else:
        _complete(future, error)


def _complete(future: Future[None], error: BaseException | None) -> None:
    future._complete_once(None, None if error is None else _copied(error) or error)  # whoever waits adds frames
