"""Limits of time, of every kind of call. Most on a virtual clock, so that they can be told to the tenth of a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.runtime.completion import Completion
from actorrpc.session import current
from actorrpc.testing import SimWorld
from tests.worlds import run_world

EARLY = r"RPC ran for more than set timeout \({} ms\) and will now be marked with an error"
LONG = 1000.0


def rest(seconds: float) -> str:
    """Lets the present worker's time pass."""
    worker = current().worker
    worker.wait(Completion(), worker.clock.now() + seconds)
    return "rested"


class Idler:
    def rest(self, seconds: float) -> str:
        return rest(seconds)


class Outcome:
    """What came of a call, and after how many seconds."""

    def __init__(self, call: Callable[[], Any]) -> None:
        now = current().worker.clock.now
        begun = now()
        self.value: Any = None
        self.error: BaseException | None = None
        try:
            self.value = call()
        except rpc.RPCTimeoutError as e:
            self.error = e
        self.seconds = round(now() - begun, 3)  # a call may have begun some microseconds before its wait

    def expired_after(self, seconds: float) -> None:
        assert self.error is not None, f"it gave {self.value!r} after {self.seconds} s"
        assert seconds <= self.seconds < seconds + 0.2, self.seconds

    def came_after(self, seconds: float) -> None:
        assert self.error is None, self.error
        assert self.value == "rested"
        assert seconds <= self.seconds < seconds + 0.2, self.seconds


Way = Callable[[float, float], Any]


def idler(to: int = 1) -> rpc.RRef[Idler]:
    ref: rpc.RRef[Idler] = rpc.remote(to, Idler, timeout=0)
    ref.to_here(timeout=0)
    return ref


WAITING: dict[str, Way] = {
    "rpc_sync": lambda seconds, limit: rpc.rpc_sync(1, rest, args=(seconds,), timeout=limit),
    "rpc_sync to oneself": lambda seconds, limit: rpc.rpc_sync(0, rest, args=(seconds,), timeout=limit),
    "rpc_async": lambda seconds, limit: rpc.rpc_async(1, rest, args=(seconds,), timeout=limit).wait(),
    "ref.rpc_sync": lambda seconds, limit: idler().rpc_sync(timeout=limit).rest(seconds),
    "ref.rpc_async": lambda seconds, limit: idler().rpc_async(timeout=limit).rest(seconds).wait(),
    "own ref.rpc_sync": lambda seconds, limit: idler(0).rpc_sync(timeout=limit).rest(seconds),
    "to_here": lambda seconds, limit: rpc.remote(1, rest, args=(seconds,), timeout=0).to_here(timeout=limit),
    "to_here on the owner": lambda seconds, limit: rpc.remote(0, rest, args=(seconds,), timeout=0).to_here(limit),
    "local_value": lambda seconds, limit: rpc.remote(0, rest, args=(seconds,), timeout=limit).local_value(),
}
"""What raises by itself when time runs out."""

KEEPING: dict[str, Way] = {
    "remote": lambda seconds, limit: rpc.remote(1, rest, args=(seconds,), timeout=limit),
    "remote to oneself": lambda seconds, limit: rpc.remote(0, rest, args=(seconds,), timeout=limit),
    "ref.remote": lambda seconds, limit: idler().remote(timeout=limit).rest(seconds),
    "own ref.remote": lambda seconds, limit: idler(0).remote(timeout=limit).rest(seconds),
}
"""What gives a reference, whose next use raises."""

each_waiting = pytest.mark.parametrize("way", WAITING.values(), ids=WAITING)
each_keeping = pytest.mark.parametrize("way", KEEPING.values(), ids=KEEPING)


def on_the_virtual_clock(program: Callable[[], None], size: int = 2, timeout: float = 60.0) -> None:
    with SimWorld(size=size, seed=1, timeout=timeout) as world:
        world.run(program)
        world.settle(2 * LONG)


# -- calls that wait


@each_waiting
def test_a_limit_of_its_own_ends_the_call(way: Way) -> None:
    def program() -> None:
        outcome = Outcome(lambda: way(100.0, 5.0))
        outcome.expired_after(5.0)
        assert "RPC ran for more than set timeout (5000 ms)" in str(outcome.error)

    on_the_virtual_clock(program)


@each_waiting
def test_zero_is_never(way: Way) -> None:
    on_the_virtual_clock(lambda: Outcome(lambda: way(LONG, 0)).came_after(LONG))


@each_waiting
def test_below_zero_is_the_default(way: Way) -> None:
    def program() -> None:
        Outcome(lambda: way(100.0, -1)).expired_after(60.0)
        Outcome(lambda: way(100.0, -0.25)).expired_after(60.0)

    on_the_virtual_clock(program)


