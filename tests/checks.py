"""Many checks in one launched world: starting a world costs seconds, a check in it milliseconds.

A module makes its `Checks` and decorates functions with it; they take the driver's actor and run in the driver's
`main`. Pytest shows each as a test of its own.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import actorrpc as rpc

if TYPE_CHECKING:
    from collections.abc import Callable


class Checks:
    """The checks of a module, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Callable[[Any], None]] = {}
        self.faults: dict[str, str] = {}

    def __call__(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        self.found[check.__name__] = check
        return check

    def fails(self, reason: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """For a check that is known to fail, and must be told when it no longer does."""

        def mark(check: Callable[[Any], None]) -> Callable[[Any], None]:
            self.faults[check.__name__] = reason
            return self(check)

        return mark

    def run(self, driver: Any) -> dict[str, str]:
        """Runs all; returns the traceback of each, "" where there is none."""
        return {name: _outcome(check, driver) for name, check in self.found.items()}

    def parameters(self) -> pytest.MarkDecorator:
        """What makes a test function run once for each check, which it gets by its name."""
        return pytest.mark.parametrize(
            "check",
            [
                pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=self.faults[name])])
                if name in self.faults
                else name
                for name in self.found
            ],
        )


def _outcome(check: Callable[[Any], None], driver: Any) -> str:
    try:
        check(driver)
    except Exception:
        return traceback.format_exc()
    return ""


def options(timeout: float = 20.0) -> rpc.RpcBackendOptions:
    """Options under which a call that hangs fails well before its test does."""
    return rpc.RpcBackendOptions(rpc_timeout=timeout, init_timeout=60)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for a condition; polls it."""
    horizon = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < horizon, "the condition did not come true in time"
        time.sleep(0.005)
