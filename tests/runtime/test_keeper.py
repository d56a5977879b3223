"""The keeper without a worker: timers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from actorrpc.runtime.clock import LockGate
from actorrpc.runtime.keeper import Keeper


def made(now: float = 100.0) -> tuple[Keeper, list[Any]]:
    """Makes a keeper that does not look by itself, and the list of what it submits."""
    submitted: list[Any] = []
    worker: Any = SimpleNamespace(
        clock=SimpleNamespace(gate=LockGate, now=lambda: now),
        crew=SimpleNamespace(submit=lambda job: submitted.append(job[2])),
        calls=SimpleNamespace(expire_due=lambda _: float("inf")),
    )
    return Keeper(worker), submitted


def test_who_sets_a_timer_does_not_wait_for_a_finalizer_that_interrupts_the_keeper() -> None:
    keeper, submitted = made()
    door, entered, was_set = threading.RLock(), threading.Event(), threading.Event()

    class Interrupted(float):
        """A time, at the look at which the collector runs a finalizer, which waits for another lock."""

        def __le__(self, other: float) -> bool:
            entered.set()
            assert door.acquire(timeout=20)
            door.release()
            return float(self) <= other

    def first() -> None:
        """Is due."""

    def second() -> None:
        """Is set meanwhile."""

    def set_one() -> None:
        with door:
            assert entered.wait(20)
            keeper.after(1.0, second)
            was_set.set()

    keeper.after(0.0, first)
    keeper._expire(99.0)  # it is taken in
    keeper._timers = [(Interrupted(at), run) for at, run in keeper._timers]
    assert keeper.due == 100.0
    threads = [threading.Thread(target=set_one), threading.Thread(target=keeper._expire, args=(100.0,))]
    for thread in threads:
        thread.start()
    done = was_set.wait(10)
    for thread in threads:
        thread.join(20)
    assert done, "two threads wait for each other"
    assert submitted == [first]
    assert keeper.due == 101.0
    keeper._expire(101.0)
    assert submitted == [first, second]


def test_a_timer_that_is_set_as_others_fall_due_is_not_forgotten() -> None:
    keeper, submitted = made()

    def later() -> None:
        """Is set by a finalizer, as the keeper looks at the time of another one."""

    class Interrupted(float):
        def __gt__(self, other: float) -> bool:
            if not keeper._new_timers:
                keeper.after(-1.0, later)
            return float(self) > other

    keeper._timers = [(Interrupted(200.0), later)]
    keeper._expire(100.0)
    assert keeper.due == 99.0
    keeper._timers.clear()
    keeper._expire(100.0)
    assert submitted == [later]
