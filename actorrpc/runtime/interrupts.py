"""Ctrl-C that never tears the kernel.

Python runs signal handlers in the main thread between any two bytecodes, so a KeyboardInterrupt could surface between
taking leadership and the `try` that gives it back. RULE KI1: it may not surface in a line of `wire`, `runtime`,
`services` or `autograd` (where a thread could be left in a context for ever), except in functions marked
`wire.exposed`, which block or run user code and hold nothing. The handler here
looks at the interrupted stack: where the innermost frame of those packages is not exposed, the signal is sent again a
millisecond later, until it finds the main thread in a place where it may surface. This costs calls nothing.

Python drops an exception that surfaces in a finalizer (pyzmq's frames check for signals when they are freed); such a
KeyboardInterrupt is sent again as well.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from actorrpc.wire.exposed import EXPOSED

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROTECTED = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("wire", "runtime", "services", "autograd"))


def must_wait(frame: FrameType | None) -> bool:
    """Returns whether a signal that interrupted this stack must not surface there."""
    while frame is not None:
        if frame.f_code in EXPOSED:
            return False
        if frame.f_code.co_filename.startswith(_PROTECTED):
            return True
        frame = frame.f_back
    return False


class InterruptShield:
    """Puts itself in front of the process's SIGINT handler, from `install` to `remove`, both in the main thread."""

    def __init__(self) -> None:
        self._before: object = None
        self._hook_before: Callable[[sys.UnraisableHookArgs], object] | None = None
        self._print_before: Callable[..., object] | None = None
        self._main = threading.main_thread().ident or 0

    def install(self) -> bool:
        """Takes the handler's place; returns False, and does nothing, outside the main thread or where none is set."""
        if threading.current_thread() is not threading.main_thread():
            return False
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):
            return False
        self._before = before
        signal.signal(signal.SIGINT, self._handle)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._print_before, sys.excepthook = sys.excepthook, self._print
        return True

    def remove(self) -> None:
        """Gives the handler's place back, if nobody else has taken it since."""
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]
        if self._hook_before is not None and sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook_before
        if self._print_before is not None and sys.excepthook == self._print:
            sys.excepthook = self._print_before
        self._before = self._hook_before = self._print_before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if must_wait(frame):
            # Not threading.Thread: its start takes locks that the interrupted main thread may hold.
            _thread.start_new_thread(self._again, (number,))
        elif callable(before):
            before(number, frame)

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is KeyboardInterrupt and threading.get_ident() == self._main:
            _thread.start_new_thread(self._again, (signal.SIGINT,))
        elif self._hook_before is not None:
            self._hook_before(what)

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Cython prints what it cannot raise, before it reports that as above; code still runs then. Not so when the
        # program ends of it.
        if kind is KeyboardInterrupt and sys._getframe().f_back is not None:
            return
        if self._print_before is not None:
            self._print_before(kind, error, trace)

    def _again(self, number: int) -> None:
        time.sleep(0.001)
        signal.pthread_kill(self._main, number)  # this one also ends a blocking system call
