"""Shared memory for what is large along a direct way: its sender fills a segment, its receiver's tensors lie in it.

A segment belongs to one way. The receiver makes it, when the sender asks along the way, and gives the sender its
descriptor along the same socket in the other direction; that is all that travels there. So nothing has a name that
could be left behind, nobody else can open it, and the sender knows that the receiver has it.

Rules:
- SG1: a segment is the sender's from the grant, or the news that it is free, until the message that names it; from then
  on it is the receiver's, until no view of it is left. Nobody touches what is the other's.
- SG2: no message waits for a segment. What finds none that is free, or none at all, travels as bytes. So does what
  finds a lock taken: whoever has it may be in a finalizer of the user's, which waits for what the sender has.
- SG3: a finalizer takes no lock. It may run anywhere, also in a forked child, which tells nobody anything.
- SG4: a forked child inherits what its parent holds: from then on both see their own copy, and the sender never fills
  that segment again. So before a fork what is on loan is mapped anew, as a private copy-on-write view, in its place.

What several receivers are to have lies in a segment of the sender's own (SG5 and SG6, in `wire.commons`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "MSG_CMSG_CLOEXEC")
"""Whether this system has what it takes."""
LARGE: Final = 256 * 1024
"""Bytes from which the buffers of a message go into a segment: below, the socket is as fast."""
ORDER: Final = struct.Struct("<IIQQQI")
"""What a sender asks for, along the way: what, the segment's number, its size; of one that is the sender's own also its
device, its inode, and its descriptor there.
"""
WANT, DROP, OPEN = 1, 2, 3
"""Orders: make that segment; I have let go of it; open that one, which is mine."""
COMMON: Final = 1 << 31
"""From here on numbers are those of segments that are the sender's own."""
IDLE_SECONDS: Final = 10.0
"""After which a segment that is free is given up."""

NEWS = struct.Struct("<II")
"""What a receiver says: what, the segment's number."""
GRANTED, FREE, GONE, REFUSED, OPENED, CHANGED = 1, 2, 3, 4, 5, 6
_PATIENCE_SECONDS = 1.0
"""For which a sender does not ask again, once it was refused."""
_MOST = 32
"""Segments of one way: so that what is told of them always has room in the socket."""
_UNANSWERED = 2
_CLOSING_SECONDS = 1.0
_ALIGNMENT = 64
HOW = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE if AVAILABLE else 0
_PAGE = mmap.PAGESIZE
_PRESENT, _SWAPPED, _OF_A_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of an entry of /proc/self/pagemap."""


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


if AVAILABLE:
    # Python's own mmap holds a second descriptor, and cannot map anew in the same place.
    _address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _mmap = _function("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
    _munmap = _function("munmap", _int, _address, _size)
    _madvise = _function("madvise", _int, _address, _size, _int)
    _view = ctypes.pythonapi.PyMemoryView_FromMemory
    _view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def map_memory(fd: int, size: int, flags: int, at: int = 0) -> int:
    """Maps a segment; returns its address."""
    address = _mmap(at or None, size, _BOTH, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def unmap(address: int, size: int) -> None:
    """Takes a mapping away. It may be called by finalizers."""
    _munmap(address, size)


class Place(NamedTuple):
    """Where shared memory without a name is: the process and its descriptor, and what they must lead to. On one kernel
    no two files have the same device and inode, so these prove it, also where processes have other numbers over there.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size: int


def open_of_peer(place: Place, how: int) -> int:
    """Opens another process's shared memory (`how`: os.O_RDONLY or os.O_RDWR); returns the descriptor.

    Raises:
        OSError: it cannot be had here.
    """
    path = f"/proc/{place.pid}/fd/{place.fd}"
    if not _is_at(place, os.stat(path)):  # before: to open something else might have effects
        raise FileNotFoundError(f"{path} is not the memory that was meant")
    own = os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK)
    if _is_at(place, os.fstat(own)):
        return own
    os.close(own)
    raise FileNotFoundError(f"{path} is not the memory that was meant any more")


