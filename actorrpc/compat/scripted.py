"""Scripted functions and modules that make calls, or take references. TorchScript compiles `rpc_async` and the methods
of RRef to operators of torch's own agent, which is not there; such code runs as the Python that it was made of.

Code that calls such code is such code itself: what TorchScript compiles on the way is compiled as ever, so that all of
its operators are in the graph of the whole. Not covered is what no longer has its Python (`torch.jit.load`, functions
that were compiled before `install`), and what `torch.jit.script` does not return: classes that it compiles, and
`torch.jit.ScriptModule` as a base class with `script_method`.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.autograd

from actorrpc.rref import RRef

if TYPE_CHECKING:
    from collections.abc import Iterator

_FUNCTIONS = {"aten::get_gradients": "get_gradients", "aten::dist_backward": "backward"}
"""The operators that TorchScript knows by functions of `torch.distributed.autograd`, and the names of these."""
_OPERATORS = {"prim::rpc_async", "prim::rpc_sync", "prim::rpc_remote", *_FUNCTIONS}
_REFERENCE = re.compile(r"\bRRef\[")
"""In the name of a type: a reference, or something made of references."""


class _Compiling(threading.local):
    """Whether this thread is within `torch.jit.script`, which calls itself for what the compiled code calls."""

    depth = 0


_compiling = _Compiling()


def install() -> None:
    """Has `torch.jit.script` give back the Python of what only torch's agent could run. To be called when torch's
    modules have been patched.
    """
    compile_it = torch.jit.script
    for operator, name in _FUNCTIONS.items():
        torch.jit._builtins._register_builtin(getattr(torch.distributed.autograd, name), operator)

    @functools.wraps(compile_it)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = _compiling.depth == 0
        _compiling.depth += 1
        try:
            compiled = compile_it(obj, *args, **kwargs)
        except Exception:
            if outermost and _holds_references(obj):
                return obj
            raise
        finally:
            _compiling.depth -= 1
        return obj if outermost and compiled is not obj and _needs_the_agent(compiled) else compiled

    torch.jit.script = script


def _holds_references(obj: Any) -> bool:
    """Whether an object is a module with references among its attributes, of which TorchScript knows no type."""
    if not isinstance(obj, torch.nn.Module):
        return False
    return any(isinstance(value, RRef) for module in obj.modules() for value in vars(module).values())


def _needs_the_agent(compiled: Any) -> bool:
    if isinstance(compiled, torch.jit.ScriptFunction):
        return _has_calls(compiled.inlined_graph)
    if not isinstance(compiled, torch.jit.ScriptModule):
        return False
    parts = [module._c for module in compiled.modules() if isinstance(module, torch.jit.ScriptModule)]
    return any(_has_calls(part._get_method(name).inlined_graph) for part in parts for name in part._method_names())


def _has_calls(graph: Any) -> bool:
    return any(_REFERENCE.search(str(value.type())) for value in graph.inputs()) or any(map(_is_call, _nodes(graph)))


def _nodes(block: Any) -> Iterator[Any]:
    """Yields all nodes of a graph, also those of its inner blocks and of the functions that it forks."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        for name in node.attributeNames():
            if node.kindOf(name) == "g":  # what is forked
                forked = node.g(name).copy()
                torch._C._jit_pass_inline(forked)
                yield from _nodes(forked)


def _is_call(node: Any) -> bool:
    return node.kind() in _OPERATORS or any(_REFERENCE.search(str(value.type())) for value in node.outputs())
