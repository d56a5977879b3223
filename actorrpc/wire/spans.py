"""What is sent of a storage: its bytes, or of a large one of which only small views were met, parts of it."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch

from actorrpc.wire.message import Way, Writing

SMALL: Final = 8 * 1024
"""Storages, and spans of views, up to this many bytes are sent whole."""
Bytes: TypeAlias = bytes | pickle.PickleBuffer

_CPU = torch.device("cpu")
_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Late:
    """A storage of which small views were met: what to send of it is decided when all of them are known."""

    def __init__(self, number: int, storage: torch.UntypedStorage, way: Way | None) -> None:
        self.number = number
        self.storage = storage
        self.way = way
        self.views: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self.whole = False

    def add(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, nbytes: int) -> int:
        # Down to 16, the largest item size, so that offsets in a piece are whole items whatever each view's dtype.
        start = offset * itemsize & ~15
        end = (offset + extent(shape, stride)) * itemsize
        self.views.append((start, end, nbytes, (offset, shape, stride, itemsize)))
        return len(self.views) - 1

    def decide(self, writing: Writing) -> tuple[list[Bytes], list[Any], int, str | None]:
        """Decides what is sent.

        Returns:
            The pieces to send; for each view the number of its piece, the byte of the storage at which that begins,
            and, if the piece is a copy of the view alone, its stride there; the alignment that the pieces want; and the
            device on which they shall be.
        """
        pieces: list[Bytes] = []
        places: list[Any] = [None] * len(self.views)

        def span(members: Sequence[int], start: int, end: int) -> None:
            for i in members:
                places[i] = (len(pieces), start, None)
            pieces.append(contents(writing, self.storage, start, end - start, self.way))

        def copies(members: Sequence[int]) -> None:
            made: dict[tuple[Any, ...], Any] = {}
            for i in members:
                key = self.views[i][3]
                if key not in made:
                    offset, shape, stride, itemsize = key
                    view = torch.empty(0, dtype=_BY_SIZE[itemsize], device=self.storage.device)
                    copy = view.set_(self.storage, offset, shape, stride).clone()
                    made[key] = (len(pieces), 0, copy.stride())
                    pieces.append(contents(writing, copy.untyped_storage(), 0, copy.nbytes, self.way))
                places[i] = made[key]

        def dense(members: Sequence[int], start: int, end: int) -> bool:
            return end - start <= max(SMALL, 2 * sum(self.views[i][2] for i in members))

        order = sorted(range(len(self.views)), key=lambda i: self.views[i][:2])
        end = max(view[1] for view in self.views)
        if self.whole:
            span(order, 0, self.storage.nbytes())
        elif dense(order, start := self.views[order[0]][0], end):
            span(order, start, end)
        else:
            for group, start, end in self._groups(order):
                if dense(group, start, end):
                    span(group, start, end)
                else:
                    copies(group)
        return pieces, places, max(view[3][3] for view in self.views), None if self.way is None else self.way[1]

    def _groups(self, order: Sequence[int]) -> list[tuple[list[int], int, int]]:
        """Views that overlap, directly or over others, with the span of each such group."""
        groups: list[tuple[list[int], int, int]] = []
        for i in order:
            start, end = self.views[i][:2]
            if groups and start < groups[-1][2]:
                members, first, last = groups[-1]
                members.append(i)
                groups[-1] = (members, first, max(last, end))
            else:
                groups.append(([i], start, end))
        return groups


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many items a view spans, from its first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def raw_bytes(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """A part of a storage as bytes, in place."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return raw.set_(storage, start, (nbytes,), (1,))


def contents(writing: Writing, storage: torch.UntypedStorage, start: int, nbytes: int, way: Way | None = None) -> Bytes:
    """The bytes of a part of a storage, without a copy if it is large and on the CPU; they keep the storage alive."""
    if way is not None and way[0] is not None and writing.leaving is not None:
        raw = writing.leaving.fetch(raw_bytes(storage, start, nbytes), way[0])
        storage, start = raw.untyped_storage(), 0
    if storage.device == _CPU and writing.fits(nbytes):
        return ctypes.string_at(storage.data_ptr() + start, nbytes) if nbytes else b""
    array: Any = raw_bytes(storage, start, nbytes).cpu().numpy()
    return pickle.PickleBuffer(array)


def finish(writing: Writing) -> list[tuple[list[Bytes], list[Any], int, str | None]]:
    """Decides what to send of the storages that were left open; makes the table for `write_late`."""
    return [late.decide(writing) for late in writing.late.values()]