def _is_at(place: Place, found: os.stat_result) -> bool:
    same = (found.st_dev, found.st_ino, found.st_size) == (place.device, place.inode, place.size)
    return same and not found.st_nlink and stat.S_ISREG(found.st_mode)


def forget_changes(address: int, size: int) -> int:
    """Takes back what this process has changed in a private mapping, whose pages then are the file's again; those that
    it only read stay mapped, since to map them once more takes longer than to copy them. From finalizers, too.

    Returns how many bytes have been changed, by the page.
    """
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(pagemap, size // _PAGE * 8, address // _PAGE * 8)
        finally:
            os.close(pagemap)
        if len(data) != size // _PAGE * 8:
            raise OSError(f"{len(data)} bytes of a page map")
    except OSError:  # there is none here
        _madvise(address, size, mmap.MADV_DONTNEED)
        return 0
    pages = np.frombuffer(data, np.uint64)
    (own,) = np.nonzero((pages & (_PRESENT | _SWAPPED) != 0) & (pages & _OF_A_FILE == 0))
    if not len(own):
        return 0
    first, last = int(own[0]), int(own[-1])
    _madvise(address + first * _PAGE, (last + 1 - first) * _PAGE, mmap.MADV_DONTNEED)
    return len(own) * _PAGE


def array_over(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns mapped memory as an array; it does not keep the memory mapped."""
    return np.frombuffer(_view(address, size, 0x200), np.uint8)  # PyBUF_WRITE


def order(what: int, number: int, size: int = 0, device: int = 0, inode: int = 0, fd: int = 0) -> bytes:
    """Writes what a sender asks for."""
    return ORDER.pack(what, number, size, device, inode, fd)


def rounded(size: int) -> int:
    """Returns the size of a segment for that many bytes: one of four between two powers of two."""
    step = max(LARGE // 4, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def places_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where in a segment frames of these sizes lie, and the end of the last one."""
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, at


class Stock:
    """The segments that a sender may fill along one way.

    Arguments:
        socket: along which the receiver tells of them.
        tell: called with what it tells of segments that are not this way's alone, and their number; with no lock of
            anybody else's held, and it may take none.
    """

    def __init__(self, socket: socket.socket, tell: Callable[[int, int], None]) -> None:
        self._socket, self._tell = socket, tell
        # Nobody waits for it (SG2). Not reentrant: a finalizer in the midst of it finds it taken, too.
        self._lock = threading.Lock()
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
        places, end = places_of(sizes)
        if not self._lock.acquire(False):
            return b"", 0, sizes
        try:
            segment = self._find(end)
            if segment is None:
                self._hear()
                segment = self._find(end)
                if segment is None:
                    orders, self._orders = self._orders + self._ask(end), b""
                    return orders, 0, sizes
        finally:
            self._lock.release()
        copied = False
        try:
            # Without the lock: it takes a while, and the leader may look in.
            for frame, place, size in zip(frames, places, sizes, strict=True):
                if size:
                    # This way of copying lets others have the GIL meanwhile.
                    np.copyto(segment.memory[place : place + size], np.frombuffer(frame, np.uint8))
            copied = True
        finally:
            segment.used = time.monotonic()
            if copied:
                self._away[segment.number] = segment
            else:
                self._free.append(segment)
            self._drop_if_closed()
        return b"", segment.number, sizes

    def _find(self, size: int) -> _Filled | None:
        """Takes out the smallest that is large enough, and of these the last used, whose pages are warm."""
        best: _Filled | None = None
        for segment in reversed(self._free):
            if size <= segment.size <= 4 * max(size, LARGE) and (best is None or segment.size < best.size):
                best = segment
        return best if best is not None and self._take_out(best) else None

    def _take_out(self, segment: _Filled) -> bool:
        """Takes a free one out; returns whether it was there: the way may be closed meanwhile."""
        try:
            self._free.remove(segment)
        except ValueError:
            return False
        return True

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
        return orders + order(WANT, self._last, size)

    def _give_up(self, segments: Sequence[_Filled]) -> bytes:
        orders = b""
        for segment in segments:
            if self._take_out(segment):
                segment.drop()
                orders += order(DROP, segment.number)
        return orders

    def _hear(self) -> None:
        """Reads what the receiver tells."""
        while self._open:
            try:
                data, rights, _, _ = self._socket.recvmsg(4096, 256, HOW | socket.MSG_CMSG_CLOEXEC)
            except OSError:  # nothing there; or the way has ended
                break
            fds = array.array("i")
            for _, _, got in rights:
                fds.frombytes(got[: len(got) // 4 * 4])
            if not data:
                break
            for what, number in NEWS.iter_unpack(data[: len(data) // NEWS.size * NEWS.size]):
                if number >= COMMON:
                    self._tell(what, number)
                elif what == GRANTED:
                    self._granted(number, fds.pop(0) if fds else -1)
                elif what == REFUSED:
                    self._wanted.pop(number, None)
                    self._patient_until, self._cramped = time.monotonic() + _PATIENCE_SECONDS, True
                else:
                    segment = self._away.pop(number, None)
                    if segment is None:
                        continue
                    if what == FREE:
                        self._free.append(segment)
                    else:
                        segment.drop()
            for fd in fds:
                os.close(fd)
        self._drop_if_closed()

    def _granted(self, number: int, fd: int) -> None:
        size = self._wanted.pop(number, None)
        if fd >= 0 and size is not None:
            try:
                self._free.append(_Filled(number, size, map_memory(fd, size, mmap.MAP_SHARED)))
            except OSError as e:
                log.debug("a segment cannot be mapped: %s", e)
            else:
                os.close(fd)
                return
        if fd >= 0:
            os.close(fd)
        self._orders += order(DROP, number)  # it is of no use
        self._patient_until = time.monotonic() + 60 * _PATIENCE_SECONDS

    def hear(self) -> None:
        """Takes in what the receiver has told, unless somebody is about to."""
        if self._lock.acquire(False):
            try:
                self._hear()
            finally:
                self._lock.release()

    def trim(self, now: float) -> bytes:
        """Gives up what has not been used for long, unless somebody is at it; returns the orders that say so."""
        if not self._lock.acquire(False):
            return b""
        try:
            self._hear()
            orders, self._orders = self._orders, b""
            return orders + self._give_up([s for s in self._free if now - s.used >= IDLE_SECONDS])
        finally:
            self._lock.release()

    @property
    def empty(self) -> bool:
        """Whether there is nothing that might be given up later."""
        return not (self._open and (self._free or self._away or self._wanted))

    def close(self) -> None:
        """Lets go of everything; of what somebody is at, that one does. Before the socket's end."""
        self._open = False
        # Who reads must have seen that, since the descriptor may become another's; one in a finalizer will.
        if self._lock.acquire(timeout=_CLOSING_SECONDS):
            self._lock.release()
        self._drop_if_closed()

    def _drop_if_closed(self) -> None:
        """To be called after a segment was put anywhere: by then the way may be closed. Each is taken out once."""
        if self._open:
            return
        with contextlib.suppress(IndexError):
            while self._free:
                self._free.pop().drop()
        with contextlib.suppress(KeyError):
            while self._away:
                self._away.popitem()[1].drop()


class _Filled:
    """A segment at its sender's."""

    __slots__ = ("_address", "memory", "number", "size", "used")

    def __init__(self, number: int, size: int, address: int) -> None:
        self.number, self.size, self._address = number, size, address
        self.memory = array_over(address, size)
        self.used = time.monotonic()

    def drop(self) -> None:
        """Unmaps it. Only who has taken it out may."""
        unmap(self._address, self.size)
