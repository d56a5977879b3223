"""Four workers, of which only the first two form a process group; one outside of it calls another outside of it.

torchrun --nproc-per-node 4 world_larger_than_the_group.py
"""

from __future__ import annotations

import os

import torch.distributed as dist

import actorrpc as rpc

GROUP_SIZE = 2


def worker_function(a: int, b: int) -> int:
    """Runs on the worker that is called."""
    info = rpc.get_worker_info()
    print(f"Worker {info.name} received a call with a={a}, b={b}")
    return a + b


def main() -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    master_addr = os.environ["MASTER_ADDR"]
    master_port = int(os.environ["MASTER_PORT"])
    address = f"tcp://{master_addr}:{master_port}"
    print(f"master addr: {master_addr}:{master_port}")

    if rank < GROUP_SIZE:
        print(f"rank {rank} start init_process_group...")
        dist.init_process_group(backend="gloo", rank=rank, world_size=GROUP_SIZE, init_method=address)
        print(f"rank {rank} have done init_process_group")
        print(dist)

    options = rpc.TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=2, rpc_timeout=10)
    print(f"rank {rank} start init_rpc..., dist.is_initialized={dist.is_initialized()}")
    rpc.init_rpc(name=f"worker_{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    print(f"rank {rank} have done init_rpc")
    print(f"Worker {rank} is ready.")

    if rank == 0:
        print("--- Worker 0 sending RPC calls ---")
        result = rpc.rpc_sync(to="worker_1", func=worker_function, args=(10, 20))
        print(f"Worker 0 received sync result from Worker 1: {result}")

        future = rpc.rpc_async(to="worker_1", func=worker_function, args=(30, 40))
        print("Worker 0 is doing other work while waiting for async result...")
        print(f"Worker 0 received async result from Worker 1: {future.wait()}")
    elif rank == 3:
        print("--- Worker 3 sending RPC calls ---")
        result = rpc.rpc_sync(to="worker_2", func=worker_function, args=(10, 20))
        print(f"Worker 3 received sync result from Worker 2: {result}")
    else:
        print("--- Worker 1 is waiting for RPC calls ---")

    rpc.shutdown()
    if dist.is_initialized():  # not so on the ranks outside of the group: init_rpc makes none
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
