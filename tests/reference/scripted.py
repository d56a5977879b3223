"""Functions compiled by TorchScript, which must live at the top level of a module that every worker can import."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# TorchScript takes a comment for mypy within a function for one of its own.

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import actorrpc as rpc

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch would have us use something else

    @torch.jit.script
    def script_add(t1: Tensor, t2: int) -> Tensor:
        return torch.add(t1, t2)

    @torch.jit.script
    def scale(x: Tensor, factor: float = 2.0, shift: int = 0) -> Tensor:
        return x * factor + shift

    @torch.jit.script
    def refuse(x: Tensor) -> Tensor:
        if x.numel() > 0:
            raise ValueError("not today")
        return x

    @torch.jit.script
    def sum_of(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @rpc.functions.async_execution
    @torch.jit.script
    def forked_add(x: Tensor, y: Tensor) -> torch.jit.Future[Tensor]:
        return torch.jit.fork(sum_of, x, y)

    @torch.jit.script
    def unmarked_forked_add(x: Tensor, y: Tensor) -> torch.jit.Future[Tensor]:
        return torch.jit.fork(sum_of, x, y)

    @rpc.functions.async_execution
    @torch.jit.script
    def forked_refuse(x: Tensor) -> torch.jit.Future[Tensor]:
        return torch.jit.fork(refuse, x)

    @rpc.functions.async_execution
    @torch.jit.script
    def no_future(x: Tensor) -> Tensor:
        return x
