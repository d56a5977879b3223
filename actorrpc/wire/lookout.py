"""What becomes of the ways to peers: connections that ended or never came about, processes of this host that ended.

ZeroMQ facts that bind this file:
- LO1: heartbeats are the ROUTER's alone: its pings carry a time to live (TTL), after which the DEALER gives the
  connection up. Pings of the DEALER would wait behind what is queued; where the other side takes nothing in they would
  never leave, and their timeout never begin; and an answer to one stops the clock of the TTL.
  But the first ping comes an interval after the connection, and until then no clock runs. So a little later it is seen
  whether the other side still greets a new connection: then it has sent that ping. The greeting is sent by ZeroMQ's own
  thread. A handshake would tell less: with a token it needs one of Python's, which a handler may keep from running.
- LO2: a time to live of more than 65.5 s overflows in libzmq. The ROUTER must take a known identity over (HANDOVER), or
  a connection that was made again is ignored while the old one still stands.
- LO3: news of a closed connection does not say why: the other side closed it, or was silent for too long. A CLOSED
  without a connection before it means that nobody listens there.
- LO5: a direct way (`wire.direct`) has no heartbeats, and needs none: the system says whether a process of this host
  stands still.
- LO4: a monitor blocks ZeroMQ's own thread when nobody takes its news. So its reader has no high-water mark.
- LO6: an altered length has a receiver wait for the rest of a frame that has none, and take what follows for it; pings
  go on both ways all the while. Only the receiver's own timeout sees that nothing whole comes any more: each message
  that was taken in whole stops that clock. So it is no longer than the time to live, and no frame may take as long.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from actorrpc.wire.transport import News
from actorrpc.wire.waking import Waker

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("actorrpc")
_TOLD = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
PING, LIFE, ANSWER = 0.2, 0.6, 0.35
"""Shares of the heartbeat timeout: between two pings; their time to live, and as long after a ping a ROUTER closes a
connection over which nothing whole has come; and what a peer then gets to answer. LIFE and ANSWER leave a little of it,
so that all is known within it on a busy machine, too.
"""
LOOK, STILL = 0.125, 0.4
"""Shares as well: between two looks at the processes of this host; and for how long one must be seen to stand still
before it is asked. Both, the next look, and ANSWER are the whole.
"""
_RECONNECT, _RECONNECT_AT_MOST = 20, 200
"""Milliseconds until a connection that has ended is made again, and between later attempts."""
PROBED, PROBE = 0.25, 0.4
"""Shares as well: how old a connection is when it is probed, which is after its first ping; and for how long. With
ANSWER they are the whole.
"""
_KNOCK_SECONDS = 0.5
_NEVER = float("inf")
_names = itertools.count(1)


def beat(inbox: zmq.Socket[bytes], seconds: float) -> None:
    """Has a ROUTER send heartbeats, so that peers notice when this process stands still; 0: none."""
    inbox.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if seconds:
        inbox.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(seconds * PING * 1000)))
        inbox.setsockopt(zmq.HEARTBEAT_TTL, int(seconds * LIFE * 1000))
        inbox.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(seconds * LIFE * 1000))


class Lookout:
    """Looks out for the ends of peers, in a thread of its own, which sleeps until there is news.

    Arguments:
        context: makes sockets.
        told: called in that thread with a peer's number and one of `News`.
        seconds: the time of silence, which is also what a connection gets to come about; 0 for ever.
        guarded: whether there is a token, so that a connection comes about only when a thread of Python's over there
            has its turn: then it is enough that the other side greets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        told: Callable[[int, str], None],
        seconds: float,
        guarded: bool = False,
    ) -> None:
        self._guarded = guarded
        self._context, self._told, self._seconds = context, told, seconds
        self._waker: Waker | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._poller = zmq.Poller()
        self._news: dict[Any, int] = {}
        """The readers of monitors, and whose way it is."""
        self._readers: dict[int, zmq.Socket[bytes]] = {}
        self._unmade: dict[int, float] = {}
        """Ways that have not come about yet, and until when they must."""
        self._endpoints: dict[int, str] = {}
        self._unproved: dict[int, float] = {}
        """Ways so young that a ping may not have come yet, and when to probe them."""
        self._probed: dict[int, float] = {}
        """Ways that are being probed, and until when there must be an answer."""
        self._probes: dict[int, socket.socket] = {}
        """Connections that wait for a greeting, by descriptor,"""
        self._probers: dict[int, int] = {}
        """and their descriptors, by way."""
        self._ended: set[int] = set()
        """Ways whose connection has ended, and was not made again."""
        self._processes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        """Of this host's peers: descriptors of their processes, by peer and the other way round; and process ids."""
        self._stopped: dict[int, float] = {}
        """Since when a process of this host was seen to stand still, or was last told of; its sockets do not tell."""
        self._next_look = 0.0
        self.overdue = _NEVER
        """When this thread must have looked again, unless the process, or one who holds the GIL, keeps it from it."""
        self._closed = False
        # Reentrant: the collector may run a finalizer of the user's, which sends, as the thread is started.
        self._door = threading.RLock()
        self._thread: threading.Thread | None = None

    # -- from any thread

    def watch(self, number: int, endpoint: str, dealer: zmq.Socket[bytes]) -> None:
        """Watches a peer's way, before it connects."""
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_AT_MOST)
        reader = self._reader(dealer)
        share = 1 - PROBE if self._guarded else 1.0
        until = time.monotonic() + self._seconds * share if self._seconds else 0.0

        def begin() -> None:
            self._readers[number], self._endpoints[number] = reader, endpoint
            self._news[reader] = number
            if until:
                self._unmade[number] = until
            self._poller.register(reader, zmq.POLLIN)

        self._order(begin)

    def attend(self, number: int, pid: int) -> bool:
        """Watches a peer's process. Returns whether that can be done; one that has ended already is told of.

        A closed connection would not tell: a child that the peer forked keeps it open.
        """
        if not hasattr(os, "pidfd_open"):
            return False
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._told(number, News.ENDED)
            return True
        except OSError as e:  # no descriptor to be had, say: not the peer's fault
            log.warning("process %d cannot be watched: %s", pid, e)
            return False

        def begin() -> None:
            self._forget_process(number)
            self._processes[number], self._numbers[fd], self._pids[number] = fd, number, pid
            self._poller.register(fd, zmq.POLLIN)

        self._order(begin)
        return True

    def leave(self, number: int) -> None:
        """Watches a peer no more, neither its way nor its process; before the way is closed."""
        self._order(lambda: self._forget(number))

    def close(self) -> None:
        """Ends the thread, and frees everything."""
        with self._door:
            self._closed = True
        self._rouse()
        if self._thread is not None:
            self._thread.join()
        while self._orders:  # what was opened shall be closed
            self._orders.popleft()()
        for number in (*self._readers, *self._processes):
            self._forget(number)
        if self._waker is not None:
            self._waker.close()
        self._waker = None

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        if self._thread is None:
            self._begin()
        self._rouse()

    def _begin(self) -> None:
        waker, thread = Waker(), threading.Thread(target=self._run, name="actorrpc-lookout", daemon=True)
        if self._door.acquire(False):  # else another thread does it; it may be in a finalizer that waits for this one
            try:
                if not self._closed and self._thread is None:
                    self._waker, self._thread = waker, thread
                    self._poller.register(waker, zmq.POLLIN)
                    thread.start()
            finally:
                self._door.release()
        if self._thread is not thread:
            waker.close()

    def _rouse(self) -> None:
        waker = self._waker  # which `close` takes away
        if waker is not None:
            waker.wake()

    def _reader(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Opens what reads the news of a socket."""
        where = f"inproc://way-{next(_names)}"
        dealer.monitor(where, _TOLD)
        reader = self._context.socket(zmq.PAIR)
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVHWM, 0)
        reader.connect(where)
        return reader

    # -- in the thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._round()
            except Exception:  # nobody would look out any more
                log.exception("the lookout met an error")
                time.sleep(0.2)

    def _round(self) -> None:
        now = time.monotonic()
        due = [*self._unmade.values(), *self._unproved.values(), *self._probed.values()]
        if self._seconds and self._has_peers:
            due.append(self._next_look)
        pause = min(due) - now if due else None
        ready = self._poller.poll(None if pause is None else max(0, int(pause * 1000) + 1))
        for source, _ in ready:
            if self._waker is not None and source == self._waker.fileno():
                self._waker.drain()
            elif source in self._numbers:
                number = self._numbers[source]
                self._forget_process(number)
                self._told(number, News.ENDED)
            elif source in self._news:
                self._read(source)
            elif source in self._probes:
                self._read_greeting(source)
        while self._orders:
            self._orders.popleft()()
        now = time.monotonic()
        if self._seconds and self._has_peers and now >= self._next_look:
            if now >= self.overdue:
                self._told(-1, News.AWAKE)  # first: who finds that it is not overdue must know already
            self._next_look, self.overdue = now + self._seconds * LOOK, now + self._seconds * (LOOK + STILL)
            self._look_for_stopped(now)
        for number in [n for n, until in self._unmade.items() if until <= now]:
            if self._guarded:
                self._unmade[number] = now + self._seconds
                self._begin_probe(number)
            else:
                del self._unmade[number]
                self._told(number, News.UNREACHED)
        for number in [n for n, at in self._unproved.items() if at <= now]:
            del self._unproved[number]
            self._begin_probe(number)
        for number in [n for n, until in self._probed.items() if until <= now]:
            self._end_probe(number)
            self._told(number, News.CUT if self._unmade.pop(number, None) is None else News.UNREACHED)

    @property
    def _has_peers(self) -> bool:
        return bool(self._pids or self._endpoints)

    def _look_for_stopped(self, now: float) -> None:
        for number, pid in self._pids.items():
            if state_of(pid) not in ("T", "t"):
                self._stopped.pop(number, None)
            elif now - self._stopped.setdefault(number, now) >= self._seconds * STILL:
                self._stopped[number] = now  # it is asked now, and again if it stands still after its answer
                self._told(number, News.CUT)

    def _begin_probe(self, number: int) -> None:
        self._end_probe(number)
        where = _address(self._endpoints[number])
        if where is None:
            return
        family, address = where
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setblocking(False)
        with contextlib.suppress(OSError):  # under way, or nobody is there, so that nothing will come
            probe.connect(address)
        self._probed[number] = time.monotonic() + self._seconds * PROBE
        self._probes[probe.fileno()], self._probers[number] = probe, probe.fileno()
        self._poller.register(probe.fileno(), zmq.POLLIN)

    def _end_probe(self, number: int) -> None:
        self._probed.pop(number, None)
        self._close_probe(self._probers.pop(number, -1))

    def _close_probe(self, fd: int) -> None:
        probe = self._probes.pop(fd, None)
        if probe is not None:
            self._poller.unregister(fd)
            probe.close()

    def _read_greeting(self, fd: int) -> None:
        try:
            greeting = self._probes[fd].recv(64)
        except BlockingIOError:
            return
        except OSError:
            greeting = b""
        if not greeting:  # a door that is shut tells no more; what stands may stand all the same
            self._close_probe(fd)
            return
        for number in [n for n, prober in self._probers.items() if prober == fd]:
            self._end_probe(number)

    def _read(self, reader: zmq.Socket[bytes]) -> None:
        number = self._news[reader]
        while True:
            try:
                event = int.from_bytes(reader.recv_multipart(zmq.NOBLOCK)[0][:2], sys.byteorder)
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._unmade.pop(number, None)
                self._ended.discard(number)
                self._end_probe(number)
                if self._seconds:
                    self._unproved[number] = time.monotonic() + self._seconds * PROBED
            elif event == zmq.EVENT_DISCONNECTED:
                if number not in self._unmade and number not in self._ended:
                    self._unproved.pop(number, None)
                    self._ended.add(number)
                    self._told(number, News.CUT)
            elif event == zmq.EVENT_CLOSED and (number in self._ended or number in self._unmade):
                self._told(number, News.REFUSED)

    def _forget(self, number: int) -> None:
        self._unmade.pop(number, None)
        self._unproved.pop(number, None)
        self._ended.discard(number)
        self._end_probe(number)
        self._endpoints.pop(number, None)
        reader = self._readers.pop(number, None)
        if reader is not None:
            del self._news[reader]
            self._poller.unregister(reader)
            reader.close(0)
        self._forget_process(number)

    def _forget_process(self, number: int) -> None:
        fd = self._processes.pop(number, None)
        self._pids.pop(number, None)
        self._stopped.pop(number, None)
        if fd is not None:
            del self._numbers[fd]
            self._poller.unregister(fd)
            os.close(fd)


def _address(endpoint: str) -> tuple[int, Any] | None:
    """Returns the family and the address of a ZeroMQ endpoint; None where it is not written in numbers."""
    scheme, _, place = endpoint.partition("://")
    if scheme in ("ipc", "unix"):
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
    except (OSError, ValueError):
        return None
    return found[0][0], found[0][4]


def is_shut(endpoint: str) -> bool:
    """Returns whether nobody listens at an endpoint, as its host says at once. One that says nothing may be slow, and a
    process that does nothing listens all the same.
    """
    where = _address(endpoint)
    if where is None:
        return False
    with socket.socket(where[0], socket.SOCK_STREAM) as way:
        way.settimeout(_KNOCK_SECONDS)
        try:
            way.connect(where[1])
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False


def state_of(pid: int) -> str:
    """Returns the letter that the system has for the state of a process of this host: "T" for one that is stopped, "Z"
    for one that has ended and was not waited for, "" for none, "?" where it does not say.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "" if os.path.isdir("/proc/self") else "?"
    except (OSError, IndexError):
        return "?"
