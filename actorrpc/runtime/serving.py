"""The requests that a worker has and has not answered yet: how they are cancelled, and dropped before they begin."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from actorrpc.errors import CancelledError, RPCTimeoutError
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.message import QUEUED, RETURNED
from actorrpc.runtime.peers import Standing
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

_NEVER = float("inf")
_GONE = "its call was cancelled, or its caller was lost"


class Serving:
    """What one worker has to answer.

    Whether a cancelled message begins is settled without a lock: its handler's thread says that it begins and then
    looks whether it is cancelled; who cancels it says so and then looks whether it has begun. So one sees the other.

    Attributes:
        requests: by their callers' ids and the callers' numbers.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.requests: dict[tuple[int, int], Message] = {}
        self._door = threading.Lock()
        worker.members.watchers.append(self._gone)

    def answered(self, message: Message) -> None:
        """Forgets a request."""
        self.requests.pop((message.caller, message.call), None)
        if message.came and self._worker.meter is not None:
            self._worker.meter.answered(message)

    def cancel(self, which: tuple[int, int, float]) -> None:
        """Cancels a request, unless it is answered: one that has not begun is dropped, the handler of one that has can
        see it, and what is to be answered later is answered now. In a thread of the pool.

        Arguments:
            which: its caller's id, the caller's number, and the seconds that it had left: 0 where its time has run out.
        """
        message = self.requests.get(which[:2])
        if message is None:
            return
        if not which[2]:
            message.deadline = self._worker.clock.now()
        message.cancelled = True
        if message.stage == QUEUED:
            self.drop(message)
        elif message.stage == RETURNED:
            message.fail(CancelledError("the call was cancelled by its caller, or its time has run out"))
        if message.on_cancel is not None:
            message.on_cancel()

    def drop(self, message: Message) -> None:
        """Answers a message that is not to begin; takes over and drops the references in it. May be said twice."""
        with self._door:
            if message.answered:
                return
            message.answered = True
            frames, message.frames = message.frames, ()
        self.answered(message)
        if message.mailbox is not None and message.turn is None:
            message.mailbox.forget(_was_answered)
        if frames and message.flags & Flag.REFS:
            self._worker.answers.discard((frames, message.caller))
        if message.kept is not None:
            late = message.deadline is not None and message.deadline <= self._worker.clock.now()
            kind, reason = (RPCTimeoutError, "the time of the call had run out") if late else (CancelledError, _GONE)
            message.kept.fill(None, kind(f"the object was not made: {reason}"))
        if message.wants_answer:
            self._worker.answers.give_nothing(message)

    def returned(self, message: Message) -> None:
        """Says that a handler has returned. If the message was cancelled and is to be answered later, it is now."""
        message.stage = RETURNED
        if message.cancelled and not message.answered:
            self.cancel((message.caller, message.call, _NEVER))

    def _gone(self, peer: Peer) -> None:
        """Cancels what a lost peer had asked for: nobody will hear the answers."""
        if peer.standing is not Standing.LOST:
            return
        for caller, call in list(self.requests):
            if caller == peer.record.id:
                self._worker.crew.submit((Lane.FREE, self.cancel, (caller, call, _NEVER)))


def _was_answered(message: Message) -> bool:
    return message.answered
