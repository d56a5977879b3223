"""The direct way: a Unix socket between two processes of one user on one host.

A message through ZeroMQ changes threads three times on its way, since each side has a thread of ZeroMQ's own between
the socket and whoever sends or receives. Here the sender writes into the receiver's socket itself. Where a direct way
is not to be had (another host, another system than Linux, a world with a token), messages travel by ZeroMQ.

On the stream a message is a word of 4 bytes and its frames: the word is the size of the only frame; or, with its
highest bit set, the number of frames, whose sizes follow in 8 bytes each.

Rules:
- DW1: nothing here blocks. What the socket does not take stays in the backlog, which the leader writes on when there
  is room: it receives through the same epoll.
- DW2: a descriptor leaves the epoll before it is closed, since a forked child may hold it open, and is shut down, so
  that the other side sees the end all the same.
- DW3: a way whose other end is gone takes everything and drops it. The kernel hears of the end by other means.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
AVAILABLE = hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")
"""Whether this system has what it takes."""
SCHEME = "unix://"

_WORD = struct.Struct("<I")
_MANY = 1 << 31
_MOST_FRAMES = 1 << 16
_READ = 1 << 17
"""Bytes that are read at once, where it is not known how many there are."""
_APART = 1 << 16
"""Bytes from which a frame is read into its own memory, and written from where it lies."""
_COPY_BELOW = 262144
"""Bytes below which what the socket does not take of a frame is copied."""
_GATHER = 64
"""How many pieces are written at once."""
_TURNS = 16
"""How often a way reads or writes before others have their turn."""
_HOLD_BELOW = 2048
_HOLD_AT_MOST = 32
_IN, _OUT = (select.EPOLLIN, select.EPOLLOUT) if AVAILABLE else (0, 0)
_CREDENTIALS = struct.Struct("3i")
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


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
            self._incoming[here.fileno()] = _Incoming(here, self._buffer)
            self._epoll.register(here.fileno(), _IN)

    def _forget(self, incoming: _Incoming) -> None:
        fd = incoming.socket.fileno()
        del self._incoming[fd]
        self._epoll.unregister(fd)
        _end(incoming.socket)

    def arm(self, outgoing: Outgoing) -> None:
        """Has the leader go on with a backlog."""
        fd = outgoing.socket.fileno()
        if fd not in self._outgoing:
            self._outgoing[fd] = outgoing
            self._epoll.register(fd, _OUT)

    def disarm(self, outgoing: Outgoing) -> None:
        """Takes that back."""
        fd = outgoing.socket.fileno()
        if self._outgoing.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self, linger: float = 0.0) -> None:
        """Closes everything; backlogs get `linger` seconds to leave."""
        for outgoing in list(self._outgoing.values()):
            outgoing.drain(linger)
        for incoming in list(self._incoming.values()):
            self._forget(incoming)
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
    """

    __slots__ = ("_apart", "_buffer", "_filled", "_frames", "_rest", "_sizes", "socket")

    def __init__(self, socket: socket.socket, buffer: memoryview) -> None:
        self.socket, self._buffer = socket, buffer
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
                count = self.socket.recv_into(self._buffer, 0, _NO_WAIT)
                if not count:
                    return False
                data = self._buffer[:count]
                self._take(self._rest + data if self._rest else data if count >= _APART else bytes(data), messages)
            for _ in range(_TURNS):
                if self._apart is None:
                    break
                count = self.socket.recv_into(self._apart[self._filled :], 0, _NO_WAIT)
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
            (word,) = _WORD.unpack_from(data, at)
            if word >= _MANY:
                count = word - _MANY
                if not 0 < count <= _MOST_FRAMES:
                    raise _NonsenseError(f"a message of {count} frames")
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
            elif word < _APART:
                break
            else:
                self._sizes = [word]
                at = self._next(data, start, messages)
        self._rest = bytes(data[at:]) if at < end else b""

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
        messages.append(frames)
        self._frames, self._sizes = [], []
        return at


