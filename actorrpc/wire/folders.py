"""Temporary folders that go with the process: the next one clears away what a killed one left behind."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tempfile

try:
    import fcntl

    AVAILABLE = True
except ImportError:  # on Windows
    AVAILABLE = False

_PREFIX = "actorrpc-"


class HeldFolder:
    """A folder of mode 0700, which exists until `close`, or until its process has died and another one makes a folder.

    A living process holds a lock in its folder: process ids would say nothing across pid namespaces that share a disk.

    Arguments:
        path_limit: how many characters the folder's path may have; for sockets, whose paths are limited.

    Raises:
        OSError: there is no place for it.
    """

    def __init__(self, path_limit: int | None = None) -> None:
        base = _base(path_limit)
        for old in glob.glob(f"{base}/{_PREFIX}*"):
            if _abandoned(old):
                shutil.rmtree(old, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        self._lock = -1
        if AVAILABLE:
            try:
                self._lock = os.open(f"{self.path}/new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.rename(f"{self.path}/new", f"{self.path}/lock")  # seen by others only when it is held
            except OSError:  # the disk is full, say
                self.close()
                raise

    def close(self) -> None:
        """Removes the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _base(path_limit: int | None) -> str:
    for base in (tempfile.gettempdir(), "/tmp"):
        if (path_limit is None or len(base) + 2 + len(_PREFIX) + 8 <= path_limit) and os.access(base, os.W_OK):
            return base
    raise OSError(f"no folder for temporary files has a path short enough for the limit of {path_limit}")


def held() -> list[str]:
    """Returns the folders that processes of this user's hold on this host, the newest one first."""
    found = {f for base in {tempfile.gettempdir(), "/tmp"} for f in glob.glob(f"{base}/{_PREFIX}*")}
    ages: dict[str, float] = {}
    for folder in found:
        try:
            if _is_own(folder) and os.path.exists(f"{folder}/lock") and not _abandoned(folder):
                ages[folder] = os.lstat(folder).st_ctime
        except OSError:  # it has gone meanwhile
            continue
    return sorted(ages, key=lambda folder: ages[folder], reverse=True)


def is_private(path: str) -> bool:
    """Returns whether there is a file of this user's own at a path, in a folder that nobody else may enter."""
    try:
        return os.access(path, os.W_OK) and _is_own(os.path.dirname(path)) and os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _is_own(folder: str) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _abandoned(folder: str) -> bool:
    if not AVAILABLE:
        return False
    try:
        if not _is_own(folder):  # anybody may put something of this name there
            return False
        fd = os.open(f"{folder}/lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
