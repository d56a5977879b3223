"""Calls within calls, and many threads at once: nothing deadlocks, nobody starves."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import actorrpc as rpc
from tests.worlds import run_world

WAYS = ("wait", "then", "wait_all", "event", "sync")


def leaf(x: int) -> int:
    time.sleep(0.002)
    return x + 1


def back(caller: str, x: int, way: str) -> int:
    """Calls its caller back, and waits for it in one of several ways."""
    if way == "sync":
        return int(rpc.rpc_sync(caller, leaf, args=(x,)))
    future = rpc.rpc_async(caller, leaf, args=(x,))
    if way == "wait":
        return int(future.wait())
    if way == "then":
        return int(future.then(lambda f: f.wait()).wait())
    if way == "wait_all":
        return int(torch.futures.wait_all([future])[0])
    ready = threading.Event()
    future.add_done_callback(lambda f: ready.set())
    assert ready.wait(20)
    return int(future.wait())


def both_directions(rank: int, way: str, n: int) -> None:
    me, other = f"worker{rank}", f"worker{1 - rank}"
    futures = [rpc.rpc_async(other, back, args=(me, i, way), timeout=20) for i in range(n)]
    assert [future.wait() for future in futures] == list(range(1, n + 1))


@pytest.mark.parametrize("way", WAYS)
def test_32_calls_back_with_two_threads_finish_in_both_directions(way: str) -> None:
    run_world(both_directions, 2, args=(way, 32), options={"num_worker_threads": 2})


def one_direction(rank: int, way: str, n: int) -> None:
    if rank == 0:
        both_directions(rank, way, n)


@pytest.mark.parametrize("way", WAYS)
def test_32_calls_back_with_one_thread_finish_in_one_direction(way: str) -> None:
    run_world(one_direction, 2, args=(way, 32), options={"num_worker_threads": 1})


def down(depth: int, me: str, other: str) -> int:
    return 0 if depth == 0 else 1 + int(rpc.rpc_sync(other, down, args=(depth - 1, other, me)))


@pytest.mark.parametrize("threads", [1, 16])
def test_recursion_between_two_workers_goes_deep(threads: int) -> None:
    def program(rank: int) -> None:
        assert down(40, f"worker{rank}", f"worker{1 - rank}") == 40

    run_world(program, 2, options={"num_worker_threads": threads})


def test_a_handler_that_calls_its_own_worker_finishes_with_one_thread() -> None:
    def program(rank: int) -> None:
        me = f"worker{rank}"
        assert down(10, me, me) == 10
        assert rpc.rpc_sync(f"worker{1 - rank}", down, args=(10, f"worker{1 - rank}", f"worker{1 - rank}")) == 10

    run_world(program, 2, options={"num_worker_threads": 1})


def hammer(rank: int, threads: int, calls: int) -> float:
    """Many threads call one peer; returns the slowest call's seconds."""
    if rank != 0:
        return 0.0
    finished: list[int] = []
    slowest = [0.0] * threads
    errors: list[BaseException] = []

    def caller(k: int) -> None:
        try:
            for i in range(calls):
                began = time.monotonic()
                assert rpc.rpc_sync(1, add, args=(k, i), timeout=30) == k + i
                slowest[k] = max(slowest[k], time.monotonic() - began)
            finished.append(k)
        except BaseException as e:
            errors.append(e)

    crowd = [threading.Thread(target=caller, args=(k,)) for k in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    if errors:
        raise errors[0]
    assert sorted(finished) == list(range(threads))
    return max(slowest)


def add(a: int, b: int) -> int:
    return a + b


def test_sixteen_threads_calling_one_peer_all_finish() -> None:
    slowest = run_world(hammer, 2, args=(16, 150))[0]
    assert slowest < 5.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32_threads_times_2000_calls_to_one_peer_all_finish(record_property: Any) -> None:
    slowest = run_world(hammer, 2, args=(32, 2000), timeout=240)[0]
    record_property("slowest_call_seconds", slowest)
    print(f"slowest call: {slowest * 1000:.0f} ms")
    assert slowest < 10.0


def test_calls_are_answered_while_the_main_thread_computes_in_python() -> None:
    def program(rank: int) -> float:
        if rank == 1:
            end, n = time.monotonic() + 1.5, 0
            while time.monotonic() < end:
                n += 1
            return 0.0
        times = []
        for _ in range(50):
            began = time.monotonic()
            rpc.rpc_sync(1, add, args=(1, 2))
            times.append(time.monotonic() - began)
        return sorted(times)[25]

    median = run_world(program, 2)[0]
    assert median < 0.05


def test_calls_run_in_all_directions_between_four_workers() -> None:
    def program(rank: int) -> None:
        futures = [rpc.rpc_async(to, back, args=(f"worker{rank}", i, "wait")) for i in range(10) for to in range(4)]
        assert [f.wait() for f in futures] == [i + 1 for i in range(10) for _ in range(4)]

    run_world(program, 4, options={"num_worker_threads": 2})
