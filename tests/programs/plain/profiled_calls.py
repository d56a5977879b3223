"""What the autograd profiler shows of calls: their names, and what the callee ran for them.

MASTER_ADDR=localhost MASTER_PORT=29500 python profiled_calls.py
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor
from torch.autograd import profiler_legacy

WORLD_SIZE = 2
OPERATORS = {"aten::add", "aten::mul", "aten::rand"}


def random_tensor() -> Tensor:
    return torch.rand((3, 3), requires_grad=True)


def udf_with_ops() -> Tensor:
    """Sleeps a little, then runs three operators."""
    time.sleep(random.uniform(0.01, 0.05))
    a, b = random_tensor(), random_tensor()
    torch.add(a, b)
    return torch.mul(a, b)


class Box:
    """Something to have a method of profiled."""

    def get(self) -> Tensor:
        return random_tensor() + 1


def show(title: str, p: Any, word: str = "result ") -> None:
    """Prints the table, and what is in it of calls: their names, and the operators that ran for them elsewhere."""
    averages = p.key_averages()
    print(averages.table(sort_by="cpu_time_total", row_limit=20))
    for event in averages:
        call, _, operator = event.key.partition("#remote_op: ")
        if " -> " in call and (not operator or operator in OPERATORS):
            print(f"{word}{title}:{event.key}={event.count}")


def profile_calls(other: str) -> None:
    # The profiler of today is on the caller only. It counts what runs here.
    with profiler.profile() as today:
        rpc.rpc_sync(other, udf_with_ops)
        random_tensor()
        with profiler.record_function("a span of our own"):
            rpc.rpc_sync(other, random_tensor)
    averages = today.key_averages()
    print(averages.table(sort_by="cpu_time_total", row_limit=20))
    counts = {event.key: event.count for event in averages}
    print(f"result today={[counts['aten::rand'], counts['a span of our own']]}")

    # The one before it asks the callee to profile as well.
    with profiler_legacy.profile() as p:
        rpc.rpc_async(other, torch.add, args=(random_tensor(), random_tensor())).wait()
        rpc.rpc_sync(other, torch.mul, args=(random_tensor(), random_tensor()))
    show("operators", p)

    with profiler_legacy.profile() as p:
        rpc.rpc_async(other, udf_with_ops).wait()
        rpc.rpc_sync(other, udf_with_ops)
    show("functions", p)

    # What `remote` ran may come too late for the table, and the function that a proxy calls has no name in public.
    with profiler_legacy.profile() as p:
        rpc.remote(other, Box).rpc_sync().get()
    show("proxies", p, word="")


def run_worker(rank: int, world_size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        profile_calls("worker1")
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
