"""Large frames in pieces: heartbeats wait behind a frame that is on its way, so none may take long over a slow link.

A message with a frame that is too long travels as `[plan][piece or frame]...`. The plan says how long a piece is at the
most and how long each frame of the message is. All of them are parts of one message of ZeroMQ's, so nothing comes
between them but heartbeats.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def join(plan: bytes, part: Callable[[], Frame | None]) -> list[Frame] | None:
    """Puts a message together again.

    Arguments:
        plan: the first part.
        part: takes the next one; None where there is none left.

    Returns its frames, writable but for the first; None where the parts are not as the plan says.
    """
    count = (len(plan) - 10) // 8
    try:
        _, piece, *sizes = struct.unpack(f"<2sQ{count}Q", plan)
    except struct.error:
        return None
    frames: list[Frame] = []
    for size in sizes:
        if size <= piece:
            only = part()
            if only is None or memoryview(only).nbytes != size:
                return None
            frames.append(only)
            continue
        try:
            whole = np.empty(size, np.uint8)
        except (MemoryError, ValueError, OverflowError):  # no sender of ours has had as much
            return None
        for at in range(0, size, piece or size):
            one = part()
            if one is None or memoryview(one).nbytes != min(piece, size - at):
                return None
            whole[at : at + piece] = np.frombuffer(one, np.uint8)
        frames.append(memoryview(whole))  # type: ignore[arg-type]
    if not frames or part() is not None:
        return None
    frames[0] = bytes(frames[0])
    return frames
