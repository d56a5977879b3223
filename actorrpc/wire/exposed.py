"""Marks the few functions in which a Ctrl-C may surface (see runtime.interrupts for the rule, KI1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

    F = TypeVar("F", bound=Callable[..., Any])

EXPOSED: set[CodeType] = set()


def exposed(function: F) -> F:
    """Marks a function that blocks or runs user code, and that a KeyboardInterrupt may leave at any line."""
    EXPOSED.add(function.__code__)
    return function
