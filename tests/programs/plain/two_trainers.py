"""The shortest training over two workers: a product there, a sum here, and a step of the optimizer on both.

MASTER_ADDR=localhost MASTER_PORT=29500 python two_trainers.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, optim
from torch.distributed.optim import DistributedOptimizer


def random_tensor(seed: int) -> Tensor:
    return torch.rand((3, 3), generator=torch.Generator().manual_seed(seed), requires_grad=True)


def run_worker(rank: int, dst_rank: int, world_size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    name, dst_name = f"worker{rank}", f"worker{dst_rank}"
    rpc.init_rpc(name=name, rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    first = rpc.remote(dst_name, random_tensor, args=(rank,))
    second = rpc.remote(dst_name, random_tensor, args=(rank + 10,))
    optimizer = DistributedOptimizer(optim.SGD, [first, second], lr=0.05)
    for step in range(3):
        with dist_autograd.context() as context_id:
            # To here, where the sum is; the gradients go back to where the tensors are.
            loss = (first.to_here() * second.to_here()).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        print(f"result loss_{rank}_{step}={loss.item()!r}", flush=True)
    print(f"result first_{rank}={first.to_here().detach().double().sum().item()!r}", flush=True)
    rpc.shutdown()


def spawned(rank: int, world_size: int) -> None:
    run_worker(rank, (rank + 1) % world_size, world_size)


if __name__ == "__main__":
    mp.spawn(spawned, args=(2,), nprocs=2, join=True)
