"""`profiler.breakdown`: where the time of single calls goes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import profiler
from actorrpc.profiler import Breakdown, CallParts
from tests.test_profiler import is_lost, watched
from tests.worlds import World, inside, until

PARTS = ("write", "queue", "wire", "wait", "run", "read")
SLOW = 0.05
SLOW_US = SLOW * 1e6


def doze(seconds: float) -> int:
    time.sleep(seconds)
    return 1


def echo(value: Any) -> Any:
    return value


def broken() -> None:
    raise KeyError("as it was")


class SlowToWrite:
    def __reduce__(self) -> Any:
        time.sleep(SLOW)
        return abs, (-1,)


class SlowToRead:
    def __reduce__(self) -> Any:
        return doze, (SLOW,)


DOOR = threading.Event()


def unlock() -> None:
    DOOR.set()


class Holder(rpc.Actor):
    def hold(self) -> None:
        assert DOOR.wait(30)

    def nothing(self) -> None:
        pass


def broken_down(body: Callable[[], Any]) -> Breakdown:
    with profiler.breakdown() as found:
        body()
    for call in found.calls:
        assert sum(getattr(call, part) for part in PARTS) == pytest.approx(call.total, abs=0.01)
        assert all(getattr(call, part) >= 0 for part in PARTS), call
    return found


def one(body: Callable[[], Any]) -> CallParts:
    (call,) = broken_down(body).calls
    return call


@inside
def test_time_in_the_handler_is_run() -> None:
    for rank in (0, 1):
        call = one(lambda rank=rank: rpc.rpc_sync(rank, doze, args=(SLOW,)))  # type: ignore[misc]
        assert call.name == f"rpc_sync#doze(worker0 -> worker{rank})"
        assert call.total >= call.run >= SLOW_US


@inside
def test_writing_and_reading_count_on_both_sides() -> None:
    assert one(lambda: rpc.rpc_sync("worker1", echo, args=(SlowToWrite(),))).write >= SLOW_US
    assert one(lambda: rpc.rpc_sync("worker1", SlowToWrite)).write >= SLOW_US
    assert one(lambda: rpc.rpc_sync("worker1", echo, args=(SlowToRead(),))).read >= SLOW_US
    assert one(lambda: rpc.rpc_sync("worker1", SlowToRead)).read >= SLOW_US


@inside
def test_an_actor_that_is_busy_is_waited_for() -> None:
    actor = Holder.spawn("worker1")

    def both() -> None:
        actor.tell().hold()  # a tell has no answer, and so no parts
        future = actor.rpc_async().nothing()
        until(lambda: any(one.depth for worker in rpc.debug.dump().workers for one in worker.actors))
        time.sleep(SLOW)
        rpc.rpc_sync("worker1", unlock)
        future.wait()

    nothing, _ = broken_down(both).calls
    assert nothing.name == "rpc_async#nothing(worker0 -> worker1)"
    assert nothing.wait >= SLOW_US


@inside
def test_every_kind_of_call_is_broken_down() -> None:
    def calls() -> None:
        rpc.rpc_async("worker1", echo, args=(torch.ones(3),)).wait()
        ref = rpc.remote("worker1", echo, args=([1],))
        assert ref.to_here() == [1]
        assert ref.rpc_sync().copy() == [1]
        with pytest.raises(KeyError):
            rpc.rpc_sync("worker1", broken)

    names = [call.name.split("(")[0] for call in broken_down(calls).calls]
    assert names == ["rpc_async#echo", "rpc_remote#echo", "to_here#", "rpc_sync#copy", "rpc_sync#broken"]


@inside
def test_only_the_calls_of_the_blocks_thread_are_there_and_nothing_is_left() -> None:
    rpc.rpc_sync("worker1", abs, args=(-1,))
    with profiler.breakdown() as found:
        assert "write" in watched()
        rpc.rpc_sync("worker1", rpc_from_elsewhere)
    rpc.rpc_sync("worker1", abs, args=(-1,))
    assert [call.name for call in found.calls] == ["rpc_sync#rpc_from_elsewhere(worker0 -> worker1)"]
    assert watched() == []
    assert rpc.rpc_sync("worker1", watched) == []


def rpc_from_elsewhere() -> Any:
    return rpc.rpc_sync("worker0", abs, args=(-1,))


@inside
def test_its_text_is_a_table() -> None:
    found = broken_down(lambda: rpc.rpc_sync("worker1", abs, args=(-1,)))
    head, line = str(found).splitlines()
    assert head.split() == ["call", "total", "us", *PARTS]
    numbers = line.removeprefix("rpc_sync#abs(worker0 -> worker1)").split()
    assert len(numbers) == 7
    assert sum(map(float, numbers[1:])) == pytest.approx(float(numbers[0]), abs=0.5)


@pytest.fixture
def mortal() -> Iterator[World]:
    with World(2, timeout=60) as world:
        world.let_die(1)
        yield world
        world.on(0, rpc.shutdown, False)


def die_meanwhile(pid: int) -> Breakdown:
    with profiler.breakdown() as found:
        rpc.rpc_sync("worker0", abs, args=(-1,))
        rpc.rpc_sync("worker1", abs, args=(-1,))
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_lost("worker1"), 20)
    return found


def test_calls_to_one_who_died_are_named_as_missing(mortal: World) -> None:
    found = mortal.on(0, die_meanwhile, mortal.pid(1))
    assert [call.name for call in found.calls] == ["rpc_sync#abs(worker0 -> worker0)"]
    ((name, reason),) = found.missing.items()
    assert name == "rpc_sync#abs(worker0 -> worker1)"
    assert "worker1" in reason
    assert f"{name}: {reason}" in str(found)
