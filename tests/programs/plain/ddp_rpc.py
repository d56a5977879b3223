"""Trainers that share a table on a parameter server, beside a dense part that DistributedDataParallel keeps equal.

Four RPC workers: two trainers, which also form a process group, a parameter server, and a master that has the table
made and tells the trainers to train. Each trainer looks up words of its own, so that it does not matter who is first.

MASTER_ADDR=localhost MASTER_PORT=29500 GROUP_PORT=29501 python ddp_rpc.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

TRAINERS = 2
WORDS, WIDTH, CLASSES = 100, 16, 8


class Table(nn.Module):
    """Sums of the vectors of words, whose first values come from a generator of their own."""

    def __init__(self, words: int, width: int, mode: str = "sum") -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(words, width, mode=mode, sparse=True)
        self.bags.weight.data.normal_(generator=torch.Generator().manual_seed(5))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        vectors: Tensor = self.bags(indices, offsets)
        return vectors


class HybridModel(nn.Module):
    """The remote table, and a dense part in DDP."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table
        self.fc = DDP(nn.Linear(WIDTH, CLASSES))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.table.forward(indices, offsets))
        return scores


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Bags of words, as flat indices and where each bag begins, with a class for each bag."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        bags, length = 10, 4
        indices = torch.randint(WORDS // TRAINERS, (bags * length,), generator=generator) * TRAINERS + rank
        yield indices, torch.arange(0, bags * length, length), torch.randint(CLASSES, (bags,), generator=generator)


def run_trainer(table: Any, rank: int, epochs: int) -> list[float]:
    torch.manual_seed(6)
    model = HybridModel(table)
    # All parameters: those on the server, by the module; those here.
    rrefs = model.table.remote_parameters()
    rrefs += [rpc.RRef(parameter) for parameter in model.fc.parameters()]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.05)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(epochs):
        for indices, offsets, target in batches(rank):
            with dist_autograd.context() as context_id:
                loss = criterion(model(indices, offsets), target)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
    print(f"result parameters_{rank}={len(rrefs)}")
    print(f"result fc_{rank}={model.fc.module.weight.detach().double().abs().sum().item()!r}", flush=True)
    return losses


def bag_sum(module: Any) -> float:
    return float(module.local_value().bags.weight.detach().double().abs().sum())


def run_master(epochs: int) -> None:
    table: Any = RemoteModule("ps", Table, args=(WORDS, WIDTH), kwargs={"mode": "sum"})
    print(f"result table_before={rpc.rpc_sync('ps', bag_sum, args=(table.get_module_rref(),))!r}")
    looked_up = table.forward_async(torch.tensor([0, 1, 2]), torch.tensor([0])).wait()
    print(f"result lookup={F.normalize(looked_up).double().sum().item()!r}")
    futures = [
        rpc.rpc_async(f"trainer{rank}", run_trainer, args=(table, rank, epochs), timeout=120)
        for rank in range(TRAINERS)
    ]
    for rank, future in enumerate(futures):
        losses = future.wait()
        print(f"result losses_{rank}={losses}")
    print(f"result table_after={rpc.rpc_sync('ps', bag_sum, args=(table.get_module_rref(),))!r}", flush=True)


def run_worker(rank: int, world_size: int, epochs: int) -> None:
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = int(os.environ.get("MASTER_PORT", "29500"))
    group_port = int(os.environ.get("GROUP_PORT", str(port + 1)))
    options = TensorPipeRpcBackendOptions(init_method=f"tcp://{address}:{port}", rpc_timeout=60)
    if rank < TRAINERS:
        # The trainers' group meets at an address of its own.
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS, init_method=f"tcp://{address}:{group_port}")
        name = f"trainer{rank}"
    else:
        name = "master" if rank == TRAINERS else "ps"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if name == "master":
        run_master(epochs)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    mp.spawn(run_worker, args=(TRAINERS + 2, parser.parse_args().epochs), nprocs=TRAINERS + 2, join=True)
