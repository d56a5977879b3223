"""Large frames in pieces: heartbeats wait behind a frame that is on its way, so none may take long over a slow link.

A message with a frame that is too long travels as a plan, and then piece by piece. The plan says how long a piece is at
the most and how long each frame of the message is. Plan and pieces are messages of ZeroMQ's own, since the parts of one
are handed out when all are there: so each side copies one piece while others are on their way. They leave under the
way's lock, and nothing comes between those of one sender but heartbeats.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

PLAN = b"p\1"
"""How a plan begins."""


def cut(frames: Sequence[Frame], piece: int) -> list[Frame]:
    """Cuts the frames of a message into pieces, without a copy, and puts the plan before them."""
    views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"") for frame in frames]
    parts: list[Frame] = [struct.pack(f"<2sQ{len(views)}Q", PLAN, piece, *(view.nbytes for view in views))]
    for view in views:
        parts += [view[at : at + piece] for at in range(0, view.nbytes, piece)] or [view]
    return parts


class Joining:
    """A message that comes in pieces.

    Arguments:
        plan: what came before them.

    Attributes:
        since: when the last one came.

    Raises:
        ValueError: it is no plan.
    """

    __slots__ = ("_at", "_frames", "_piece", "_sizes", "_whole", "since")

    def __init__(self, plan: bytes) -> None:
        count = (len(plan) - 10) // 8
        try:
            _, self._piece, *self._sizes = struct.unpack(f"<2sQ{count}Q", plan)
        except struct.error as e:
            raise ValueError(str(e)) from None
        if not self._sizes:
            raise ValueError("a message of no frames")
        self._frames: list[Frame] = []
        self._whole: Any = None
        """The frame that comes in pieces just now, and how much of it is there."""
        self._at = 0
        self.since = time.monotonic()

    def take(self, part: Frame) -> list[Frame] | None:
        """Takes the next piece, or frame. Returns the message's frames, writable but for the first, when all are there.

        Raises:
            ValueError: it is not as the plan says; nothing comes of this message any more.
        """
        frames, size, length = self._frames, self._sizes[len(self._frames)], memoryview(part).nbytes
        if length != min(size - self._at, self._piece):
            raise ValueError(f"a piece of {length} bytes")
        if size <= self._piece:
            frames.append(part)
        else:
            if self._whole is None:
                try:
                    self._whole = np.empty(size, np.uint8)
                except (MemoryError, OverflowError) as e:  # no sender of ours has had as much
                    raise ValueError(str(e)) from None
            # This way of copying lets others have the GIL meanwhile.
            np.copyto(self._whole[self._at : self._at + length], np.frombuffer(part, np.uint8))
            self._at += length
            if self._at == size:
                frames.append(memoryview(self._whole))
                self._whole, self._at = None, 0
        self.since = time.monotonic()
        if len(frames) < len(self._sizes):
            return None
        frames[0] = bytes(frames[0])
        return frames
