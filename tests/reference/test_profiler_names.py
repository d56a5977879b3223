"""What a trace of torch's profiler calls the calls."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import actorrpc as rpc
from tests.worlds import run_world


def double(x: int) -> int:
    return 2 * x


class Box:
    def get(self) -> int:
        return 3


def traced(rank: int) -> set[str]:
    """Makes calls of every kind, the last of them when no profiler is on; returns the names in the trace."""
    if rank:
        return set()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert rpc.rpc_sync("worker1", double, args=(2,)) == 4
        assert rpc.rpc_async(1, double, args=(3,)).wait() == 6
        assert rpc.remote("worker1", double, args=(4,)).to_here() == 8
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)) == 2
        assert rpc.rpc_sync("worker0", double, args=(5,)) == 10
        assert rpc.remote("worker1", Box).rpc_sync().get() == 3
    rpc.rpc_sync("worker1", len, args=("untraced",))
    return {event.key for event in trace.key_averages() if "worker0 ->" in event.key}


def test_a_call_is_named_by_verb_function_caller_and_callee() -> None:
    assert run_world(traced, 2)[0] == {
        "rpc_sync#double(worker0 -> worker1)",
        "rpc_async#double(worker0 -> worker1)",
        "rpc_remote#double(worker0 -> worker1)",
        "rpc_sync#aten::add(worker0 -> worker1)",
        "rpc_sync#double(worker0 -> worker0)",
        "rpc_remote#Box(worker0 -> worker1)",
        "rpc_sync#get(worker0 -> worker1)",
    }
