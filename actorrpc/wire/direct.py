"""The direct way: a Unix socket between two processes of one user on one host.

A message through ZeroMQ changes threads three times on its way, since each side has a thread of ZeroMQ's own between
the socket and whoever sends or receives. Here the sender writes into the receiver's socket itself. Where a direct way
is not to be had (another host, another system than Linux, a world with a token), messages travel by ZeroMQ.

On the stream a message is a word of 4 bytes and its frames: the word is the size of the only frame; or, with its
highest bit set, the number of frames, whose sizes follow in 8 bytes each. A second bit says that all frames but the
first lie in shared memory (`wire.segments`), in the segment whose number comes before the sizes; a third one, that this
is no message but an order for such a segment. What is told of them in the other direction is that file's.

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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from actorrpc.wire import segments
from actorrpc.wire.segments import LARGE, ORDER, Room, Shelf, Stock
from actorrpc.wire.transport import snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
AVAILABLE = hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")
"""Whether this system has what it takes."""
SCHEME = "unix://"

_WORD = struct.Struct("<I")
_MANY, _STOWED, _ORDER = 1 << 31, 1 << 30, 1 << 29
_STOWED_HEAD = struct.Struct("<II")
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
        self.room = Room() if segments.AVAILABLE else None
        """Where the large frames come from that are sent here; None where this system has no such thing."""
        self._stocks: set[Outgoing] = set()
        """Ways with segments to fill."""
        self._tidied = 0.0

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

    def stocked(self, outgoing: Outgoing) -> None:
        """Has `tidy` look at a way."""
        self._stocks.add(outgoing)

    def tidy(self, timeout: float | None) -> float | None:
        """Gives up segments that have not been used for long. Returns how long the leader may sleep, at most
        `timeout`, until it is to do that again.
        """
        if not self._stocks:
            return timeout
        now = time.monotonic()
        left = self._tidied + segments.IDLE_SECONDS / 4 - now
        if left <= 0:
            self._tidied, left = now, segments.IDLE_SECONDS / 4
            for outgoing in list(self._stocks):
                self._stocks.discard(outgoing)  # first: another thread may be ordering something for it
                if not outgoing.tidy(now):
                    self._stocks.add(outgoing)
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
            elif word < _APART:
                break
            else:
                self._sizes = [word]
                at = self._next(data, start, messages)
        self._rest = bytes(data[at:]) if at < end else b""

    def _take_special(
        self, word: int, data: bytes | memoryview, at: int, end: int, messages: deque[list[Frame]]
    ) -> int:
        """Takes an order, or a message that lies in a segment. Returns where the next begins, -1: more is to come."""
        if word == _MANY | _ORDER:
            at += 4
            if end - at < ORDER.size:
                return -1
            if self.shelf is None and self._room is not None:
                self.shelf = Shelf(self.socket, self._room)
            if self.shelf is not None:
                self.shelf.order(*ORDER.unpack_from(data, at))
            return at + ORDER.size
        count = word - _MANY - _STOWED
        if not 1 < count <= _MOST_FRAMES:
            raise _NonsenseError(f"a message that begins with {word:#x}")
        start = at + _STOWED_HEAD.size + 8 * count
        if start > end:
            return -1
        _, number = _STOWED_HEAD.unpack_from(data, at)
        size, *sizes = struct.unpack_from(f"<{count}Q", data, at + _STOWED_HEAD.size)
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


class _Stowed(NamedTuple):
    """What is sent of a message whose other frames lie in a segment; or an order."""

    head: bytes
    frames: Sequence[Frame]


class Outgoing:
    """A way that was dialled.

    Arguments:
        socket: this end of it.
        ways: whose leader goes on with what the socket does not take.
    """

    __slots__ = ("_backlog", "_held", "_lock", "_open", "_sending", "_stock", "_ways", "socket")

    def __init__(self, socket: socket.socket, ways: DirectWays) -> None:
        self.socket, self._ways = socket, ways
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send.
        self._lock = threading.RLock()
        self._held: list[Sequence[Frame] | _Stowed] = []
        self._stock: Stock | None = None
        self._backlog: deque[Frame] = deque()
        self._sending = False
        self._open = True

    def send(self, frames: Sequence[Frame], hold: bool, lasting: bool) -> bool:
        """Sends a message, or keeps it back with those before it. Returns whether something is kept back.

        Raises:
            KeyError: the way was closed.
        """
        message: Sequence[Frame] | _Stowed = frames
        if len(frames) > 1:
            if sum(map(len, frames)) >= LARGE:
                message = self._stow(frames)
            if not lasting and message is frames:
                message = snapshot(frames)
        with self._lock:
            if not self._open:
                raise KeyError(self.socket)
            held = self._held
            held.append(message)
            if hold and len(held) < _HOLD_AT_MOST and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW:
                return True
            if not self._sending:
                self._flush()
            return False

    def _stow(self, frames: Sequence[Frame]) -> Sequence[Frame] | _Stowed:
        """Puts all frames but the first into a segment, where there is one."""
        stock = self._stock
        if stock is None:
            with self._lock:
                if not self._open or self._ways.room is None:
                    return frames
                stock = self._stock = self._stock or Stock(self.socket)
        order, number, sizes = stock.stow(frames[1:])
        if order:
            self._ways.stocked(self)
            self._order(order)
        if not number:
            return frames
        count = len(frames)
        head = struct.pack(f"<II{count}Q", _MANY + _STOWED + count, number, len(frames[0]), *sizes)
        return _Stowed(head, frames[:1])

    def _order(self, orders: bytes) -> None:
        """Has orders leave before the next message."""
        word = _WORD.pack(_MANY + _ORDER)
        with self._lock:
            for at in range(0, len(orders), ORDER.size):
                self._held.append(_Stowed(word + orders[at : at + ORDER.size], ()))

    def tidy(self, now: float) -> bool:
        """Gives up segments that have not been used for long. Returns whether there are none any more."""
        stock = self._stock
        if stock is None:
            return True
        orders = stock.trim(now)
        if orders:
            self._order(orders)
            self.flush()
        return stock.empty

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
                    if isinstance(frames, _Stowed):
                        head, frames = frames
                    else:
                        sizes = [memoryview(frame).nbytes for frame in frames]
                        head = struct.pack(f"<I{len(sizes)}Q", _MANY + len(sizes), *sizes)
                    small.append(head)
                    for frame in frames:
                        size = memoryview(frame).nbytes
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
        if self._stock is not None:
            self._stock.close()
            self._ways.forget_stock(self)
        _end(self.socket)


def _end(way: socket.socket) -> None:
    with contextlib.suppress(OSError):
        way.shutdown(socket.SHUT_RDWR)
    way.close()
