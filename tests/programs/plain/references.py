"""References, futures and proxies, each way of using them once; and a scripted function as a target.

MASTER_ADDR=localhost MASTER_PORT=29500 python references.py
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.futures import Future

OTHER = "worker1"


def add_one(rref: Any) -> Tensor:
    value: Tensor = rref.to_here()
    return value + 1


def run(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a proxy does, by hand."""
    return getattr(rref.local_value(), name)(*args, **kwargs)


def square_sum(x: Tensor) -> Tensor:
    return (x * x).sum()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def fail(text: str) -> None:
    raise ValueError(text)


def passed_back(rref: Any) -> Any:
    return rref


@torch.jit.script
def scripted_add(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b)


@rpc.functions.async_execution
def add_elsewhere(to: str, x: Tensor, y: Tensor, z: float) -> Any:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z)


class Keeper:
    """Methods of all kinds that answer later."""

    def __init__(self, start: float, *, step: float = 1.0) -> None:
        self.value, self.step = torch.full((2,), start), step

    def bump(self, times: int = 1) -> Tensor:
        self.value = self.value + times * self.step
        return self.value

    @staticmethod
    @rpc.functions.async_execution
    def static_later(to: str, x: Tensor) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda future: future.wait() * 2)

    @classmethod
    @rpc.functions.async_execution
    def class_later(cls, to: str, x: Tensor) -> Any:
        answer: Future[Tensor] = Future()
        rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda future: answer.set_result(future.wait() * 3))
        return answer

    @rpc.functions.async_execution
    def bound_later(self, to: str, x: Tensor) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda future: future.wait() + self.value)


def show(name: str, value: Any) -> None:
    print(f"result {name}={value.tolist() if isinstance(value, Tensor) else value}", flush=True)


def failure(act: Any) -> str:
    """The kind of what an act raises: as it is, or as RuntimeError where it is one."""
    try:
        act()
    except RuntimeError:
        return "RuntimeError"
    except Exception as e:
        return type(e).__name__
    return "none"


def use_calls() -> None:
    show("sync", rpc.rpc_sync(OTHER, torch.add, args=(torch.ones(2), 3)))
    show("by_rank", rpc.rpc_sync(1, torch.add, args=(torch.ones(2), 3), kwargs={"alpha": 2}))
    show("by_info", rpc.rpc_sync(rpc.get_worker_info(OTHER), min, args=(2, 1)))
    first = rpc.rpc_async(OTHER, torch.add, args=(torch.ones(2), 3))
    second = rpc.rpc_async(OTHER, min, args=(1, 2))
    show("two", first.wait() + second.wait())
    show("then", rpc.rpc_async(OTHER, max, args=(4, 7)).then(lambda future: future.wait() + 1).wait())
    show("all", torch.futures.wait_all([rpc.rpc_async(OTHER, pow, args=(2, n)) for n in range(5)]))
    both = torch.futures.collect_all([rpc.rpc_async(OTHER, abs, args=(-n,)) for n in (3, 4)])
    show("collected", [future.wait() for future in both.wait()])
    show("scripted", rpc.rpc_sync(OTHER, scripted_add, args=(torch.ones(2), torch.ones(2))))
    show("error", failure(lambda: rpc.rpc_sync(OTHER, fail, args=("as wanted",))))
    show("late_error", failure(lambda: rpc.rpc_async(OTHER, fail, args=("as wanted",)).wait()))
    show("too_late", failure(lambda: rpc.rpc_sync(OTHER, sleep, args=(0.5,), timeout=0.05)))
    show("no_limit", failure(lambda: rpc.rpc_sync(OTHER, sleep, args=(0.05,), timeout=0)))
    rpc._set_rpc_timeout(0.05)  # type: ignore[attr-defined]
    show("too_late_by_default", failure(lambda: rpc.rpc_sync(OTHER, sleep, args=(0.5,))))
    rpc._set_rpc_timeout(30)  # type: ignore[attr-defined]


def use_references() -> None:
    rref = rpc.remote(OTHER, torch.add, args=(torch.ones(2), 3))
    show("here", rref.to_here())
    for _ in range(1000):  # the value may be here before the owner has said so
        if rref.confirmed_by_owner():
            break
        time.sleep(0.01)
    show("confirmed", rref.confirmed_by_owner())
    show("owner", [rref.is_owner(), rref.owner_name(), rref.owner().name, rref.owner().id])
    show("local_value_away", failure(rref.local_value))
    show("pickle", failure(lambda: pickle.dumps(rref)))
    mine = RRef(torch.zeros(2, 2))
    show("mine", [mine.is_owner(), mine.owner_name(), mine.confirmed_by_owner(), mine.to_here() is mine.local_value()])
    show("shared", rpc.rpc_sync(OTHER, add_one, args=(mine,)))
    show("came_back", rpc.rpc_sync(OTHER, passed_back, args=(mine,)).local_value() is mine.local_value())
    show("theirs_through_them", add_one(rpc.rpc_sync(OTHER, passed_back, args=(rref,))))

    keeper = rpc.remote(OTHER, Keeper, args=(1.0,), kwargs={"step": 2.0})
    show("proxy_sync", keeper.rpc_sync().bump())
    show("proxy_async", keeper.rpc_async(timeout=20).bump(times=2).wait())
    show("proxy_remote", keeper.remote().bump().to_here())
    show("by_hand", rpc.rpc_async(keeper.owner(), run, args=(keeper, "bump", (1,), {})).wait())
    show("size", list(rref.rpc_sync().size()))
    show("view", rref.remote().view(1, 2).to_here())
    show("lost", failure(rpc.remote(OTHER, fail, args=("as wanted",)).to_here))

    x = torch.ones(2)
    show("elsewhere", rpc.rpc_sync(OTHER, add_elsewhere, args=("worker2", x, 1, 1)))
    show("static", rpc.rpc_sync(OTHER, Keeper.static_later, args=("worker2", x)))
    show("class", rpc.rpc_async(OTHER, Keeper.class_later, args=("worker2", x)).wait())
    show("bound", keeper.rpc_sync().bound_later("worker2", x))
    show("static_by_proxy", keeper.rpc_async().static_later("worker2", x).wait())
    show("class_by_proxy", keeper.remote().class_later("worker2", x).to_here())


def use_backward() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    local: Any = RRef((x * x).sum())
    local.backward()
    show("local_gradient", x.grad)

    x = torch.tensor([3.0, 4.0], requires_grad=True)
    with dist_autograd.context() as context_id:
        total = rpc.remote(OTHER, square_sum, args=(x,))
        total.backward(context_id, retain_graph=True)
        show("gradient", dist_autograd.get_gradients(context_id)[x])
        total.backward(context_id)
        show("gradient_twice", dist_autograd.get_gradients(context_id)[x])
        show("grad_field", x.grad)

    with dist_autograd.context() as context_id:
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
        loss = rpc.rpc_sync(OTHER, torch.mul, args=(a, b)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
        show("product", [gradients[a].tolist(), gradients[b].tolist()])


def run_worker(rank: int, world_size: int) -> None:
    address = f"tcp://{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '29500')}"
    options = TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30, init_method=address)
    rpc.init_rpc(
        name=f"worker{rank}",
        backend=rpc.BackendType.TENSORPIPE,  # type: ignore[attr-defined]  # grows as backends are registered
        rpc_backend_options=options,
        rank=rank,
        world_size=world_size,
    )
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        show("me", [rpc.get_worker_info().name, rpc.get_worker_info().id])
        use_calls()
        use_references()
        use_backward()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
