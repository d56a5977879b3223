"""Tensors and storages in messages: raw bytes of whatever dtype, and aliases that stay aliases.

The rule, for each storage in a message:

* It is met first through a tensor that covers at least half of it, or it is at most `SMALL` bytes: it is sent whole,
  once, and every further view of it refers to that.
* Else its views are only counted while the message is written, and decided on at its end. If the span of them all is at
  most `SMALL` bytes, or at most twice the bytes of the views, the span is sent. Else views that do not overlap are told
  apart, the same question is asked for each group of overlapping ones, and a group that still is too sparse is sent as
  copies, one for each distinct view: the one case in which aliasing (and the stride, unless the view is dense) is lost.

So a row of a big matrix costs a row, two rows cost two rows, and a module's tied weights stay tied.

Tensors arrive on the CPU. Negative and conjugate bits are kept. Non-leaf tensors arrive as leaves with their
`requires_grad`; where the writer has a trace, it and the reader's are told of them instead (see `codec.dumps`). Hooks
on tensors do not travel. A tensor with Python attributes, a quantized or meta one, and a subclass take torch's own
`__reduce_ex__`, whose storages come back here.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from actorrpc.wire.message import INLINE, Writing, now

SMALL: Final = 8 * 1024
"""Storages, and spans of views, up to this many bytes are sent whole."""
Reduced: TypeAlias = tuple[Any, ...]
_Bytes: TypeAlias = bytes | pickle.PickleBuffer

_REQUIRES_GRAD, _PARAMETER, _CONJ, _NEG, _RECORDED = 1, 2, 4, 8, 16
_STRIDED = torch.strided
_CPU = torch.device("cpu")
_DTYPES: Final = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}
_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}

_TORCHS_OWN: Final = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)

# ctypes.memmove gives up the GIL, and getting it back can take a switch interval (5 ms) in a busy process.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _Late:
    """A storage of which small views were met: what to send of it is decided when all of them are known."""

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.storage = storage
        self.views: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self.whole = False

    def add(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, nbytes: int) -> int:
        # Down to 16, the largest item size, so that offsets in a piece are whole items whatever each view's dtype.
        start = offset * itemsize & ~15
        end = (offset + _extent(shape, stride)) * itemsize
        self.views.append((start, end, nbytes, (offset, shape, stride, itemsize)))
        return len(self.views) - 1

    def decide(self, writing: Writing) -> tuple[list[_Bytes], list[Any], int]:
        """Decides what is sent.

        Returns:
            The pieces to send; for each view the number of its piece, the byte of the storage at which that begins,
            and, if the piece is a copy of the view alone, its stride there; the alignment that the pieces want.
        """
        pieces: list[_Bytes] = []
        places: list[Any] = [None] * len(self.views)

        def span(members: Sequence[int], start: int, end: int) -> None:
            for i in members:
                places[i] = (len(pieces), start, None)
            pieces.append(_contents(writing, self.storage, start, end - start))

        def copies(members: Sequence[int]) -> None:
            made: dict[tuple[Any, ...], Any] = {}
            for i in members:
                key = self.views[i][3]
                if key not in made:
                    offset, shape, stride, itemsize = key
                    view = torch.empty(0, dtype=_BY_SIZE[itemsize], device=self.storage.device)
                    copy = view.set_(self.storage, offset, shape, stride).clone()
                    made[key] = (len(pieces), 0, copy.stride())
                    pieces.append(_contents(writing, copy.untyped_storage(), 0, copy.nbytes))
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
        return pieces, places, max(view[3][3] for view in self.views)

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


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many items a view spans, from its first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _storages(table: Any) -> list[tuple[list[torch.UntypedStorage], list[Any]]]:
    return [([_storage_over(piece, align) for piece in pieces], places) for pieces, places, align in table]


def finish(writing: Writing) -> list[tuple[list[_Bytes], list[Any], int]]:
    """Decides what to send of the storages that were left open; makes the table for `write_late`."""
    return [late.decide(writing) for late in writing.late.values()]


def _memory(storage: torch.UntypedStorage, start: int, nbytes: int) -> pickle.PickleBuffer:
    """The bytes of a part of a storage, without a copy if it is on the CPU; they keep the storage alive."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    raw.set_(storage, start, (nbytes,), (1,))
    array: Any = raw.cpu().numpy()
    return pickle.PickleBuffer(array)


def _contents(writing: Writing, storage: torch.UntypedStorage, start: int, nbytes: int) -> _Bytes:
    if storage.device == _CPU and writing.fits(nbytes):
        return ctypes.string_at(storage.data_ptr() + start, nbytes) if nbytes else b""
    return _memory(storage, start, nbytes)


def _message() -> Writing:
    if now.writing is None:
        raise RuntimeError("tensors are reduced only while a Codec writes a message")
    return now.writing


