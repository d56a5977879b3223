"""Common segments: shared memory that a sender fills once for several receivers (`wire.segments` tells of the rest).

Such a segment is the sender's own. Each receiver opens it through /proc, by order, knows by its inode that it is the
one that was meant, and maps it privately: pages that a receiver writes to become its own, the others are there once.

Rules:
- SG5: a message names a common segment only to a receiver that has said that it has it open. So the first broadcasts
  travel as if there were none, and nothing waits (SG2).
- SG6: each receiver to whom a message names the segment holds it until it says FREE. While anybody holds it, it is not
  filled. Where a way ends nobody knows whether its receiver still reads; and a child that a receiver has forked may
  (GONE, SG4). Such a segment is never filled again, and dropped when nobody holds it.

To write to pages that are shared costs a fault each, and more than a copy. So a receiver that says that it has CHANGED
most of one is sent copies for a while.

Nobody waits for the lock: whoever has it may be in a finalizer of the user's, which waits for what others have. Who
finds it taken sends copies.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from actorrpc.wire.segments import (
    COMMON,
    DROP,
    FREE,
    GONE,
    IDLE_SECONDS,
    LARGE,
    OPEN,
    OPENED,
    array_over,
    map_memory,
    order,
    places_of,
    rounded,
    unmap,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.outgoing import Outgoing
    from actorrpc.wire.shelf import Room

log = logging.getLogger("actorrpc")
_MOST: Final = 16
"""Common segments of one sender."""
_APART_SECONDS = 60.0
"""For which a receiver that could not open a segment, or has changed most of one, is sent copies."""
_CLOSING_SECONDS = 1.0


class Commons:
    """The common segments of one sender.

    Arguments:
        room: what they are taken from, and count in.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        # Not reentrant: a finalizer in the midst of what it guards finds it taken, too.
        self._lock = threading.Lock()
        self._segments: dict[int, _Common] = {}
        self._shared: dict[int, _Common] = {}
        """What is being sent, by the identity of its first buffer."""
        self._news: deque[tuple[Outgoing, int, int]] = deque()
        self._apart: dict[Outgoing, float] = {}
        """Receivers that are sent copies, and until when."""
        self._last = COMMON
        self._open = True

    @contextlib.contextmanager
    def sharing(self, ways: Sequence[Outgoing], frames: Sequence[Frame]) -> Generator[None]:
        """Fills a segment with all frames but the first, where there is one that several of these receivers have; a
        message with the same buffers that leaves along their ways in the `with` block is in it.
        """
        sizes = [memoryview(frame).nbytes for frame in frames[1:]]
        segment = self._begin(ways, sizes) if sum(sizes) >= LARGE and len(ways) > 1 else None
        if segment is None:
            yield
            return
        buffers = frames[1:]  # they stay, so that the number does not become another's
        try:
            for buffer, place, size in zip(buffers, places_of(sizes)[0], sizes, strict=True):
                if size:
                    # This way of copying lets others have the GIL meanwhile.
                    np.copyto(segment.memory[place : place + size], np.frombuffer(buffer, np.uint8))
            self._shared[id(buffers[0])] = segment
            yield
        finally:
            self._shared.pop(id(buffers[0]), None)
            segment.used, segment.busy = time.monotonic(), False
            if not self._open:
                self._drop(segment)

    def _begin(self, ways: Sequence[Outgoing], sizes: Sequence[int]) -> _Common | None:
        """Takes out a segment to fill, and offers it to who has it not; returns None where too few have one."""
        self._hear(ways)
        _, end = places_of(sizes)
        offered: list[Outgoing] = []
        if not self._lock.acquire(False):
            return None
        try:
            dropped, now = self._settle(), time.monotonic()
            able = {way for way in ways if self._apart.get(way, 0.0) <= now}
            segment = self._find(end, able) if len(able) > 1 and self._open else None
            if segment is None and len(able) > 1 and self._open:
                segment = self._make(end, dropped)
            if segment is not None:
                offered = [way for way in able if way not in segment.known and way not in segment.offered]
                segment.offered.update(offered)
                segment.used = now
                segment.ready = segment.known & able
                segment.busy = len(segment.ready) > 1
        finally:
            self._lock.release()
        self._tell(dropped)
        if segment is None:
            return None
        for way in offered:
            way.order(order(OPEN, segment.number, segment.size, segment.device, segment.inode, segment.fd))
        return segment if segment.busy else None

    def share(self, way: Outgoing, frames: Sequence[Frame]) -> int:
        """Returns the number of the segment in which all frames but the first lie, for this way's receiver; 0: none.

        Each way gets it once: a second message along the same one travels by itself.
        """
        segment = self._shared.get(id(frames[1])) if self._shared else None
        if segment is None or way not in segment.ready:
            return 0
        # Without the lock, since this thread alone sends what is in it.
        segment.ready.discard(way)
        # A way that ends from now on is found among those who hold it; one that has ended sends nothing.
        segment.held.add(way)
        return segment.number

    def _find(self, size: int, able: set[Outgoing]) -> _Common | None:
        """Returns, of those that are large enough and free, the one that most receivers have; of these the smallest."""
        best: _Common | None = None
        for segment in list(self._segments.values()):
            if segment.free and size <= segment.size <= 4 * max(size, LARGE):
                rank = (len(segment.known & able), -segment.size)
                if best is None or rank > (len(best.known & able), -best.size):
                    best = segment
        return best

    def _make(self, end: int, dropped: list[_Common]) -> _Common | None:
        size = rounded(end)
        if len(self._segments) >= _MOST:
            dropped += self._drop_free()  # they are of the wrong size
            if len(self._segments) >= _MOST:
                return None
        try:
            fd = self._room.make(size, "actorrpc-group")
        except OSError:
            dropped += self._drop_free()
            return None
        try:
            address = map_memory(fd, size, mmap.MAP_SHARED)
        except OSError as e:
            self._room.give_back(fd)
            log.debug("a segment cannot be mapped: %s", e)
            return None
        self._last += 1
        segment = self._segments[self._last] = _Common(self._last, size, fd, address)
        return segment

    # -- what becomes of them

    def told(self, way: Outgoing, what: int, number: int) -> None:
        """Notes what a receiver tells of one. Takes no lock."""
        self._news.append((way, what, number))

    def _hear(self, ways: Iterable[Outgoing]) -> None:
        asked = {way for segment in list(self._segments.values()) for way in segment.held | segment.offered}
        for way in asked.union(ways):
            way.hear()

    def _settle(self) -> list[_Common]:
        """Takes in what was told, and which ways have ended; returns what was dropped. Under the lock."""
        while self._news:
            way, what, number = self._news.popleft()
            segment = self._segments.get(number)
            if segment is None:
                continue
            segment.offered.discard(way)
            if what == OPENED:
                segment.known.add(way)
            else:
                segment.held.discard(way)
                if what == GONE:
                    segment.known.discard(way)
                    segment.spoiled = True
                elif what != FREE:  # REFUSED, CHANGED
                    self._apart[way] = time.monotonic() + _APART_SECONDS
        for way in [way for way in self._apart if not way.is_open]:
            del self._apart[way]
        for segment in list(self._segments.values()):
            for way in [way for way in segment.known | segment.offered | segment.held if not way.is_open]:
                segment.known.discard(way)
                segment.offered.discard(way)
                if way in segment.held:
                    segment.held.discard(way)
                    segment.spoiled = True
        spoiled = [s for s in list(self._segments.values()) if s.spoiled and not s.held and not s.busy]
        for segment in spoiled:
            self._drop(segment)
        return spoiled

    def _drop_free(self, idle_since: float | None = None) -> list[_Common]:
        """Drops those that nobody holds, and who were not used since then; returns them. Under the lock."""
        free = [s for s in list(self._segments.values()) if s.free and (idle_since is None or s.used <= idle_since)]
        for segment in free:
            self._drop(segment)
        return free

    def _drop(self, segment: _Common) -> None:
        if self._segments.pop(segment.number, None) is not None:
            unmap(segment.address, segment.size)
            self._room.give_back(segment.fd)

    def _tell(self, dropped: Sequence[_Common]) -> None:
        for segment in dropped:
            for way in segment.known | segment.offered:
                way.order(order(DROP, segment.number))
                way.flush()

    def trim(self, now: float) -> None:
        """Gives up what has not been used for long, and what is not to be filled again."""
        self._hear(())
        if not self._lock.acquire(False):
            return
        try:
            dropped = self._settle() + self._drop_free(now - IDLE_SECONDS)
        finally:
            self._lock.release()
        self._tell(dropped)

    @property
    def empty(self) -> bool:
        """Whether there is nothing that might be given up later."""
        return not self._segments

    def close(self) -> None:
        """Lets go of everything; receivers keep what they hold."""
        self._open = False
        waited = self._lock.acquire(timeout=_CLOSING_SECONDS)  # for who is just making one
        try:
            for segment in [s for s in list(self._segments.values()) if not s.busy]:
                self._drop(segment)
        finally:
            if waited:
                self._lock.release()


class _Common:
    """A common segment, at its sender's.

    Attributes:
        known: who has it open; `offered`: who was told to open it, and has not answered.
        ready: who is to get what is in it, and has not been sent it yet.
        held: who has it lying there with a message in it, or with what was read of one.
        busy: whether it is being filled, or what is in it is being sent.
        spoiled: whether it must not be filled again.
    """

    __slots__ = (
        "address", "busy", "device", "fd", "held", "inode", "known", "memory", "number", "offered", "ready", "size",
        "spoiled", "used",
    )  # fmt: skip

    def __init__(self, number: int, size: int, fd: int, address: int) -> None:
        self.number, self.size, self.fd, self.address = number, size, fd, address
        found = os.fstat(fd)
        self.device, self.inode = found.st_dev, found.st_ino
        self.memory = array_over(address, size)
        self.known: set[Outgoing] = set()
        self.offered: set[Outgoing] = set()
        self.ready: set[Outgoing] = set()
        self.held: set[Outgoing] = set()
        self.busy = self.spoiled = False
        self.used = time.monotonic()

    @property
    def free(self) -> bool:
        """Whether it may be filled, or dropped."""
        return not (self.held or self.busy or self.spoiled)
