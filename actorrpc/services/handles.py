"""The two ends of a reference: the owner's entry, with the object in it, and the handles of those who use it."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.services.executor import invoke
from actorrpc.services.forks import OwnerForks
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from actorrpc.runtime.cells import MailboxCell
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.services.forks import Id, UserFork
    from actorrpc.services.objects import Objects


class Entry:
    """The owner's side of a reference: the object, or the error of its creation. It is the cell of the reference's id.

    Attributes:
        id: the reference's id.
        forks: who holds it.
        ready: done when the object, or the error, is there.
        mailbox: the mailbox in front of an actor; None for any other object.
        held: whether the mailbox stays closed until somebody opens it.
    """

    def __init__(self, service: Objects, ref: Id, held: bool = False) -> None:
        self.id, self._service, self.held, self.forks = ref, service, held, OwnerForks()
        self.ready = Completion()
        self.mailbox: MailboxCell | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self.handles: list[None] = []
        """One for each hold of the owner's own; a list, since finalizers may change it without a lock."""
        self.expected = False
        """Whether a reference has come before the message that makes its object."""
        self.let_go = False
        """Whether it was said that nobody holds the object any more."""
        self._waiting: list[Message] = []
        self._door = threading.Lock()

    @property
    def value(self) -> Any:
        """The object.

        Raises:
            BaseException: what its creation raised.
        """
        self.check()
        return self._value

    def check(self) -> None:
        """Raises what the creation raised, if it is known to have."""
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # not one frame longer with every raise

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        if message.flags & Flag.KEEP:
            self._service.reserve(message)
        with self._door:
            if not self.ready.done:
                self._waiting.append(message)
                return None
        return self._job(message)

    def _job(self, message: Message) -> Job | None:
        if self.mailbox is not None:
            return self.mailbox.accept(message)
        return Job(Lane.HANDLER, self._service.worker.perform, message)

    def fill(self, value: Any, error: BaseException | None = None) -> None:
        """Puts the object, or the error of its creation, in; lets in what has waited for it."""
        service = self._service
        self._value, self._error = value, error
        self._trace = error.__traceback__ if error is not None else None
        if error is None and service.mailbox_for is not None:
            self.mailbox = service.mailbox_for(value, self)
        with self._door:
            service.worker.complete(self.ready)
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                job = self._job(message)
                if job is not None:
                    service.worker.crew.submit(job)
        if self.mailbox is not None and not self.used:  # it was dropped while it was being made
            service.worker.keeper.drop(self)

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
        """Runs a method, or hands out a copy of the object (a method named None)."""
        with self._service.keeping(message) as give:
            method, args, kwargs = message.load()
            if method is None:
                give(self.value)
            else:
                invoke(message, getattr(self.value, method), args, kwargs, give)


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
                raise copy.copy(call.failure)
            self.creation = None
        self.entry.check()

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
    """

    def __init__(self, service: Objects, fork: UserFork) -> None:
        self.service, self.fork = service, fork
        self.ref, self.owner = fork.ref, fork.owner
        self.creation: Call | None = None
        self.failure: ActorRPCError | None = None

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

    def __del__(self) -> None:
        self.service.worker.keeper.drop(self.fork)
