"""Ctrl-C, which a terminal sends to the launcher and to all members at once: who is deaf to it, and when."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT  # the exit code that shells give to a program ended by Ctrl-C


@contextlib.contextmanager
def sigint_deferred(discard: bool = False) -> Iterator[None]:
    """Hold back SIGINT: children started in this block begin deaf to it, and here it is raised when the block ends.

    The mask alone does not protect this thread: another thread of this process may take the signal, and Python then
    interrupts the main thread all the same. Hence the handler as well.

    Args:
        discard: Forget an interrupt that came meanwhile, since one is already being raised.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    # An ignored signal stays ignored in children; a handler in its place would undo that.
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if hasattr(signal, "pthread_sigmask") else None
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ours:
            signal.signal(signal.SIGINT, before)
            if came and not discard:
                signal.raise_signal(signal.SIGINT)


def unblock_sigint() -> None:
    """In a child: take Ctrl-C again, which its parent held back around its start; one that came meanwhile is raised."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def ignore_sigint() -> None:
    """In a child: no more KeyboardInterrupts until it ends; the parent ends whoever does not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
