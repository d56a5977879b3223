"""Leadership that lies free while a handler runs: for how long the keeper lets it (RULE TR4 of `crew`).

To have another thread lead costs a worker that computes: the thread that was sent is the one that receives the next
message, and runs it on another core, whose caches know nothing of it. Where nothing has lain there for it, that was in
vain, and the keeper waits a tick longer the next time. Where something had, for that thread or for one that came back
from a handler before any was sent, it does not wait at all.
"""

from __future__ import annotations

_MOST = 3
"""Ticks that leadership may lie free beyond the first."""
NAP = 4
"""Ticks in which the keeper need not look, while somebody leads."""


class Vacancy:
    """What the keeper knows of it.

    Arguments:
        soon: seconds within which a thread that takes leadership up finds what had lain there for it.
    """

    def __init__(self, soon: float) -> None:
        self._soon = soon
        self._patience = self._ticks = 0
        self._turns = 0
        self._sent = False

    def tick(self, free: bool, turns: int, passed: int = 1) -> tuple[bool, bool]:
        """Looks at leadership.

        Arguments:
            free: whether it lies free.
            turns: how often it was taken up so far.
            passed: how many ticks after the last time.

        Returns whether it was taken up since the last tick, and whether a thread is to be sent.
        """
        changed, self._turns = turns != self._turns, turns
        if changed or not free:
            self._ticks = 0
            return changed, False
        self._ticks += passed
        self._sent = self._ticks > self._patience
        return False, self._sent

    def rest(self, free: bool) -> int:
        """Returns in how many ticks it is to be looked at again."""
        return max(1, self._patience + 1 - self._ticks) if free else NAP

    def taken(self) -> bool:
        """Notes that a thread of the pool leads; returns whether a tick has seen leadership free before."""
        return self._sent or self._ticks > 0

    def served(self, seconds: float, anything: bool) -> None:
        """Notes after how long such a thread came back from receiving, and whether with anything."""
        sent, self._sent = self._sent, False
        self._ticks = 0
        if anything and seconds < self._soon:
            self._patience = 0
        elif sent:
            self._patience = min(_MOST, self._patience + 1)
