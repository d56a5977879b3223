"""Looking at calls from time to time, without a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.services.looking import Looking


class Failing(Looking):
    """Its first look fails."""

    looks = 0

    def _look(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise MemoryError


@pytest.mark.parametrize("pending", [False, True])
def test_a_look_that_fails_is_not_the_last_one(pending: bool) -> None:
    timers: list[Callable[[], None]] = []
    calls = SimpleNamespace(pending={1: None} if pending else {}, next_sent=deque[Callable[[], None]]())
    keeper = SimpleNamespace(after=lambda _, run: timers.append(run))
    worker: Any = SimpleNamespace(open=True, calls=calls, keeper=keeper)
    looking = Failing(worker)
    looking._begin(1.0)
    with pytest.raises(MemoryError):
        timers.pop()()
    if not pending:
        assert not timers  # an idle worker is to sleep
        calls.next_sent.popleft()()
    timers.pop()()
    assert looking.looks == 2
