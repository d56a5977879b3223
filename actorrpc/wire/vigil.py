"""How a leader stays awake for a while before it sleeps (RULE DW4; `wire.direct` has the others)."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from actorrpc.wire.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_SECONDS = 3e-4
_MOST_SECONDS = 5e-3
_MOST_IN_VAIN = 5
_OTHERS_PART = 0.4
"""Of the time: how much other threads of this process may have computed, for it to count as idle."""
_WANTED_SECONDS = 1e-4
"""A core that is offered comes back sooner, unless somebody wants it."""
_GIVES_UP_GIL: Final = (3, 10, 8) <= sys.version_info < (3, 11) or sys.version_info >= (3, 11, 1)
_offer: Callable[[], None] | None = getattr(os, "sched_yield", None) if _GIVES_UP_GIL else None


class Tries:
    """Something that is left for the more times, the more often in a row it was in vain; up to 31.

    Arguments:
        free: how many times in a row cost nothing.

    Attributes:
        left: how many more times it is left.
        in_vain: how often in a row it was in vain.
    """

    def __init__(self, free: int = 0) -> None:
        self._free = free
        self.left = self.in_vain = 0

    def may(self) -> bool:
        """Returns whether it is to be tried; else it is left this time."""
        if not self.left:
            return True
        self.left -= 1
        return False

    def failed(self) -> bool:
        """Says that it was in vain. Returns whether that costs something."""
        self.in_vain = min(self.in_vain + 1, self._free + _MOST_IN_VAIN)
        self.left = (1 << max(0, self.in_vain - self._free)) - 1
        return self.left > 0


class Vigil:
    """For how long the leaders of one worker stay awake.

    Attributes:
        first: the short time that they do in any case.
        longer: the time after that.
    """

    def __init__(self) -> None:
        self.first, self.longer = Tries(), Tries(free=1)
        self._awake = cores() > 1
        self._offer = None if has_quota() else _offer
        self._leader = 0
        self._others = self._at = 0.0
        """Which thread asked last whether the process is idle, how long others had computed by then, and when."""

    @exposed
    def keep(self, poll: Callable[[float], Sequence[Any]], timeout: float | None) -> Sequence[Any]:
        """Polls for a while, unless that has been in vain of late. Returns what there was; nothing: one may sleep.

        Arguments:
            poll: asks without waiting, given 0.
            timeout: when the wait is to be over in any case, in seconds; None for never.
        """
        if not self._awake or not self.first.may():
            return ()
        now, offer = time.monotonic, self._offer
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
                if offer is None or (not longer and (at >= end or not self._may_go_on(at))):
                    break
                longer = True
                if at >= end:
                    break
                offer()
                if now() - at > _WANTED_SECONDS:
                    break
        if not longer or self.longer.failed():  # a core is taken for a moment now and then: once is forgiven
            self.first.failed()
        return ()

    def _may_go_on(self, at: float) -> bool:
        """Whether nobody but the present thread has computed much in this process since it last asked."""
        if not self.longer.may():
            return False
        leader, others = threading.get_ident(), time.process_time() - time.thread_time()
        same, before, since = leader == self._leader, self._others, self._at
        self._leader, self._others, self._at = leader, others, at
        if not same:
            return False
        idle = abs(others - before) < _OTHERS_PART * (at - since)  # it may be below 0 by some nanoseconds
        if not idle:
            self.longer.failed()
        return idle


def cores() -> int:
    """Returns how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def has_quota(root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether this container may compute for a part of the time only: then whoever stays awake takes it from others."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):  # of cgroups, version 2 and 1
        try:
            quota = (root / name).read_text().split()[0]
        except (OSError, IndexError):
            continue
        return quota not in ("max", "-1")
    return False
