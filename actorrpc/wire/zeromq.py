"""The ZeroMQ transport: one ROUTER for all that comes in, one DEALER a peer for all that goes out.

ZeroMQ facts that bind this file:
- ZQ1: a ROUTER or DEALER at its high-water mark drops or blocks, so all marks are 0; bounding is the kernel's business.
- ZQ2: an identity used twice is ignored by the other side, so every DEALER has a fresh random one.
- ZQ3: without a finite LINGER, closing a context waits for ever for a dead peer.
- ZQ4: a socket may be used from several threads only under a lock: each DEALER has one; the ROUTER is the leader's.
- ZQ5: `recv_multipart` interrupted halfway shifts all later messages; so the waiting is done in `_poll`, the one place
  here that a Ctrl-C may leave (see runtime.interrupts), and messages are taken whole.
- ZQ6: an `ipc` path ends at about 107 characters.
- ZQ7: a connection that ends by a violation of ZeroMQ's protocol (one side has CURVE, the other has not) is not made
  again, and then a send to nobody would block; so it is made again there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from actorrpc.errors import RendezvousError
from actorrpc.wire import folders, pieces
from actorrpc.wire.curve import Guard
from actorrpc.wire.exposed import exposed
from actorrpc.wire.folders import HeldFolder
from actorrpc.wire.lookout import Lookout, beat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.wire.curve import Keys
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_IPC_PATH_LIMIT = 100
_COPY_BELOW = 262144
"""Bytes below which copying a frame beats handing its memory to ZeroMQ."""
_PIECE, _LOCAL_PIECE = 1 << 20, 1 << 28
"""The longest frame over a network, and on this host, where putting pieces together costs more than it gives."""
_BUNDLE = b"b\1"
"""Marks a frame that holds several messages."""
_LONGEST_POLL = 3600.0
_HOLD_BELOW = 2048
_HOLD_AT_MOST = 32


class ZmqTransport:
    """A transport over ZeroMQ sockets.

    Arguments:
        address: the local IP address to bind, without brackets.
        ipc: also listen on an `ipc` socket, for peers on this host.
        max_sockets: how many sockets the context may open.
        keys: of the world's token: nobody without them gets in, or is sent anything. None: no token, anybody may.
        silence: seconds without a sign of life after which peers take this process for dead; 0: they never do.

    Raises:
        RendezvousError: this host does not have the address.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        ipc: bool = True,
        max_sockets: int = 65536,
        keys: Keys | None = None,
        silence: float = 10.0,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(max_sockets, self._context.get(zmq.SOCKET_LIMIT)))
        self._inbox = self._context.socket(zmq.ROUTER)
        self._folder: HeldFolder | None = None
        self._keys = keys
        self._guard: Guard | None = None
        self._outboxes: dict[int, _Outbox] = {}
        self._unpacked: deque[bytes] = deque()
        self.holding = self.crowded = False
        self.emptied = 0
        self._door = threading.Lock()
        self._closed = False
        self.silence = silence
        self.told: Callable[[int, str], None] = lambda peer, news: None
        try:
            if keys is not None:
                self._guard = Guard(self._context, self._inbox, keys)
            self._endpoints = self._bind(address, ipc)
            self._wake_read, self._wake_write = _wake_pair()
        except BaseException:
            self._close_inbox()
            raise
        self._lookout = Lookout(
            self._context, keys, lambda peer, news: self.told(peer, news), silence, _wake_pair
        )
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def _bind(self, address: str, ipc: bool) -> list[str]:
        inbox, endpoints = self._inbox, []
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.setsockopt(zmq.SNDHWM, 0)
        inbox.setsockopt(zmq.BACKLOG, 1024)
        beat(inbox, self.silence)
        if ipc and folders.AVAILABLE and zmq.has("ipc"):
            try:
                self._folder = HeldFolder(_IPC_PATH_LIMIT - len("/inbox"))
                endpoint = f"ipc://{self._folder.path}/inbox"
                inbox.bind(endpoint)
                endpoints.append(endpoint)
            except (OSError, zmq.ZMQError) as e:
                self._remove_folder()
                log.info("no ipc socket to be had (%s); peers on this host come by tcp", e)
        v6 = ":" in address
        inbox.setsockopt(zmq.IPV6, int(v6))
        try:
            inbox.bind(f"tcp://[{address}]:*" if v6 else f"tcp://{address}:*")
        except zmq.ZMQError as e:
            raise RendezvousError(f"cannot listen at {address}: {e}; is it an address of this host?") from e
        endpoints.append(inbox.getsockopt_string(zmq.LAST_ENDPOINT))
        return endpoints

    @property
    def endpoints(self) -> list[str]:
        return list(self._endpoints)

    @property
    def strangers(self) -> str:
        """Who was turned away for want of the token, in words; "" where nobody was."""
        return "" if self._guard is None else self._guard.strangers()

    def attend(self, peer: int, pid: int) -> None:
        self._lookout.attend(peer, pid)

    def is_local(self, peer: int) -> bool:
        outbox = self._outboxes.get(peer)
        return outbox is not None and outbox.endpoint.startswith("ipc:")

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        self.hang_up(peer)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.IDENTITY, b"a" + os.urandom(12))
        if self._keys is not None:
            self._keys.show(dealer)
        endpoint = reachable(endpoints)
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        if peer >= 0:
            self._lookout.watch(peer, endpoint, dealer)
        dealer.connect(endpoint)
        with self._door:
            self._outboxes[peer] = _Outbox(dealer, endpoint)

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        with self._door:
            outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            with outbox.lock:
                if linger:
                    outbox.flush()
                if peer >= 0:
                    outbox.dealer.disable_monitor()
                    self._lookout.leave(peer)
                outbox.dealer.close(int(linger * 1000))

    def send(self, peer: int, frames: Sequence[Frame], hold: bool = False) -> None:
        outbox = self._outboxes[peer]
        with outbox.lock:
            dealer = outbox.dealer
            if dealer.closed:
                raise KeyError(peer)
            if len(frames) == 1 and not (hold or outbox.held or outbox.busy) and len(frames[0]) <= outbox.piece:
                outbox.busy = True
                try:
                    dealer.send(frames[0], zmq.NOBLOCK)
                except zmq.Again:
                    outbox.once_more(frames[0])
                finally:
                    outbox.busy = False
                if not outbox.held:
                    return
            else:
                outbox.held.append(frames)
            if hold and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW and len(outbox.held) < _HOLD_AT_MOST:
                self.holding = True
            else:
                outbox.flush()

    def flush(self) -> None:
        self.holding = False
        for outbox in list(self._outboxes.values()):
            if outbox.held:
                with outbox.lock:
                    if not outbox.dealer.closed:
                        outbox.flush()

    @exposed
    def _poll(self, timeout: float | None) -> list[tuple[Any, int]]:
        return self._poller.poll(None if timeout is None else max(0, int(min(timeout, _LONGEST_POLL) * 1000 + 0.999)))

    def receive(self, timeout: float | None) -> list[Frame] | None:
        if self._unpacked:
            return [self._unpacked.popleft()]
        inbox, woken = self._inbox, False
        ready = self._poll(0)
        self.crowded = bool(ready)
        if not ready:
            self.emptied += 1
            if self.holding:
                self.flush()
            ready = self._poll(timeout)
        for source, _ in ready:
            if source is not inbox:
                _drain(self._wake_read)
                woken = True
        if woken or not ready:  # a message stays for the next receive: whoever called wake wants the leader's eye now
            return None
        inbox.recv(zmq.NOBLOCK)  # the sender's ZeroMQ identity: the header says who it is
        first = inbox.recv(zmq.NOBLOCK, copy=False)
        data = first.bytes
        if data[:2] == _BUNDLE:
            if first.more:
                self._skip()
            self._unpacked.extend(_unpack(data))
            return [self._unpacked.popleft()] if self._unpacked else None
        frames: list[Frame] = [data]
        more = first.more
        if more and data[:2] == pieces.PLAN:
            whole = pieces.join(data, self._part)
            self._skip()
            return whole
        while more:
            part = inbox.recv(zmq.NOBLOCK, copy=False)
            frames.append(part.buffer)  # writable, and keeps the frame alive
            more = part.more
        return frames

    def _part(self) -> Frame | None:
        """Takes the next part of a message, if there is one."""
        return self._inbox.recv(zmq.NOBLOCK, copy=False).buffer if self._inbox.getsockopt(zmq.RCVMORE) else None

    def _skip(self) -> None:
        """Drops the rest of a message that is not as it should be."""
        while self._inbox.getsockopt(zmq.RCVMORE):
            self._inbox.recv(zmq.NOBLOCK)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is under way; closed: nobody waits
            os.write(self._wake_write, _ONE)

    def close(self, linger: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._outboxes):
            self.hang_up(peer, linger)
        self._lookout.close()
        self._close_inbox()
        for fd in {self._wake_read, self._wake_write}:
            os.close(fd)

    def _close_inbox(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._inbox.close(0)
        self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None


class _Outbox:
    """The way to one peer."""

    __slots__ = ("busy", "dealer", "endpoint", "held", "lock", "piece")

    def __init__(self, dealer: zmq.Socket[bytes], endpoint: str) -> None:
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send (`busy`).
        self.dealer, self.endpoint, self.lock = dealer, endpoint, threading.RLock()
        self.held: list[Sequence[Frame]] = []
        self.busy = False
        self.piece = _LOCAL_PIECE if endpoint.startswith("ipc:") else _PIECE

    def flush(self) -> None:
        """Sends what is held, under the lock."""
        if self.busy:
            return
        self.busy = True
        try:
            while self.held:
                held, self.held = self.held, []
                small = [frames[0] for frames in held if len(frames) == 1 and len(frames[0]) <= self.piece]
                if len(small) == len(held) > 1:
                    self._put(_pack(small), 0, True)
                else:
                    for frames in held:
                        self._send(frames)
        finally:
            self.busy = False

    def _send(self, frames: Sequence[Frame]) -> None:
        if any(memoryview(frame).nbytes > self.piece for frame in frames):
            frames = pieces.cut(frames, self.piece)
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            small = not i or memoryview(frame).nbytes < _COPY_BELOW
            self._put(frame, zmq.SNDMORE if i < last else 0, small)

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


def _pack(messages: Sequence[Frame]) -> bytes:
    """Makes one frame of several messages of one frame each."""
    count = len(messages)
    head = struct.pack(f"<2sH{count}I", _BUNDLE, count, *map(len, messages))
    return b"".join((head, *messages))


def _unpack(data: bytes) -> list[bytes]:
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


_ONE = (1).to_bytes(8, sys.byteorder)


def _wake_pair() -> tuple[int, int]:
    """Returns descriptors (read, write) of a channel that a finalizer may write to without a lock."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def reachable(endpoints: Sequence[str]) -> str:
    """Picks the first endpoint to use from here: an ipc path may be another host's, container's or user's."""
    for endpoint in endpoints:
        if not endpoint.startswith("ipc://") or folders.is_private(endpoint[6:]):
            return endpoint
    return endpoints[-1]
