"""The process group and the RPC world meet at the same tcp:// address.

torchrun --standalone --nproc-per-node 2 one_address.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import TensorPipeRpcBackendOptions


def worker_function(a: int, b: int) -> int:
    print(f"result called_{a}_{b}={rpc.get_worker_info().name}", flush=True)
    return a + b


def mean_over_the_group(x: Tensor) -> Tensor:
    """A collective within a call: the caller takes part as well."""
    dist.all_reduce(x)
    return x / dist.get_world_size()


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size, init_method=address)
    options = TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=2, rpc_timeout=10)
    print(f"rank {rank}: init_rpc begins, dist.is_initialized={dist.is_initialized()}")
    rpc.init_rpc(name=f"worker_{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        print(f"result sync={rpc.rpc_sync(to='worker_1', func=worker_function, args=(10, 20))}")
        future = rpc.rpc_async("worker_1", mean_over_the_group, args=(torch.tensor([1.0, 3.0]),))
        here = mean_over_the_group(torch.tensor([5.0, 9.0]))
        print(f"result means={[here.tolist(), future.wait().tolist()]}", flush=True)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
