"""The objects service: what references refer to, and the counting of who holds them."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from actorrpc.errors import ActorRPCError, NotAMemberError, RPCTimeoutError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services import creator
from actorrpc.services.early import Early
from actorrpc.services.forks import UserForks
from actorrpc.services.handles import Entry, OwnerHandle, UserHandle
from actorrpc.services.ids import OBJECTS, OWN_NUMBER, ROOT
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.cells import MailboxCell
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message, Parcel
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.forks import Delete, Id, UserFork
    from actorrpc.services.leaks import Leaks

log = logging.getLogger("actorrpc")

Handle = TypeVar("Handle", OwnerHandle, UserHandle)
Written = tuple["Id", int, "Id", int]
"""A reference in a message: its id, its owner, the new fork, and the fork's parent (the sender's worker id)."""


class Objects:
    """The service of one worker.

    Attributes:
        mailbox_for: makes the mailbox of an object that is an actor; returns None for others. Set by the face.
        construct: called as `construct(entry, function, *args, **kwargs)`, calls the function that makes an object; the
            face's knows how to prepare an actor for its `__init__`.
        leaks: notes where references are made, for a report at the end; None where nobody has asked for one.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.mailbox_for: Callable[[Any, Entry], MailboxCell | None] | None = None
        self.construct: Callable[..., Any] = creator.construct
        self.leaks: Leaks | None = None
        self._users = UserForks()
        self._owned: dict[Id, Entry] = {}
        """What others hold."""
        self._entries: weakref.WeakValueDictionary[Id, Entry] = weakref.WeakValueDictionary()
        """What only the owner's own threads hold, and a few others: `known` looks in both."""
        self._early = Early(self)
        self._ids = itertools.count()
        # Reentrant: the collector may run a finalizer of the user's, which calls, in the midst of what it guards.
        self.door = threading.RLock()
        self.closing = False
        """Whether the session is at its end: jobs that are submitted may not run any more."""
        self.released: Callable[[Any], None] | None = None
        """Called, in a thread of the pool, with an object that nobody else holds any more. Set by the face."""
        self.root = self._entries[ROOT] = Entry(self, ROOT, held=True)
        """The place of the actor that a worker is launched as. It lives as long as its worker, and is not counted."""
        worker.services[Objects] = self
        worker.cells[ROOT] = self.root
        worker.fallback = self._early
        creator.install(self)
        worker.cells[OBJECTS] = ServiceCell(worker, Lane.CONTROL, self._control)
        worker.members.watchers.append(self._gone)
        worker.keeper.bury = self.bury

    # -- what the face asks for

    def own(self, value: Any) -> OwnerHandle:
        """Makes a reference to an object of this worker."""
        entry = self.entry((self.worker.id, self._new_id()))
        entry.fill(value)
        return self._noted(OwnerHandle(self, entry), type(value))

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
            number = self._new_id()
            call = worker.request(
                to, target, body, timeout, what, flags=Flag.KEEP, number=number, bounded=True, counted=True
            )
            ref = worker.id, call.id
            with self.door:
                entry = self._owned[ref]
            own = OwnerHandle(self, entry)
            own.creation = call
            self._delete(ref, ref)  # the fork that held it until now
            return self._noted(own, what)
        number = self._new_id()
        next(self._ids)  # what the fork is shown with: its id is the reference's
        ref = worker.id, number
        with self.door:
            fork = self._users.add(ref, ref, to, confirmed=False)
        try:
            # Confirmed also with an error: the owner has made room for the object before it failed. And after a
            # timeout: the order of messages sees to it that a deletion comes after what it deletes.
            call = worker.request(
                to, target, body, timeout, what, None, partial(self._confirm_later, fork), Flag.KEEP, number, True, True
            )
        except BaseException:
            self._users.forget(ref)
            raise
        handle = UserHandle(self, fork)
        handle.creation = call
        return self._noted(handle, what)

    def write(self, handle: OwnerHandle | UserHandle, parcel: Parcel) -> Written:
        """Makes a new fork for the receiver of a message that a reference is written into.

        Raises:
            NotAMemberError: the reference is of another world than the message.
            BaseException: the reference's creation failed.
        """
        if parcel.worker is not self.worker:
            raise NotAMemberError(
                f"reference {handle.ref} belongs to {self.worker}, and cannot be sent by {parcel.worker}; "
                f"after a shutdown and another init_rpc, references are to be made anew"
            )
        handle.check()
        me = self.worker.id
        fork = me, self._new_id()
        with self.door:
            if isinstance(handle, OwnerHandle):
                self.record(handle.entry, fork, parcel.peer)  # RULE RR2
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
        (ref, owner, fork, parent), me = written, self.worker.id
        if owner == me:
            with self.door:
                entry = self.known(ref)
                if entry is None:  # its creation may still be on its way, from the one who passed the reference on
                    entry = self._early.expect(ref)
                own = OwnerHandle(self, entry)  # before the fork goes that held it until now
            if parent == me:
                self._delete(ref, fork)
            else:
                self._tell(parent, ("accept", fork))
            return self._noted(own, sender=parent)
        with self.door:
            held = self._users.add(ref, fork, owner, confirmed=parent == owner)
        handle = UserHandle(self, held)
        if parent != owner:  # RULE RR3

            def recorded(call: Call) -> None:
                if call.failed:
                    with self.door:
                        self._users.forget(fork)
                else:
                    self._confirm_later(held)
                # In any case: a parent that is never told would be kept for ever.
                self.worker.crew.submit((Lane.CONTROL, lambda _: self._tell(parent, ("accept", fork)), None))

            try:
                handle.creation = self.worker.request(
                    owner, OBJECTS, ("record", ref, fork), 0.0, "recording a reference", note=recorded
                )
            except ActorRPCError as e:  # the owner is gone: whoever uses the reference shall hear of it
                handle.failure = e.with_traceback(None)
                self._users.forget(fork)
                self._tell(parent, ("accept", fork))
        return self._noted(handle, sender=parent)

    def failure_of(self, call: Call) -> BaseException:
        """Makes the error that a call ended with, which may be asked for any number of times."""
        if call.failure is not None:
            if isinstance(call.failure, RPCTimeoutError) and call.sent_flags & Flag.KEEP:
                return RPCTimeoutError(f"RRef creation timed out, so that the object may not exist: {call.failure}")
            return copy.copy(call.failure)
        try:
            self.worker.answers.read(copy.copy(call))  # of a copy: it takes the frames out
        except BaseException as e:
            return e.with_traceback(None)
        raise AssertionError("it did not fail")

    def adopt(self, ref: Id, owner: int) -> UserHandle:
        """Makes a reference to an object that is not counted, since it lives as long as its worker."""
        with self.door:
            fork = self._users.add(ref, (self.worker.id, self._new_id()), owner, confirmed=True)
            fork.ended = True
            self._users.forks.pop(fork.id)
        return UserHandle(self, fork)

    def close(self) -> None:
        """Lets go of all objects, at the end of the session: from now on an object lives as long as this process holds
        a reference to it, and one that has not come will not. May be called twice.
        """
        self.closing = True
        with self.door:
            entries = self._all()
            self._owned.clear()
            self._early.clear()
            self._users = UserForks()
            self.worker.keeper.dropped.clear()
        for entry in entries:
            if not (entry.ready.done or entry.held):
                entry.fill(None, NotAMemberError(f"{self.worker} has shut down; the object was never made"))
        if self.root.ready.done:  # the actor of a role is its references' alone
            self.root = Entry(self, ROOT, held=True)
            self.root.fill(None, NotAMemberError(f"{self.worker} has shut down"))

    def _noted(self, handle: Handle, what: object = None, sender: int | None = None) -> Handle:
        if self.leaks is not None:
            self.leaks.note(handle, what, sender)
        return handle

    def owned(self) -> list[Entry]:
        """Returns the places of the objects that others hold."""
        with self.door:
            return list(self._owned.values())

    def actors(self) -> list[Any]:
        """Returns the objects here that have a mailbox, whoever holds them."""
        return [entry.value for entry in self._all() if entry.mailbox is not None]

    def mailboxes(self) -> list[MailboxCell]:
        """Returns the mailboxes of the actors here."""
        return list({id(e.mailbox): e.mailbox for e in self._all() if e.mailbox is not None}.values())

    def statistics(self) -> dict[str, int]:
        """Returns counts: objects that others hold, forks held here, open children."""
        with self.door:
            return {
                "owned": len(self._owned),
                "forks": sum(len(e.forks.holders) for e in self._owned.values()),
                "held": len(self._users.forks),
                "children": len(self._users.parents),
            }

    def pending(self) -> dict[str, int]:
        """Returns counts of what is under way: objects that are not made yet, forks that are not confirmed."""
        with self.door:
            return {
                "unmade": sum(not e.ready.done for e in self._owned.values()),
                "unconfirmed": sum(not fork.confirmed for fork in self._users.forks.values()),
            }

    def reserve(self, message: Message) -> None:
        """Makes room for the object that a message will make. Under leadership: what is sent to it may come next."""
        ref = message.caller, message.call
        with self.door:
            # It is there when the message was sent again, by value, or when a reference to it has come before.
            entry = self.known(ref) or Entry(self, ref)
            self.record(entry, ref, message.caller)
            if ref not in self._owned:
                self._entries[ref] = entry
            self._early.take_up(ref, entry)
        message.kept = entry

    def _control(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "record":
            ref, fork = rest
            with self.door:
                entry = self.known(ref)
                if entry is None:  # its creation may still be on its way, from the one who passed the reference on
                    self._early.record(ref, fork, message)
                    return
                self.record(entry, fork, message.caller)
            message.reply(None)
        elif verb == "accept":
            with self.door:
                delete = self._users.close_child(rest[0])
            self._send([delete] if delete is not None else [])
        else:
            with self.door:
                released = [entry for ref, fork in reversed(rest[0]) if (entry := self._drop(ref, fork)) is not None]
            entry = None  # else the last object would outlive its turn
            while released:
                self._let_go(released.pop())

    def record(self, entry: Entry, fork: Id, holder: int) -> None:
        """Notes that another worker holds an object, unless that worker is gone. Under the door.

        What a worker has sent may be handled after it was found to be lost, and its forks were dropped.
        """
        if not entry.held and self.worker.peers[holder].standing is Standing.MEMBER:
            entry.forks.record(fork, holder)
            self._owned[entry.id] = self.worker.cells[entry.id] = entry

    def _delete(self, ref: Id, fork: Id) -> None:
        with self.door:
            entry = self._drop(ref, fork)
        if entry is not None:
            self._let_go(entry)

    def _drop(self, ref: Id, fork: Id) -> Entry | None:
        """Drops a fork; returns the object's place where that was the last one. Under the door."""
        entry = self._owned.get(ref)
        if entry is None or not entry.forks.delete(fork):
            return None
        self._release(ref)
        return entry

    def _release(self, ref: Id) -> None:
        entry = self._owned.pop(ref)
        self.worker.cells.pop(ref, None)
        if entry.handles or entry.mailbox is not None or not entry.ready.done:  # else nobody can come back to it
            self._entries[ref] = entry

    def _take_back(self, refs: list[tuple[Id, int, Id]]) -> None:
        """Undoes `write` for a message that was not, or could not be, read."""
        for ref, owner, fork in refs:
            if owner == self.worker.id:
                self._delete(ref, fork)
            else:
                with self.door:
                    delete = self._users.close_child(fork)
                self._send([delete] if delete is not None else [])

    def _confirm_later(self, fork: UserFork, _: Call | None = None) -> None:
        # Under leadership, where nothing may be sent: the mark is set here, what follows from it comes with the burial.
        fork.confirmed = True
        if fork.dropped:
            self.worker.keeper.drop(fork)

    def bury(self) -> None:
        """Ends what finalizers have left with the keeper."""
        dropped, deletes, entries = self.worker.keeper.dropped, [], []
        with self.door:
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
        with self.door:
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
            self.worker.crew.submit((Lane.FREE, self._say_released, entry))

    def _say_released(self, entry: Entry) -> None:
        if entry.used:  # somebody has got hold of it again
            entry.let_go = False
        elif self.released is not None:
            self.released(entry.value)

    def known(self, ref: Id) -> Entry | None:
        """Returns the place of an object, if anybody holds it. Under the door."""
        entry = self._owned.get(ref)
        return self._entries.get(ref) if entry is None else entry

    def _all(self) -> list[Entry]:
        """Returns the places of all objects."""
        with self.door:
            return list({**self._entries, **self._owned}.values())

    def entry(self, ref: Id) -> Entry:
        """Makes the place of an object that is yet to come."""
        entry = self._entries[ref] = Entry(self, ref)
        return entry

    def _new_id(self) -> int:
        return OWN_NUMBER | next(self._ids)
