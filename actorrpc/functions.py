"""Decorators for functions that others call."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, TypeVar

import torch

from actorrpc.services.batches import Batching
from actorrpc.services.executor import ASYNC_MARK

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Marks a function whose result is a Future, so that the call is answered when that future is done.

    The thread that runs `fn` is free as soon as `fn` returns. Works for functions; for static, class and instance
    methods, where it stands below `@staticmethod` and `@classmethod`; and for scripted functions, where it stands above
    `@torch.jit.script`.

    Returns the marked function.

    Raises:
        TypeError: `fn` cannot be called, or is a static or class method already.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        kind = type(fn).__name__
        raise TypeError(f"async_execution goes below @{kind}, next to the function: @{kind} over @async_execution")
    if not callable(fn):
        raise TypeError(f"async_execution decorates a function, not {fn!r} of type {type(fn).__name__}")

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        _take_name(wrapper, fn)
    else:
        functools.update_wrapper(wrapper, fn)
    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper  # type: ignore[return-value]


def batched(*, max_size: int, max_wait: float = 0.0) -> Callable[[F], Callable[..., Any]]:
    """Decorates a method that serves many calls at once: it gets lists, one entry a call, and returns a list of results
    in the same order.

        @batched(max_size=32, max_wait=0.005)
        def forward(self, states):                  # callers: ref.rpc_sync().forward(state)
            return self.net(torch.stack(states))

    Each caller calls it with its own arguments and gets its own result. Every parameter comes as a list, also those
    that callers leave to their defaults. The result is a list, a tuple, or a tensor whose rows are the results; an
    entry that is an exception is raised in that caller alone, what the method raises in all. It may be `async def`.
    Calls that were cancelled, or whose time has run out, are left out. Calls of different autograd contexts are not
    batched together; within one, gradients come back to each caller. On its own object (`self.forward([a, b])`) it is
    the plain method.

    Arguments:
        max_size: how many calls are one batch at most; then it runs at once.
        max_wait: seconds that the first call of a batch waits for others; 0: for those only that are queued already.

    Raises:
        ValueError: `max_size` is less than 1, or `max_wait` below 0.
        TypeError: what is decorated cannot be batched.
    """
    given: object = max_size
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"max_size must be a whole number, at least 1, not {max_size!r}")
    if not 0 <= max_wait < math.inf:
        raise ValueError(f"max_wait must be seconds, 0 or more, not {max_wait!r}")

    def decorate(method: F) -> F:
        plain: object = method
        if isinstance(plain, (staticmethod, classmethod)) or hasattr(method, ASYNC_MARK):
            raise TypeError(f"batched decorates plain methods and `async def` ones, not {method!r}")
        setattr(method, ASYNC_MARK, Batching(method, max_size, max_wait))
        return method

    return decorate


def _take_name(wrapper: Any, scripted: Any) -> None:
    """Gives a wrapper the name by which it travels: that of the function that was scripted."""
    plain = getattr(scripted, "_torchdynamo_inline", None)
    if plain is not None:
        functools.update_wrapper(wrapper, plain, updated=())
        return
    module, _, name = str(scripted.qualified_name).removeprefix("__torch__.").rpartition(".")
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name
