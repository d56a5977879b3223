"""Rank 0 dies: the others go on, tell each other of further losses, and what cannot work any more says so."""

from __future__ import annotations

import os
import signal

import pytest

import actorrpc as rpc
from actorrpc import session
from tests.failure.test_lost import SHORT, SOON, kept, lost, made, stopped
from tests.failure.test_watching import told, watch
from tests.test_elastic_worlds import Place, call_everybody, named, present
from tests.worlds import World, raised_within, stop, until


def call_all(ranks: list[int]) -> list[int]:
    return [rpc.rpc_sync(rank, abs, args=(-rank,)) for rank in ranks]


def shut_down() -> tuple[str, str]:
    with raised_within(SOON), pytest.raises(rpc.WorkerLostError) as caught:
        rpc.shutdown()
    assert not session.is_available()
    return caught.value.worker, str(caught.value)


@pytest.mark.parametrize("how", ["is killed", "is stopped"])
def test_without_rank_0_the_others_call_each_other_and_a_graceful_end_says_why_there_is_none(how: str) -> None:
    with made(4, **SHORT) as world:
        world.on(2, watch)
        if how == "is killed":
            os.kill(world.pid(0), signal.SIGKILL)
        else:
            stop(world.pid(0))
        world.let_die(0)
        for rank in (1, 2, 3):
            until(lambda rank=rank: world.on(rank, lost, 0), 20)  # type: ignore[misc]
        for rank in (1, 2, 3):
            assert world.on(rank, call_all, [1, 2, 3]) == [1, 2, 3]
        world.kill(3)  # the next one tells of further losses
        until(lambda: [t[0] for t in world.on(2, told)] == ["worker0", "worker3"], 20)
        for rank in (1, 2):
            worker, text = world.on(rank, shut_down)
            assert worker == "worker0"
            assert ("has ended" if how == "is killed" else "is stopped") in text
            assert "could not learn whether the others have ended" in text


def test_when_each_next_one_dies_those_who_are_left_hear_of_it() -> None:
    with made(5) as world:
        world.on(4, watch)
        for rank in (0, 1, 2, 3):
            world.kill(rank)
            until(lambda rank=rank: len(world.on(4, told)) == rank + 1, 20)  # type: ignore[misc]
        assert [t[0] for t in world.on(4, told)] == [f"worker{rank}" for rank in range(4)]


def test_rank_0_that_wakes_up_is_told_that_the_others_have_gone_on_without_it() -> None:
    def call() -> str:
        with pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(1, abs, args=(-1,))
        return str(caught.value)

    with made(3, **SHORT) as world:
        with stopped(world, 0):
            for rank in (1, 2):
                until(lambda rank=rank: world.on(rank, lost, 0), 20)  # type: ignore[misc]
        until(lambda: world.on(0, lambda: session.current().worker.members.verdicts.against), 20)
        assert "was taken for lost by the others" in world.on(0, call)
        assert world.on(1, call_all, [1, 2]) == [1, 2]


def test_a_stopped_worker_of_an_elastic_world_is_replaced_and_harms_nobody_when_it_wakes() -> None:
    def come_as_w1(method: str) -> int:
        from tests.test_elastic_worlds import come

        come(1, method, heartbeat_timeout=1.0)
        call_everybody(named(0, 1, 2))
        return os.getpid()

    def old_calls() -> tuple[str, str]:
        with pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync("w0", abs, args=(-1,))
        return caught.value.worker, str(caught.value)

    def is_told() -> str:
        return session.current().worker.members.verdicts.against

    def pid_of_w1() -> int:
        return int(rpc.rpc_sync("w1", os.getpid))

    with World(4, join=False, timeout=60, strict=False) as world:
        place = Place(world)
        for rank in range(3):
            world.on(rank, _come_soon, rank, place.method)
        with stopped(world, 1):
            for rank in (0, 2):
                until(lambda rank=rank: world.on(rank, present) == named(0, 2), 20)  # type: ignore[misc]
            new = world.on(3, come_as_w1, place.method)
            assert world.on(0, pid_of_w1) == world.on(2, pid_of_w1) == new
        until(lambda: world.on(1, is_told), 20)
        worker, text = world.on(1, old_calls)
        assert worker == "w1"
        assert "was taken for lost by the others" in text
        assert world.on(0, pid_of_w1) == world.on(2, pid_of_w1) == new
        for rank in (3, 0, 2):
            world.on(rank, call_everybody, named(0, 1, 2))
        for rank in (1, 3, 2, 0):
            world.on(rank, rpc.shutdown)


def _come_soon(rank: int, method: str) -> None:
    from tests.test_elastic_worlds import come

    come(rank, method, heartbeat_timeout=1.0)
    kept()
