"""The support for worlds itself: its guards must be able to fire."""

from __future__ import annotations

import os
import threading
import time

import pytest

import actorrpc as rpc
from tests.worlds import World, WorldError, run_processes, run_world


def ask(rank: int, word: str) -> str:
    return f"{rpc.rpc_sync(1 - rank, os.getpid)} {rank} {word}".split(" ", 1)[1]


def test_a_program_runs_on_every_rank_and_its_results_come_back() -> None:
    assert run_world(ask, 2, args=("hello",)) == ["0 hello", "1 hello"]


def test_a_failing_rank_shows_its_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")

    with pytest.raises(WorldError, match=r"(?s)rank 1.*in fail.*KeyError: 'the reason'"):
        run_world(fail, 2)


def test_a_rank_that_does_not_end_is_killed_and_its_stack_shown() -> None:
    def sleep(rank: int) -> None:
        time.sleep(60 * rank)

    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] did not come to an end.*in sleep"):
        with World(2, join=False, timeout=2) as world:
            world.everywhere(sleep, ranked=True)


def test_threads_and_descriptors_that_are_left_are_found() -> None:
    def leak(rank: int) -> None:
        if rank == 1:
            threading.Thread(target=time.sleep, args=(30,), name="leaky", daemon=True).start()
            os.dup(0)

    outcomes = run_processes(leak, 2)
    assert outcomes[0].problems == []
    assert "leaky" in outcomes[1].problems[0]
    assert "1 descriptors" in outcomes[1].problems[1]


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    outcomes = run_processes(lambda rank: os._exit(3), 1)
    assert outcomes[0].exitcode == 3
    assert not outcomes[0].returned


def test_a_standing_world_runs_one_thing_after_the_other() -> None:
    with World(2) as world:
        assert world.on(0, lambda: rpc.get_worker_info().name) == "worker0"
        assert world.everywhere(ask, "x", ranked=True) == ["0 x", "1 x"]
