"""Random graphs of nested calls over two to four workers: the gradients are those of a run in one process."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd
from tests.worlds import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORKERS = 4
DTYPES = (torch.float64, torch.float64, torch.float32, torch.complex128)
VERBS = 5


@functools.lru_cache(maxsize=4)
def params_of(seed: int, rank: int) -> list[Tensor]:
    """The leaves of a worker in a case: two tensors and a Parameter, the same wherever they are made."""
    dtype = DTYPES[seed % len(DTYPES)]
    made = torch.Generator().manual_seed(seed * 10 + rank)
    leaves = [torch.randn(3, dtype=dtype, generator=made).requires_grad_() for _ in range(2)]
    return [*leaves, torch.nn.Parameter(torch.randn(3, dtype=dtype, generator=made))]


def steps(seed: int, plan: int, me: int, depth: int, values: list[Tensor], call: Any) -> list[Tensor]:
    """What a worker does with the tensors that it gets; `call(to, plan, depth, tensors)` calls another one."""
    r, params = random.Random(plan), params_of(seed, me)
    size = 2 + seed % (WORKERS - 1)
    values = list(values)
    if values and r.random() < 0.3 and not values[0].is_leaf:
        values[0].add_(r.choice(params))  # in place, on what was received
    values = values or [params[0] * 1]
    for _ in range(r.randint(1, 4)):
        kind, value = r.random(), r.choice(values)
        if kind < 0.3:
            values.append(torch.tanh(value * r.choice(params)))
        elif kind < 0.4:
            values.append(value * r.choice(values) + r.choice(params))
        elif depth < 3:
            sent = [value * 2]
            if r.random() < 0.4:
                sent.append(r.choice(values))
            if r.random() < 0.3:
                sent.append(r.choice(params))  # a leaf, directly
            if r.random() < 0.2:
                sent.append(sent[0])  # twice
            came = call(r.randrange(size), r.randrange(1 << 30), depth + 1, sent)
            if r.random() < 0.5:
                values.append(sent[0].add_(r.choice(params)))  # in place, after it was sent
            values += [tensor for tensor in came if r.random() < 0.7]
    return [value for value in values if r.random() < 0.7] or values[-1:]


def losses(seed: int, call: Any) -> list[Tensor]:
    """The roots of a case, on worker 0."""
    values = steps(seed, seed, 0, 0, [], call)
    sums = [value.abs().square().sum() for value in values]
    return [functools.reduce(torch.add, sums[:2]), *sums[2:]]


def in_one_process(seed: int) -> list[list[Tensor | None]]:
    def call(to: int, plan: int, depth: int, tensors: list[Tensor]) -> list[Tensor]:
        copies = {id(tensor): tensor * 1 for tensor in tensors}
        return [v * 1 for v in steps(seed, plan, to, depth, [copies[id(t)] for t in tensors], call)]

    flat = [p for rank in range(WORKERS) for p in params_of(seed, rank)]
    loss = functools.reduce(torch.add, losses(seed, call))
    grads = torch.autograd.grad(loss, flat, allow_unused=True)
    return [list(grads[3 * rank : 3 * rank + 3]) for rank in range(WORKERS)]


def visit(seed: int, plan: int, me: int, depth: int, tensors: list[Tensor]) -> list[Tensor]:
    """One worker's turn."""
    return steps(seed, plan, me, depth, tensors, functools.partial(call_another, seed))


@rpc.functions.async_execution
def visit_later(seed: int, plan: int, me: int, depth: int, tensors: list[Tensor]) -> rpc.Future[list[Tensor]]:
    """One worker's turn, which it takes later."""
    return rpc.rpc_async(me, visit, args=(seed, plan, me, depth, tensors))


class Visitor:
    """The same as a method, of an object or an actor."""

    def visit(self, *args: Any) -> list[Tensor]:
        return visit(*args)


class ActingVisitor(Visitor, rpc.Actor):
    """The same as an actor's."""


def call_another(seed: int, to: int, plan: int, depth: int, tensors: list[Tensor]) -> list[Tensor]:
    args, verb = (seed, plan, to, depth, tensors), plan % VERBS
    came: list[Tensor]
    if verb == 0:
        came = rpc.rpc_sync(to, visit, args=args)
    elif verb == 1:
        came = rpc.rpc_async(to, visit, args=args).wait()
    elif verb == 2:
        came = [v * 1 for v in rpc.remote(to, visit, args=args).to_here()]
    elif verb == 3:
        came = rpc.rpc_sync(to, visit_later, args=args)
    else:
        kind = Visitor if plan % 2 else ActingVisitor
        came = rpc.remote(to, kind).rpc_sync().visit(*args)
    return came


def gradients_here(seed: int, me: int, context_id: int) -> list[Tensor | None]:
    grads = autograd.get_gradients(context_id)
    assert all(leaf.grad is None for leaf in params_of(seed, me))
    return [grads.get(leaf) for leaf in params_of(seed, me)]


def over_workers(seed: int) -> list[list[Tensor | None]]:
    """Runs a case from worker 0."""
    with autograd.context() as context_id:
        roots = losses(seed, functools.partial(call_another, seed))
        autograd.backward(context_id, roots)
        return [rpc.rpc_sync(rank, gradients_here, args=(seed, rank, context_id)) for rank in range(WORKERS)]


def check(seeds: Sequence[int]) -> None:
    """Runs cases on worker 0 and compares."""
    for seed in seeds:
        ours, theirs = over_workers(seed), in_one_process(seed)
        for rank in range(WORKERS):
            for mine, right in zip(ours[rank], theirs[rank], strict=True):
                if right is None or mine is None:
                    assert right is None or not right.any(), (seed, rank, mine, right)
                    assert mine is None or not mine.any(), (seed, rank, mine, right)
                else:
                    torch.testing.assert_close(mine, right, msg=lambda m: f"seed {seed}, rank {rank}: {m}")  # noqa: B023


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(WORKERS) as made:
        yield made


@pytest.mark.parametrize("part", range(5))
def test_gradients_of_random_graphs_are_those_of_one_process(world: World, part: int) -> None:
    world.on(0, check, range(part * 100, part * 100 + 100))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5, 50))
def test_gradients_of_5000_random_graphs_are_those_of_one_process(world: World, part: int) -> None:
    world.on(0, check, range(part * 100, part * 100 + 100))
