"""Spans for torch's profilers: a call is named in a trace as torch names it, `rpc_sync#f(a -> b)`.

The span of `rpc_sync` lasts until the result is there, those of `rpc_async` and `remote` until the call was sent. What
the callee does is not in the caller's trace. The stand-in changes both; see `compat/profiler.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from actorrpc.runtime.completion import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.worker import Worker

_enabled: Any = torch._C._autograd._profiler_enabled
is_wanted: Callable[[], bool] = _enabled
"""Whether calls are spans on the present thread. The stand-in asks in another way."""
_find_builtin: Any = torch.jit._builtins._find_builtin
_NOTHING = nullcontext()
_PREFIXES = {"remote": "rpc_remote"}


def span(verb: str, what: object, worker: Worker, to: int) -> AbstractContextManager[object]:
    """Makes the span of a call, where a profiler is on.

    Arguments:
        verb: "rpc_sync" and so on.
        what: the function that is called, or its name.
        worker: the caller.
        to: the callee's worker id.
    """
    if not is_wanted():
        return _NOTHING
    return record_function(key_of(verb, name_of(what), worker, to))


def block(name: str) -> AbstractContextManager[object]:
    """Makes a span of any other name, where a profiler is on."""
    return record_function(name) if _enabled() else _NOTHING


def fetching(worker: Worker, owner: int) -> AbstractContextManager[object]:
    """Makes the span of `to_here`, where a profiler is on."""
    return record_function(f"to_here#({worker.record.name})->({_peer(worker, owner)})") if _enabled() else _NOTHING


def key_of(verb: str, name: str, worker: Worker, to: int) -> str:
    """Returns what the span of a call is named; arguments: see `span`."""
    return f"{_PREFIXES.get(verb, verb)}#{name}({worker.record.name} -> {_peer(worker, to)})"


def _peer(worker: Worker, to: int) -> str:
    peer = worker.peers.get(to)
    return peer.record.name if peer is not None else f"rank {to}"


def name_of(what: object) -> str:
    """Returns what a function is called in a trace: operators by torch's names, scripted functions by full ones."""
    if isinstance(what, torch.jit.ScriptFunction):
        return str(what.qualified_name)
    builtin = _find_builtin(what) if callable(what) else None
    return str(builtin or describe(what))
