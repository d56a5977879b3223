"""The pending calls of a worker: sent, and not answered yet. Whoever takes a call out of the table completes it."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from actorrpc.errors import ActorRPCError, CancelledError, RPCTimeoutError, SerializationError
from actorrpc.runtime.completion import Call, describe
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.wire import envelope
from actorrpc.wire.envelope import Flag, Kind
from actorrpc.wire.transport import AT_ONCE, LATER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.futures import Future
    from actorrpc.runtime.message import Outgoing, Parcel
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_NEVER = float("inf")
_A_LIFETIME = 1e9
BURST: Final = 16
"""Calls under way to one peer from which on further ones may leave together (TR9 in `crew`)."""


class Calls:
    """The table of pending calls.

    Attributes:
        pending: by the calls' numbers.
        next_sent: each is called once, when the next call has been sent.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.pending: dict[int, Call] = {}
        self.next_sent: deque[Callable[[], None]] = deque()
        self._ids = itertools.count(1)
        self._unsettled: deque[Call] = deque()
        self._unpublished: deque[Future[Any]] = deque()

    def next_id(self) -> int:
        """Returns a number that this worker has not used for a call."""
        return next(self._ids)

    def post(
        self,
        to: int,
        target: tuple[int, int],
        frames: Sequence[Frame],
        timeout: float,
        what: object,
        parcel: Parcel | None = None,
        again: Callable[[], tuple[Sequence[Frame], Parcel]] | None = None,
        then: Callable[[Call], None] | None = None,
        note: Callable[[Call], None] | None = None,
        flags: int = 0,
        chain: int | None = None,
        context: int = NO_CONTEXT,
        number: int | None = None,
        bounded: bool = False,
        counted: bool = False,
        lasting: bool = True,
    ) -> Call:
        """Sends a request whose payload is written. Arguments and errors: see `Worker.request`; `chain`: the call
        chain, where that is not the present thread's; `lasting`: see `Transport.send`.
        """
        worker = self._worker
        if timeout < 0:
            timeout = worker.timeout
        if timeout > _A_LIFETIME:  # infinity, say
            timeout = 0.0
        deadline, bound, remaining, hold = self.deadline(timeout), None, timeout or _NEVER, AT_ONCE
        if bounded and here.handling is not None:
            deadline, bound = self.deadline_here(timeout)
        if number is None:
            number = next(self._ids)
        under_way = 0
        if counted:
            try:
                under_way = worker.limits.admit(to, target, number, frames, False, deadline, what)
            except BaseException:
                if parcel is not None:
                    parcel.restart()
                raise
            flags |= Flag.COUNTED
            if under_way > BURST:
                hold = LATER
        if deadline is not None and ((counted and not under_way) or bound is not None):
            remaining = deadline - worker.clock.now()
        call = Call(number, to, timeout, deadline, what)
        call.bound = bound
        call.again, call.then, call.note = again, then, note
        if parcel is not None and parcel.refs:
            call.refs = parcel
            flags |= Flag.REFS
        call.sent_flags = flags
        self.pending[call.id] = call
        try:
            out = (
                Kind.REQUEST, flags, call.id, *target, worker.chain() if chain is None else chain, context,
                remaining,
            )  # fmt: skip
            worker.emit(to, out, frames, hold, parcel.trace if parcel is not None else None, lasting)
        except BaseException:
            self.pending.pop(call.id, None)
            worker.limits.answered(call.id)
            if parcel is not None:
                parcel.restart()
            raise
        if deadline is not None and deadline < worker.keeper.due:
            worker.keeper.schedule(deadline)
        while self.next_sent:
            try:
                told = self.next_sent.popleft()
            except IndexError:  # another thread sends as well
                break
            told()
        return call

    def deadline(self, timeout: float) -> float | None:
        """Returns the time at which `timeout` seconds (0: for ever, below 0: the worker's own) will have passed."""
        if timeout < 0:
            timeout = self._worker.timeout
        return self._worker.clock.now() + timeout if 0 < timeout <= _A_LIFETIME else None

    def deadline_here(self, timeout: float) -> tuple[float | None, int | None]:
        """Returns the same for a call that the present thread makes, whose handler's time bounds it; then, and only
        then, with the id of the worker that called the handler.
        """
        deadline, handling = self.deadline(timeout), here.handling
        message = None if handling is None else handling.message
        limit = None if message is None else message.deadline
        if message is None or limit is None or (deadline is not None and deadline <= limit):
            return deadline, None
        return limit, message.caller

    # -- answers

    def answered(
        self, number: int, caller: int, failed: bool, flags: int, frames: Sequence[Frame], place: int
    ) -> Job | None:
        """Takes an answer in, under leadership. `place`: its place among the messages (RULE MB3)."""
        worker, call = self._worker, self.pending.get(number)
        if call is None or call.peer != caller or self.pending.pop(number, None) is None:
            worker.limits.answered(number)
            # Late: it expired. References in it must be taken over and dropped, or their counts stay up.
            return (Lane.FREE, worker.answers.discard, (frames, caller)) if flags & Flag.REFS else None
        if failed and flags & Flag.NEEDS_VALUE and call.again is not None:
            return (Lane.FREE, self._send_again, (call, frames))
        if call.sent_flags & Flag.COUNTED:
            worker.limits.answered(number)
        if flags & Flag.DROPPED:  # its time had run out over there, so that it has here, or is about to
            self.pending[number] = call
            return (Lane.FREE, self.give_up, call)
        call.frames, call.failed, call.flags = frames, failed, flags
        if flags & Flag.UNREAD and call.refs is not None:
            worker.crew.submit((Lane.FREE, _take_back, call.refs))
        call.again = call.refs = None
        if call.note is not None:
            call.note(call)
        worker.crew.done(call, place)
        then = call.then  # once: the thread that waited may just be clearing it
        if then is None or (call.waiters and not call.urgent):
            return None
        if call.urgent:
            return (Lane.FREE, then, call)
        self._unsettled.append(call)
        if worker.crew.pool_leads and not worker.transport.crowded:
            return (Lane.FREE, self._settle_all, None)
        worker.crew.wake_keeper()
        return None

    def _send_again(self, what: tuple[Call, Sequence[Frame]]) -> None:
        call, answer = what
        worker, again, call.again = self._worker, call.again, None
        assert again is not None
        try:
            if call.refs is not None:
                call.refs.restart()  # they were not read; the new payload has its own
            worker.peers[call.peer].by_value = True
            frames, parcel = again()
            call.refs = parcel if parcel.refs else None
            call.sent_flags &= ~Flag.NEEDS_VALUE
            out = self._header_of(call, answer, call.sent_flags)
            self.pending[call.id] = call
            worker.emit(call.peer, out, frames, False, parcel.trace)
        except BaseException as e:
            if call.sent_flags & Flag.KEEP:
                self._say_unmade(call, answer, e)
            worker.limits.answered(call.id)
            self.pending[call.id] = call
            self.fail(call, e)

    def _header_of(self, call: Call, answer: Sequence[Frame], flags: int) -> Outgoing:
        """Returns the header of what goes to a call's target once more."""
        target = envelope.unpack(memoryview(answer[0]))
        remaining = _NEVER if call.deadline is None else max(0.001, call.deadline - self._worker.clock.now())
        return Kind.REQUEST, flags, call.id, target.creator, target.local, target.chain, target.context, remaining

    def _say_unmade(self, call: Call, answer: Sequence[Frame], error: BaseException) -> None:
        """Has the callee put an error in the place of an object that nothing will be sent for: others may wait there.
        The answer comes when the call is over, and is dropped.
        """
        worker, known = self._worker, SerializationError(f"{describe(call.what)} was never sent: {error}")
        try:
            frames, _ = worker.write((_raise, (known,), {}), call.peer)
            worker.emit(call.peer, self._header_of(call, answer, Flag.KEEP), frames)
        except ActorRPCError as e:
            log.debug("%s: rank %d could not be told of %r: %s", worker.record.name, call.peer, error, e)

    def abandon(self, call: Call) -> None:
        """Gives up a call whose thread was interrupted: nobody will read the answer, but references in it count."""
        call.then = self._drop_answer
        if call.done:
            self._worker.crew.submit((Lane.FREE, self._drop_answer, call))

    def _drop_answer(self, call: Call) -> None:
        frames, call.frames = call.frames, ()
        if frames and call.flags & Flag.REFS:
            self._worker.answers.discard((frames, call.peer))

    # -- futures that nobody waits for

    def publish_soon(self, future: Future[Any]) -> None:
        """Has torch's part of a future filled in, off the present thread's stack."""
        self._unpublished.append(future)
        if self._worker.open:
            self._worker.crew.wake_keeper()
        else:  # nobody else will: whoever waited was told that the worker has stopped
            self.publish_left()

    def publish_left(self) -> None:
        """Fills in torch's part of futures on this thread, at the worker's end."""
        while self._unpublished:
            try:
                future = self._unpublished.popleft()
            except IndexError:  # another thread does the same
                return
            future._publish()

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
            self._worker.crew.submit((Lane.FREE, _publish, futures))
        if self._unsettled:
            self._worker.crew.submit((Lane.FREE, self._settle_all, None))

    def _settle_all(self, _: object) -> None:
        """Finishes the calls that were answered, one after the other: a thread for each would cost more than they do.

        Where one takes long, the next tick sends another thread for the rest.
        """
        unsettled = self._unsettled
        while True:
            try:
                call = unsettled.popleft()
            except IndexError:
                return
            then = call.then
            if then is not None:
                try:
                    then(call)
                except Exception:
                    log.exception("%s: an answer could not be taken in", self._worker)

    # -- calls that are not answered

    def expire(self, call: Call) -> None:
        """Gives a call up whose time has run out; where its answer is just coming, waits for that."""
        self.give_up(call)
        if not call.done:  # somebody else has taken it out of the table and is about to complete it
            self._worker.wait(call, None)

    def give_up(self, call: Call) -> None:
        """Ends a call whose time has run out, unless its answer is just coming; the callee is told."""
        if self.fail(call, self.too_late(call.what, call.peer, call.timeout, call.bound)):
            self._withdraw(call, 0.0)

    def cancel(self, call: Call) -> bool:
        """Ends a call for which nobody waits any more; the callee is told. Returns False where it has ended."""
        who = self._name(call.peer)
        error = CancelledError(f"{describe(call.what)} on {who} was cancelled; it may or may not have run")
        return self.end(call, error)

    def end(self, call: Call, error: BaseException) -> bool:
        """Ends a call with an error; the callee is told. Returns False where it has ended."""
        if not self.fail(call, error):
            return False
        self._withdraw(call)
        return True

    def _withdraw(self, call: Call, remaining: float = _NEVER) -> None:
        """Tells the callee that nobody waits for a call any more."""
        if not call.sent_flags & Flag.CONTROL:
            try:
                out = (Kind.CANCEL, Flag.CONTROL, call.id, 0, 0, 0, NO_CONTEXT, remaining)
                self._worker.emit(call.peer, out, (b"",))
            except ActorRPCError as e:
                log.debug("%s: a cancellation could not leave: %s", self._worker.record.name, e)

    def _name(self, number: int) -> str:
        peer = self._worker.members.peers.get(number)
        return str(peer.record) if peer is not None else f"rank {number}"

    def too_late(self, what: object, to: int, timeout: float, bound: int | None = None) -> RPCTimeoutError:
        """Makes the error of a call whose `timeout` seconds (below 0: the worker's own) have passed, or the time of the
        handler that made it, which worker `bound` had called.
        """
        if timeout < 0:
            timeout = self._worker.timeout
        where = f"{describe(what)} on {self._name(to)}; it may or may not have run"
        if bound is not None:
            return RPCTimeoutError(
                f"RPC ran for more than the time that its handler had left, and will now be marked with an error: "
                f"{where}. It was made by a handler that {self._name(bound)} had called, and that call's time has run "
                f"out; what a handler calls has no longer than the handler itself"
            )
        return RPCTimeoutError(
            f"RPC ran for more than set timeout ({int(timeout * 1000)} ms) and will now be marked with an error: "
            f"{where}. Longer calls need timeout=seconds (0: for ever), or RpcBackendOptions(rpc_timeout=...)"
        )

    def expire_due(self, time: float) -> float:
        """Gives up all calls whose time has run out at `time`; returns when the next one is due (infinity: none)."""
        due = _NEVER
        for call in list(self.pending.values()):
            if call.deadline is None:
                continue
            if call.deadline <= time:
                self.give_up(call)
            else:
                due = min(due, call.deadline)
        return due

    def fail(self, call: Call, error: BaseException) -> bool:
        """Ends a call with an error of this side's own; returns False where it has ended already."""
        if self.pending.pop(call.id, None) is None:
            return False
        call.failure, call.failed, call.again, call.refs = error, True, None, None
        if call.note is not None:
            call.note(call)
        self._worker.complete(call)
        then = call.then
        if then is not None and (call.urgent or not call.waiters):
            self._worker.crew.submit((Lane.FREE, then, call))
        return True

    def fail_all_to(self, peer: int | None, error: Callable[[], BaseException]) -> None:
        """Ends all calls to a peer (None: to anybody)."""
        for call in list(self.pending.values()):
            if peer is None or call.peer == peer:
                self.fail(call, error())


def _raise(*args: Any) -> None:
    """Raises the last argument. Called where an object was to be made, or with one of which a method was."""
    raise args[-1]


def _take_back(parcel: Parcel) -> None:
    parcel.restart()


def _publish(futures: list[Future[Any]]) -> None:
    while futures:
        futures.pop()._publish()
