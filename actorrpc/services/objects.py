"""The objects service: what references refer to, and the counting of who holds them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorGoneError, ActorRPCError, UnknownNameError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.services.executor import invoke
from actorrpc.services.forks import UserForks
from actorrpc.services.handles import Entry, OwnerHandle, UserHandle
from actorrpc.services.ids import CREATOR, OBJECTS, ROOT
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from actorrpc.runtime.cells import MailboxCell
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message, Parcel
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.forks import Delete, Id, UserFork

log = logging.getLogger("actorrpc")
_UNKNOWN_SECONDS = 5.0
"""How long a message for an unknown object is kept: its creation may still be on its way from a third worker."""

Written = tuple["Id", int, "Id", int]
"""A reference in a message: its id, its owner, the new fork, and the fork's parent (the sender's worker id)."""


class Objects:
    """The service of one worker.

    Attributes:
        mailbox_for: makes the mailbox of an object that is an actor; returns None for others. Set by the face.
        construct: called as `construct(entry, function, *args, **kwargs)`, calls the function that makes an object; the
            face's knows how to prepare an actor for its `__init__`.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.mailbox_for: Callable[[Any, Entry], MailboxCell | None] | None = None
        self.construct: Callable[..., Any] = _construct
        self._users = UserForks()
        self._owned: dict[Id, Entry] = {}
        """What others hold."""
        self._entries: weakref.WeakValueDictionary[Id, Entry] = weakref.WeakValueDictionary()
        """What anybody holds, the owner's own threads too."""
        self._unknown: dict[Id, list[Message]] = {}
        self._records: dict[Id, list[tuple[Id, Message]]] = {}
        """Forks to be recorded of objects whose creation has not come."""
        self._ids = itertools.count(1)
        # Reentrant: the collector may run a finalizer of the user's, which calls, in the midst of what it guards.
        self._door, self._reading = threading.RLock(), threading.Lock()
        self.released: Callable[[Any], None] | None = None
        """Called, in a thread of the pool, with an object that nobody else holds any more. Set by the face."""
        self.root = self._entries[ROOT] = Entry(self, ROOT, held=True)
        """The place of the actor that a worker is launched as. It lives as long as its worker, and is not counted."""
        worker.services[Objects] = self
        worker.cells[ROOT] = self.root
        worker.fallback = self
        worker.cells[CREATOR] = _Creator(self)
        worker.cells[OBJECTS] = ServiceCell(worker, Lane.CONTROL, self._control)
        worker.members.watchers.append(self._gone)
        worker.keeper.bury = self._bury

    # -- what the face asks for

    def own(self, value: Any) -> OwnerHandle:
        """Makes a reference to an object of this worker."""
        entry = self.entry((self.worker.id, self._new_id()))
        entry.fill(value)
        return OwnerHandle(self, entry)

    def create(
        self, to: int, target: tuple[int, int], body: tuple[object, ...], timeout: float, what: object
    ) -> OwnerHandle | UserHandle:
        """Sends a request whose result stays with the callee; returns a reference to it at once.

        Arguments:
            target: CREATOR, or the id of an object whose method is called.
            body: what the target takes.

        Raises as `Worker.request` does.
        """
        worker = self.worker
        if to == worker.id:
            call = worker.request(to, target, body, timeout, what, flags=Flag.KEEP)
            ref = worker.id, call.id
            with self._door:
                entry = self._owned[ref]
            own = OwnerHandle(self, entry)
            own.creation = call
            self._delete(ref, ref)  # the fork that held it until now
            return own
        made: list[UserFork] = []

        def answered(_: Call) -> None:
            # Also with an error: the owner has made room for the object before it failed. And after a timeout: the
            # order of messages sees to it that a deletion comes after what it deletes.
            if made:
                self._confirm_later(made[0])

        call = worker.request(to, target, body, timeout, what, note=answered, flags=Flag.KEEP)
        ref = worker.id, call.id
        with self._door:
            fork = self._users.add(ref, ref, to, confirmed=False)
        made.append(fork)
        handle = UserHandle(self, fork)
        handle.creation = call
        if call.done:  # it was answered before there was a fork to confirm
            self._confirm_later(fork)
        return handle

    def write(self, handle: OwnerHandle | UserHandle, parcel: Parcel) -> Written:
        """Makes a new fork for the receiver of a message that a reference is written into.

        Raises:
            BaseException: the reference's creation failed.
        """
        handle.check()
        me = self.worker.id
        fork = me, self._new_id()
        with self._door:
            if isinstance(handle, OwnerHandle):
                entry = handle.entry
                if not entry.held:
                    entry.forks.record(fork, parcel.peer)  # RULE RR2
                    self._owned[entry.id] = entry
                    self.worker.cells[entry.id] = entry
            else:
                self._users.open_child(handle.fork, fork, parcel.peer)
        if parcel.refs is None:
            parcel.refs, parcel.undo = [], self._take_back
        parcel.refs.append((handle.ref, handle.owner, fork))
        return handle.ref, handle.owner, fork, me

    def read(self, written: Written, parcel: Parcel) -> OwnerHandle | UserHandle:
        """Takes over a reference from a message.

        One of this worker's own whose object is gone says so when it is used.
        """
        ref, owner, fork, parent = written
        me = self.worker.id
        if owner == me:
            with self._door:
                entry = self._entries.get(ref)
                if entry is None:  # its creation may still be on its way, from the one who passed the reference on
                    entry = self.entry(ref)
                    entry.expected = True
                    self.worker.keeper.after(_UNKNOWN_SECONDS, lambda: self._give_up_expected(ref))
            own = OwnerHandle(self, entry)  # before the fork goes that held it until now
            if parent == me:
                self._delete(ref, fork)
            else:
                self._tell(parent, ("accept", fork))
            return own
        with self._door:
            held = self._users.add(ref, fork, owner, confirmed=parent == owner)
        handle = UserHandle(self, held)
        if parent != owner:  # RULE RR3

            def recorded(call: Call) -> None:
                if call.failed:
                    with self._door:
                        self._users.forget(fork)
                else:
                    self._confirm_later(held)
                # In any case: a parent that is never told would be kept for ever.
                self.worker.crew.submit(Job(Lane.CONTROL, lambda _: self._tell(parent, ("accept", fork)), None))

            try:
                handle.creation = self.worker.request(
                    owner, OBJECTS, ("record", ref, fork), 0.0, "recording a reference", note=recorded
                )
            except ActorRPCError as e:  # the owner is gone: whoever uses the reference shall hear of it
                handle.failure = e.with_traceback(None)
                self._users.forget(fork)
                self._tell(parent, ("accept", fork))
        return handle

    def failure_of(self, call: Call) -> BaseException:
        """Makes the error that a call ended with, which may be asked for any number of times."""
        if call.failure is not None:
            return copy.copy(call.failure)
        with self._reading:  # which takes the frames out of the call
            frames = call.frames
            try:
                self.worker.result(call)
            except BaseException as e:
                return e.with_traceback(None)
            finally:
                call.frames = frames
        raise AssertionError("it did not fail")

    def adopt(self, ref: Id, owner: int) -> UserHandle:
        """Makes a reference to an object that is not counted, since it lives as long as its worker."""
        with self._door:
            fork = self._users.add(ref, (self.worker.id, self._new_id()), owner, confirmed=True)
            fork.ended = True
            self._users.forks.pop(fork.id)
        return UserHandle(self, fork)

    def actors(self) -> list[Any]:
        """Returns the objects here that have a mailbox."""
        with self._door:
            entries = [self.root, *self._owned.values()]
        return [entry.value for entry in entries if entry.mailbox is not None]

    def statistics(self) -> dict[str, int]:
        """Returns counts: objects that others hold, forks held here, open children."""
        with self._door:
            return {
                "owned": len(self._owned),
                "forks": sum(len(e.forks.holders) for e in self._owned.values()),
                "held": len(self._users.forks),
                "children": len(self._users.parents),
            }

    # -- messages

    def reserve(self, message: Message) -> None:
        """Makes room for the object that a message will make. Under leadership: what is sent to it may come next."""
        ref = message.caller, message.call
        with self._door:
            # It is there when the message was sent again, by value, or when a reference to it has come before.
            entry = self._entries.get(ref) or self.entry(ref)
            entry.expected = False
            entry.forks.record(ref, message.caller)
            self._owned[ref] = self.worker.cells[ref] = entry
            entry.adopt(self._unknown.pop(ref, ()))
            for fork, record in self._records.pop(ref, ()):
                entry.forks.record(fork, record.caller)
                self.worker.crew.submit(Job(Lane.CONTROL, lambda m: m.reply(None), record))
        message.kept = entry

    @contextlib.contextmanager
    def keeping(self, message: Message) -> Iterator[Callable[[Any], None]]:
        """Gives what is to be called with a message's result: it answers, or puts the result in its place first.

        An error inside goes to that place, too.
        """
        entry = message.kept
        if not isinstance(entry, Entry):
            yield message.reply
            return

        def give(value: Any) -> None:
            message.reply(None)  # first, so that the reference is confirmed before any use of it is answered
            entry.fill(value)

        try:
            yield give
        except BaseException as e:
            if not (isinstance(e, UnknownNameError) and e.module in ("__main__", "__mp_main__")):
                entry.fill(None, e)  # else the caller sends it again, by value
            raise

    def accept(self, message: Message) -> Job | None:
        """Takes what is addressed to an object that others do not hold, or that is not known yet."""
        ref = message.creator, message.local
        with self._door:
            entry = self._entries.get(ref)
            if entry is None:
                message.cell = self
                first = ref not in self._unknown
                self._unknown.setdefault(ref, []).append(message)
                if first:
                    self.worker.keeper.after(_UNKNOWN_SECONDS, lambda: self._give_up(ref))
                return None
        return entry.accept(message)

    def run(self, message: Message) -> None:
        """Refuses what was addressed to an object that never came."""
        ref = message.creator, message.local
        raise ActorGoneError(f"{self.worker} has no object of reference {ref}: it was released, or never created")

    def _give_up(self, ref: Id) -> None:
        with self._door:
            messages = self._unknown.pop(ref, [])
        for message in messages:
            self.worker.crew.submit(Job(Lane.FREE, self.worker.perform, message))

    def _give_up_expected(self, ref: Id) -> None:
        entry = self._entries.get(ref)
        if entry is not None and entry.expected:
            entry.expected = False
            entry.fill(None, ActorGoneError(f"the object of reference {ref} on {self.worker} is gone, or never came"))

    def _give_up_records(self, ref: Id) -> None:
        with self._door:
            records = self._records.pop(ref, [])
        for _, message in records:
            message.fail(ActorGoneError(f"the object of reference {ref} on {self.worker} is gone, or never came"))

    def _control(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "record":
            ref, fork = rest
            with self._door:
                entry = self._entries.get(ref)
                if entry is None:  # its creation may still be on its way, from the one who passed the reference on
                    first = ref not in self._records
                    self._records.setdefault(ref, []).append((fork, message))
                    if first:
                        self.worker.keeper.after(_UNKNOWN_SECONDS, lambda: self._give_up_records(ref))
                    return
                if not entry.held:
                    entry.forks.record(fork, message.caller)
                    self._owned[ref] = self.worker.cells[ref] = entry
            message.reply(None)
        elif verb == "accept":
            with self._door:
                delete = self._users.close_child(rest[0])
            self._send([delete] if delete is not None else [])
        else:
            for ref, fork in rest[0]:
                self._delete(ref, fork)

    def _delete(self, ref: Id, fork: Id) -> None:
        with self._door:
            entry = self._owned.get(ref)
            if entry is not None and entry.forks.delete(fork):
                self._release(ref)
            else:
                return
        self._let_go(entry)

    def _release(self, ref: Id) -> None:
        del self._owned[ref]
        self.worker.cells.pop(ref, None)

    def _take_back(self, refs: list[tuple[Id, int, Id]]) -> None:
        """Undoes `write` for a message that was not, or could not be, read."""
        for ref, owner, fork in refs:
            if owner == self.worker.id:
                self._delete(ref, fork)
            else:
                with self._door:
                    delete = self._users.close_child(fork)
                self._send([delete] if delete is not None else [])

    # -- the end of forks

    def _confirm_later(self, fork: UserFork) -> None:
        # Under leadership, where nothing may be sent: the mark is set here, what follows from it comes with the burial.
        fork.confirmed = True
        if fork.dropped:
            self.worker.keeper.drop(fork)

    def _bury(self) -> None:
        dropped, deletes, entries = self.worker.keeper.dropped, [], []
        with self._door:
            while dropped:
                what = dropped.popleft()
                if isinstance(what, Entry):
                    entries.append(what)
                elif (delete := self._users.drop(what)) is not None:
                    deletes.append(delete)
        self._send(deletes)
        while entries:
            self._let_go(entries.pop())

    def _send(self, deletes: list[Delete]) -> None:
        owners: dict[int, list[tuple[Id, Id]]] = {}
        for delete in deletes:
            owners.setdefault(delete.owner, []).append((delete.ref, delete.fork))
        for owner, forks in owners.items():
            self._tell(owner, ("delete", forks))

    def _tell(self, to: int, body: object) -> None:
        try:
            self.worker.tell(to, OBJECTS, body, control=True)
        except ActorRPCError as e:
            log.debug("%s: %s for rank %d could not leave: %s", self.worker.record.name, body, to, e)

    def _gone(self, peer: Peer) -> None:
        released = []
        with self._door:
            deletes = self._users.lose(peer.record.id)
            for ref, entry in list(self._owned.items()):
                if entry.forks.drop_holder(peer.record.id):
                    self._release(ref)
                    released.append(entry)
        self._send(deletes)
        while released:
            self._let_go(released.pop())

    def _let_go(self, entry: Entry) -> None:
        """Says that nobody holds an object any more, if so; not under the door, since its finalizers may run here."""
        if self.released is not None and entry.mailbox is not None and not (entry.used or entry.let_go):
            entry.let_go = True
            self.worker.crew.submit(Job(Lane.FREE, self._say_released, entry))

    def _say_released(self, entry: Entry) -> None:
        if entry.used:  # somebody has got hold of it again
            entry.let_go = False
        elif self.released is not None:
            self.released(entry.value)

    def entry(self, ref: Id) -> Entry:
        """Makes the place of an object that is yet to come."""
        entry = self._entries[ref] = Entry(self, ref)
        return entry

    def _new_id(self) -> int:
        return 1 << 63 | next(self._ids)  # never to meet the id of a call


class _Creator:
    """The cell that takes requests to make an object out of nothing but a function's result."""

    def __init__(self, service: Objects) -> None:
        self._service = service

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        self._service.reserve(message)
        return Job(Lane.HANDLER, self._service.worker.perform, message)

    def run(self, message: Message) -> None:
        with self._service.keeping(message) as give:
            function, args, kwargs = message.load()
            entry = message.kept
            assert isinstance(entry, Entry)
            make = functools.partial(self._service.construct, entry, function)
            invoke(message, make, args, kwargs, give, mark=function)


def _construct(_: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
