"""Bounds what torch's client waits for name servers.

It wants the name of the address that it connects to, for its log, and asks for that of ``::ffff:10.0.0.1``, which no
file knows. Where a server does not answer, or an answer is lost, as happens where many workers begin at once, that
takes 10 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class _State(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state`` (``resolv.h``), of which each thread has its own."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextlib.contextmanager
def asking_once() -> Generator[None]:
    """Has each name server asked once by the present thread, and waited for a second, in the `with` block.

    Where there is no glibc, nothing changes.
    """
    state = _state()
    if state is None:
        yield
        return
    before, (state.retrans, state.retry) = (state.retrans, state.retry), (1, 1)
    try:
        yield
    finally:
        state.retrans, state.retry = before  # also for the next thread: glibc gives it this one's memory as it is


def _state() -> _State | None:
    if sys.platform != "linux" or not _is_glibc():
        return None
    try:
        libc = ctypes.CDLL(None)
        init, state = getattr(libc, "__res_init"), getattr(libc, "__res_state")
    except (OSError, AttributeError):
        return None
    state.restype = ctypes.POINTER(_State)
    if init() != 0:  # called by whoever asks first, which would undo the change
        return None
    found: _State = state().contents
    return found


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False
