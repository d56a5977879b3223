"""Spans for torch's profilers: a call is named in a trace as torch names it, `rpc_sync#f(a -> b)`.

The span of `rpc_sync` lasts until the result is there, those of `rpc_async` and `remote` until the call was sent. What
the callee does is not in the caller's trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from actorrpc.runtime.completion import describe

if TYPE_CHECKING:
    from actorrpc.runtime.worker import Worker

_enabled: Any = torch._C._autograd._profiler_enabled
_find_builtin: Any = torch.jit._builtins._find_builtin
_NOTHING = nullcontext()


def span(verb: str, what: object, worker: Worker, to: int) -> AbstractContextManager[object]:
    """Makes the span of a call, where a profiler is on.

    Arguments:
        verb: "rpc_sync" and so on.
        what: the function that is called, or its name.
        worker: the caller.
        to: the callee's worker id.
    """
    if not _enabled():
        return _NOTHING
    name = _find_builtin(what) if callable(what) else None
    peer = worker.peers.get(to)
    callee = peer.record.name if peer is not None else f"rank {to}"
    return record_function(f"{verb}#{name or describe(what)}({worker.record.name} -> {callee})")
