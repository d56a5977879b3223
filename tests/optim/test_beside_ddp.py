"""One optimizer over a dense part under DistributedDataParallel and a sparse one on a parameter server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from tests.optim.programs import parameter, same
from tests.worlds import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TRAINERS, SERVER = 2, 2
STEPS = 4
KINDS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
}


class Bag:
    """An embedding bag; Adam takes dense gradients only."""

    def __init__(self, sparse: bool) -> None:
        self.weight, self.sparse = parameter(5, 12, 4), sparse

    def forward(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.embedding_bag(rows, self.weight, mode="sum", sparse=self.sparse)

    def rref(self) -> rpc.RRef[Any]:
        return rpc.RRef(self.weight)

    def value(self) -> Tensor:
        return self.weight.detach()


def dense() -> torch.nn.Linear:
    made = torch.nn.Linear(4, 3)
    with torch.no_grad():
        made.weight.copy_(parameter(1, 3, 4))
        made.bias.copy_(parameter(2, 3))
    return made


def rows_of(rank: int, number: int) -> Tensor:
    return torch.randint(12, (2, 3), generator=torch.Generator().manual_seed(10 * number + rank))


def train(rank: int, name: str, bag: rpc.RRef[Any], where: str) -> list[Tensor]:
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=TRAINERS)
    try:
        # as the tutorial does; a bucket's view in .grad must do no harm
        model = DistributedDataParallel(dense(), gradient_as_bucket_view=True)
        refs = [bag.rpc_sync().rref(), *(rpc.RRef(param) for param in model.parameters())]
        optimizer = DistributedOptimizer(getattr(torch.optim, name), refs, lr=0.1)
        for number in range(STEPS):
            with autograd.context() as context_id:
                loss = model(bag.rpc_sync().forward(rows_of(rank, number))).square().sum()
                dist.barrier()  # nobody makes a step before all have read
                autograd.backward(context_id, [loss])
                for turn in range(TRAINERS):
                    dist.barrier()
                    if turn == rank:
                        optimizer.step(context_id)
            dist.barrier()
        return [param.detach() for param in model.parameters()]
    finally:
        dist.destroy_process_group()


def in_one_process(name: str) -> tuple[list[Tensor], Tensor]:
    bag, model = Bag(sparse=name != "Adam"), dense()
    params = list(model.parameters())
    optimizers = [KINDS[name]([bag.weight]) for _ in range(TRAINERS)]
    own = KINDS[name](params)
    for number in range(STEPS):
        losses = [model(bag.forward(rows_of(rank, number))).square().sum() for rank in range(TRAINERS)]
        grads = [torch.autograd.grad(loss, [bag.weight, *params]) for loss in losses]
        for rank in range(TRAINERS):
            bag.weight.grad = grads[rank][0]
            optimizers[rank].step()
        for i, param in enumerate(params):
            param.grad = (grads[0][1 + i] + grads[1][1 + i]) / TRAINERS
        own.step()
    return [param.detach() for param in params], bag.value()


def drive(name: str, where: str) -> tuple[Sequence[list[Tensor]], Tensor]:
    bag = rpc.remote(SERVER, Bag, args=(name != "Adam",))
    done = [rpc.rpc_async(rank, train, args=(rank, name, bag, where)) for rank in range(TRAINERS)]
    return [one.wait() for one in done], bag.rpc_sync().value()


@pytest.mark.parametrize("name", KINDS)
def test_a_dense_part_under_ddp_and_a_sparse_one_on_a_server_train_together(tmp_path: Path, name: str) -> None:
    with World(3, check=False) as world:  # gloo leaves threads of its own
        trained, value = world.on(0, drive, name, f"file://{tmp_path}/gloo")
        params, right = world.on(0, in_one_process, name)
    assert same(trained[0], trained[1])
    torch.testing.assert_close(trained[0], params)
    torch.testing.assert_close(value, right)
