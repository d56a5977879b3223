"""The reference's example of `async_execution` with compiled functions, a program for torch.distributed.rpc.

It prints the result, and what a number in the place of a tensor comes to: the reference writes one, which TorchScript
does not take.
"""

# mypy: ignore-errors
# It is written as programs for torch.distributed.rpc are, which has no types.

import os
import socket

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@rpc.functions.async_execution
@torch.jit.script
def async_add(to: str, x: Tensor, y: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, script_add, (x, y))


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        print(rpc.rpc_sync("worker1", async_add, args=("worker2", torch.ones(2), torch.tensor(1.0))), flush=True)
        try:
            rpc.rpc_sync("worker1", async_add, args=("worker2", torch.ones(2), 1))
        except RuntimeError as e:
            print("type 'Tensor' for argument 'y' but instead found type 'int'" in str(e), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("localhost", 0))
        free = s.getsockname()[1]
    mp.start_processes(work, args=(free,), nprocs=3, start_method="fork")
