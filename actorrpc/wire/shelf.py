"""The receiving end of shared memory along direct ways: makes segments, lends them, and takes them back.

The rules (SG1 to SG4) stand in `wire.segments`, those of segments that are the sender's own (SG5, SG6) in
`wire.commons`.
"""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from actorrpc.wire.segments import (
    AVAILABLE,
    CHANGED,
    COMMON,
    DROP,
    FREE,
    GONE,
    GRANTED,
    HOW,
    NEWS,
    OPEN,
    OPENED,
    REFUSED,
    WANT,
    Place,
    array_over,
    forget_changes,
    map_memory,
    open_of_peer,
    places_of,
    unmap,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_KEPT_FROM = 1 << 16
"""Bytes below which a frame is copied out of its segment, so as not to hold it."""
_MAP_FIXED = 0x10
_WAIT_SECONDS = 0.05
_MOST_COMMON = 32
"""Segments of the sender's own that are opened for one way."""
_CREDENTIALS = struct.Struct("3i")


class Room:
    """How much memory one worker has in segments: lent to those who send to it, and its own for several.

    Arguments:
        limit: bytes; default: a quarter of the machine's memory, or of the container's, and 1 GiB at the most.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _default_limit() if limit is None else limit
        self.segments: dict[int, int] = {}
        """Sizes, by descriptor. Finalizers take out what is gone."""
        self._most = _half_of_descriptors()
        self._told = False
        # Whoever has it may be in a finalizer of the user's, which waits for what others have: they wait for a moment.
        self._lock = threading.Lock()

    def make(self, size: int, name: str = "actorrpc") -> int:
        """Makes a segment; returns its descriptor. From any thread.

        Arguments:
            size: bytes.
            name: what it is called in /proc, for people.

        Raises:
            OSError: it is not to be had, which is logged once.
        """
        if not self._lock.acquire(timeout=_WAIT_SECONDS):
            raise BlockingIOError("somebody is at the memory for large tensors")
        try:
            held = list(self.segments.values())
            if sum(held) + size > self.limit or len(held) >= self._most:
                raise BlockingIOError("all the memory for large tensors is in use")
            try:
                fd = os.memfd_create(name, os.MFD_CLOEXEC)
            except OSError as e:
                self.failed(e)
                raise
            try:
                os.ftruncate(fd, size)
            except OSError as e:
                os.close(fd)
                self.failed(e)
                raise
            self.segments[fd] = size
            return fd
        finally:
            self._lock.release()

    def failed(self, error: OSError) -> None:
        """Logs that there is no shared memory, the first time."""
        if not self._told:
            self._told = True
            log.info("no shared memory to be had (%s); large tensors come through sockets", error)

    def give_back(self, fd: int) -> None:
        """Closes a segment's descriptor."""
        self.segments.pop(fd, None)
        os.close(fd)


def _default_limit(of_container: str = "/sys/fs/cgroup/memory.max") -> int:
    limits = [1 << 30]
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    with contextlib.suppress(ValueError, OSError), open(of_container) as file:  # "max": none
        limits.append(int(file.read()) // 4)
    return min(limits)


def _half_of_descriptors() -> int:
    import resource  # not on all systems

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else max(4, soft // 4)


class Shelf:
    """The segments that one peer fills, at their owner's.

    Arguments:
        socket: along which the peer is told of them.
        room: what they are taken from.
    """

    def __init__(self, socket: socket.socket, room: Room) -> None:
        self._socket, self._room = socket, room
        self._segments: dict[int, _Segment] = {}
        self._pid = os.getpid()
        self._open = True
        self._telling: list[None] = []

    def order(self, what: int, number: int, size: int, device: int, inode: int, fd: int) -> None:
        """Does what the peer asks for. Under leadership."""
        if what == WANT and number not in self._segments and size > 0:
            self._make(number, size)
        elif what == OPEN and number >= COMMON and number not in self._segments and size > 0:
            self._open_common(number, size, device, inode, fd)
        elif what == DROP:
            segment = self._segments.get(number)
            if segment is not None and segment.loan is None:
                del self._segments[number]
                segment.drop(self._room)

    def _make(self, number: int, size: int) -> None:
        try:
            fd = self._room.make(size)
        except OSError:
            self._tell(REFUSED, number)
            return
        try:
            segment = _Segment(number, size, fd, map_memory(fd, size, mmap.MAP_SHARED))
        except OSError as e:
            self._room.give_back(fd)
            self._room.failed(e)
            self._tell(REFUSED, number)
            return
        self._segments[number] = segment
        if not self._tell(GRANTED, number, fd):
            del self._segments[number]
            segment.drop(self._room)

    def _open_common(self, number: int, size: int, device: int, inode: int, fd: int) -> None:
        try:
            if sum(n >= COMMON for n in list(self._segments)) >= _MOST_COMMON:
                raise BlockingIOError("too many segments of one peer's")
            peer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            own = open_of_peer(Place(_CREDENTIALS.unpack(peer)[0], fd, device, inode, size), os.O_RDONLY)
            try:
                address = map_memory(own, size, mmap.MAP_PRIVATE)
            finally:
                os.close(own)
        except OSError as e:
            log.debug("a segment for several cannot be opened: %s", e)
            self._tell(REFUSED, number)
            return
        segment = self._segments[number] = _Segment(number, size, -1, address)
        if not self._tell(OPENED, number):
            del self._segments[number]
            segment.drop(self._room)

    def take(self, number: int, sizes: Sequence[int]) -> list[Frame] | None:
        """Lends the frames of a message that lies in a segment. Returns None where there is no such thing."""
        segment = self._segments.get(number)
        places, end = places_of(sizes)
        if segment is None or segment.loan is not None or segment.retired or end > segment.size:
            return None
        memory = array_over(segment.address, segment.size)
        whole = memoryview(memory.data)
        frames: list[Frame] = []
        kept = False
        for place, size in zip(places, sizes, strict=True):
            frame = whole[place : place + size]
            if size < _KEPT_FROM:
                frame = memoryview(bytearray(frame))
            else:
                kept = True
            frames.append(frame)
        if not kept:
            self._tell(FREE, number)
            return frames
        segment.over = False
        loan = segment.loan = _Loan(memory, _end_loan)
        loan.shelf, loan.segment = self, segment
        _LOANS[id(loan)] = loan
        return frames

    def returned(self, segment: _Segment) -> None:
        """Takes a segment of which no view is left. From a finalizer."""
        if os.getpid() != self._pid or self._is_closed():
            segment.drop(self._room)
        elif segment.retired:
            self._segments.pop(segment.number, None)
            segment.drop(self._room)
            self._tell(GONE, segment.number)
        else:
            changed = 0 if segment.fd >= 0 else forget_changes(segment.address, segment.size)
            segment.loan = None
            self._tell(CHANGED if changed > segment.size // 2 else FREE, segment.number)
            if self._is_closed():  # just now; then it still seemed to be on loan
                segment.drop(self._room)

    def _is_closed(self) -> bool:
        return not self._open

    def _tell(self, what: int, number: int, fd: int = -1) -> bool:
        self._telling.append(None)
        try:
            if not self._open:
                return False
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else ()
            self._socket.sendmsg([NEWS.pack(what, number)], rights, HOW)
        except OSError as e:
            if fd >= 0 and not isinstance(e, (BrokenPipeError, ConnectionError)):
                self._room.failed(e)
            return False
        finally:
            self._telling.pop()
        return True

    def close(self) -> None:
        """Lets go of everything but what is on loan, which goes when its last view does. Before the socket's end."""
        self._open = False
        # A finalizer on another thread may be in the midst of telling: the descriptor must not become another's.
        for _ in range(1000):
            if not self._telling:
                break
            time.sleep(0)
        while self._segments:
            _, segment = self._segments.popitem()
            if segment.loan is None:
                segment.drop(self._room)


class _Segment:
    """A segment at its owner's.

    Arguments:
        fd: its descriptor; -1: it is the sender's own, and mapped privately here.

    Attributes:
        loan: of its memory, while a message or what was read of it lies there.
        retired: whether a forked child may see it, so that it is not filled again.
        over: whether no view of it is left.
    """

    __slots__ = ("_live", "address", "fd", "loan", "number", "over", "retired", "size")

    def __init__(self, number: int, size: int, fd: int, address: int) -> None:
        self.number, self.size, self.fd, self.address = number, size, fd, address
        self.loan: _Loan | None = None
        self.retired = self.over = False
        self._live = [True]

    def drop(self, room: Room) -> None:
        """Unmaps and closes it, once."""
        with contextlib.suppress(IndexError):
            self._live.pop()
            unmap(self.address, self.size)
            if self.fd >= 0:
                room.give_back(self.fd)

    def retire(self) -> None:
        """Makes what it holds this process's own, in its place, and that of children which it forks from now on."""
        if not self.retired:
            self.retired = True
            if self.fd < 0:  # it is mapped like that from the beginning
                return
            map_memory(self.fd, self.size, mmap.MAP_PRIVATE | _MAP_FIXED, self.address)


class _Loan(weakref.ref):  # type: ignore[type-arg]
    """Notices when the last view of a segment goes."""

    __slots__ = ("segment", "shelf")
    segment: _Segment
    shelf: Shelf


_LOANS: dict[int, _Loan] = {}
"""All loans of this process. Whoever takes one out sees to it: a finalizer, or a fork, which puts it back."""


def _end_loan(loan: Any) -> None:
    loan.segment.over = True  # first: else a fork that has just taken the loan out would not see it
    if _LOANS.pop(id(loan), None) is not None:
        loan.shelf.returned(loan.segment)


def _before_fork() -> None:
    for key in list(_LOANS):
        loan = _LOANS.pop(key, None)
        if loan is None:
            continue
        try:
            loan.segment.retire()
        except OSError as e:  # no memory, not even for this
            log.error("a child that is forked now shares a tensor with its parent: %s", e)
        _LOANS[key] = loan
        if loan.segment.over and _LOANS.pop(key, None) is not None:
            loan.shelf.returned(loan.segment)


if AVAILABLE:
    os.register_at_fork(before=_before_fork)
