"""Files that one recording writes at a time: a second one would write between its lines."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

try:
    import fcntl

    _CAN_LOCK = True
except ImportError:  # on Windows
    _CAN_LOCK = False

if TYPE_CHECKING:
    from collections.abc import Callable


def claim(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to be written over, unless a living recording writes to it. To be closed by `release`.

    A lock tells, on systems and disks that have them. Devices and pipes are nobody's.

    Raises:
        FileExistsError: another recording writes to it.
        OSError: it cannot be written.
    """
    # Emptied only when it is ours.
    opener: Callable[[str, int], int] = lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666)  # noqa: E731
    file = open(path, "wb", opener=opener)  # noqa: SIM115  the caller's
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _lock(file, path)
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    if not _CAN_LOCK:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = "another recording is being written to it; wait for its end, or name another file"
        raise FileExistsError(errno.EEXIST, text, os.fspath(path)) from None
    except OSError:  # of a disk that has no locks
        pass


def release(file: BinaryIO) -> None:
    """Closes a file that was claimed. May be called twice."""
    if file.closed:
        return
    try:
        file.flush()
    finally:
        if _CAN_LOCK:
            try:
                fcntl.flock(file, fcntl.LOCK_UN)  # children that were forked meanwhile have it open as well
            except OSError:
                pass
        file.close()
