"""How jobs share the pool: lanes with limits. Plain logic, used under the crew's door (rules TR5 and TR7 in `crew`)."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

STANDSTILL = 0.05
_FREE_LIMIT = 32
_HELD_UP_LIMIT = 256


class Lane:
    """How a job shares the pool. Plain numbers, since to look at the member of an enumeration takes long."""

    CONTROL: Final = 0
    """One at a time, before all others; they do not block."""
    FREE: Final = 1
    """Before handlers, and beside them: what handlers may be waiting for."""
    HANDLER: Final = 2
    """At most the user's limit that run."""


Job: TypeAlias = "tuple[int, Callable[[Any], None], Any]"
"""Something for the pool to run: the lane, a function, which must not raise, and its argument."""


class Place(threading.local):
    """What a thread is to the crew."""

    held: int | None = None
    """The lane in which it holds a place that it may lend."""
    hand = False
    """Whether it is a thread of the pool."""
    kept_back = False
    """Whether it has held back a call since its last job ended (TR9)."""


class Lanes:
    """The queues, and who runs.

    Arguments:
        limit: how many handlers may run at once.
    """

    def __init__(self, limit: int) -> None:
        self.queues: tuple[deque[Job], deque[Job], deque[Job]] = (deque(), deque(), deque())
        self.put_off: deque[Job] = deque()
        """Jobs that wait for a thread which has nothing else to do (TR8)."""
        self._limits = (1, _FREE_LIMIT, limit)
        self._extra = [0, 0, 0]
        self._running = [0, 0, 0]
        self._begun = [0, 0, 0]
        """Jobs in progress, those that wait included."""
        self.ended = [0, 0, 0]
        self._ended_seen = [0, 0, 0]
        self.held_up = [0, 0, 0]
        """Jobs that wait to send."""
        self._stood_since: list[float | None] = [None, None, None]
        """Since when jobs are queued and none of the lane has ended; None where none is queued."""

    def free(self, lane: int) -> bool:
        """Whether one more job of a lane may run."""
        return self._running[lane] < self._limits[lane] + self._extra[lane]

    def claim(self, lane: int) -> bool:
        """Takes a place in a lane, if there is one."""
        if self._running[lane] >= self._limits[lane] + self._extra[lane]:
            return False
        self._running[lane] += 1
        self._begun[lane] += 1
        return True

    def take(self) -> Job | None:
        """Takes the first job that may run, with its place."""
        for lane, queue in enumerate(self.queues):
            if queue and self.claim(lane):
                return queue.popleft()
        if self.put_off and self.claim(self.put_off[0][0]):
            return self.put_off.popleft()
        return None

    @property
    def startable(self) -> bool:
        """Whether a job is queued that may run."""
        for lane, queue in enumerate(self.queues):
            if queue and self.free(lane):
                return True
        return bool(self.put_off) and self.free(self.put_off[0][0])

    @property
    def crowded(self) -> bool:
        """Whether jobs are queued in a lane whose limit may have to grow."""
        return bool(self.queues[Lane.HANDLER] or self.queues[Lane.FREE])

    def end(self, lane: int) -> None:
        """Gives a place back: the job has ended."""
        self._running[lane] -= 1
        self._begun[lane] -= 1
        self.ended[lane] += 1

    def lend(self, lane: int) -> bool:
        """Gives a place back for a while: the job waits. Returns whether a queued one may now start."""
        self._running[lane] -= 1
        return bool(self.queues[lane])

    def hold_up(self, lane: int) -> int | None:
        """Notes that a job waits to send. Returns the lane where it may lend its place, None when too many have."""
        self.held_up[lane] += 1
        return lane if self.held_up[lane] <= _HELD_UP_LIMIT else None

    def reclaim(self, lane: int) -> None:
        """Takes a place that was lent back, also where that makes one too many."""
        self._running[lane] += 1

    def grow(self, now: float) -> int:
        """Raises the limit of lanes that stand still: jobs are queued, and none of the lane has ended for a while.

        Returns how many more jobs may start.
        """
        started = 0
        for lane in (Lane.FREE, Lane.HANDLER):
            if not self.queues[lane]:
                self._extra[lane] = 0
                self._stood_since[lane] = None
            elif (since := self._stood_since[lane]) is None or self.ended[lane] != self._ended_seen[lane]:
                self._ended_seen[lane] = self.ended[lane]
                self._stood_since[lane] = now
            elif now - since >= STANDSTILL:
                self._stood_since[lane] = now
                more = max(1, self._extra[lane]) if self.held_up[lane] < _HELD_UP_LIMIT else 1
                self._extra[lane] += more
                started += min(more, len(self.queues[lane]))
        return started

    @property
    def quiet(self) -> bool:
        """Whether nothing but control is in progress or queued."""
        return not (self._begun[Lane.HANDLER] or self._begun[Lane.FREE] or self.crowded)

    def statistics(self) -> dict[str, int]:
        """Returns counts: running handlers, queued jobs, jobs ended."""
        return {
            "running": self._running[Lane.HANDLER],
            "queued": sum(map(len, self.queues)) + len(self.put_off),
            "ended": sum(self.ended),
        }
