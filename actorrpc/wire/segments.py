"""Shared memory for what is large along a direct way: its sender fills a segment, its receiver's tensors lie in it.

A segment belongs to one way. The receiver makes it, when the sender asks along the way, and gives the sender its
descriptor along the same socket in the other direction; that is all that travels there. So nothing has a name that
could be left behind, nobody else can open it, and the sender knows that the receiver has it.

Rules:
- SG1: a segment is the sender's from the grant, or the news that it is free, until the message that names it; from then
  on it is the receiver's, until no view of it is left. Nobody touches what is the other's.
- SG2: no message waits for a segment. What finds none that is free, or none at all, travels as bytes.
- SG3: a finalizer takes no lock. It may run anywhere, also in a forked child, which tells nobody anything.
- SG4: a forked child inherits what its parent holds: from then on both see their own copy, and the sender never fills
  that segment again. So before a fork what is on loan is mapped anew, as a private copy-on-write view, in its place.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "MSG_CMSG_CLOEXEC")
"""Whether this system has what it takes."""
LARGE: Final = 256 * 1024
"""Bytes from which the buffers of a message go into a segment: below, the socket is as fast."""
ORDER: Final = struct.Struct("<IIQ")
"""What a sender asks for, along the way: what, the segment's number, its size."""
WANT, DROP = 1, 2
"""Orders: make that segment; I have let go of it."""
IDLE_SECONDS: Final = 10.0
"""After which a segment that is free is given up."""

_NEWS = struct.Struct("<II")
"""What a receiver says: what, the segment's number."""
_GRANTED, _FREE, _GONE, _REFUSED = 1, 2, 3, 4
_PATIENCE_SECONDS = 1.0
"""For which a sender does not ask again, once it was refused."""
_MOST = 32
"""Segments of one way: so that what is told of them always has room in the socket."""
_UNANSWERED = 2
_ALIGNMENT = 64
_KEPT_FROM = 1 << 16
"""Bytes below which a frame is copied out of its segment, so as not to hold it."""
_HOW = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE if AVAILABLE else 0
_MAP_FIXED = 0x10


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


