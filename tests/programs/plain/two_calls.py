"""Two workers beside a process group: a call that waits and one that does not.

torchrun --standalone --nproc-per-node 2 two_calls.py
"""

from __future__ import annotations

import os

import torch.distributed as dist
import torch.distributed.rpc as rpc


def worker_function(a: int, b: int) -> int:
    print(f"result called_{a}_{b}={rpc.get_worker_info().name}", flush=True)
    return a + b


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)
    rpc.init_rpc(name=f"worker_{rank}", rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        print(f"result sync={rpc.rpc_sync(to='worker_1', func=worker_function, args=(10, 20))}")
        future = rpc.rpc_async(to="worker_1", func=worker_function, args=(30, 40))
        print("worker 0 has something else to do meanwhile")
        print(f"result async={future.wait()}", flush=True)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
