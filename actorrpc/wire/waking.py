"""A way to wake a thread that polls, which other threads, finalizers and signal handlers may use without a lock."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

_ONE = (1).to_bytes(8, sys.byteorder)


class Waker:
    """What a poller watches, and others write to. An eventfd where there are such, else a pair of sockets: pipes cannot
    be polled on Windows.
    """

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, ...] = ()
        if hasattr(os, "eventfd"):
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return
        read, write = self._sockets = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._fd = read.fileno()

    def fileno(self) -> int:
        """Returns the descriptor to poll for reading; -1 when closed."""
        return self._fd

    def wake(self) -> None:
        """Makes it readable. Nothing happens where it is already (a wake-up is under way), or closed."""
        with contextlib.suppress(OSError):
            if self._sockets:
                self._sockets[1].send(b"\1")
            else:
                os.write(self._fd, _ONE)

    def drain(self) -> None:
        """Makes it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            if self._sockets:
                self._sockets[0].recv(4096)
            else:
                os.read(self._fd, 8)

    def close(self) -> None:
        """Closes it; again does nothing."""
        fd, self._fd = self._fd, -1
        for end in self._sockets:
            end.close()
        if fd != -1 and not self._sockets:
            os.close(fd)
        self._sockets = ()