class Outgoing:
    """A way that was dialled.

    Arguments:
        socket: this end of it.
        ways: whose leader goes on with what the socket does not take.
    """

    __slots__ = ("_backlog", "_held", "_lock", "_open", "_sending", "_ways", "socket")

    def __init__(self, socket: socket.socket, ways: DirectWays) -> None:
        self.socket, self._ways = socket, ways
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send.
        self._lock = threading.RLock()
        self._held: list[Sequence[Frame]] = []
        self._backlog: deque[Frame] = deque()
        self._sending = False
        self._open = True

    is_local = True
    """Whether it never leaves this host."""

    def send(self, frames: Sequence[Frame], hold: bool) -> bool:
        """Sends a message, or keeps it back with those before it. Returns whether something is kept back.

        Raises:
            KeyError: the way was closed.
        """
        with self._lock:
            if not self._open:
                raise KeyError(self.socket)
            held = self._held
            held.append(frames)
            if hold and len(held) < _HOLD_AT_MOST and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW:
                return True
            if not self._sending:
                self._flush()
            return False

    def flush(self) -> None:
        """Sends what is kept back."""
        if self._held:
            with self._lock:
                if self._held and self._open and not self._sending:
                    self._flush()

    def _flush(self) -> None:
        self._sending = True
        try:
            while self._held:
                held, self._held = self._held, []
                small: list[Frame] = []
                pieces: list[bytes | memoryview] = []
                for frames in held:
                    if len(frames) == 1 and len(frames[0]) < _APART:
                        small += (_WORD.pack(len(frames[0])), frames[0])
                        continue
                    sizes = [memoryview(frame).nbytes for frame in frames]
                    small.append(struct.pack(f"<I{len(sizes)}Q", _MANY + len(sizes), *sizes))
                    for frame, size in zip(frames, sizes, strict=True):
                        if size < _APART:
                            small.append(frame)
                        elif size:
                            pieces += (b"".join(small), memoryview(frame).cast("B"))
                            small = []
                if small:
                    pieces.append(b"".join(small))
                self._write(pieces)
        finally:
            self._sending = False

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        count = 0
        if not self._backlog:
            try:
                if len(pieces) == 1:
                    count = self.socket.send(pieces[0], _NO_WAIT)
                else:
                    count = self.socket.sendmsg(pieces[:_GATHER], (), _NO_WAIT)
            except BlockingIOError:
                pass
            except OSError as e:
                log.debug("a direct way has ended: %s", e)  # DW3
                return
        for piece in pieces:
            size = len(piece)
            if count >= size:
                count -= size
                continue
            rest = memoryview(piece)[count:]
            count = 0
            self._backlog.append(rest if size >= _COPY_BELOW else bytes(rest))
        if self._backlog:
            self._ways.arm(self)

    def go_on(self) -> None:
        """Writes what the socket takes of the backlog, within reason."""
        with self._lock:
            if self._sending:
                return
            self._sending = True
            try:
                done = self._write_backlog()
            finally:
                self._sending = False
            if done and self._held:  # a finalizer has sent something in the meantime
                self._flush()
            if done and not self._backlog:
                self._ways.disarm(self)
                if not self._open:
                    self._end()

    def _write_backlog(self) -> bool:
        backlog = self._backlog
        for _ in range(_TURNS):
            if not backlog:
                return True
            try:
                count = self.socket.sendmsg(itertools.islice(backlog, _GATHER), (), _NO_WAIT)
            except BlockingIOError:
                return False
            except OSError as e:
                log.debug("a direct way has ended: %s", e)
                backlog.clear()
                return True
            while count:
                first = backlog.popleft()
                if count < len(first):
                    backlog.appendleft(memoryview(first)[count:])
                    break
                count -= len(first)
        return not backlog

    def drain(self, linger: float) -> None:
        """Gives the backlog some seconds to leave, and closes the way. Blocks: at the end of a worker."""
        poll, end = select.poll(), time.monotonic() + linger
        poll.register(self.socket.fileno(), select.POLLOUT)
        while self._backlog:
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                break
            self.go_on()
        with self._lock:
            if self.socket.fileno() >= 0:
                self._open = False
                self._end()

    def close(self, linger: float) -> None:
        """Closes the way. `linger`, unless 0: the backlog may still leave, as long as the leader receives."""
        with self._lock:
            if not self._open:
                return
            if linger and self._held and not self._sending:
                self._flush()
            self._open = False
            if not (linger and self._backlog):
                self._end()

    def _end(self) -> None:
        self._backlog.clear()
        self._ways.disarm(self)
        _end(self.socket)


def _end(way: socket.socket) -> None:
    with contextlib.suppress(OSError):
        way.shutdown(socket.SHUT_RDWR)
    way.close()
