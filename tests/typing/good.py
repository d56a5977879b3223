"""A small program as a user would type it: strict checkers find nothing wrong in it (test_typing.py)."""

from __future__ import annotations

import torch

import actorrpc as rpc
from actorrpc import autograd as dist_autograd
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer


class Counter(rpc.Actor):
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, n: int) -> int:
        """Adds, and returns the sum."""
        self.total += n
        return self.total

    async def later(self, n: int) -> int:
        """Does so on the worker's loop."""
        return n

    @rpc.batched(max_size=4)
    def double(self, numbers: list[int]) -> list[int]:
        """Is called with one number, and answered with one."""
        return [2 * n for n in numbers]


async def fetch(key: str) -> bytes:
    """A function that runs on a worker's loop."""
    return key.encode()


def calls() -> int:
    """Functions keep their results' types."""
    length: int = rpc.rpc_sync("worker1", len, args=("abc",))
    future: rpc.Future[int] = rpc.rpc_async(1, len, args=("abc",), timeout=5)
    value: bytes = rpc.rpc_sync(1, fetch, args=("a",))
    later: rpc.Future[bytes] = rpc.rpc_async(1, fetch, args=("a",))
    return length + future.wait() + len(value) + len(later.wait())


def references() -> int:
    """Methods are the object's own."""
    counter: rpc.RRef[Counter] = Counter.spawn("worker1", start=3)
    total: int = counter.rpc_sync(timeout=3).add(2)
    doubled: int = counter.rpc_sync().double(4)
    module: rpc.RRef[torch.nn.Linear] = rpc.remote(1, torch.nn.Linear, args=(2, 2))
    features: int = module.to_here().in_features
    return total + doubled + features


async def waits(counter: rpc.RRef[Counter]) -> int:
    """Futures are awaited."""
    first: int = await counter.rpc_async().later(1)
    second: int = await rpc.rpc_async(1, len, args=("abc",))
    return first + second


def gradients() -> torch.Tensor:
    """Autograd, optimizer and module."""
    module = RemoteModule("worker1", torch.nn.Linear, args=(2, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with dist_autograd.context() as context_id:
        loss: torch.Tensor = module(torch.ones(1, 2)).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss


if __name__ == "__main__":
    rpc.launch(counter=rpc.Role(Counter, 2, start=1), options=rpc.RpcBackendOptions(rpc_timeout=30))
