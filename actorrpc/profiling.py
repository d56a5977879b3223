"""Spans for torch's profilers: a call is named in a trace as torch names it, `rpc_sync#f(a -> b)`.

The span of `rpc_sync` lasts until the result is there, those of `rpc_async` and `remote` until the call was sent. What
the callee does is not in the caller's trace. The stand-in changes both; see `compat/profiler.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from actorrpc.services.spans import key_of, name_of, peer_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.worker import Worker

_enabled: Any = torch._C._autograd._profiler_enabled
is_wanted: Callable[[], bool] = _enabled
"""Whether calls are spans on the present thread. The stand-in asks in another way."""
_NOTHING = nullcontext()


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
    return record_function(f"to_here#({worker.record.name})->({peer_name(worker, owner)})") if _enabled() else _NOTHING
