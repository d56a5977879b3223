"""For tests whose processes call `init_rpc` themselves (`worlds.run_processes`)."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from tests.worlds import Outcome


def free_port() -> int:
    """Returns a port that nobody listens at, for now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def options(method: str, **more: Any) -> rpc.RpcBackendOptions:
    """Returns options with a place to meet, and a bound for it."""
    return rpc.RpcBackendOptions(**{"init_method": method, "init_timeout": 20.0, **more})


def join_world(rank: int, size: int, method: str, **more: Any) -> None:
    """Calls `init_rpc`, as w0, w1, ..."""
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options(method, **more))


def join_and_fail(rank: int, name: str, size: int, method: str, seconds: float) -> tuple[str, float]:
    """Calls `init_rpc`, which must fail and leave no worker behind; returns the error's text and how long it took."""
    began = time.monotonic()
    with pytest.raises(rpc.RendezvousError) as caught:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options(method, init_timeout=seconds))
    took = time.monotonic() - began
    rpc.shutdown()  # does nothing
    assert not session.is_available()
    return str(caught.value), took


def add(a: int, b: int) -> int:
    return a + b


def greet_all(rank: int, size: int) -> None:
    """Calls all workers, this one too."""
    for other in range(size):
        assert rpc.rpc_sync(other, add, args=(rank, 1)) == rank + 1


def fine(outcomes: list[Outcome]) -> list[Any]:
    """Fails unless all processes came to a good end; returns their results."""
    for outcome in outcomes:
        assert outcome.returned, f"rank {outcome.rank} died: {outcome}"
        assert not outcome.traceback, f"rank {outcome.rank}\n{outcome.traceback}\n{outcome.stderr}"
        assert outcome.problems == [], outcome.problems
    return [outcome.value for outcome in outcomes]