def reduce_tensor(tensor: torch.Tensor, flags: int = 0) -> Reduced:
    """The reducer of plain tensors; see the module for the rule."""
    if tensor.requires_grad and not flags & _RECORDED:
        trace = (now.writing or _message()).trace
        if trace is not None:
            make, arguments = reduce_tensor(tensor, flags | _RECORDED)[:2]
            return _make_recorded, (trace.add(tensor), make, arguments)
        flags |= _REQUIRES_GRAD
    if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_meta or tensor.__dict__:
        return _reduce_other(tensor, flags)
    try:
        shape, stride = tuple(tensor.shape), tensor.stride()
    except RuntimeError:  # a nested tensor, which says that its layout is strided
        return _torch_reduced(tensor)
    dtype = tensor.dtype
    if dtype.is_complex and tensor.is_conj():
        flags |= _CONJ
    if tensor.is_neg():
        flags |= _NEG
    name = _NAMES[dtype]
    nbytes = tensor.nbytes
    if not nbytes:
        return _make, (b"", name, shape, stride, None, flags)
    writing = now.writing or _message()
    storage = tensor.untyped_storage()
    key = storage._cdata
    anchor = writing.anchors.get(key)
    if anchor is not None:
        return _make_view, (anchor, name, shape, stride, tensor.storage_offset(), flags)
    size = storage.nbytes()
    contiguous = tensor.is_contiguous()
    if not contiguous:  # it may view the same bytes several times
        nbytes = min(nbytes, _extent(shape, stride) * dtype.itemsize)
    if (size <= SMALL or size <= 2 * nbytes) and key not in writing.late:
        writing.anchors[key] = tensor
        contents = _contents(writing, storage, 0, size)
        # No offset means that the tensor is its storage, which the reader can then make in one step.
        offset = None if size == nbytes and contiguous else tensor.storage_offset()
        return _make, (contents, name, shape, stride, offset, flags)
    late = writing.late.get(key)
    if late is None:
        late = writing.late[key] = _Late(len(writing.late), storage)
    start = int(tensor.storage_offset())
    number = late.add(start, shape, stride, dtype.itemsize, nbytes)
    return _make_late, (late.number, number, name, shape, stride, start, flags)


def reduce_parameter(parameter: torch.nn.Parameter) -> Reduced:
    """The reducer of `torch.nn.Parameter` itself (its subclasses take torch's way)."""
    return reduce_tensor(parameter, _PARAMETER)


def reduce_subclass(tensor: torch.Tensor) -> Reduced:
    """The reducer of subclasses that have none of their own: torch's, but recorded as others are."""
    reduced = _torch_reduced(tensor)
    trace = now.writing.trace if now.writing is not None else None
    if trace is None or not tensor.requires_grad or type(tensor).__reduce_ex__ not in _TORCHS_OWN:
        return reduced
    make, arguments = reduced[:2]  # there is no more in what torch gives
    return _make_recorded, (trace.add(tensor), _make_leaf, (make, *arguments))


def _torch_reduced(tensor: Any) -> Reduced:
    reduced: Reduced = tensor.__reduce_ex__(5)
    return reduced


def _reduce_other(tensor: torch.Tensor, flags: int) -> Reduced:
    layout = tensor.layout
    if layout is _STRIDED or tensor.__dict__ or str(layout) not in _LAYOUTS or tensor.is_meta:
        return _torch_reduced(tensor)
    plain = tensor.detach()
    coalesced = None
    parts: tuple[torch.Tensor, ...]
    if layout is torch.sparse_coo:
        parts = (plain._indices(), plain._values())
        coalesced = plain.is_coalesced()
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = plain.crow_indices(), plain.col_indices(), plain.values()
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = plain.ccol_indices(), plain.row_indices(), plain.values()
    else:
        return _torch_reduced(tensor)
    return _make_sparse, (str(layout), parts, tuple(tensor.shape), coalesced, flags)