@each_waiting
def test_the_default_can_be_set_and_holds_at_once(way: Way) -> None:
    def program() -> None:
        assert rpc.get_rpc_timeout() == 60
        rpc._set_rpc_timeout(7)
        assert rpc.get_rpc_timeout() == 7
        Outcome(lambda: way(100.0, -1)).expired_after(7.0)
        rpc._set_rpc_timeout(0)
        Outcome(lambda: way(LONG, -1)).came_after(LONG)
        Outcome(lambda: way(100.0, 5.0)).expired_after(5.0)

    on_the_virtual_clock(program)


@each_waiting
def test_the_options_give_the_first_default(way: Way) -> None:
    on_the_virtual_clock(lambda: Outcome(lambda: way(100.0, -1)).expired_after(9.0), timeout=9.0)


def test_a_limit_that_is_left_out_is_the_default() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync(1, rest, args=(100.0,)),
        lambda: rpc.rpc_async(1, rest, args=(100.0,)).wait(),
        lambda: idler().rpc_sync().rest(100.0),
        lambda: idler().rpc_async().rest(100.0).wait(),
        lambda: rpc.remote(1, rest, args=(100.0,), timeout=0).to_here(),
        lambda: rpc.remote(0, rest, args=(100.0,)).local_value(),
    ]

    def program() -> None:
        for call in calls:
            Outcome(call).expired_after(60.0)

    on_the_virtual_clock(program)


def test_a_new_default_is_for_calls_that_are_sent_after_it_proxies_of_before_included() -> None:
    def program() -> None:
        proxy = idler().rpc_sync()
        before = rpc.rpc_async(1, rest, args=(100.0,))
        rpc._set_rpc_timeout(5)
        Outcome(lambda: proxy.rest(100.0)).expired_after(5.0)
        Outcome(before.wait).expired_after(55.0)

    on_the_virtual_clock(program)


def test_a_new_default_is_this_workers_alone() -> None:
    def program() -> None:
        rpc._set_rpc_timeout(5)
        assert rpc.rpc_sync(1, rpc.get_rpc_timeout) == 60
        rpc.rpc_sync(1, rpc._set_rpc_timeout, args=(8,))
        assert (rpc.get_rpc_timeout(), rpc.rpc_sync(1, rpc.get_rpc_timeout)) == (5, 8)

    on_the_virtual_clock(program)


def test_torchs_words_are_used_and_say_what_ran_where() -> None:
    def program() -> None:
        for call in (
            lambda: rpc.rpc_sync(1, rest, args=(1.0,), timeout=0.1),
            lambda: rpc.rpc_async(1, rest, args=(1.0,), timeout=0.1).wait(),
            lambda: idler().rpc_sync(timeout=0.1).rest(1.0),
            lambda: idler().rpc_async(timeout=0.1).rest(1.0).wait(),
        ):
            with pytest.raises(rpc.RPCTimeoutError, match=EARLY.format(100)) as caught:
                call()
            assert isinstance(caught.value, (RuntimeError, TimeoutError))
            assert 'rest on worker "w1" (rank 1' in str(caught.value)

    on_the_virtual_clock(program)


@pytest.mark.parametrize("wrong, kind", [("soon", TypeError), (None, TypeError), (math.nan, ValueError)])
def test_what_is_no_limit_is_refused(wrong: Any, kind: type[Exception]) -> None:
    def program() -> None:
        future, mine, theirs = rpc.rpc_async(1, rest, args=(1.0,)), rpc.RRef(1), idler()
        calls: list[Callable[[], Any]] = [
            *(lambda way=way: way(1.0, wrong) for way in (*WAITING.values(), *KEEPING.values())),
            lambda: rpc._set_rpc_timeout(wrong),
            lambda: future.wait(wrong),
            lambda: mine.to_here(wrong),
            lambda: theirs.to_here(wrong),
        ]
        for call in calls:
            with pytest.raises(kind, match=r"timeout must be seconds \(0: for ever\), not"):
                call()
        assert future.wait() == "rested"

    on_the_virtual_clock(program)


def test_a_default_below_zero_is_refused() -> None:
    def program() -> None:
        with pytest.raises(ValueError, match=r"0 \(never\) or seconds above it, not -1"):
            rpc._set_rpc_timeout(-1)
        assert rpc.get_rpc_timeout() == 60

    on_the_virtual_clock(program)


# -- remote


def use(ref: Any) -> Any:
    return ref.to_here(timeout=0)


