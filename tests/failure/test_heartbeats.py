"""Heartbeats cost little, and tell a process that computes from one that is gone. Real processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.wire import lookout
from actorrpc.wire.transport import News
from tests.failure.test_lost import SHORT, lost, made, stopped
from tests.relay import descriptors
from tests.worlds import World, until


def hold_the_gil(seconds: float) -> int:
    """No other thread of Python runs meanwhile."""
    if ctypes.PyDLL(None).usleep(int(seconds * 1e6)):
        raise OSError("interrupted")
    return 1


def test_a_handler_that_holds_the_gil_for_longer_than_the_heartbeat_timeout_is_not_taken_for_dead() -> None:
    def call() -> int:
        return int(rpc.rpc_sync(1, hold_the_gil, args=(3.0,), timeout=0))

    with World(3, options=SHORT) as world:
        world.on(2, rpc.rpc_sync, 1, abs, (-1,))
        assert world.on(0, call) == 1
        assert [world.on(rank, lost, 1) for rank in (0, 2)] == ["", ""]
        assert world.on(1, lost, 0) == ""


def call_all_of(size: int) -> None:
    for rank in range(size):
        assert rpc.rpc_sync(rank, abs, args=(-1,)) == 1


def settled() -> bool:
    """Whether no connection is probed any more, for which another one is open."""
    transport: Any = session.current().worker.transport
    looks = transport._lookout
    return not (looks._unproved or looks._probed or looks._unmade)


def test_a_peer_costs_at_most_six_descriptors() -> None:
    """Two for each way's socket and connection, one for its connection to us, one for its process, two for news."""
    counted = 0
    for size in (2, 6):
        with World(size, options=SHORT) as world:
            world.everywhere(call_all_of, size)
            for rank in range(size):
                until(lambda rank=rank, world=world: world.on(rank, settled), 20)  # type: ignore[misc]
            if size == 2:
                counted = world.on(0, descriptors)
            else:  # the other ends of probes take a moment to close
                until(lambda world=world, few=counted: world.on(0, descriptors) - few <= 4 * 6)  # type: ignore[misc]


def switches(*words: str) -> int:
    """How often the threads of these names have slept so far."""
    count = 0
    for thread in threading.enumerate():
        if any(word in thread.name for word in words):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            count += int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return count


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_an_idle_worker_sleeps() -> None:
    """None of its Python threads does anything while heartbeats go back and forth."""

    def count() -> int:
        until(settled, 20)
        time.sleep(2.5)
        before = switches("keeper", "lookout", "hand")
        time.sleep(2.0)
        return switches("keeper", "lookout", "hand") - before

    with made(3, heartbeat_timeout=10) as world:
        world.everywhere(call_all_of, 3)
        assert world.on(0, count) <= 6  # polling every 0.2 s would be 10; a thread of the pool may end meanwhile


def test_without_heartbeats_a_stopped_worker_is_waited_for_and_a_dead_one_is_noticed_all_the_same() -> None:
    with made(2, heartbeat_timeout=0) as world:
        with stopped(world, 1):
            time.sleep(1.5)
            assert world.on(0, lost, 1) == ""
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        world.kill(1)
        until(lambda: world.on(0, lost, 1), 20)


@pytest.mark.parametrize("wrong", [-1, 0.1, 81, float("nan"), float("inf"), "x", None, [1]])
def test_a_heartbeat_timeout_that_cannot_be_is_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions):
        options = kind(heartbeat_timeout=2)
        assert options.heartbeat_timeout == 2.0
        with pytest.raises((ValueError, TypeError), match="heartbeat_timeout"):
            options.heartbeat_timeout = wrong
        assert options.heartbeat_timeout == 2.0
    monkeypatch.setenv("ACTORRPC_HEARTBEAT_TIMEOUT", "3.5")
    assert rpc.RpcBackendOptions().heartbeat_timeout == 3.5
    for text in ("soon", "100"):
        monkeypatch.setenv("ACTORRPC_HEARTBEAT_TIMEOUT", text)
        with pytest.raises(ValueError, match="ACTORRPC_HEARTBEAT_TIMEOUT"):
            rpc.RpcBackendOptions()


@pytest.mark.slow
def test_a_stopped_worker_to_which_much_is_on_its_way_is_noticed_as_well() -> None:
    """Heartbeats of the sender's own would not leave any more."""
    from tests.failure.test_lost import SOON, stopped

    def push() -> str:
        futures = []
        with contextlib.suppress(rpc.WorkerLostError):
            for _ in range(50):
                futures.append(rpc.rpc_async(1, torch.numel, args=(torch.zeros(250_000),), timeout=0))
        end = time.monotonic() + SOON
        for future in futures:
            until(future.done, end - time.monotonic())
        with pytest.raises(rpc.WorkerLostError) as caught:
            futures[-1].wait()
        return str(caught.value)

    with made(2, **SHORT) as world:
        world.on(0, rpc.rpc_sync, 1, abs, (-1,))
        with stopped(world, 1):
            assert "is stopped" in world.on(0, push)


def test_all_that_is_done_about_a_silent_peer_is_done_within_the_heartbeat_timeout() -> None:
    assert lookout.LIFE + lookout.ANSWER < 1
    assert lookout.PING < lookout.PROBED
    assert lookout.PROBED + lookout.PROBE + lookout.ANSWER <= 1
    assert 2 * lookout.LOOK + lookout.STILL + lookout.ANSWER <= 1
    assert lookout.PING * 2 < lookout.LIFE  # one ping may come late


@pytest.mark.parametrize("token", [None, "of the test"])
def test_a_worker_that_stands_still_is_asked_first_and_not_lost_if_it_goes_on(token: str | None) -> None:
    def doubt() -> None:
        session.current().worker.doubts.hear(1, News.CUT)

    def doubted() -> bool:
        return bool(session.current().worker.doubts.open)

    with made(2, heartbeat_timeout=20, security_token=token) as world:
        world.on(0, rpc.rpc_sync, 1, abs, (-1,))
        with stopped(world, 1):
            world.on(0, doubt)  # as its lookout does after a while
            assert world.on(0, doubted)
            assert world.on(0, lost, 1) == ""
        until(lambda: not world.on(0, doubted), 5)  # it has answered, long before its time was over
        assert world.on(0, lost, 1) == ""
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
