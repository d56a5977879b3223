"""A training run that goes on and on leaves nothing behind."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import actorrpc as rpc
from actorrpc import autograd, session
from actorrpc.optim import DistributedOptimizer
from actorrpc.services.autograd import Autograd
from tests.worlds import run_world, until

WARM_UP, STEPS, SAMPLES = 200, 1000, 5
NOISE = 2 << 20
"""Bytes by which the memory of a process may grow from the first to the last sample: allocators breathe."""


def state_here() -> dict[str, int]:
    """Returns what this worker holds: memory, contexts, pending calls, forks of references."""
    gc.collect()
    current = session.current()
    held = current.objects.statistics()
    return {
        "memory": psutil.Process().memory_info().rss,
        "contexts": current.worker.services[Autograd].contexts.statistics()["contexts"],
        "pending": current.worker.statistics()["pending"],
        "forks": held["forks"] + held["held"],
        "children": held["children"],
    }


def train(rank: int) -> list[list[dict[str, int]]] | None:
    """Trains a model whose middle is on worker 1 and whose end is on worker 2; returns samples of all workers."""
    torch.set_num_threads(1)
    if rank:
        return None
    first = nn.Linear(32, 64)
    middle: Any = rpc.remote(1, nn.Linear, args=(64, 64))
    last: Any = rpc.remote(2, nn.Linear, args=(64, 8))
    parameters = [*(rpc.RRef(p) for p in first.parameters())]
    for module in (middle, last):
        parameters += rpc.rpc_sync(module.owner(), parameters_of, args=(module,))
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=1e-3)

    def step() -> None:
        x, wanted = torch.randn(16, 32), torch.randn(16, 8)
        with autograd.context() as context_id:
            hidden = middle.remote().forward(first(x))
            loss = (last.rpc_sync().forward(hidden.to_here().relu()) - wanted).square().mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    samples = []
    for number in range(1, WARM_UP + STEPS + 1):
        step()
        if number >= WARM_UP and (number - WARM_UP) % (STEPS // (SAMPLES - 1)) == 0:
            until(lambda: all(rpc.rpc_sync(to, state_here)["contexts"] == 0 for to in range(3)))
            samples.append([rpc.rpc_sync(to, state_here) for to in range(3)])
    return samples


def parameters_of(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[nn.Parameter]]:
    """Returns references to the parameters of a module of this worker."""
    return [rpc.RRef(p) for p in module.local_value().parameters()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_steps_leave_no_contexts_no_messages_no_references_and_no_memory() -> None:
    samples: list[list[dict[str, int]]] = run_world(train, 3, timeout=350)[0]
    assert len(samples) == SAMPLES
    for worker in range(3):
        own = [sample[worker] for sample in samples]
        for name in ("contexts", "forks", "children"):
            assert len({state[name] for state in own}) == 1, (worker, name, own)
        assert all(state["pending"] <= 1 for state in own), own  # the call that asks
        memory = [state["memory"] for state in own]
        assert memory[-1] - memory[0] < NOISE, (worker, memory)
