"""Decorators for functions that others call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

import torch

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


def _take_name(wrapper: Any, scripted: Any) -> None:
    """Gives a wrapper the name by which it travels: that of the function that was scripted."""
    plain = getattr(scripted, "_torchdynamo_inline", None)
    if plain is not None:
        functools.update_wrapper(wrapper, plain, updated=())
        return
    module, _, name = str(scripted.qualified_name).removeprefix("__torch__.").rpartition(".")
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name
