"""Scripted functions that make calls. TorchScript compiles `rpc_async` to operators of torch's own agent, which is not
there; such a function runs as the Python that it was made of.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

_OPERATORS = ("prim::rpc_async", "prim::rpc_sync", "prim::rpc_remote")
_codes: set[CodeType] = set()
"""Of the functions that run as Python."""


def install() -> None:
    """Has `torch.jit.script` give back, of a function that makes calls, the function itself."""
    compile_it = torch.jit.script

    @functools.wraps(compile_it)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_it(obj, *args, **kwargs)
        if isinstance(compiled, torch.jit.ScriptFunction) and isinstance(obj, FunctionType) and _makes_calls(compiled):
            _codes.add(obj.__code__)
            return obj
        return compiled

    torch.jit.script = script


def is_running() -> bool:
    """Returns whether the present thread is in a scripted function that makes calls; looks through the whole stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes:
            return True
        frame = frame.f_back
    return False


def _makes_calls(function: Any) -> bool:
    graph = str(function.inlined_graph)
    return any(operator in graph for operator in _OPERATORS)
