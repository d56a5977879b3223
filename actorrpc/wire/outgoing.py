"""The sending end of a direct way (`wire.direct`; rules DW1 to DW5 stand there).

On the stream a message is a word of 4 bytes and its frames: the word is the size of the only frame; or, with its
highest bit set, the number of frames, whose sizes follow in 8 bytes each. A second bit says that all frames but the
first lie in shared memory (`wire.segments`), in the segment whose number comes before the sizes; a third one, that this
is no message but an order for such a segment. What is told of them in the other direction is that file's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from actorrpc.wire.segments import LARGE, ORDER, Stock
from actorrpc.wire.transport import COPIED_BELOW, snapshot, taken_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from actorrpc.wire.direct import DirectWays
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
WORD = struct.Struct("<I")
MANY, STOWED, ORDERED = 1 << 31, 1 << 30, 1 << 29
"""Bits of the word."""
STOWED_HEAD = struct.Struct("<II")
"""The word, and the number of a segment."""
APART = 1 << 16
"""Bytes from which a frame is read into its own memory, and written from where it lies."""
TURNS = 16
"""How often a way reads or writes before others have their turn."""
NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
_GATHER = 64
"""How many pieces are written at once."""
_HOLD_BELOW = 2048
_HOLD_AT_MOST = 32


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

    __slots__ = ("_backlog", "_held", "_late", "_lock", "_open", "_sending", "_stock", "_ways", "socket")

    def __init__(self, socket: socket.socket, ways: DirectWays) -> None:
        self.socket, self._ways = socket, ways
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send.
        self._lock = threading.RLock()
        self._held: list[Sequence[Frame] | _Stowed] = []
        self._late: deque[Sequence[Frame] | _Stowed] = deque()
        """What came while another thread had the lock, before what is to be held (DW5)."""
        self._stock: Stock | None = None
        self._backlog: deque[Frame] = deque()
        self._sending = False
        self._open = True

    is_local = True
    """Whether it never leaves this host."""

    def send(self, frames: Sequence[Frame], hold: int, lasting: bool) -> bool:
        """Sends a message, or keeps it back with those before it. Returns whether something is kept back.

        Raises:
            KeyError: the way was closed.
        """
        message: Sequence[Frame] | _Stowed = frames
        if len(frames) > 1 and sum(map(len, frames)) >= LARGE:
            message = self._stow(frames)
            if not lasting and message is frames:
                message = snapshot(frames)
            lasting = True
        if not self._lock.acquire(False):
            self._late.append(message if message is not frames else snapshot(frames, lasting))
            self._pass_on()
            return False
        try:
            if not self._open:
                raise KeyError(self.socket)
            if self._late:
                self._gather()
            if self._sending and message is frames:  # it has to wait; else what the socket does not take is copied
                message = snapshot(frames, lasting)
            held = self._held
            held.append(message)
            if hold and len(held) < _HOLD_AT_MOST and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW:
                return True
            if not self._sending:
                self._flush()
            return False
        finally:
            self._leave()

    # -- the lock (RULE DW5)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            self._gather()
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._lock.release()
        if self._late:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._late and self._lock.acquire(False):
            try:
                self._gather()
                if self._open and not self._sending:
                    self._flush()
            finally:
                self._lock.release()

    def _gather(self) -> None:
        while self._late:
            late = taken_out(self._late)
            try:
                self._held.extend(late)
            except IndexError:  # a finalizer has sent meanwhile
                pass

    def _stow(self, frames: Sequence[Frame]) -> Sequence[Frame] | _Stowed:
        """Puts all frames but the first into a segment, where there is one."""
        stock, commons = self._stock or self._open_stock(), self._ways.commons
        if stock is None or commons is None:
            return frames
        number = commons.share(self, frames)
        if number:
            sizes = [memoryview(frame).nbytes for frame in frames[1:]]
        else:
            order, number, sizes = stock.stow(frames[1:])
            if order:
                self._ways.stocked(self)
                self.order(order)
        if not number:
            return frames
        count = len(frames)
        head = struct.pack(f"<II{count}Q", MANY + STOWED + count, number, len(frames[0]), *sizes)
        return _Stowed(head, frames[:1])

    def _open_stock(self) -> Stock | None:
        if not self._lock.acquire(False):
            return self._stock
        try:
            commons = self._ways.commons
            if self._stock is None and self._open and commons is not None:
                self._stock = Stock(self.socket, lambda what, number: commons.told(self, what, number))
            return self._stock
        finally:
            self._leave()

    @property
    def is_open(self) -> bool:
        """Whether messages may still be sent along it."""
        return self._open

    def hear(self) -> None:
        """Takes in what is told of segments."""
        stock = self._stock or self._open_stock()
        if stock is not None:
            stock.hear()

    def order(self, orders: bytes) -> None:
        """Has orders leave before the next message."""
        word = WORD.pack(MANY + ORDERED)
        for at in range(0, len(orders), ORDER.size):
            # Nothing else is touched: a message that came late meanwhile is left to who has seen that it must leave.
            self._late.append(_Stowed(word + orders[at : at + ORDER.size], ()))

    def tidy(self, now: float) -> bool:
        """Gives up segments that have not been used for long. Returns whether there are none any more."""
        stock = self._stock
        if stock is None:
            return True
        orders = stock.trim(now)
        if orders:
            self.order(orders)
            self.flush()
        return stock.empty

    def flush(self) -> None:
        """Sends what is kept back."""
        if self._held or self._late:
            with self._turn():
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
                    if len(frames) == 1 and len(frames[0]) < APART:
                        small += (WORD.pack(len(frames[0])), frames[0])
                        continue
                    if isinstance(frames, _Stowed):
                        head, frames = frames
                    else:
                        sizes = [memoryview(frame).nbytes for frame in frames]
                        head = struct.pack(f"<I{len(sizes)}Q", MANY + len(sizes), *sizes)
                    small.append(head)
                    for frame in frames:
                        size = memoryview(frame).nbytes
                        if size < APART:
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
                    count = self.socket.send(pieces[0], NO_WAIT)
                else:
                    count = self.socket.sendmsg(pieces[:_GATHER], (), NO_WAIT)
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
            self._backlog.append(rest if size >= COPIED_BELOW else bytes(rest))
        if self._backlog:
            self._ways.arm(self)

    def go_on(self) -> None:
        """Writes what the socket takes of the backlog, within reason."""
        with self._turn():
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
        for _ in range(TURNS):
            if not backlog:
                return True
            try:
                count = self.socket.sendmsg(itertools.islice(backlog, _GATHER), (), NO_WAIT)
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
        with self._turn():
            if self.socket.fileno() >= 0:
                self._open = False
                self._end()

    def close(self, linger: float) -> None:
        """Closes the way. `linger`, unless 0: the backlog may still leave, as long as the leader receives."""
        with self._turn():
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
        end_way(self.socket)


def end_way(way: socket.socket) -> None:
    """Closes a socket so that the other side sees the end, whoever else holds it (DW2)."""
    with contextlib.suppress(OSError):
        way.shutdown(socket.SHUT_RDWR)
    way.close()
