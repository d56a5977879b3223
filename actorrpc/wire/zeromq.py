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
- ZQ8: a socket's descriptor tells of what happens, once, and not that messages lie there; so after each message that is
  taken the socket itself is asked for more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from actorrpc.errors import RendezvousError
from actorrpc.wire import direct, folders
from actorrpc.wire.curve import Guard
from actorrpc.wire.direct import DirectWays
from actorrpc.wire.exposed import exposed
from actorrpc.wire.folders import HeldFolder
from actorrpc.wire.transport import snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.curve import Keys
    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.outgoing import Outgoing

log = logging.getLogger("actorrpc")
_IPC_PATH_LIMIT = 100
_COPY_BELOW = 262144
"""Bytes below which copying a frame beats handing its memory to ZeroMQ."""
_BUNDLE = b"b\1"
"""Marks a frame that holds several messages."""
_LONGEST_POLL = 3600.0
_HOLD_BELOW = 2048
_HOLD_AT_MOST = 32


class ZmqTransport:
    """A transport over ZeroMQ sockets.

    Arguments:
        address: the local IP address to bind, without brackets.
        ipc: also listen on a socket in a private folder, for this user's other processes on this host.
        directly: let that be a direct way (`wire.direct`), where it can be had, instead of ZeroMQ's `ipc`. With keys it
            is `ipc` in any case: then all that travels is sealed.
        max_sockets: how many sockets the context may open.
        keys: of the world's token: nobody without them gets in, or is sent anything. None: no token, anybody may.

    Raises:
        RendezvousError: this host does not have the address.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        ipc: bool = True,
        directly: bool = True,
        max_sockets: int = 65536,
        keys: Keys | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(max_sockets, self._context.get(zmq.SOCKET_LIMIT)))
        self._inbox = self._context.socket(zmq.ROUTER)
        self._folder: HeldFolder | None = None
        self._keys = keys
        self._guard: Guard | None = None
        self._outboxes: dict[int, _Outbox | Outgoing] = {}
        self._direct: DirectWays | None = None
        self._epoll: select.epoll | None = None
        self._poller = zmq.Poller()
        """Stands in for the epoll where there is none."""
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._more = True
        """Whether the inbox may hold messages of which its descriptor says nothing any more (ZQ8)."""
        self._endpoints: list[str] = []
        self._unpacked: deque[list[Frame]] = deque()
        self.holding = self.crowded = False
        self.emptied = 0
        self._woken = False
        self._door = threading.Lock()
        self._closed = False
        self._wake_read = self._wake_write = -1
        try:
            if keys is not None:
                self._guard = Guard(self._context, self._inbox, keys)
            self._set_up()
            self._wake_read, self._wake_write = _wake_pair()
            self._epoll = self._make_epoll()
            if ipc and folders.AVAILABLE:
                self._direct = self._listen_here(directly and keys is None)
            self._listen(address)
        except BaseException:
            self._close_inbox()
            raise

    def _make_epoll(self) -> select.epoll | None:
        if not direct.AVAILABLE:
            self._poller.register(self._inbox_fd, zmq.POLLIN)
            self._poller.register(self._wake_read, zmq.POLLIN)
            return None
        epoll = select.epoll()
        epoll.register(self._wake_read, select.EPOLLIN)
        epoll.register(self._inbox_fd, select.EPOLLIN)
        return epoll

    def _set_up(self) -> None:
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):
            self._inbox.setsockopt(option, 0)
        self._inbox.setsockopt(zmq.BACKLOG, 1024)

    def _listen_here(self, directly: bool) -> DirectWays | None:
        """Listens for this user's other processes on this host, where that can be had."""
        ways = None
        try:
            self._folder = HeldFolder(_IPC_PATH_LIMIT - len("/inbox"))
            path = f"{self._folder.path}/inbox"
            if directly and self._epoll is not None:
                ways = DirectWays(path, self._epoll)
                self._endpoints.append(ways.endpoint)
            elif zmq.has("ipc"):
                self._inbox.bind(f"ipc://{path}")
                self._endpoints.append(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as e:
            self._remove_folder()
            log.info("no ipc socket to be had (%s); peers on this host come by tcp", e)
        return ways

    def _listen(self, address: str) -> None:
        inbox, v6 = self._inbox, ":" in address
        inbox.setsockopt(zmq.IPV6, int(v6))
        try:
            inbox.bind(f"tcp://[{address}]:*" if v6 else f"tcp://{address}:*")
        except zmq.ZMQError as e:
            raise RendezvousError(f"cannot listen at {address}: {e}; is it an address of this host?") from e
        self._endpoints.append(inbox.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def endpoints(self) -> list[str]:
        return list(self._endpoints)

    @property
    def strangers(self) -> str:
        """Who was turned away for want of the token, in words; "" where nobody was."""
        return "" if self._guard is None else self._guard.strangers()

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        outbox = self._way(endpoints)
        self.hang_up(peer)
        with self._door:
            self._outboxes[peer] = outbox

    def _way(self, endpoints: Sequence[str]) -> _Outbox | Outgoing:
        endpoint = reachable(endpoints)
        if endpoint.startswith(direct.SCHEME):
            way = None if self._direct is None else self._direct.dial(endpoint)
            if way is not None:
                return way
            endpoint = reachable([e for e in endpoints if e != endpoint])
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.IDENTITY, b"a" + os.urandom(12))
        if self._keys is not None:
            self._keys.show(dealer)
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        dealer.connect(endpoint)
        return _Outbox(dealer, endpoint)

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        with self._door:
            outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.close(linger)

    def send(self, peer: int, frames: Sequence[Frame], hold: bool = False, lasting: bool = True) -> None:
        if self._outboxes[peer].send(frames, hold, lasting):
            self.holding = True

    def flush(self) -> None:
        self.holding = False
        for outbox in list(self._outboxes.values()):
            outbox.flush()

    @exposed
    def _poll(self, timeout: float | None) -> Sequence[tuple[Any, int]]:
        if timeout is not None and timeout > _LONGEST_POLL:
            timeout = _LONGEST_POLL
        if self._epoll is not None:
            return self._epoll.poll(timeout)
        return self._poller.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))

    def receive(self, timeout: float | None) -> list[Frame] | None:
        unpacked = self._unpacked
        self._woken = False
        if not unpacked:
            if self.holding:
                self._look(0)
                if not unpacked:
                    self.flush()
            if not unpacked and not self._woken:
                self._wait(timeout)
            if not unpacked:
                self.emptied += 1
        if self._woken or not unpacked:  # what came stays for the next time: whoever called wake wants a look around
            return None
        message = unpacked.popleft()
        self.crowded = self._more or bool(unpacked)
        return message

    def _wait(self, timeout: float | None) -> None:
        """Waits until a message is there, `wake` is called or time runs out."""
        end = None
        if self._direct is not None:
            timeout = self._direct.tidy(timeout)
        while self._look(timeout) and not self._unpacked and not self._woken:
            if timeout is not None:  # something was done, but there is no whole message yet
                now = time.monotonic()
                end = now + timeout if end is None else end
                timeout = max(0.0, end - now)

    def _look(self, timeout: float | None) -> bool:
        """Waits for something to do, and does it. Returns whether there was anything."""
        if self._more:
            timeout = 0.0
        found = self._poll(timeout)
        fd: int
        for fd, _ in found:
            if fd == self._wake_read:
                _drain(fd)
                self._woken = True
            elif fd == self._inbox_fd:
                self._more = True
            elif self._direct is not None:
                self._direct.handle(fd, self._unpacked)
        if self._more:
            if int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                self._take()
            self._more = bool(int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN)
            return True
        return bool(found)

    def _take(self) -> None:
        """Takes one message out of the inbox."""
        inbox = self._inbox
        inbox.recv(zmq.NOBLOCK)  # the sender's ZeroMQ identity: the header says who it is
        first = inbox.recv(zmq.NOBLOCK, copy=False)
        data = first.bytes
        if data[:2] == _BUNDLE:
            if first.more:
                self._skip()
            self._unpacked.extend([message] for message in _unpack(data))
            return
        frames: list[Frame] = [data]
        more = first.more
        while more:
            part = inbox.recv(zmq.NOBLOCK, copy=False)
            frames.append(part.buffer)  # writable, and keeps the frame alive
            more = part.more
        self._unpacked.append(frames)

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
        if self._direct is not None:
            self._direct.close(linger)
        self._close_inbox()

    def _close_inbox(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._inbox.close(0)
        self._context.term()
        self._remove_folder()
        if self._epoll is not None:
            self._epoll.close()
        for fd in {self._wake_read, self._wake_write} - {-1}:
            os.close(fd)
        self._wake_read = self._wake_write = -1

    def _remove_folder(self) -> None:
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


class _Outbox:
    """The way to one peer."""

    __slots__ = ("busy", "dealer", "endpoint", "held", "lock")

    def __init__(self, dealer: zmq.Socket[bytes], endpoint: str) -> None:
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send (`busy`).
        self.dealer, self.endpoint, self.lock = dealer, endpoint, threading.RLock()
        self.held: list[Sequence[Frame]] = []
        self.busy = False

    def send(self, frames: Sequence[Frame], hold: bool, lasting: bool) -> bool:
        """Sends a message, or keeps it back with those before it. Returns whether something is kept back.

        Raises:
            KeyError: the way was closed.
        """
        if not lasting:
            frames = snapshot(frames)
        with self.lock:
            dealer = self.dealer
            if dealer.closed:
                raise KeyError(self.endpoint)
            if len(frames) == 1 and not (hold or self.held or self.busy):
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
                self.held.append(frames)
            if hold and len(frames) == 1 and len(frames[0]) < _HOLD_BELOW and len(self.held) < _HOLD_AT_MOST:
                return True
            self._flush()
            return False

    def flush(self) -> None:
        """Sends what is kept back."""
        if self.held:
            with self.lock:
                if not self.dealer.closed:
                    self._flush()

    def close(self, linger: float) -> None:
        """Closes the way; what is under way may still leave for `linger` seconds."""
        with self.lock:
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
                small = [frames[0] for frames in held if len(frames) == 1]
                if len(small) == len(held) > 1:
                    self._put(_pack(small), 0, True)
                else:
                    for frames in held:
                        self._send(frames)
        finally:
            self.busy = False

    def _send(self, frames: Sequence[Frame]) -> None:
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
    """Picks the first endpoint to use from here: a path may be another host's, container's or user's."""
    for endpoint in endpoints:
        scheme, _, path = endpoint.partition("://")
        if scheme not in ("ipc", "unix") or folders.is_private(path):
            return endpoint
    return endpoints[-1]
