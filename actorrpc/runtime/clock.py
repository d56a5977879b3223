"""Time, waiting and threads, as the kernel sees them. Handed in, so that a test can have its own.

The real clock is `SystemClock`; `actorrpc.testing` has a virtual one, under which all workers of a world run in one
process, one thread at a time, in an order that a seed decides.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from actorrpc.wire.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Callable


class Gate(Protocol):
    """A door for one waiting thread. An opening is kept until a wait consumes it; more than one count as one."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for an opening, at most `timeout` seconds (None: without bound); returns whether there was one."""

    def open(self) -> None:
        """Lets the waiting thread, or else the next one that waits, through. Takes no lock: finalizers call it."""


class Clock(Protocol):
    """What passes time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def gate(self) -> Gate:
        """Makes a closed gate."""

    def start(self, run: Callable[[], None], name: str) -> Thread:
        """Starts a daemon thread."""


class Thread(Protocol):
    """A thread that was started by a clock."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Returns whether it still runs."""


class LockGate:
    """A gate made of a lock, of which a wait takes and an opening releases."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    @exposed
    def wait(self, timeout: float | None = None) -> bool:
        return self._lock.acquire(True, -1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))

    def open(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is open


class SystemClock:
    """Monotonic time and the operating system's threads."""

    now = staticmethod(time.monotonic)
    gate = staticmethod(LockGate)

    def start(self, run: Callable[[], None], name: str) -> Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
