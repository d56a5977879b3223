"""Decorators for functions that others call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

from actorrpc.services.executor import ASYNC_MARK

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Marks a function whose result is a Future, so that the call is answered when that future is done.

    The thread that runs `fn` is free as soon as `fn` returns. Works for functions, and, as the innermost decorator, for
    static, class and instance methods.

    Returns the marked function.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper  # type: ignore[return-value]
