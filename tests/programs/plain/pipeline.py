"""A small residual net cut in two, on two workers; a master feeds it micro-batches, so that both halves work at once.

MASTER_ADDR=localhost MASTER_PORT=29500 python pipeline.py --splits 1 2 4
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

BATCH, SIDE, CLASSES = 8, 8, 5


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(x + self.body(x))
        return y


class ShardBase(nn.Module):
    """A half: takes a reference to its input, so that what is between the halves does not pass through the master."""

    def __init__(self, seed: int, *layers: nn.Module) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.seq = nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2, generator=generator)
            else:
                parameter.data.fill_(0.5)

    def run(self, x_rref: Any) -> Tensor:
        x = x_rref.to_here()
        with self._lock:  # batch normalisation counts batches
            out: Tensor = self.seq(x)
        return out

    def parameter_rrefs(self) -> list[Any]:
        return [RRef(parameter) for parameter in self.parameters()]


class Shard1(ShardBase):
    """The first half."""

    def __init__(self) -> None:
        super().__init__(1, nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.MaxPool2d(2))

    def forward(self, x_rref: Any) -> Tensor:
        return self.run(x_rref)


class Shard2(ShardBase):
    """The second half."""

    def __init__(self) -> None:
        layers = [Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)]
        super().__init__(2, *layers)

    def forward(self, x_rref: Any) -> Tensor:
        return self.run(x_rref)


class DistNet(nn.Module):
    """Both halves."""

    def __init__(self, micro_batch: int, workers: list[str]) -> None:
        super().__init__()
        self.micro_batch = micro_batch
        self.first = rpc.remote(workers[0], Shard1)
        self.second = rpc.remote(workers[1], Shard2)

    def forward(self, xs: Tensor) -> Tensor:
        futures = []
        for x in iter(xs.split(self.micro_batch, dim=0)):
            y_rref = self.first.remote().forward(RRef(x))
            futures.append(self.second.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self) -> list[Any]:
        rrefs: list[Any] = []
        rrefs.extend(self.first.remote().parameter_rrefs().to_here())
        rrefs.extend(self.second.remote().parameter_rrefs().to_here())
        return rrefs


def run_master(splits: int, batches: int) -> None:
    model = DistNet(BATCH // splits, ["worker1", "worker2"])
    rrefs = model.parameter_rrefs()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.05)
    loss_fn = nn.MSELoss()
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(batches):
        inputs = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        classes = torch.randint(CLASSES, (BATCH, 1), generator=generator)
        labels = torch.zeros(BATCH, CLASSES).scatter_(1, classes, 1)
        with dist_autograd.context() as context_id:
            outputs = model(inputs)
            loss = loss_fn(outputs, labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(f"result splits_{splits}_losses={losses}")
    print(f"result splits_{splits}_weights={[r.to_here().detach().double().abs().sum().item() for r in rrefs]}")
    print(f"result splits_{splits}_owners={[r.owner_name() for r in rrefs]}", flush=True)


def run_worker(rank: int, world_size: int, splits: list[int], batches: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=64, rpc_timeout=300)
    name = f"worker{rank}" if rank else "master"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        for number in splits:
            begun = time.perf_counter()
            run_master(number, batches)
            print(f"speed splits={number} seconds={time.perf_counter() - begun:.2f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4], help="micro-batches of a batch, in turn")
    parser.add_argument("--batches", type=int, default=3)
    chosen = parser.parse_args()
    mp.spawn(run_worker, args=(3, chosen.splits, chosen.batches), nprocs=3, join=True)
