"""Two workers beside a process group: one call that waits, one that does not.

torchrun --nproc-per-node 2 torch_distributed_rpc_demo.py
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

import actorrpc as rpc


def say(text: str) -> None:
    """Prints a line in one piece: handlers print beside the main program."""
    sys.stdout.write(f"{text}\n")


def worker_function(a: int, b: int) -> int:
    """Runs on the worker that is called."""
    info = rpc.get_worker_info()
    say(f"Worker {info.name} received a call with a={a}, b={b}")
    return a + b


def main() -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)
    rpc.init_rpc(name=f"worker_{rank}", rank=rank, world_size=world_size)
    say(f"Worker {rank} is ready.")

    if rank == 0:
        say("--- Worker 0 sending RPC calls ---")
        result = rpc.rpc_sync(to="worker_1", func=worker_function, args=(10, 20))
        say(f"Worker 0 received sync result from Worker 1: {result}")

        future = rpc.rpc_async(to="worker_1", func=worker_function, args=(30, 40))
        say("Worker 0 is doing other work while waiting for async result...")
        say(f"Worker 0 received async result from Worker 1: {future.wait()}")
    else:
        say("--- Worker 1 is waiting for RPC calls ---")  # it serves them in shutdown

    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
