"""How a leader stays awake for a while before it sleeps (RULE DW4; `wire.direct` has the others)."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from actorrpc.wire.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
_FIRST_SECONDS = 3e-4
_MOST_SECONDS = 5e-3
_MOST_IN_VAIN = 4
_OTHERS_PART = 0.4
"""Of the time: how much other threads of this process may have computed, for it to count as idle."""
_WANTED_SECONDS = 1e-4
"""A core that is offered comes back sooner, unless somebody wants it."""
_offer: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Tries:
    """Something that is left for the more times, the more often it was in vain; up to 31.

    Attributes:
        left: how many more times it is left.
        in_vain: how often it was in vain since it last was not.
    """

    def __init__(self) -> None:
        self.left = self.in_vain = 0

    def may(self) -> bool:
        """Returns whether it is to be tried; else it is left this time."""
        if not self.left:
            return True
        self.left -= 1
        return False

    def failed(self) -> None:
        """Says that it was in vain."""
        self.left = (2 << self.in_vain) - 1
        self.in_vain = min(self.in_vain + 1, _MOST_IN_VAIN)


class Vigil:
    """For how long the leaders of one worker stay awake.

    Attributes:
        first: the short time that they do in any case.
        longer: the time after that.
    """

    def __init__(self) -> None:
        self.first, self.longer = Tries(), Tries()
        self._others = self._at = 0.0
        """How long threads of this process but the leader had computed, and when that was."""

    @exposed
    def keep(self, poll: Callable[[float], Sequence[Any]], timeout: float | None) -> Sequence[Any]:
        """Polls for a while, unless that has been in vain of late. Returns what there was; nothing: one may sleep.

        Arguments:
            poll: asks without waiting, given 0.
            timeout: when the wait is to be over in any case, in seconds; None for never.
        """
        if CORES == 1 or not self.first.may():
            return ()
        now = time.monotonic
        begun = now()
        end = begun + (_MOST_SECONDS if timeout is None else min(timeout, _MOST_SECONDS))
        look, longer = min(end, begun + _FIRST_SECONDS), False
        while True:
            found = poll(0)
            if found:
                self.first.in_vain = 0
                if longer:
                    self.longer.in_vain = 0
                return found
            at = now()
            if at >= look:
                if not longer and (at >= end or not self._may_go_on(at)):
                    break
                longer = True
                if at >= end or _is_wanted():
                    self.longer.failed()
                    break
        self.first.failed()
        return ()

    def _may_go_on(self, at: float) -> bool:
        if not self.longer.may():
            return False
        others, before, since = time.process_time() - time.thread_time(), self._others, self._at
        self._others, self._at = others, at
        idle = abs(others - before) < _OTHERS_PART * (at - since)  # it may be below 0 by some nanoseconds
        if not idle:
            self.longer.failed()
        return idle


def _is_wanted() -> bool:
    """Offers the core to others; returns whether one took it."""
    begun = time.monotonic()
    _offer()
    return time.monotonic() - begun > _WANTED_SECONDS
