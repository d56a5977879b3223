"""Calls as torch's private names see them: futures collected by `_wait_all`, and the pickler that can be changed."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from actorrpc import rpc
from actorrpc.compat import profiler
from actorrpc.compat.futures import wait_all
from actorrpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from actorrpc.runtime.futures import Future
    from actorrpc.workers import To

_thread_local_var = threading.local()
"""Its `future_list` is there within `_wait_all`: the futures that this thread's calls have returned."""


def _recordable(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call of torch's name, which a profiler can record."""

    @functools.wraps(plain)
    def call(to: To, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        if profiler.is_on():
            return profiler.call(plain, to, func, args, kwargs, timeout)
        return plain(to, func, args, kwargs, timeout)

    return call


_CALLS: tuple[Callable[..., Any], ...] = (rpc.rpc_sync, rpc.remote, rpc.rpc_async)
rpc_sync, remote, _rpc_async = map(_recordable, _CALLS)


@functools.wraps(rpc.rpc_async)
def rpc_async(*args: Any, **kwargs: Any) -> Future[Any]:
    future: Future[Any] = _rpc_async(*args, **kwargs)
    collected = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for all that `rpc_async` has begun in it on this thread.

    Raises what the first of them that failed has come to.
    """
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        collected = _thread_local_var.future_list
        del _thread_local_var.future_list
        wait_all(collected)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Torch's name for a pickler of one's own. All that is sent here is written by one codec: the object is kept where
    torch keeps it, in `api._default_pickler`, and not asked. `register_reducer` has a class written in one's own way.
    """
    from torch.distributed.rpc import api

    before, api._default_pickler = api._default_pickler, rpc_pickler
    try:
        yield
    finally:
        api._default_pickler = before
