"""A worker that has stood still (its process was stopped, its host asleep) and wakes: is it still a member?

What lies in its inbox by then may come from somebody who has taken it for lost since, and told his callers so. So, for
a while, nothing is begun before its sender has answered a question: either that it is there, or with a verdict. A
process in which no thread got on for long, because one held the GIL, cannot be told from one that was stopped, and asks
as well.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from actorrpc.runtime.completion import Completion, Waiter
from actorrpc.runtime.lanes import Lane
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

_NEVER = float("inf")
_AT_LEAST_SECONDS = 2.0
"""What a sender gets to answer: half of the time of silence, or this."""


class Waking:
    """What one worker does after it has stood still.

    Arguments:
        worker: whose.

    Attributes:
        active: whether that was not long ago.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked: dict[int, tuple[Completion, int]] = {}
        """Those who were asked since: what is done when they have answered, or are gone; and the question."""
        self._door = threading.Lock()
        self._times, self._overdue = 0, 0.0
        """How often it has begun, and since when it was overdue then: several threads may find the same."""
        self.active = False
        worker.members.watchers.append(self._gone)

    def begin(self) -> None:
        """Says that the worker has stood still until now. From any thread."""
        overdue = self._worker.transport.overdue
        with self._door:
            if overdue == self._overdue != _NEVER:
                return
            self._overdue = overdue
            self._times += 1
            times, self._asked, self.active = self._times, {}, True
        self._worker.keeper.after(2 * self._patience(), lambda: self._end(times))

    def _patience(self) -> float:
        return max(_AT_LEAST_SECONDS, self._worker.transport.silence / 2)

    def _end(self, times: int) -> None:
        with self._door:
            if times == self._times:
                self._asked, self.active = {}, False

    def check(self, message: Message) -> None:
        """Waits, bounded, until the sender of a message has answered; cancels the message if it was by a verdict."""
        worker, number = self._worker, message.caller
        if number == worker.id or message.flags & Flag.CONTROL or getattr(message.cell, "lane", None) == Lane.CONTROL:
            return
        seconds = self._patience()
        if worker.clock.now() >= worker.transport.overdue:
            self.begin()
        with self._door:
            first = number not in self._asked
            if first:
                self._asked[number] = Completion(), worker.doubts.new_question()
            answer, question = self._asked[number]
        if first and worker.doubts.ask is not None:
            worker.doubts.ask(number, seconds, question)
        if not answer.done:
            worker.crew.wait(answer, worker.clock.now() + seconds, Waiter(worker.clock.gate()))
        if worker.members.verdicts.is_by(number):
            message.cancelled = True

    def answered(self, number: int, question: int) -> None:
        """Hears that a peer has answered a question, maybe an older one. Under leadership too."""
        answer, asked = self._asked.get(number, (None, 0))
        if answer is not None and question >= asked and not answer.done:
            self._worker.complete(answer)

    def _gone(self, peer: Peer) -> None:
        answer, asked = self._asked.get(peer.record.id, (None, 0))
        if answer is not None:
            self.answered(peer.record.id, asked)
