"""Scripted functions of a program, in a module that all of its workers import."""

# mypy: ignore-errors
# It is written as programs for torch.distributed.rpc are, which has no types.

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.rpc import RRef
from torch.futures import Future


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@torch.jit.script
def mentions() -> str:
    return "prim::rpc_async RRef[Tensor]"


@rpc.functions.async_execution
@torch.jit.script
def async_add(to: str, x: Tensor, y: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, script_add, (x, y))


def plain(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, script_add, (x, x))


@torch.jit.script
def compiled(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, script_add, (x, x)).wait()


@torch.jit.script
def calls_a_compiled_one(to: str, x: Tensor) -> Tensor:
    return compiled(to, x) + 1


@torch.jit.script
def calls_a_plain_one(to: str, x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        if times > 0:
            x = plain(to, x)
    return x


@torch.jit.script
def forks_a_plain_one(to: str, x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(plain, to, x))


@torch.jit.script
def sends_a_compiled_one(first: str, second: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(first, calls_a_compiled_one, (second, x))


@torch.jit.script
def makes_one_there(to: str, x: Tensor) -> Tensor:
    return rpc.remote(to, script_add, (x, x)).to_here()


@torch.jit.script
def reads(ref: RRef[Tensor], x: Tensor) -> Tensor:
    return ref.to_here() + x


@torch.jit.script
def reads_all(refs: list[RRef[Tensor]]) -> Tensor:
    total = torch.zeros(1)
    for ref in refs:
        total = total + ref.to_here()
    return total


@torch.jit.script
def gradient_of(context_id: int, x: Tensor) -> Tensor:
    return dist_autograd.get_gradients(context_id)[x]


@torch.jit.script
def passes_back(context_id: int, loss: Tensor) -> None:
    dist_autograd.backward(context_id, [loss])


@torch.jit.script
def refuses(x: Tensor) -> Tensor:
    if x.numel() > 0:
        raise ValueError("not today")
    return x


class Calls(nn.Module):
    def forward(self, to: str, x: Tensor) -> Tensor:
        return plain(to, x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, to: str, x: Tensor) -> Tensor:
        return self.calls(to, x) * self.scale


class Reads(nn.Module):
    def __init__(self, ref: RRef[Tensor]) -> None:
        super().__init__()
        self.ref = ref

    def forward(self, x: Tensor) -> Tensor:
        return self.ref.to_here() + x


class CallsOnTheSide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    @torch.jit.export
    def other(self, to: str, x: Tensor) -> Tensor:
        return plain(to, x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = CallsOnTheSide()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)
