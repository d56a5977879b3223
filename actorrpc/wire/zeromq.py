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
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from actorrpc.errors import RendezvousError
from actorrpc.wire import dealer, direct, folders, pieces
from actorrpc.wire.curve import Guard
from actorrpc.wire.dealer import DealerWay
from actorrpc.wire.direct import DirectWays
from actorrpc.wire.exposed import exposed
from actorrpc.wire.folders import HeldFolder
from actorrpc.wire.lookout import Lookout, beat
from actorrpc.wire.outgoing import Outgoing
from actorrpc.wire.transport import AT_ONCE, SOON
from actorrpc.wire.vigil import Vigil
from actorrpc.wire.waking import Waker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from actorrpc.wire.curve import Keys
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_IPC_PATH_LIMIT = 100
_LONGEST_POLL = 3600.0
_PIECE_SECONDS = 60.0


class ZmqTransport:
    """A transport over ZeroMQ sockets.

    Arguments:
        address: the local IP address to bind, without brackets.
        ipc: also listen on a socket in a private folder, for this user's other processes on this host.
        directly: let that be a direct way (`wire.direct`), where it can be had, instead of ZeroMQ's `ipc`. With keys it
            is `ipc` in any case: then all that travels is sealed.
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
        directly: bool = True,
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
        self._ways: dict[int, DealerWay | Outgoing] = {}
        self._direct: DirectWays | None = None
        self._epoll: select.epoll | None = None
        self._poller = zmq.Poller()
        """Stands in for the epoll where there is none."""
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._more = True
        """Whether the inbox may hold messages of which its descriptor says nothing any more (ZQ8)."""
        self._endpoints: list[str] = []
        self._unpacked: deque[list[Frame]] = deque()
        self._joining: dict[bytes, pieces.Joining] = {}
        """By sender, the message that comes in pieces."""
        self.holding = self._soon = self.crowded = False
        self.emptied = 0
        self._woken = self._unsure = False
        """Whether `wake` was called; and whether messages came with that, so that it showed no empty inbox."""
        self._vigil = Vigil()
        self._closed = False
        self._waker: Waker | None = None
        self.silence = silence
        self.told: Callable[[int, str], None] = lambda peer, news: None
        try:
            if keys is not None:
                self._guard = Guard(self._context, self._inbox, keys)
            self._lookout = Lookout(
                self._context, lambda peer, news: self.told(peer, news), silence, keys is not None
            )
            self._set_up()
            self._waker = Waker()
            self._epoll = self._make_epoll(self._waker.fileno())
            if ipc and folders.AVAILABLE:
                self._direct = self._listen_here(directly and keys is None)
            self._listen(address)
        except BaseException:
            self._close_inbox()
            raise

    def _make_epoll(self, waker: int) -> select.epoll | None:
        if not direct.AVAILABLE:
            self._poller.register(self._inbox_fd, zmq.POLLIN)
            self._poller.register(waker, zmq.POLLIN)
            return None
        epoll = select.epoll()
        epoll.register(waker, select.EPOLLIN)
        epoll.register(self._inbox_fd, select.EPOLLIN)
        return epoll

    def _set_up(self) -> None:
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):
            self._inbox.setsockopt(option, 0)
        self._inbox.setsockopt(zmq.BACKLOG, 1024)
        beat(self._inbox, self.silence)

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

    @property
    def overdue(self) -> float:
        return self._lookout.overdue

    def attend(self, peer: int, pid: int) -> None:
        self._lookout.attend(peer, pid)

    def is_local(self, peer: int) -> bool:
        way = self._ways.get(peer)
        return way is not None and way.is_local

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        self.hang_up(peer)
        way = self._way(peer, endpoints)
        self._ways[peer] = way

    def _way(self, peer: int, endpoints: Sequence[str]) -> DealerWay | Outgoing:
        endpoint = reachable(endpoints)
        if endpoint.startswith(direct.SCHEME):
            straight = None if self._direct is None else self._direct.dial(endpoint)
            if straight is not None:
                return straight
            endpoint = reachable([e for e in endpoints if e != endpoint])
        way = self._context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            way.setsockopt(option, 0)
        way.setsockopt(zmq.IDENTITY, b"a" + os.urandom(12))
        if self._keys is not None:
            self._keys.show(way)
        way.setsockopt(zmq.IPV6, int("[" in endpoint))
        if peer >= 0:
            self._lookout.watch(peer, endpoint, way)
        way.connect(endpoint)
        return DealerWay(way, endpoint)

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        way = self._ways.pop(peer, None)
        if way is not None:
            if peer >= 0:
                if isinstance(way, DealerWay):
                    way.unwatch()
                self._lookout.leave(peer)
            way.close(linger)

    def send(self, peer: int, frames: Sequence[Frame], hold: int = AT_ONCE, lasting: bool = True) -> None:
        if self._ways[peer].send(frames, hold, lasting):
            self.holding = True
            if hold == SOON:
                self._soon = True

    def sharing(self, peers: Sequence[int], frames: Sequence[Frame]) -> AbstractContextManager[object]:
        commons = None if self._direct is None else self._direct.commons
        if commons is None:
            return contextlib.nullcontext()
        ways = {peer: self._ways.get(peer) for peer in peers}
        return commons.sharing([way for way in ways.values() if isinstance(way, Outgoing)], frames)

    def flush(self) -> None:
        self.holding = self._soon = False
        for way in list(self._ways.values()):
            way.flush()

    @exposed
    def _poll(self, timeout: float | None) -> Sequence[tuple[Any, int]]:
        if timeout is not None and timeout > _LONGEST_POLL:
            timeout = _LONGEST_POLL
        if self._epoll is None:
            return self._poller.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        if timeout == 0 or self._direct is None or not self._direct.in_use:
            return self._epoll.poll(timeout)
        begun = time.monotonic()
        found = self._vigil.keep(self._epoll.poll, timeout)
        if found:
            return found
        return self._epoll.poll(None if timeout is None else max(0.0, begun + timeout - time.monotonic()))

    def receive(self, timeout: float | None) -> list[Frame] | None:
        unpacked = self._unpacked
        self._woken = False
        if not unpacked:
            if self._soon:
                self._look(0)
                if not unpacked:
                    self.flush()
            if not unpacked and not self._woken:
                self._wait(0.0 if self._unsure else timeout)
            if not unpacked:
                self.emptied += 1
                self._unsure = False
            elif self._woken:
                self._unsure = True
        if self._woken or not unpacked:  # what came stays for the next time: whoever called wake wants a look around
            return None
        message = unpacked.popleft()
        self.crowded = self._more or bool(unpacked)
        return message

    def _wait(self, timeout: float | None) -> None:
        """Waits until a message is there, `wake` is called or time runs out."""
        end = None
        if self._joining:
            timeout = self._until_broken(timeout)
        if self._direct is not None:
            timeout = self._direct.tidy(timeout)
        while (found := self._look(timeout)) and not self._unpacked and not self._woken:
            if timeout is not None:  # something was done, but there is no whole message yet
                now = time.monotonic()
                end = now + timeout if end is None else end
                timeout = max(0.0, end - now)
        if self._joining and not found:  # not before: this process may have stood still, and the pieces lie there
            late = time.monotonic() - self._patience
            self._joining = {who: joining for who, joining in self._joining.items() if joining.since > late}

    def _look(self, timeout: float | None) -> bool:
        """Waits for something to do, and does it. Returns whether there was anything."""
        if self._more:
            timeout = 0.0
        found = self._poll(timeout)
        fd: int
        for fd, _ in found:
            if self._waker is not None and fd == self._waker.fileno():
                self._waker.drain()
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
        who = inbox.recv(zmq.NOBLOCK)  # the sender's ZeroMQ identity: the header says who it is
        first = inbox.recv(zmq.NOBLOCK, copy=False)
        if who in self._joining:
            self._join(who, first)
            return
        data = first.bytes
        if data[:2] == dealer.BUNDLE:
            if first.more:
                self._skip()
            self._unpacked.extend([message] for message in dealer.unpack(data))
            return
        frames: list[Frame] = [data]
        more = first.more
        if data[:2] == pieces.PLAN and not more:
            self._begin_to_join(who, data)
            return
        while more:
            part = inbox.recv(zmq.NOBLOCK, copy=False)
            frames.append(part.buffer)  # writable, and keeps the frame alive
            more = part.more
        self._unpacked.append(frames)

    def _begin_to_join(self, who: bytes, plan: bytes) -> None:
        with contextlib.suppress(ValueError):
            self._joining[who] = pieces.Joining(plan)

    @property
    def _patience(self) -> float:
        return max(_PIECE_SECONDS, 6 * self.silence)

    def _until_broken(self, timeout: float | None) -> float | None:
        """Returns how long the leader may sleep, until the sender of pieces counts as gone when no more have come."""
        left = max(0.0, min(joining.since for joining in self._joining.values()) + self._patience - time.monotonic())
        return left if timeout is None else min(timeout, left)

    def _join(self, who: bytes, piece: zmq.Frame) -> None:
        """Takes a piece of a message; one that is not as was said ends it."""
        whole = None
        with contextlib.suppress(ValueError):
            if not piece.more:
                whole = self._joining[who].take(piece.buffer)
                if whole is None:
                    return
        del self._joining[who]
        self._skip()
        if whole is not None:
            self._unpacked.append(whole)

    def _skip(self) -> None:
        """Drops the rest of a message that is not as it should be."""
        while self._inbox.getsockopt(zmq.RCVMORE):
            self._inbox.recv(zmq.NOBLOCK)

    def wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def close(self, linger: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._ways):
            self.hang_up(peer, linger)
        if self._direct is not None:
            self._direct.close(linger)
        self._lookout.close()
        self._close_inbox()

    def _close_inbox(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._inbox.close(0)
        self._context.term()
        self._remove_folder()
        if self._epoll is not None:
            self._epoll.close()
        if self._waker is not None:
            self._waker.close()

    def _remove_folder(self) -> None:
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def reachable(endpoints: Sequence[str]) -> str:
    """Picks the first endpoint to use from here: a path may be another host's, container's or user's."""
    for endpoint in endpoints:
        scheme, _, path = endpoint.partition("://")
        if scheme not in ("ipc", "unix") or folders.is_private(path):
            return endpoint
    return endpoints[-1]
