"""The kernel: carries envelopes to actors and their answers back, and knows nothing of what they mean."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import (
    ActorRPCError,
    DeserializationError,
    NotAMemberError,
    ProtocolError,
    RPCTimeoutError,
    UnknownNameError,
    WorkerLostError,
)
from actorrpc.runtime.completion import Call, Completion, Waiter, describe
from actorrpc.runtime.crew import Crew, Job, Lane
from actorrpc.runtime.handling import Handling, here
from actorrpc.runtime.keeper import Keeper
from actorrpc.runtime.message import Message, Parcel
from actorrpc.runtime.peers import Peer, Standing
from actorrpc.wire import envelope
from actorrpc.wire.codec import Codec, mentions_main
from actorrpc.wire.envelope import HEADER_SIZE, MARK, STRANGER, Flag, Kind, pack_fields
from actorrpc.wire.failures import read_failure, write_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.cells import Cell
    from actorrpc.runtime.clock import Clock
    from actorrpc.runtime.futures import Future
    from actorrpc.runtime.peers import Record
    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.transport import Transport

log = logging.getLogger("actorrpc")

_NEVER = float("inf")
_EARLY_LIMIT = 10_000
_unpack = envelope._LAYOUT.unpack_from


class Worker:
    """One member of a world, in one process: its actors, its peers, its pending calls and its threads.

    Arguments:
        record: who it is; a directory may replace it (`become`) before the first call.
        transport: what carries its messages.
        clock: what passes its time.
        threads: how many handlers may run at once.
        timeout: seconds that a call gets which names none; 0 for ever.
    """

    def __init__(self, record: Record, transport: Transport, clock: Clock, *, threads: int, timeout: float) -> None:
        self.record, self.transport, self.clock, self.timeout = record, transport, clock, timeout
        self.id = record.id
        self.codec = Codec()
        self.peers: dict[int, Peer] = {}
        self.names: dict[str, int] = {}
        """The ids of the members, by name."""
        self.cells: dict[tuple[int, int], Cell] = {}
        self.fallback: Cell | None = None
        """Takes what is addressed to actors that have no cell."""
        self.greeted: Callable[[bytes], None] | None = None
        """Takes greetings, in the control lane."""
        self.watchers: list[Callable[[Peer], None]] = []
        """Called, in the control lane, with every peer that was lost or has left."""
        self.services: dict[type, Any] = {}
        """What is installed here, by type, for those who only know the worker."""
        self.crew = Crew(record.name, transport, clock, self._route, threads)
        self.keeper = Keeper(self)
        self.pending: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._unsettled: deque[Call] = deque()
        self._unpublished: deque[Future[Any]] = deque()
        self._early: list[Sequence[Frame]] = []
        self._peers_door = threading.Lock()
        self.sent = self.received = 0
        """How many requests and tells went out and came in, house-keeping apart (nearly: threads may race)."""
        self.ending = False
        """Whether the world is about to end, so that peers that go are no surprise."""
        self.open = True
        """False once `stop` has begun: no calls any more."""

    def __str__(self) -> str:
        return str(self.record)

    def start(self) -> None:
        """Starts to receive."""
        self.keeper.start()

    # -- membership

    def become(self, record: Record) -> None:
        """Takes the id that the directory gave."""
        self.record, self.id = record, record.id

    def admit(self, records: Sequence[Record]) -> None:
        """Learns of members; what they sent before this was known is taken up now."""
        with self._peers_door:
            for record in records:
                known = self.peers.get(record.id)
                if known is None or known.record.incarnation != record.incarnation:
                    self.peers[record.id] = Peer(record)
                    self.names[record.name] = record.id
            early, self._early = self._early, []
        for frames in early:
            job = self._route(frames)
            if job is not None:
                self.crew.submit(job)

    def peer(self, number: int) -> Peer:
        """Returns a peer that can be sent to, dialled.

        Raises:
            NotAMemberError: there is none of this id.
            WorkerLostError: it was lost or has left.
        """
        peer = self.peers.get(number)
        if peer is None:
            raise NotAMemberError(f"there is no worker of rank {number} in the world of {self}")
        if peer.standing is not Standing.MEMBER:
            raise self.lost_error(peer, "the message was not sent")
        if not peer.dialled:
            with peer.lock:
                if not peer.dialled:
                    self.transport.dial(number, peer.record.endpoints)
                    peer.dialled = True
            self.keeper.watch(peer)
        return peer

    def lose(self, number: int, reason: str, standing: Standing = Standing.LOST) -> None:
        """Takes a peer for gone: its calls fail, its queue is dropped, watchers hear of it. May be said twice."""
        peer = self.peers.get(number)
        if peer is None or number == self.id:
            return
        with peer.lock:
            if peer.standing is not Standing.MEMBER:
                return
            peer.standing, peer.reason = standing, reason
        self.transport.hang_up(number)
        if standing is Standing.LOST and self.open and not self.ending:
            log.warning("%s: lost %s: %s", self.record.name, peer.record, reason)
        for call in list(self.pending.values()):
            if call.peer == number:
                self.fail_call(call, self.lost_error(peer, "the call may or may not have run"))
        self.crew.submit(Job(Lane.CONTROL, self._tell_watchers, peer))

    def _tell_watchers(self, peer: Peer) -> None:
        for watcher in list(self.watchers):
            watcher(peer)

    def lost_error(self, peer: Peer, consequence: str) -> WorkerLostError:
        """Makes the error for a call to a peer that is gone."""
        word = "was lost" if peer.standing is Standing.LOST else "has left"
        r = peer.record
        return WorkerLostError(
            f"{r} {word}: {peer.reason}; {consequence}",
            worker=r.name, rank=r.id, host=r.host, pid=r.pid, reason=peer.reason,
        )  # fmt: skip

    # -- sending

    def write(self, body: object, peer: int, *, by_value: bool = False) -> tuple[Sequence[Frame], Parcel]:
        """Writes a payload for a peer.

        Raises:
            SerializationError: a part of it cannot be written.
        """
        parcel = Parcel(self, peer)
        try:
            return self.codec.dumps(body, parcel, by_value=by_value), parcel
        except BaseException:
            parcel.restart()
            raise

    def chain(self) -> int:
        """Returns the call chain of the present thread's handler, or a new one."""
        handling = here.handling
        if handling is not None and handling.chain is not None and handling.worker is self:
            return handling.chain
        return self.id << 40 | next(self._ids)

    def request(
        self,
        to: int,
        target: tuple[int, int],
        body: object,
        timeout: float = -1.0,
        what: object = "a call",
        then: Callable[[Call], None] | None = None,
        note: Callable[[Call], None] | None = None,
        flags: int = 0,
    ) -> Call:
        """Sends a request.

        Arguments:
            to: the callee's worker id.
            target: the actor's id there.
            body: the payload.
            timeout: seconds until the call expires; 0 for never, below 0 for the worker's default.
            what: what is called, for errors; see `Call`.
            then, note: see `Call`.
            flags: bits of `Flag`, beside those that the payload asks for.

        Returns the call, to be waited for and read with `result`.

        Raises:
            SerializationError, NotAMemberError, WorkerLostError: nothing was sent.
        """
        if not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be seconds (0: for ever), not {timeout!r} of type {type(timeout).__name__}")
        frames, parcel = self.write(body, to)
        again = None
        if mentions_main(frames):
            again = lambda: self.write(body, to, by_value=True)[0]  # noqa: E731
        return self.post(to, target, frames, timeout, what, parcel, again, then, note, flags)

    def post(
        self,
        to: int,
        target: tuple[int, int],
        frames: Sequence[Frame],
        timeout: float,
        what: object,
        parcel: Parcel | None = None,
        again: Callable[[], Sequence[Frame]] | None = None,
        then: Callable[[Call], None] | None = None,
        note: Callable[[Call], None] | None = None,
        flags: int = 0,
    ) -> Call:
        """`request` with a payload that is already written."""
        if timeout < 0:
            timeout = self.timeout
        deadline = self.clock.now() + timeout if timeout > 0 else None
        call = Call(next(self._ids), to, timeout, deadline, what)
        call.again, call.then, call.note = again, then, note
        if parcel is not None and parcel.refs:
            call.refs = parcel
            flags |= Flag.REFS
        call.sent_flags = flags
        self.pending[call.id] = call
        self.sent += 1
        try:
            self._emit(to, Kind.REQUEST, flags, call.id, target, self.chain(), timeout or _NEVER, frames)
        except BaseException:
            self.pending.pop(call.id, None)
            if parcel is not None:
                parcel.restart()
            raise
        if deadline is not None and deadline < self.keeper.due:
            self.keeper.schedule(deadline)
        return call

    def tell(self, to: int, target: tuple[int, int], body: object, *, control: bool = False) -> None:
        """Sends a message that is not answered. `control`: see `Flag.CONTROL`. Raises as `request` does."""
        frames, parcel = self.write(body, to)
        try:
            flags = (Flag.REFS if parcel.refs else 0) | (Flag.CONTROL if control else 0)
            self.sent += not control
            self._emit(to, Kind.TELL, flags, next(self._ids), target, self.chain(), _NEVER, frames)
        except BaseException:
            parcel.restart()
            raise

    def greet(self, way: int, data: bytes) -> None:
        """Sends a greeting along a way that was dialled by hand."""
        head = pack_fields(
            MARK, Kind.GREETING, 0, STRANGER, self.record.incarnation, 0, 0, 0, 0, 0, -1, _NEVER
        )  # fmt: skip
        self.transport.send(way, [head + data])

    def _emit(
        self,
        to: int,
        kind: int,
        flags: int,
        call: int,
        target: tuple[int, int],
        chain: int,
        remaining: float,
        frames: Sequence[Frame],
        hold: bool = False,
    ) -> None:
        if not self.open:
            raise NotAMemberError(f"{self} has shut down; no calls any more")
        creator, local = target
        first = frames[0]
        if to == self.id:
            head = pack_fields(
                MARK, kind, flags, to, self.record.incarnation, call, 0, creator, local, chain, -1, remaining
            )
            # Copies, so that a call to oneself does not share its arguments any more than another one.
            own: list[Frame] = [head + first, *(bytearray(memoryview(f)) for f in frames[1:])]
            job = self._route(own)
            if job is not None:
                self.crew.submit(job)
            return
        peer = self.peers.get(to)
        if peer is None or not peer.dialled or peer.standing is not Standing.MEMBER:
            peer = self.peer(to)
        with peer.lock:
            peer.sent += 1
            head = pack_fields(
                MARK,
                kind,
                flags,
                self.id,
                self.record.incarnation,
                call,
                peer.sent,
                creator,
                local,
                chain,
                -1,
                remaining,
            )
            try:
                if len(frames) == 1:
                    self.transport.send(to, (head + first,), hold)
                else:
                    self.transport.send(to, [head + first, *frames[1:]])
            except KeyError:
                raise self.lost_error(peer, "the message was not sent") from None

    # -- routing (under leadership: RULE TR1)

    def _route(self, frames: Sequence[Frame]) -> Job | None:
        first = frames[0]
        try:
            mark, kind, flags, caller, incarnation, call_id, sequence, creator, local, chain, context, remaining = (
                _unpack(first)
            )
            if mark != MARK:
                raise ProtocolError("not a message of this protocol")
        except Exception:
            log.debug("%s: dropped %d bytes that are no message", self.record.name, envelope.size_of(frames))
            return None
        if caller != self.id or incarnation != self.record.incarnation:
            peer = self.peers.get(caller)
            if peer is None or peer.record.incarnation != incarnation or peer.standing is not Standing.MEMBER:
                return self._stranger(frames, kind)
            peer.seen += 1
            if peer.seen != sequence:
                self.lose(caller, f"messages {peer.seen} to {sequence - 1} from it did not arrive")
                return None
        number = next(self._numbers)
        if kind <= Kind.TELL:
            self.received += not flags & Flag.CONTROL
            deadline = None if remaining == _NEVER else self.clock.now() + remaining
            message = Message(
                self, kind, flags, caller, call_id, creator, local, chain, context, deadline, number, frames
            )  # fmt: skip
            cell = self.cells.get((creator, local), self.fallback)
            if cell is None:
                message.cell = _NO_CELL
                return Job(Lane.FREE, self.perform, message)
            return cell.accept(message)
        if kind == Kind.REPLY or kind == Kind.ERROR:
            return self._answered(call_id, caller, kind == Kind.ERROR, flags, frames, number)
        return None

    def _answered(
        self, call_id: int, caller: int, failed: bool, flags: int, frames: Sequence[Frame], number: int
    ) -> Job | None:
        call = self.pending.pop(call_id, None)
        if call is None or call.peer != caller:
            # Late: it expired. References in it must be taken over and dropped, or their counts stay up.
            return Job(Lane.FREE, self._discard, (frames, caller)) if flags & Flag.REFS else None
        if failed and flags & Flag.NEEDS_VALUE and call.again is not None:
            return Job(Lane.FREE, self._send_again, (call, frames))
        call.frames, call.failed, call.flags = frames, failed, flags
        if flags & Flag.UNREAD and call.refs is not None:
            call.refs.restart()
        call.again = call.refs = None
        if call.note is not None:
            call.note(call)
        self.crew.done(call, number)
        if call.then is None or call.waiters:
            return None
        if call.urgent or self.crew.pool_leads:
            return Job(Lane.FREE, call.then, call)
        self._unsettled.append(call)
        self.crew.wake_keeper()
        return None

    def publish_soon(self, future: Future[Any]) -> None:
        """Has torch's part of a future filled in, off the present thread's stack."""
        self._unpublished.append(future)
        self.crew.wake_keeper()

    @property
    def loose_ends(self) -> bool:
        """Whether `settle_soon` has something to do."""
        return bool(self._unsettled or self._unpublished)

    def settle_soon(self) -> None:
        """Sends a thread to finish what was put off: answers that came while a caller led and nobody waited for them,
        and torch's part of futures that were waited for.
        """
        if self._unpublished:
            futures = [self._unpublished.popleft() for _ in range(len(self._unpublished))]
            self.crew.submit(Job(Lane.FREE, _publish, futures))
        while self._unsettled:
            try:
                call = self._unsettled.popleft()
            except IndexError:
                return
            if call.then is not None:
                self.crew.submit(Job(Lane.FREE, call.then, call))

    def _stranger(self, frames: Sequence[Frame], kind: int) -> Job | None:
        if kind == Kind.GREETING and self.greeted is not None:
            return Job(Lane.CONTROL, self._greeting, bytes(memoryview(frames[0])[HEADER_SIZE:]))
        if kind != Kind.GREETING:
            with self._peers_door:
                if len(self._early) < _EARLY_LIMIT and not self.peers:  # the list of members has not come yet
                    self._early.append(frames)
        return None

    def _greeting(self, data: bytes) -> None:
        if self.greeted is not None:
            self.greeted(data)

    def _discard(self, what: tuple[Sequence[Frame], int]) -> None:
        frames, caller = what
        try:
            self._load(frames, caller)
        except Exception as e:
            log.debug("%s: a late answer could not be read: %r", self.record.name, e)

    def _send_again(self, what: tuple[Call, Sequence[Frame]]) -> None:
        call, _ = what
        again, call.again = call.again, None
        assert again is not None
        try:
            frames = again()
            self.pending[call.id] = call
            target = envelope.unpack(memoryview(what[1][0]))
            remaining = _NEVER if call.deadline is None else max(0.001, call.deadline - self.clock.now())
            self._emit(
                call.peer, Kind.REQUEST, call.sent_flags, call.id, (target.creator, target.local),
                target.chain, remaining, frames,
            )  # fmt: skip
        except BaseException as e:
            self.pending[call.id] = call
            self.fail_call(call, e)

    # -- handling

    def perform(self, message: Message) -> None:
        """Runs a message's handler on the present thread and sees to it that the message is answered."""
        if message.deadline is not None and message.deadline <= self.clock.now():
            if message.holds_refs:
                self._discard((message.frames, message.caller))
            return  # the caller has given up; what has not begun is not run
        here.handling = Handling(self, message, message.chain, message.mailbox, message.turn)
        try:
            message.cell.run(message)
        except UnknownNameError as e:
            main = e.module in ("__main__", "__mp_main__")
            message.fail(e, Flag.UNREAD | (Flag.NEEDS_VALUE if main else 0))
        except DeserializationError as e:
            message.fail(e, Flag.UNREAD)
        except BaseException as e:
            message.fail(e)
        finally:
            here.handling = None
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)

    def answer(self, message: Message, value: object) -> None:
        """Sends the reply to a message."""
        try:
            frames, parcel = self.write(value, message.caller)
        except BaseException as e:
            self.answer_error(message, e, 0)
            return
        self._answer(message, Kind.REPLY, Flag.REFS if parcel.refs else 0, frames, parcel)

    def answer_error(self, message: Message, error: BaseException, flags: int) -> None:
        """Sends an error as the answer; the error of a tell is logged, since nobody waits for it."""
        if not message.wants_answer:
            log.error("%s: a message from rank %d failed", self, message.caller, exc_info=error)
            return
        self._answer(message, Kind.ERROR, flags, write_failure(error, str(self), self.codec))

    def _answer(
        self, message: Message, kind: Kind, flags: int, frames: Sequence[Frame], parcel: Parcel | None = None
    ) -> None:
        try:
            self._emit(
                message.caller,
                kind,
                flags,
                message.call,
                (message.creator, message.local),
                message.chain,
                _NEVER,
                frames,
                self.crew.may_hold(),
            )
        except ActorRPCError as e:
            log.debug("%s: an answer to rank %d could not leave: %s", self.record.name, message.caller, e)
            if parcel is not None:
                parcel.restart()

    # -- waiting

    def wait(self, what: Completion, deadline: float | None, *, lead: bool = True) -> bool:
        """Blocks until something is done, at most until `deadline`; returns whether it is.

        In an actor's handler the mailbox is served meanwhile (RULES MB2, MB3).
        """
        handling = here.handling
        if handling is None or handling.turn is None:
            return what.done or self.crew.wait(what, deadline, Waiter(self.clock.gate()), lead=lead)
        mailbox, turn = handling.mailbox, handling.turn
        assert mailbox is not None
        if what.done and not len(mailbox):
            return True
        waiter = Waiter(self.clock.gate())
        waiter.mailbox, waiter.turn = mailbox, turn
        self._start(mailbox.suspend(turn, what.number if what.done else None))
        try:
            done = what.done or self.crew.wait(what, deadline, waiter, lead=lead)
            back = _Return(self.crew)
            ready = mailbox.resume(turn, what.number if done else 0, back)
            if turn in ready:
                ready.remove(turn)
                turn.gate = None
                self._start(ready)
            else:
                self._start(ready)
                self.crew.wait(back, None, Waiter(self.clock.gate()))
        except BaseException:
            mailbox.force(turn)
            raise
        return done

    def _start(self, turns: Sequence[Any]) -> None:
        for turn in turns:
            if turn.gate is not None:
                gate, turn.gate = turn.gate, None
                gate.open()
            else:
                turn.message.cell.start((turn,))

    def result(self, call: Call) -> Any:
        """Reads the answer of a call that is done.

        Raises:
            RPCTimeoutError, WorkerLostError: there is none.
            DeserializationError: it cannot be read.
            BaseException: what the callee raised.
        """
        if call.failure is not None:
            raise call.failure
        frames, call.frames = call.frames, ()
        if not call.failed:
            return self._load(frames, call.peer)
        raise read_failure([memoryview(frames[0])[HEADER_SIZE:], *frames[1:]], self.codec)

    def _load(self, frames: Sequence[Frame], peer: int) -> Any:
        payload = [memoryview(frames[0])[HEADER_SIZE:], *frames[1:]]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.codec.loads(payload, Parcel(self, peer))
        return self.codec.loads(payload, Parcel(self, peer))

    def wait_result(self, call: Call) -> Any:
        """Waits for a call until it is answered or expires, and reads its answer."""
        if not self.wait(call, call.deadline):
            self.expire(call)
        return self.result(call)

    def expire(self, call: Call) -> None:
        """Gives a call up whose time has run out; where its answer is just coming, waits for that."""
        self.give_up(call)
        if not call.done:  # somebody else has taken it out of the table and is about to complete it
            self.wait(call, None)

    def give_up(self, call: Call) -> None:
        """Ends a call whose time has run out, unless its answer is just coming."""
        ms = int(call.timeout * 1000)
        peer = self.peers.get(call.peer)
        self.fail_call(
            call,
            RPCTimeoutError(
                f"RPC ran for more than set timeout ({ms} ms) and will now be marked with an error: "
                f"{describe(call.what)} on {peer.record if peer else f'rank {call.peer}'}; it may or may not have run"
            ),
        )

    def fail_call(self, call: Call, error: BaseException) -> None:
        """Ends a call with an error of this side's own, unless it has ended."""
        if self.pending.pop(call.id, None) is None:
            return
        call.failure, call.failed, call.again, call.refs = error, True, None, None
        if call.note is not None:
            call.note(call)
        self.crew.done(call, next(self._numbers))
        if call.then is not None and not call.waiters:
            self.crew.submit(Job(Lane.FREE, call.then, call))

    def complete(self, what: Completion) -> None:
        """Marks something of this worker's own as done."""
        self.crew.done(what, next(self._numbers))

    # -- the end

    def stop(self, timeout: float = 5.0, linger: float = 1.0) -> None:
        """Ends the worker: pending calls fail, threads end, sockets close.

        Arguments:
            timeout: seconds that threads get to end; handlers that still run then are left alone.
            linger: seconds that messages which are queued get to leave.
        """
        if not self.open:
            return
        self.open = False
        for call in list(self.pending.values()):
            self.fail_call(call, NotAMemberError(f"{self} has shut down; the call may or may not have run"))
        self.keeper.stop()
        if not self.crew.stop(timeout):
            log.warning("%s: handlers still run after %g s; they are left behind", self, timeout)
        self.transport.close(linger)
        self.cells.clear()
        self.fallback = self.greeted = None
        self.watchers.clear()

    @property
    def quiet(self) -> bool:
        """Whether no call is pending and no handler runs or is queued."""
        return not self.pending and self.crew.quiet and not self.loose_ends

    def statistics(self) -> dict[str, int]:
        """Returns counts: pending calls, actors, peers dialled, threads, running and queued handlers."""
        return {
            "pending": len(self.pending),
            "actors": len(self.cells),
            "dialled": sum(p.dialled for p in self.peers.values()),
            **self.crew.statistics(),
        }


def _publish(futures: list[Future[Any]]) -> None:
    while futures:
        futures.pop()._publish()


class _Return(Completion):
    """The gate of a turn that waits to go on, for a thread that waits like any other."""

    __slots__ = ("_crew",)

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew = crew

    def open(self) -> None:
        self._crew.done(self, 0)

    def wait(self, timeout: float | None = None) -> bool:
        raise NotImplementedError("threads wait for it through the crew")


class _NoCell:
    """Answers what is addressed to nobody."""

    def accept(self, message: Message) -> Job | None:
        raise AssertionError("it is never registered")

    def run(self, message: Message) -> None:
        raise ActorRPCError(f"there is no actor ({message.creator}, {message.local}) on {message.worker}")


_NO_CELL = _NoCell()


def new_incarnation() -> int:
    """Draws the number by which a worker's present life is told from earlier ones."""
    return int.from_bytes(os.urandom(8), "little")