def reduce_untyped_storage(storage: torch.UntypedStorage) -> Reduced:
    """The reducer of storages: whole, and shared with the tensors of the message that view it."""
    size = storage.nbytes()
    if storage.device.type == "meta":
        return _meta_storage, (size,)
    writing = _message()
    key = storage._cdata
    if (anchor := writing.anchors.get(key)) is not None:
        return _storage_of, (anchor,)
    if (late := writing.late.get(key)) is not None:
        late.whole = True
        return _late_storage, (late.number,)
    if size:
        writing.anchors[key] = storage
    return _storage_over, (_contents(writing, storage, 0, size),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Reduced:
    """The reducer of typed storages."""
    return _typed_storage, (storage._untyped_storage, _NAMES[storage.dtype])


def _storage_over(data: bytes | bytearray | memoryview, align: int = 8) -> torch.UntypedStorage:
    """A storage of these bytes: in place if they are writable memory from a frame, else in memory of torch's."""
    size = len(data)
    if size > INLINE or (isinstance(data, memoryview) and size):
        raw = torch.frombuffer(data, dtype=torch.uint8)
        if align > 8 and raw.data_ptr() % align:  # frames are only known to be at 8
            raw = raw.clone()
        return raw.untyped_storage()
    raw = torch.empty(size, dtype=torch.uint8, device=_CPU)
    _copy(raw.data_ptr(), bytes(data), size)
    return raw.untyped_storage()


def _over(storage: torch.UntypedStorage, name: str, shape: Any, stride: Any, offset: int, flags: int) -> torch.Tensor:
    tensor = torch.empty(0, dtype=_DTYPES[name], device=_CPU)
    nbytes = storage.nbytes()
    # set_, not view or as_strided: a view of another tensor that requires grad could not be changed in place.
    tensor.set_(storage, offset, shape, stride)
    if storage.nbytes() != nbytes:  # it makes the storage larger where it can, with whatever lies there
        raise ValueError(f"{nbytes} bytes arrived for a {name} tensor of shape {tuple(shape)}")
    return _flagged(tensor, flags) if flags else tensor


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & (_CONJ | _NEG):
        # torch sets every bit that is named, whatever value is given.
        bits = {name: True for name, flag in (("conj", _CONJ), ("neg", _NEG)) if flags & flag}
        torch._utils.set_tensor_metadata(tensor, bits)  # type: ignore[no-untyped-call]
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & _REQUIRES_GRAD))
    return tensor.requires_grad_(bool(flags & _REQUIRES_GRAD))


def _make(data: Any, name: str, shape: Any, stride: Any, offset: int | None, flags: int) -> torch.Tensor:
    dtype = _DTYPES[name]
    if offset is None and type(data) is bytes:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)
        if tensor.untyped_storage().nbytes() != len(data):
            raise ValueError(f"{len(data)} bytes arrived for a {name} tensor of shape {tuple(shape)}")
        _copy(tensor.data_ptr(), data, len(data))
        return _flagged(tensor, flags) if flags else tensor
    return _over(_storage_over(data, dtype.itemsize), name, shape, stride, offset or 0, flags)


def _make_recorded(mark: Any, make: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> torch.Tensor:
    tensor = make(*arguments)
    trace = getattr(now.reading.notes, "trace", None) if now.reading is not None else None
    if trace is None:  # a leaf, as outside of contexts: this side has already done with its context
        return tensor.requires_grad_()
    trace.take(tensor.requires_grad_(False), mark)
    return tensor


def _make_leaf(make: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    with torch.no_grad():  # torch makes it and turns it into the subclass, which would be a step of a graph
        return make(*arguments)


def _make_view(anchor: Any, name: str, shape: Any, stride: Any, offset: int, flags: int) -> torch.Tensor:
    return _over(_storage_of(anchor), name, shape, stride, offset, flags)


def _make_late(group: int, view: int, name: str, shape: Any, stride: Any, offset: int, flags: int) -> torch.Tensor:
    if now.reading is None:
        raise RuntimeError("views of large storages are read only by a Codec")
    storages, places = now.reading.late(_storages)[group]
    piece, start, copied = places[view]
    if copied is not None:
        return _over(storages[piece], name, shape, copied, 0, flags)
    return _over(storages[piece], name, shape, stride, offset - start // _DTYPES[name].itemsize, flags)


def _make_sparse(layout: str, parts: Any, shape: Any, coalesced: bool | None, flags: int) -> torch.Tensor:
    if coalesced is not None:
        indices, values = parts
        tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
    else:
        rows, columns, values = parts
        kind = _LAYOUTS[layout]
        tensor = torch.sparse_compressed_tensor(rows, columns, values, shape, layout=kind, check_invariants=False)
    return _flagged(tensor, flags) if flags else tensor


def _storage_of(anchor: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return anchor if isinstance(anchor, torch.UntypedStorage) else anchor.untyped_storage()


def _late_storage(group: int) -> torch.UntypedStorage:
    if now.reading is None:
        raise RuntimeError("views of large storages are read only by a Codec")
    whole: torch.UntypedStorage = now.reading.late(_storages)[group][0][0]
    return whole


def _meta_storage(size: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]


def _typed_storage(storage: torch.UntypedStorage, name: str) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=_DTYPES[name], _internal=True)  # type: ignore[no-untyped-call]


class Table(dict[type, Callable[[Any], Any]]):
    """Reducers by class, for picklers; subclasses of tensors come without being named."""

    def __missing__(self, kind: type) -> Callable[[Any], Reduced]:
        if issubclass(kind, torch.Tensor):
            return reduce_subclass
        raise KeyError(kind)


REDUCERS: Final[dict[type, Callable[[Any], Reduced]]] = {
    torch.Tensor: reduce_tensor,
    torch.nn.Parameter: reduce_parameter,
    torch.UntypedStorage: reduce_untyped_storage,
    torch.TypedStorage: reduce_typed_storage,
}
"""What every codec begins with."""
