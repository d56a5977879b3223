"""A way to a peer by ZeroMQ: one DEALER, its lock, and what is kept back to leave together."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

import zmq

from actorrpc.wire import pieces
from actorrpc.wire.transport import COPIED_BELOW, snapshot, taken_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from actorrpc.wire.envelope import Frame

BUNDLE = b"b\1"
"""Marks a frame that holds several messages."""
_HOLD_BELOW = 2048
_HOLD_AT_MOST = 32
_PIECE, _LOCAL_PIECE = 1 << 20, 1 << 26
"""The longest frame over a network, and on this host, where putting pieces together costs more than it gives; but none
may take long there either, sealed as it is with a token (LO6 in `wire.lookout`).
"""


class DealerWay:
    """A way to a peer by ZeroMQ.

    Arguments:
        dealer: its socket, connected.
        endpoint: to where.

    As with a direct way, who sends does not wait for the lock (DW5 in `wire.direct`).
    """

    __slots__ = ("busy", "dealer", "endpoint", "held", "late", "lock", "piece")

    def __init__(self, dealer: zmq.Socket[bytes], endpoint: str) -> None:
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send (`busy`).
        self.dealer, self.endpoint, self.lock = dealer, endpoint, threading.RLock()
        self.held: list[tuple[Sequence[Frame], bool]] = []
        self.late: deque[tuple[Sequence[Frame], bool]] = deque()
        """What came while another thread had the lock, before what is to be held."""
        self.busy = False
        self.piece = _LOCAL_PIECE if self.is_local else _PIECE

    @property
    def is_local(self) -> bool:
        """Whether it never leaves this host."""
        return self.endpoint.startswith("ipc:")

    def send(self, frames: Sequence[Frame], hold: int, lasting: bool) -> bool:
        """Sends a message, or keeps it back with those before it. Returns whether something is kept back.

        Raises:
            KeyError: the way was closed.
        """
        if not self.lock.acquire(False):
            self.late.append((snapshot(frames, lasting), True))
            self._pass_on()
            return False
        try:
            dealer = self.dealer
            if self.late:
                self._gather()
            if self.busy:
                frames, lasting = snapshot(frames, lasting), True
            if dealer.closed:
                raise KeyError(self.endpoint)
            if len(frames) == 1 and not (hold or self.held or self.busy) and len(frames[0]) <= self.piece:
                self.busy = True
                try:
                    dealer.send(frames[0], zmq.NOBLOCK)
                except zmq.Again:
                    self.once_more(frames[0])
                finally:
                    self.busy = False
                if not self.held:
                    return False
            else:
                message = frames, lasting  # first: meanwhile a finalizer may have sent what is held
                self.held.append(message)
            if hold and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW and len(self.held) < _HOLD_AT_MOST:
                return True
            self._flush()
            return False
        finally:
            self.lock.release()
            if self.late:
                self._pass_on()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self.lock.acquire()
        try:
            self._gather()
            yield
        finally:
            self.lock.release()
            self._pass_on()

    def _pass_on(self) -> None:
        """Sends what came late, unless somebody has the lock, who will."""
        while self.late and self.lock.acquire(False):
            try:
                self._gather()
                if not self.dealer.closed:
                    self._flush()
            finally:
                self.lock.release()

    def _gather(self) -> None:
        while self.late:
            late = taken_out(self.late)
            try:
                self.held.extend(late)
            except IndexError:  # a finalizer has sent meanwhile
                pass

    def flush(self) -> None:
        """Sends what is kept back."""
        if self.held or self.late:
            with self._turn():
                if not self.dealer.closed:
                    self._flush()

    def unwatch(self) -> None:
        """Ends the news of its connection; before their reader goes, or ZeroMQ's thread would wait for it (LO4)."""
        with self._turn():
            if not self.dealer.closed:
                self.dealer.disable_monitor()

    def close(self, linger: float) -> None:
        """Closes the way; what is under way may still leave for `linger` seconds."""
        with self._turn():
            if linger and not self.dealer.closed:
                self._flush()
            self.dealer.close(int(linger * 1000))

    def _flush(self) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            while self.held:
                held, self.held = self.held, []
                small = [frames[0] for frames, _ in held if len(frames) == 1 and len(frames[0]) <= self.piece]
                if len(small) == len(held) > 1:
                    self._put(pack(small), 0, True)
                else:
                    for frames, lasting in held:
                        self._send(frames, lasting)
        finally:
            self.busy = False

    def _send(self, frames: Sequence[Frame], lasting: bool) -> None:
        apart = any(memoryview(frame).nbytes > self.piece for frame in frames)
        if apart:
            frames = pieces.cut(frames, self.piece)
        last = 0 if apart else len(frames) - 1
        for i, frame in enumerate(frames):
            # What may change is copied by the piece, into memory that is warm, which a snapshot's would not be.
            copied = not i or not lasting or memoryview(frame).nbytes < COPIED_BELOW
            self._put(frame, zmq.SNDMORE if i < last else 0, copied)

    def _put(self, frame: Frame, flags: int, copy: bool) -> None:
        try:
            self.dealer.send(frame, zmq.NOBLOCK | flags, copy=copy)
        except zmq.Again:
            self.once_more(frame, flags)

    def once_more(self, frame: Frame, flags: int = 0) -> None:
        """Sends what found no connection, by a new one (ZQ7); under the lock."""
        with contextlib.suppress(zmq.ZMQError):
            self.dealer.disconnect(self.endpoint)  # else it would take the old connection for one
        self.dealer.connect(self.endpoint)
        with contextlib.suppress(zmq.Again):  # gone again already, and the message with it, as after any send
            self.dealer.send(frame, zmq.NOBLOCK | flags)


def pack(messages: Sequence[Frame]) -> bytes:
    """Makes one frame of several messages of one frame each."""
    count = len(messages)
    head = struct.pack(f"<2sH{count}I", BUNDLE, count, *map(len, messages))
    return b"".join((head, *messages))


def unpack(data: bytes) -> list[bytes]:
    """Takes a bundle apart; returns nothing where it is not as it should be."""
    try:
        _, count = struct.unpack_from("<2sH", data)
        sizes = struct.unpack_from(f"<{count}I", data, 4)
    except struct.error:
        return []
    at, messages = 4 + 4 * count, []
    if at + sum(sizes) != len(data):
        return []
    for size in sizes:
        messages.append(data[at : at + size])
        at += size
    return messages