if AVAILABLE:
    # Python's own mmap holds a second descriptor, and cannot map anew in the same place.
    _address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _mmap = _function("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
    _munmap = _function("munmap", _int, _address, _size)
    _view = ctypes.pythonapi.PyMemoryView_FromMemory
    _view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def _map(fd: int, size: int, flags: int, at: int = 0) -> int:
    """Maps a segment; returns its address."""
    address = _mmap(at or None, size, _BOTH, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def _array(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns mapped memory as an array; it does not keep the memory mapped."""
    return np.frombuffer(_view(address, size, 0x200), np.uint8)  # PyBUF_WRITE


def rounded(size: int) -> int:
    """Returns the size of a segment for that many bytes: one of four between two powers of two."""
    step = max(LARGE // 4, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where in a segment frames of these sizes lie, and the end of the last one."""
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, at


class Room:
    """How much memory one worker lends to those who send to it.

    Arguments:
        limit: bytes; default: a quarter of the machine's memory, and 1 GiB at the most.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _default_limit() if limit is None else limit
        self.segments: dict[int, int] = {}
        """Sizes, by descriptor. Finalizers take out what is gone."""
        self._most = _half_of_descriptors()
        self._told = False

    def make(self, size: int) -> int:
        """Makes a segment; returns its descriptor.

        Raises:
            OSError: it is not to be had, which is logged once.
        """
        held = list(self.segments.values())
        if sum(held) + size > self.limit or len(held) >= self._most:
            raise BlockingIOError("all the memory for large tensors is in use")
        try:
            fd = os.memfd_create("actorrpc", os.MFD_CLOEXEC)
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

    def failed(self, error: OSError) -> None:
        """Logs that there is no shared memory, the first time."""
        if not self._told:
            self._told = True
            log.info("no shared memory to be had (%s); large tensors come through sockets", error)

    def give_back(self, fd: int) -> None:
        """Closes a segment's descriptor."""
        self.segments.pop(fd, None)
        os.close(fd)


def _default_limit() -> int:
    try:
        return min(1 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    except (ValueError, OSError):
        return 1 << 28


def _half_of_descriptors() -> int:
    import resource  # not on all systems

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else max(4, soft // 4)


# -- the receiving end


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

    def order(self, what: int, number: int, size: int) -> None:
        """Does what the peer asks for. Under leadership."""
        if what == WANT and number not in self._segments and size > 0:
            self._make(number, size)
        elif what == DROP:
            segment = self._segments.get(number)
            if segment is not None and segment.loan is None:
                del self._segments[number]
                segment.drop(self._room)

    def _make(self, number: int, size: int) -> None:
        try:
            fd = self._room.make(size)
        except OSError:
            self._tell(_REFUSED, number)
            return
        try:
            segment = _Segment(number, size, fd, _map(fd, size, mmap.MAP_SHARED))
        except OSError as e:
            self._room.give_back(fd)
            self._room.failed(e)
            self._tell(_REFUSED, number)
            return
        self._segments[number] = segment
        if not self._tell(_GRANTED, number, fd):
            del self._segments[number]
            segment.drop(self._room)

    def take(self, number: int, sizes: Sequence[int]) -> list[Frame] | None:
        """Lends the frames of a message that lies in a segment. Returns None where there is no such thing."""
        segment = self._segments.get(number)
        places, end = _places(sizes)
        if segment is None or segment.loan is not None or segment.retired or end > segment.size:
            return None
        memory = _array(segment.address, segment.size)
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
            self._tell(_FREE, number)
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
            self._tell(_GONE, segment.number)
        else:
            segment.loan = None
            self._tell(_FREE, segment.number)
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
            self._socket.sendmsg([_NEWS.pack(what, number)], rights, _HOW)
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
            _munmap(self.address, self.size)
            room.give_back(self.fd)

    def retire(self) -> None:
        """Makes what it holds this process's own, in its place, and that of children which it forks from now on."""
        if not self.retired:
            self.retired = True
            _map(self.fd, self.size, mmap.MAP_PRIVATE | _MAP_FIXED, self.address)


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


# -- the sending end


class Stock:
    """The segments that a sender may fill along one way.

    Arguments:
        socket: along which the receiver tells of them.
    """

    def __init__(self, socket: socket.socket) -> None:
        self._socket = socket
        # Reentrant: the collector may run a finalizer of the user's, which sends, at any point in here.
        self._lock = threading.RLock()
        self._free: list[_Filled] = []
        """What may be filled; used last, last."""
        self._away: dict[int, _Filled] = {}
        self._wanted: dict[int, int] = {}
        self._last = 0
        self._patient_until = 0.0
        self._orders = b""
        """What to send with the next ones."""
        self._cramped = False
        """Whether there was no room for the last one that was wanted."""
        self._open = True

    def stow(self, frames: Sequence[Frame]) -> tuple[bytes, int, list[int]]:
        """Copies frames into a segment, where there is one for them.

        Returns orders to send before the message (or nothing), the segment's number (0: none, they travel as bytes),
        and the frames' sizes.
        """
        sizes = [memoryview(frame).nbytes for frame in frames]
        places, end = _places(sizes)
        with self._lock:
            segment = self._find(end)
            if segment is None:
                self._hear()
                segment = self._find(end)
                if segment is None:
                    orders, self._orders = self._orders + self._ask(end), b""
                    return orders, 0, sizes
        copied = False
        try:
            # Without the lock: it takes a while, and the leader may look in.
            for frame, place, size in zip(frames, places, sizes, strict=True):
                if size:
                    # This way of copying lets others have the GIL meanwhile.
                    np.copyto(segment.memory[place : place + size], np.frombuffer(frame, np.uint8))
            copied = True
        finally:
            with self._lock:
                segment.used = time.monotonic()
                if not self._open:
                    segment.drop()
                elif copied:
                    self._away[segment.number] = segment
                else:
                    self._free.append(segment)
        return b"", segment.number, sizes

    def _find(self, size: int) -> _Filled | None:
        """Takes out the smallest that is large enough, and of these the last used, whose pages are warm."""
        best: _Filled | None = None
        for segment in reversed(self._free):
            if size <= segment.size <= 4 * max(size, LARGE) and (best is None or segment.size < best.size):
                best = segment
        if best is not None:
            self._free.remove(best)
        return best

    def _ask(self, size: int) -> bytes:
        """Returns what to order for want of a segment of that size; nothing where enough are on order."""
        if not self._open or len(self._wanted) >= _UNANSWERED or time.monotonic() < self._patient_until:
            return b""
        orders = b""
        if self._cramped or len(self._free) + len(self._away) + len(self._wanted) >= _MOST:
            orders, self._cramped = self._give_up(list(self._free)), False  # they are of the wrong size
            if len(self._away) + len(self._wanted) >= _MOST:
                return orders
        self._last += 1
        self._wanted[self._last] = size = rounded(size)
        return orders + ORDER.pack(WANT, self._last, size)

    def _give_up(self, segments: Sequence[_Filled]) -> bytes:
        orders = b""
        for segment in segments:
            self._free.remove(segment)
            segment.drop()
            orders += ORDER.pack(DROP, segment.number, 0)
        return orders

    def _hear(self) -> None:
        """Reads what the receiver tells."""
        while self._open:
            try:
                data, rights, _, _ = self._socket.recvmsg(4096, 256, _HOW | socket.MSG_CMSG_CLOEXEC)
            except OSError:  # nothing there; or the way has ended
                return
            fds = array.array("i")
            for _, _, got in rights:
                fds.frombytes(got[: len(got) // 4 * 4])
            if not data:
                return
            for what, number in _NEWS.iter_unpack(data[: len(data) // _NEWS.size * _NEWS.size]):
                if what == _GRANTED:
                    self._granted(number, fds.pop(0) if fds else -1)
                elif what == _REFUSED:
                    self._wanted.pop(number, None)
                    self._patient_until, self._cramped = time.monotonic() + _PATIENCE_SECONDS, True
                else:
                    segment = self._away.pop(number, None)
                    if segment is None:
                        continue
                    if what == _FREE:
                        self._free.append(segment)
                    else:
                        segment.drop()
            for fd in fds:
                os.close(fd)

    def _granted(self, number: int, fd: int) -> None:
        size = self._wanted.pop(number, None)
        if fd >= 0 and size is not None:
            try:
                self._free.append(_Filled(number, size, _map(fd, size, mmap.MAP_SHARED)))
            except OSError as e:
                log.debug("a segment cannot be mapped: %s", e)
            else:
                os.close(fd)
                return
        if fd >= 0:
            os.close(fd)
        self._orders += ORDER.pack(DROP, number, 0)  # it is of no use
        self._patient_until = time.monotonic() + 60 * _PATIENCE_SECONDS

    def trim(self, now: float) -> bytes:
        """Gives up what has not been used for long; returns the orders that say so."""
        with self._lock:
            self._hear()
            orders, self._orders = self._orders, b""
            return orders + self._give_up([s for s in self._free if now - s.used >= IDLE_SECONDS])

    @property
    def empty(self) -> bool:
        """Whether there is nothing that might be given up later."""
        return not (self._free or self._away or self._wanted)

    def close(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._open = False
            for segment in [*self._free, *self._away.values()]:
                segment.drop()
            self._free, self._away = [], {}


class _Filled:
    """A segment at its sender's."""

    __slots__ = ("_address", "memory", "number", "size", "used")

    def __init__(self, number: int, size: int, address: int) -> None:
        self.number, self.size, self._address = number, size, address
        self.memory = _array(address, size)
        self.used = time.monotonic()

    def drop(self) -> None:
        """Unmaps it. Only who has taken it out may."""
        _munmap(self._address, self.size)
