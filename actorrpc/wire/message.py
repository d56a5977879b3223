"""The message that a thread is writing or reading: its buffers, and what its parts must know of each other.

A message is the frame with the pickle, then the raw buffers that it refers to. Where something could only be decided
when all of the pickle was written (`tensors`), one more frame comes last: the number of the first buffer that belongs
to it, and a pickled table.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

from actorrpc.wire.memo import asks_too_much

TINY: Final = 2 * 1024
"""Buffers up to this many bytes always go in band: a frame of their own costs more than copying them."""
INLINE: Final = 32 * 1024
"""How many bytes of buffers over `TINY` a message carries in band before it takes to frames of their own."""

_FIRST: Final = struct.Struct("<I")
_PLAIN: Final = (memoryview, bytes, bytearray)


Way: TypeAlias = "tuple[str | None, str | None]"
"""On which device a tensor is, and on which it shall be where it arrives, by names; None: the CPU."""


class Leaving(Protocol):
    """What knows, of one message that is being written, where its tensors go."""

    def way_of(self, what: torch.Tensor | torch.UntypedStorage) -> Way | None:
        """Returns the way of a tensor, or a storage; None where it is on the CPU and stays on one.

        Raises:
            DeviceMapError: it can go nowhere.
        """

    def fetch(self, raw: torch.Tensor, device: str) -> torch.Tensor:
        """Copies bytes from a device to the CPU; they are those of all that was to be done there before."""


class Landing(Protocol):
    """What puts the tensors of one message that is being read where they are to be."""

    def put(self, raw: torch.Tensor, device: str) -> torch.Tensor:
        """Begins to copy bytes from the CPU to a device.

        Raises:
            DeserializationError: it cannot be done.
        """

    def done(self) -> None:
        """Waits until all is where it is to be; called once, also where the message could not be read."""


class Writing:
    """What is known of one message while it is written.

    Args:
        notes: the caller's object, which reducers get from `codec.writing()`.
        leaving: where its tensors go; None: they arrive on the CPU, wherever they are.
    """

    __slots__ = ("anchors", "frames", "inline", "late", "leaving", "notes", "trace")

    def __init__(self, notes: object = None, leaving: Leaving | None = None) -> None:
        self.notes, self.leaving = notes, leaving
        # What takes down tensors that require grad, instead of their being sent as leaves; see `codec.dumps`.
        self.trace: Any = getattr(notes, "trace", None)
        self.frames: list[memoryview] = []
        self.inline = 0
        # By StorageImpl: the tensor or storage through which it was written. The pickler's memo keeps that object
        # alive, hence the storage, hence the key unique.
        self.anchors: dict[int, Any] = {}
        # By StorageImpl, too: the storages of which the end of the message decides what is sent.
        self.late: dict[int, Any] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether a buffer of that size goes in band; if so it is counted."""
        if nbytes <= TINY:
            return True
        if self.inline + nbytes <= INLINE:
            self.inline += nbytes
            return True
        return False

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's `buffer_callback`: True keeps the buffer in band."""
        raw = buffer.raw()
        if self.fits(raw.nbytes):
            return True
        # Read-only, so that frames handed straight to a reader (a call to oneself) are copied and never shared.
        self.frames.append(raw.toreadonly())
        return False


class Reading:
    """What is known of one message while it is read.

    Args:
        notes: the caller's object, which loading functions get from `codec.reading()`.
        frames: the message.
        land: makes, for the first tensor that is to be on another device than the CPU, what puts it there.
    """

    __slots__ = ("_late", "frames", "land", "landing", "notes")

    def __init__(self, notes: object, frames: Sequence[Any], land: Callable[[Any], Landing] | None = None) -> None:
        self.notes = notes
        self.frames = frames
        self.land = land
        self.landing: Landing | None = None
        self._late: Any = None

    def put(self, raw: torch.Tensor, device: str) -> torch.Tensor:
        """Puts bytes on a device."""
        if self.landing is None:
            if self.land is None:
                raise RuntimeError(f"a tensor for {device} is read only by a worker")
            self.landing = self.land(self.notes)
        return self.landing.put(raw, device)

    def late(self, make: Callable[[Any], Any]) -> Any:
        """What `write_late` wrote, as `make` makes it at the first call."""
        if self._late is None:
            last = plain(self.frames[-1])
            (first,) = _FIRST.unpack_from(last)
            buffers = map(owned, self.frames[1 + first : -1])
            late = memoryview(last)[_FIRST.size :]
            if asks_too_much(late):
                raise pickle.UnpicklingError("a table of views that asks for more memory than it can need")
            self._late = make(pickle.loads(late, buffers=buffers))
        return self._late


class _Now(threading.local):
    writing: Writing | None = None
    reading: Reading | None = None


now = _Now()
"""The messages that this thread is writing and reading; set by the codec, restored in a `finally`."""


def write_late(message: Writing, table: object) -> None:
    """Adds the last frame: a table that the pickle before it needs, found by `Reading.late`."""
    first = len(message.frames)
    data = pickle.dumps(table, 5, buffer_callback=message.take)
    message.frames.append(memoryview(_FIRST.pack(first) + data))


def plain(frame: Any) -> Any:
    """A frame as something bytes-like."""
    return frame if isinstance(frame, _PLAIN) else frame.buffer


def owned(frame: Any) -> bytearray | memoryview:
    """A frame as writable memory, aligned to 8 bytes at least: its own if that is so, else a copy."""
    view = memoryview(plain(frame))
    if view.readonly or not view.contiguous or not view.nbytes:
        return bytearray(view)
    view = view.cast("B")
    if ctypes.addressof(ctypes.c_char.from_buffer(view)) % 8:
        return bytearray(view)
    return view
