"""Backward passes in the simulated world: exact whatever the order of messages, and soon over where a worker fails."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.errors import WorkerLostError
from actorrpc.services.autograd import Autograd
from actorrpc.testing import SimWorld
from tests.autograd.common import Fails

SIZE = 3
_leaves: dict[int, list[Tensor]] = {}
"""By worker: all workers of a simulated world live in this process."""


def leaves_of(me: int) -> list[Tensor]:
    return _leaves[me]


def me() -> int:
    return rpc.get_worker_info().id


def visit(plan: int, depth: int, x: Tensor, bad: bool) -> list[Tensor]:
    """One worker's turn: some steps of its own, and calls to others, some of which it does not wait for in order."""
    return steps(plan, depth, x, bad, me(), call)


def steps(plan: int, depth: int, x: Tensor, bad: bool, here: int, call: Any) -> list[Tensor]:
    choice, own = random.Random(plan), leaves_of(here)
    values = [x, x * choice.choice(own)]
    futures = []
    for _ in range(choice.randint(1, 3)):
        value = torch.tanh(choice.choice(values) * choice.choice(own))
        if depth < 3 and choice.random() < 0.7:
            verb, to, plan = choice.randrange(3), choice.randrange(SIZE), choice.randrange(1 << 30)
            futures.append(call(verb, to, plan, depth + 1, value, bad))
        else:
            values.append(value)
    choice.shuffle(futures)
    for future in futures[: choice.randint(0, 3)]:  # others nobody waits for
        values += future()
    if bad and depth == 2:
        values.append(Fails.apply(values[-1]))  # type: ignore[no-untyped-call]
    return values[-2:]


def call(verb: int, to: int, plan: int, depth: int, x: Tensor, bad: bool) -> Any:
    args = plan, depth, x, bad
    if verb == 0:
        result = rpc.rpc_sync(to, visit, args=args)
        return lambda: result
    if verb == 1:
        return rpc.rpc_async(to, visit, args=args).wait
    return rpc.remote(to, visit, args=args).to_here


def call_here(verb: int, to: int, plan: int, depth: int, x: Tensor, bad: bool) -> Any:
    return functools.partial(list, [v * 1 for v in steps(plan, depth, x * 1, bad, to, call_here)])


def fresh_leaves(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for rank in range(SIZE):
        draw = functools.partial(torch.randn, 2, dtype=torch.float64, generator=made)
        _leaves[rank] = [draw().requires_grad_() for _ in range(2)]


def gradients_here(context_id: int) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [found.get(leaf) for leaf in leaves_of(me())]


def passes_at_once(seed: int, trainers: int) -> None:
    """Some workers run passes over the same leaves at the same time."""
    fresh_leaves(seed)
    flat = [leaf for rank in range(SIZE) for leaf in leaves_of(rank)]
    plans = [seed * 10 + n for n in range(trainers)]
    expected: list[tuple[Tensor | None, ...]] = []
    for rank, plan in enumerate(plans):
        loss: Any = sum(v.sum() for v in steps(plan, 0, leaves_of(rank)[0] * 1, False, rank, call_here))
        expected.append(torch.autograd.grad(loss, flat, allow_unused=True))
    with SimWorld(size=SIZE, seed=seed, threads=2, timeout=300.0) as world:

        def program(plan: int) -> list[Tensor | None]:
            with autograd.context() as context_id:
                loss: Any = sum(v.sum() for v in visit(plan, 0, leaves_of(me())[0] * 1, False))
                autograd.backward(context_id, [loss])
                touched = {rank for rank in range(SIZE) if known(world, rank, context_id)}
                return [
                    grad
                    for rank in range(SIZE)
                    for grad in (
                        rpc.rpc_sync(rank, gradients_here, args=(context_id,)) if rank in touched else [None, None]
                    )
                ]

        results: list[list[Tensor | None]] = world.run(*(functools.partial(program, plan) for plan in plans))
        for mine, right in zip(results, expected, strict=True):
            for one, other in zip(mine, right, strict=True):
                if one is None or other is None:
                    assert other is None or not other.any(), (seed, one, other)
                    assert one is None or not one.any(), (seed, one, other)
                else:
                    torch.testing.assert_close(one, other, msg=lambda m: f"seed {seed}: {m}")
        settled(world, seed)


def known(world: SimWorld, rank: int, context_id: int) -> bool:
    contexts = world.sessions[rank].worker.services[Autograd].contexts
    return any(context.id == context_id for context in contexts.all())


def settled(world: SimWorld, seed: int) -> None:
    """Fails if a worker keeps something of passes or contexts."""
    world.settle(1.0)
    for session in world.sessions:
        if session.worker.id not in world.dead:
            mine = session.worker.services[Autograd]
            assert not mine.contexts.all(), (seed, str(session.worker))
            assert not mine.leaves.running, (seed, str(session.worker))
            assert not mine.leaves._held, (seed, str(session.worker))
            assert session.worker.crew.quiet, (seed, str(session.worker))


def fail_somewhere(seed: int) -> None:
    """A pass fails on some worker; within a virtual second, nobody has anything left to do with it."""
    fresh_leaves(seed)
    with SimWorld(size=SIZE, seed=seed, threads=2, timeout=300.0) as world:

        def program() -> bool:
            with autograd.context() as context_id:
                loss: Any = sum(v.sum() for v in visit(seed, 0, leaves_of(0)[0] * 1, True))
                try:
                    autograd.backward(context_id, [loss])
                except ZeroDivisionError:
                    return True
                return False

        world.run(program)
        assert world.simulation.time < 100, seed
        settled(world, seed)


def lose_somewhere(seed: int) -> None:
    """A worker dies some time in forward or backward: the pass is over soon, right or with an error that says so."""
    fresh_leaves(seed)
    with SimWorld(size=SIZE, seed=seed, threads=2, timeout=300.0) as world:
        after = random.Random(seed).random() * 0.02

        def program() -> None:
            try:
                with autograd.context() as context_id:
                    loss: Any = sum(v.sum() for v in visit(seed, 0, leaves_of(0)[0] * 1, False))
                    autograd.backward(context_id, [loss])
            except WorkerLostError:
                pass

        world.simulation.at(after, lambda: world.kill(2))
        world.run(program)
        assert world.simulation.time < 100, seed
        world.settle(0.1)
        settled(world, seed)


def test_passes_are_exact_in_any_order_of_messages() -> None:
    for seed in range(40):
        passes_at_once(seed, 1)
    for seed in range(40, 60):
        passes_at_once(seed, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_passes_are_exact_in_1000_seeds() -> None:
    for seed in range(1_000):
        passes_at_once(seed, 1 + seed % 3)


def test_a_pass_that_fails_is_over_everywhere_in_any_order_of_messages() -> None:
    for seed in (*range(40), 606, 905):  # in these two the context's end comes before the news
        fail_somewhere(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_passes_that_fail_are_over_everywhere_in_1000_seeds() -> None:
    for seed in range(1_000):
        fail_somewhere(seed)


def test_a_pass_is_over_everywhere_when_a_worker_dies_at_any_time() -> None:
    for seed in range(40):
        lose_somewhere(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_passes_are_over_everywhere_in_1000_deaths() -> None:
    for seed in range(1_000):
        lose_somewhere(seed)
