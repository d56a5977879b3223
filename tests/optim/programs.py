"""What the tests of optimizers have run on workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd

if TYPE_CHECKING:
    from collections.abc import Sequence


def parameter(seed: int, *shape: int) -> torch.nn.Parameter:
    """A parameter, the same wherever it is made."""
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def place(seed: int, on: int, *shape: int) -> rpc.RRef[Any]:
    """A parameter on a worker."""
    return rpc.remote(on, parameter, args=(seed, *shape))


def loss_of(param: Tensor, x: Tensor) -> Tensor:
    return (param * x).square().sum()


def loss_there(ref: rpc.RRef[Any], x: Tensor) -> Tensor:
    return loss_of(ref.local_value(), x)


def losses(refs: Sequence[rpc.RRef[Any]], xs: Sequence[Tensor]) -> list[Tensor]:
    """For each parameter its loss, which its owner computes."""
    return [rpc.rpc_sync(ref.owner(), loss_there, args=(ref, x)) for ref, x in zip(refs, xs, strict=True)]


def step(optimizer: Any, refs: Sequence[rpc.RRef[Any]], xs: Sequence[Tensor]) -> Any:
    """One step of training, in a context of its own."""
    with autograd.context() as context_id:
        autograd.backward(context_id, losses(refs, xs))
        return optimizer.step(context_id)


def step_here(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """The same in one process."""
    optimizer.zero_grad()
    for param, x in zip(params, xs, strict=True):
        loss_of(param, x).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def inputs(number: int, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What a step trains on."""
    made = torch.Generator().manual_seed(1000 + number)
    return [torch.randn(shape, generator=made) for shape in shapes]


def values(refs: Sequence[rpc.RRef[Any]]) -> list[Tensor]:
    return [ref.to_here().detach().clone() for ref in refs]


def grad_of(ref: rpc.RRef[Any]) -> Any:
    return ref.local_value().grad


def give_grad(ref: rpc.RRef[Any], grad: Tensor) -> None:
    ref.local_value().grad = grad


def give_value(ref: rpc.RRef[Any], value: Tensor) -> None:
    with torch.no_grad():
        ref.local_value().copy_(value)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nests of containers have equal values, tensors to the last bit."""
    if isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and torch.equal(ours.detach(), theirs.detach())
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)