USES: dict[str, Callable[[Any], Any]] = {
    "to_here": lambda ref: ref.to_here(),
    "rpc_sync": lambda ref: ref.rpc_sync().upper(),
    "rpc_async": lambda ref: ref.rpc_async().upper(),
    "remote": lambda ref: ref.remote().upper(),
    "tell": lambda ref: ref.tell().upper(),
    "passed on as an argument": lambda ref: rpc.rpc_sync(1, use, args=(ref,)),
    "passed on to oneself": lambda ref: rpc.rpc_sync(0, use, args=(ref,)),
    "passed on in a container": lambda ref: rpc.rpc_async(2, len, args=([ref],)),
    "its method sent": lambda ref: rpc.rpc_sync(2, ref.rpc_sync().upper),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@each_keeping
def test_the_limit_of_remote_is_raised_at_the_next_use(way: Way, use: Callable[[Any], Any]) -> None:
    def program() -> None:
        ref = way(100.0, 5.0)
        rest(5.1)
        outcome = Outcome(lambda: use(ref))
        outcome.expired_after(0.0)
        assert "RPC ran for more than set timeout (5000 ms)" in str(outcome.error)
        Outcome(lambda: use(ref)).expired_after(0.0)  # and at the one after

    on_the_virtual_clock(program, 3)


@each_keeping
def test_remote_has_the_default_where_it_names_none_and_zero_is_never(way: Way) -> None:
    def program() -> None:
        rpc._set_rpc_timeout(7)
        ref = way(100.0, -1)
        rest(7.1)
        Outcome(ref.to_here).expired_after(0.0)
        ref = way(LONG, 0)
        rest(100.0)
        Outcome(lambda: ref.to_here(timeout=0)).came_after(LONG - 100.0)

    on_the_virtual_clock(program)


@each_keeping
def test_a_use_before_the_limit_of_remote_has_a_limit_of_its_own(way: Way) -> None:
    def program() -> None:
        ref = way(3.0, 5.0)
        Outcome(lambda: ref.to_here(timeout=1)).expired_after(1.0)
        Outcome(lambda: ref.to_here(timeout=4)).came_after(2.0)
        rest(10.0)
        Outcome(lambda: ref.to_here()).came_after(0.0)

    on_the_virtual_clock(program)


def local_value_of(ref: Any) -> Any:
    return ref.local_value()


def test_all_who_hold_it_hear_of_a_remote_that_expired_in_the_callees_queue() -> None:
    """Nobody will make the object: those to whom the reference was passed in time must not wait for it for ever."""

    def program(rank: int) -> int:
        if rank:
            return 0
        busy = [rpc.rpc_async(1, time.sleep, args=(0.01,)) for _ in range(40)]
        ref = rpc.remote(1, int, timeout=0.05)
        uses = [
            rpc.rpc_async(1, local_value_of, args=(ref,), timeout=15),
            rpc.rpc_async(2, use, args=(ref,), timeout=15),
            ref.rpc_async(timeout=15).bit_length(),
        ]
        for future in uses:
            with pytest.raises(rpc.RPCTimeoutError, match="the object was not made: the time of the call had run out"):
                future.wait()
        for future in busy:
            future.wait()
        return 1

    assert run_world(program, 3, options={"num_worker_threads": 1}) == [1, 0, 0]


# -- the wait of a future


def test_of_a_calls_limit_and_a_waits_the_smaller_holds_each_from_its_own_start() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, rest, args=(100.0,), timeout=10)
        rest(4.0)
        outcome = Outcome(lambda: future.wait(100))
        outcome.expired_after(6.0)
        assert "set timeout (10000 ms)" in str(outcome.error)
        assert future.done()

        future = rpc.rpc_async(1, rest, args=(50.0,), timeout=100)
        rest(4.0)
        outcome = Outcome(lambda: future.wait(5))
        outcome.expired_after(5.0)
        assert "waited 5 s for rest; it is still under way" in str(outcome.error)
        assert not future.done()
        Outcome(lambda: future.wait(timeout=60)).came_after(41.0)
        assert future.done()

    on_the_virtual_clock(program)


@pytest.mark.parametrize("unbounded", [0, -1, math.inf])
def test_a_wait_without_a_limit_has_the_calls(unbounded: float) -> None:
    def program() -> None:
        future = rpc.rpc_async(1, rest, args=(100.0,), timeout=10)
        rest(4.0)
        Outcome(lambda: future.wait(unbounded)).expired_after(6.0)
        Outcome(lambda: rpc.rpc_async(1, rest, args=(100.0,)).wait(unbounded)).expired_after(60.0)
        Outcome(lambda: rpc.rpc_async(1, rest, args=(LONG,), timeout=0).wait(unbounded)).came_after(LONG)

    on_the_virtual_clock(program)


def test_a_wait_has_a_limit_where_the_call_has_none() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, rest, args=(LONG,), timeout=0)
        Outcome(lambda: future.wait(5)).expired_after(5.0)
        Outcome(lambda: future.then(lambda done: done.wait()).wait(5)).expired_after(5.0)
        Outcome(future.wait).came_after(LONG - 10.0)

    on_the_virtual_clock(program)
