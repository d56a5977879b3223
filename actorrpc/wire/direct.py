"""The direct way: a Unix socket between two processes of one user on one host.

A message through ZeroMQ changes threads three times on its way, since each side has a thread of ZeroMQ's own between
the socket and whoever sends or receives. Here the sender writes into the receiver's socket itself. Where a direct way
is not to be had (another host, another system than Linux, a world with a token), messages travel by ZeroMQ.

How messages lie on the stream is told in `wire.outgoing`.

Rules:
- DW1: nothing here blocks. What the socket does not take stays in the backlog, which the leader writes on when there
  is room: it receives through the same epoll.
- DW2: a descriptor leaves the epoll before it is closed, since a forked child may hold it open, and is shut down, so
  that the other side sees the end all the same.
- DW3: a way whose other end is gone takes everything and drops it. The kernel hears of the end by other means.
- DW4: the leader stays awake for a moment before it sleeps, since to be woken takes longer than most answers to small
  calls do: 300 us, and for up to 5 ms where no other thread of this process has computed much of late and nobody else
  wants the core. Where nothing came meanwhile it sleeps at once the next time, and the more often that was in vain, the
  more times (up to 31). On a single core, or without a way that leads here, it never stays awake (`wire.vigil`).
- DW5: who sends does not wait for the lock of a way. It has the lock of its peer, and whoever has the way's may be in a
  finalizer of the user's, which sends to that peer, and waits for that. Who has the lock takes along what it leaves.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from actorrpc.wire import segments
from actorrpc.wire.commons import Commons
from actorrpc.wire.outgoing import APART, MANY, NO_WAIT, ORDERED, STOWED, STOWED_HEAD, TURNS, WORD, Outgoing, end_way
from actorrpc.wire.segments import ORDER
from actorrpc.wire.shelf import Room, Shelf

if TYPE_CHECKING:
    from collections import deque

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
AVAILABLE = hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")
"""Whether this system has what it takes."""
SCHEME = "unix://"

_MOST_FRAMES = 1 << 16
_READ = 1 << 17
"""Bytes that are read at once, where it is not known how many there are."""
_IN, _OUT = (select.EPOLLIN, select.EPOLLOUT) if AVAILABLE else (0, 0)
_CREDENTIALS = struct.Struct("3i")


class DirectWays:
    """All direct ways of one worker: those that lead to it, and those that it has dialled.

    Arguments:
        path: where to listen; in a folder that only this user may enter.
        epoll: tells the leader what there is to do.

    Raises:
        OSError: one cannot listen there.
    """

    def __init__(self, path: str, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = memoryview(bytearray(_READ))
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        """Ways with a backlog, by descriptor."""
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(4096)
            epoll.register(self._listener.fileno(), _IN)
        except BaseException:
            self._listener.close()
            raise
        self.endpoint = SCHEME + path
        self.room = Room() if segments.AVAILABLE else None
        """Where the large frames come from that are sent here; None where this system has no such thing."""
        self.commons = None if self.room is None else Commons(self.room)
        """What is sent to several peers lies there."""
        self._stocks: set[Outgoing] = set()
        """Ways with segments to fill."""
        self._tidied = 0.0

    @property
    def in_use(self) -> bool:
        """Whether anybody sends along one."""
        return bool(self._incoming)

    def dial(self, endpoint: str) -> Outgoing | None:
        """Opens a way; returns None where nobody listens, or too many wait there to be let in."""
        there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            there.setblocking(False)
            there.connect(endpoint.removeprefix(SCHEME))
        except OSError as e:
            there.close()
            log.debug("no direct way to %s: %s", endpoint, e)
            return None
        return Outgoing(there, self)

    def handle(self, fd: int, messages: deque[list[Frame]]) -> None:
        """Does what there is to do at a descriptor: lets in who knocks, reads, or writes on. Under leadership.

        Arguments:
            fd: the descriptor, of which the epoll has told.
            messages: takes the messages that are whole.
        """
        incoming = self._incoming.get(fd)
        if incoming is not None:
            if not incoming.read(messages):
                self._forget(incoming)
            return
        outgoing = self._outgoing.get(fd)
        if outgoing is not None:
            outgoing.go_on()
        elif fd == self._listener.fileno():
            self._let_in()

    def _let_in(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    log.error("a peer on this host cannot be let in: %s", e)
                return
            here.setblocking(False)
            _, user, _ = _CREDENTIALS.unpack(here.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user != os.geteuid():
                log.warning("a process of another user (%d) was turned away", user)
                here.close()
                continue
            self._incoming[here.fileno()] = _Incoming(here, self._buffer, self.room)
            self._epoll.register(here.fileno(), _IN)

    def _forget(self, incoming: _Incoming) -> None:
        fd = incoming.socket.fileno()
        del self._incoming[fd]
        self._epoll.unregister(fd)
        if incoming.shelf is not None:
            incoming.shelf.close()
        end_way(incoming.socket)

    def arm(self, outgoing: Outgoing) -> None:
        """Has the leader go on with a backlog."""
        fd = outgoing.socket.fileno()
        if fd not in self._outgoing:
            self._epoll.register(fd, _OUT)  # first: where that fails, the next message tries again
            self._outgoing[fd] = outgoing

    def disarm(self, outgoing: Outgoing) -> None:
        """Takes that back."""
        fd = outgoing.socket.fileno()
        if self._outgoing.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stocked(self, outgoing: Outgoing) -> None:
        """Has `tidy` look at a way."""
        self._stocks.add(outgoing)

    def tidy(self, timeout: float | None) -> float | None:
        """Gives up segments that have not been used for long. Returns how long the leader may sleep, at most
        `timeout`, until it is to do that again.
        """
        commons = self.commons
        if not self._stocks and (commons is None or commons.empty):
            return timeout
        now = time.monotonic()
        left = self._tidied + segments.IDLE_SECONDS / 4 - now
        if left <= 0:
            self._tidied, left = now, segments.IDLE_SECONDS / 4
            for outgoing in list(self._stocks):
                self._stocks.discard(outgoing)  # first: another thread may be ordering something for it
                if not outgoing.tidy(now):
                    self._stocks.add(outgoing)
            if commons is not None:
                commons.trim(now)
        return left if timeout is None else min(timeout, left)

    def forget_stock(self, outgoing: Outgoing) -> None:
        """Takes `stocked` back."""
        self._stocks.discard(outgoing)

    def close(self, linger: float = 0.0) -> None:
        """Closes everything; backlogs get `linger` seconds to leave."""
        for outgoing in list(self._outgoing.values()):
            outgoing.drain(linger)
        for incoming in list(self._incoming.values()):
            self._forget(incoming)
        if self.commons is not None:
            self.commons.close()
        if self._listener.fileno() >= 0:
            self._epoll.unregister(self._listener.fileno())
            self._listener.close()


class _NonsenseError(Exception):
    """What came along a way is no message."""


class _Incoming:
    """A way that leads here: takes a stream apart into messages.

    Arguments:
        socket: this end of it.
        buffer: what is read first goes there; the leader's, for all ways.
        room: where segments for large frames are taken from.
    """

    __slots__ = ("_apart", "_buffer", "_filled", "_frames", "_rest", "_room", "_sizes", "_stowed", "shelf", "socket")

    def __init__(self, socket: socket.socket, buffer: memoryview, room: Room | None) -> None:
        self.socket, self._buffer, self._room = socket, buffer, room
        self.shelf: Shelf | None = None
        self._stowed: list[Frame] = []
        """Of a message that is read frame by frame: the frames that lie in a segment."""
        self._rest = b""
        """The beginning of a message that was not whole."""
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        """Of a message that is read frame by frame: its frames so far, and the sizes of all of them."""
        self._apart: memoryview | None = None
        self._filled = 0
        """Of its present frame: the memory, and how much of it is there."""

    def read(self, messages: deque[list[Frame]]) -> bool:
        """Reads what is there, within reason. Returns False at the end of the way, or where it makes no sense."""
        try:
            if self._apart is None:
                count = self.socket.recv_into(self._buffer, 0, NO_WAIT)
                if not count:
                    return False
                data = self._buffer[:count]
                self._take(self._rest + data if self._rest else data if count >= APART else bytes(data), messages)
            for _ in range(TURNS):
                if self._apart is None:
                    break
                count = self.socket.recv_into(self._apart[self._filled :], 0, NO_WAIT)
                if not count:
                    return False
                self._filled += count
                if self._filled == len(self._apart):
                    self._next(b"", 0, messages)
        except BlockingIOError:
            return True
        except (OSError, _NonsenseError, MemoryError) as e:
            log.debug("a direct way was closed: %s", e)
            return False
        return True

    def _take(self, data: bytes | memoryview, messages: deque[list[Frame]]) -> None:
        """Takes whole messages from data, and keeps the rest."""
        at, end = 0, len(data)
        while end - at >= 4:
            (word,) = WORD.unpack_from(data, at)
            if word >= MANY:
                count = word - MANY
                if not 0 < count <= _MOST_FRAMES:
                    start = self._take_special(word, data, at, end, messages)
                    if start < 0:
                        break
                    at = start
                    continue
                start = at + 4 + 8 * count
                if start > end:
                    break
                self._sizes = list(struct.unpack_from(f"<{count}Q", data, at + 4))
                at = self._next(data, start, messages)
                continue
            start = at + 4
            if start + word <= end:
                messages.append([bytes(data[start : start + word])])
                at = start + word
            elif word < APART:
                break
            else:
                self._sizes = [word]
                at = self._next(data, start, messages)
        self._rest = bytes(data[at:]) if at < end else b""

    def _take_special(
        self, word: int, data: bytes | memoryview, at: int, end: int, messages: deque[list[Frame]]
    ) -> int:
        """Takes an order, or a message that lies in a segment. Returns where the next begins, -1: more is to come."""
        if word == MANY | ORDERED:
            at += 4
            if end - at < ORDER.size:
                return -1
            if self.shelf is None and self._room is not None:
                self.shelf = Shelf(self.socket, self._room)
            if self.shelf is not None:
                self.shelf.order(*ORDER.unpack_from(data, at))
            return at + ORDER.size
        count = word - MANY - STOWED
        if not 1 < count <= _MOST_FRAMES:
            raise _NonsenseError(f"a message that begins with {word:#x}")
        start = at + STOWED_HEAD.size + 8 * count
        if start > end:
            return -1
        _, number = STOWED_HEAD.unpack_from(data, at)
        size, *sizes = struct.unpack_from(f"<{count}Q", data, at + STOWED_HEAD.size)
        stowed = None if self.shelf is None else self.shelf.take(number, sizes)
        if stowed is None:
            raise _NonsenseError(f"a message of {sum(sizes)} bytes in segment {number}")
        self._sizes, self._stowed = [size], stowed
        return self._next(data, start, messages)

    def _next(self, data: bytes | memoryview, at: int, messages: deque[list[Frame]]) -> int:
        """Goes on with a message frame by frame, from data or, at its end, into memory of its own; returns where."""
        frames, sizes = self._frames, self._sizes
        if self._apart is not None:
            frames.append(self._apart)
            self._apart = None
        while len(frames) < len(sizes):
            size = sizes[len(frames)]
            here = min(size, len(data) - at)
            if here == size and not frames:
                frames.append(bytes(data[at : at + size]))
                at += size
                continue
            # Writable, its own, and not cleared first: it is filled in any case.
            memory = np.empty(size, np.uint8).data
            memory[:here] = memoryview(data)[at : at + here]
            at += here
            if here < size:
                self._apart, self._filled = memory, here
                return at
            frames.append(memory)
        frames[0] = bytes(frames[0])
        if self._stowed:
            frames += self._stowed
            self._stowed = []
        messages.append(frames)
        self._frames, self._sizes = [], []
        return at
