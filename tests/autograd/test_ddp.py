"""Dense parameters under DistributedDataParallel (gloo), a sparse embedding on a server, one backward pass for both."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import actorrpc as rpc
from actorrpc import autograd
from tests.autograd.common import nothing_left, put_accumulated_hook, same
from tests.worlds import World

TRAINERS, SERVER = 2, 2
ROWS, WIDTH = 6, 4


@functools.cache
def table() -> torch.nn.EmbeddingBag:
    """The server's table."""
    torch.manual_seed(1)
    return torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)


def make_table() -> None:
    table()


def look_up(rows: Tensor, offsets: Tensor) -> Tensor:
    found: Tensor = table()(rows, offsets)
    return found


def table_gradient(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(table().weight)


def dense() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    chosen = torch.Generator().manual_seed(rank * 100 + step)
    return torch.randint(ROWS, (5,), generator=chosen), torch.tensor([0, 2])


def local(rank: int, step: int) -> tuple[list[Tensor], Tensor]:
    """One trainer's gradients, all in one process: of the dense part, and of the table."""
    module, own = dense(), table()
    loss = module(own(*batch(rank, step))).sum()
    *grads, of_table = torch.autograd.grad(loss, [*module.parameters(), own.weight])
    return grads, of_table.to_dense()


def join_trainers(rank: int, port: int) -> None:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, TRAINERS, is_master=rank == 0
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)


def train(rank: int, port: int, steps: int, uneven: bool, bucket_views: bool, hooks: bool) -> int:
    join_trainers(rank, port)
    try:
        module = DistributedDataParallel(dense(), gradient_as_bucket_view=bucket_views)
        calls: list[int] = []
        if hooks:
            put_accumulated_hook(next(module.parameters()), lambda _: calls.append(1))
        steps += rank if uneven else 0
        joined: Any = Join([module], divide_by_initial_world_size=False) if uneven else contextlib.nullcontext()
        with joined:
            for step in range(steps):
                one_step(rank, step, module, alone=uneven and step == steps - 1 and rank == 1)
        return len(calls)
    finally:
        dist.destroy_process_group()


def two_passes(rank: int, port: int, bucket_views: bool) -> None:
    join_trainers(rank, port)
    try:
        module = DistributedDataParallel(dense(), gradient_as_bucket_view=bucket_views)
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 7)
        kept = []
        for _ in range(2):
            with autograd.context() as context_id:
                for step in range(2):
                    rows = rpc.rpc_sync(SERVER, look_up, args=batch(rank, step))
                    autograd.backward(context_id, [module(rows).sum()])
                kept.append(autograd.get_gradients(context_id))
        locals_ = [local(r, step)[0] for r in range(TRAINERS) for step in range(2)]
        for found in kept:  # the later context has left the earlier one's gradients alone
            for parameter, grads in zip(parameters, zip(*locals_, strict=True), strict=True):
                same(found[parameter], torch.stack(grads).sum(0) / 2)
                assert parameter.grad is not None
                assert (parameter.grad == 7).all()
    finally:
        dist.destroy_process_group()


def one_step(rank: int, step: int, module: DistributedDataParallel, alone: bool) -> None:
    with autograd.context() as context_id:
        rows = rpc.rpc_sync(SERVER, look_up, args=batch(rank, step))
        autograd.backward(context_id, [module(rows).sum()])
        found = autograd.get_gradients(context_id)
        of_table = rpc.rpc_sync(SERVER, table_gradient, args=(context_id,))
    mine, right_table = local(rank, step)
    others = mine if alone else local(1 - rank, step)[0]
    for parameter, one, two in zip(module.parameters(), mine, others, strict=True):
        same(found[parameter], one if alone else (one + two) / 2)
        assert parameter.grad is None
    assert of_table is not None
    assert of_table.is_sparse
    same(of_table.to_dense(), right_table)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_trainers(world: World, program: Any, *args: Any) -> list[Any]:
    port = free_port()
    world.on(SERVER, make_table)  # once, before two trainers ask for it
    for rank in range(TRAINERS):
        world.start(rank, program, rank, port, *args)
    found = [world.result(rank) for rank in range(TRAINERS)]
    world.everywhere(nothing_left)
    return found


@pytest.fixture(scope="module")
def world() -> Any:
    with World(3, check=False, timeout=60) as made:  # gloo keeps threads of its own
        yield made


def test_dense_gradients_are_averaged_over_trainers_and_sparse_ones_stay_in_their_contexts(world: World) -> None:
    assert run_trainers(world, train, 4, False, False, True) == [4, 4]


def test_trainers_with_uneven_inputs_join(world: World) -> None:
    run_trainers(world, train, 2, True, False, False)


def test_gradients_may_be_views_of_buckets(world: World) -> None:
    run_trainers(world, train, 4, False, True, True)


@pytest.mark.parametrize("bucket_views", [False, True])
def test_gradients_of_two_passes_add_up_and_stay_apart_from_the_buckets(world: World, bucket_views: bool) -> None:
    run_trainers(world, two_passes, bucket_views)
