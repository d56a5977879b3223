"""Four RPC workers, of which two form a process group; those outside of it call each other as well.

torchrun --standalone --nproc-per-node 4 wider_world.py
"""

from __future__ import annotations

import os

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import TensorPipeRpcBackendOptions

GROUP_SIZE = 2


def worker_function(a: int, b: int) -> int:
    print(f"result called_{a}_{b}={rpc.get_worker_info().name}", flush=True)
    return a + b


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    if rank < GROUP_SIZE:
        dist.init_process_group(backend="gloo", rank=rank, world_size=GROUP_SIZE, init_method=address)
    options = TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=2, rpc_timeout=10)
    rpc.init_rpc(name=f"worker_{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    print(f"result group_on_{rank}={dist.is_initialized()}", flush=True)
    if rank == 0:
        print(f"result sync={rpc.rpc_sync(to='worker_1', func=worker_function, args=(10, 20))}")
        future = rpc.rpc_async(to="worker_1", func=worker_function, args=(30, 40))
        print(f"result async={future.wait()}", flush=True)
    elif rank == 3:
        print(f"result outside={rpc.rpc_sync(to='worker_2', func=worker_function, args=(50, 60))}", flush=True)
    rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
