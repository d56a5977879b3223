"""Tensors and storages in messages: raw bytes of whatever dtype, and aliases that stay aliases.

The rule, for each storage in a message:

* It is met first through a tensor that covers at least half of it, or it is at most `SMALL` bytes: it is sent whole,
  once, and every further view of it refers to that.
* Else its views are only counted while the message is written, and decided on at its end. If the span of them all is at
  most `SMALL` bytes, or at most twice the bytes of the views, the span is sent. Else views that do not overlap are told
  apart, the same question is asked for each group of overlapping ones, and a group that still is too sparse is sent as
  copies, one for each distinct view: the one case in which aliasing (and the stride, unless the view is dense) is lost.

So a row of a big matrix costs a row, two rows cost two rows, and a module's tied weights stay tied.

Tensors arrive on the CPU, but for those for which the writer's `Leaving` says otherwise: what stands for their storages
in the message then has the name of a device, where the reader's `Landing` puts them (`message`).

Negative and conjugate bits are kept. Non-leaf tensors arrive as leaves with their `requires_grad`; where the writer has
a trace, it and the reader's are told of them instead (see `codec.dumps`). Hooks on tensors do not travel. A tensor with
Python attributes, a quantized or meta one, and a subclass take torch's own `__reduce_ex__`, whose storages come back
here; but where all that a subclass adds is its type and attributes, its plain tensor is written as others are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from actorrpc.wire.message import INLINE, Way, Writing, now
from actorrpc.wire.spans import SMALL, Late, contents, extent, raw_bytes

Reduced: TypeAlias = tuple[Any, ...]

_REQUIRES_GRAD, _PARAMETER, _CONJ, _NEG, _RECORDED = 1, 2, 4, 8, 16
_STRIDED = torch.strided
_CPU = torch.device("cpu")
_DTYPES: Final = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}
_LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}

_OF_TYPE: Final = torch._tensor._rebuild_from_type_v2
_PLAINLY: Final = torch._utils._rebuild_tensor_v2
"""What torch makes subclasses anew with, and what plain tensors."""
_TORCHS_OWN: Final = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)

# ctypes.memmove gives up the GIL, and getting it back can take a switch interval (5 ms) in a busy process.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def _storages(table: Any) -> list[tuple[list[torch.UntypedStorage], list[Any]]]:
    return [
        ([_placed(_storage_over(piece, align), there) for piece in pieces], places)
        for pieces, places, align, there in table
    ]


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
    writing = now.writing or _message()
    way = None if writing.leaving is None else writing.leaving.way_of(tensor)
    if not nbytes:
        return _made(way, (b"", name, shape, stride, None, flags))
    storage = tensor.untyped_storage()
    key = storage._cdata
    anchor = writing.anchors.get(key)
    if anchor is not None:
        return _make_view, (anchor, name, shape, stride, tensor.storage_offset(), flags)
    size = storage.nbytes()
    contiguous = tensor.is_contiguous()
    if not contiguous:  # it may view the same bytes several times
        nbytes = min(nbytes, extent(shape, stride) * dtype.itemsize)
    if (size <= SMALL or size <= 2 * nbytes) and key not in writing.late:
        writing.anchors[key] = tensor
        data = contents(writing, storage, 0, size, way)
        # No offset means that the tensor is its storage, which the reader can then make in one step.
        offset = None if size == nbytes and contiguous else tensor.storage_offset()
        return _made(way, (data, name, shape, stride, offset, flags))
    late = writing.late.get(key)
    if late is None:
        late = writing.late[key] = Late(len(writing.late), storage, way)
    start = int(tensor.storage_offset())
    number = late.add(start, shape, stride, dtype.itemsize, nbytes)
    return _make_late, (late.number, number, name, shape, stride, start, flags)


def _made(way: Way | None, arguments: tuple[Any, ...]) -> Reduced:
    if way is None or way[1] is None:
        return _make, arguments
    return _make_placed, (way[1], *arguments)


def reduce_parameter(parameter: torch.nn.Parameter) -> Reduced:
    """The reducer of `torch.nn.Parameter` itself (its subclasses take torch's way)."""
    return reduce_tensor(parameter, _PARAMETER)


def reduce_subclass(tensor: torch.Tensor) -> Reduced:
    """The reducer of subclasses that have none of their own: torch's, but recorded as others are."""
    reduced = _torch_reduced(tensor)
    if not tensor.requires_grad and reduced[0] is _OF_TYPE and reduced[1][0] is _PLAINLY:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(torch.Tensor)
        _, cls, _, state = reduced[1]
        return _OF_TYPE, (_itself, cls, (plain,), state)
    trace = now.writing.trace if now.writing is not None else None
    if trace is None or not tensor.requires_grad or type(tensor).__reduce_ex__ not in _TORCHS_OWN:
        return reduced
    make, arguments = reduced[:2]  # there is no more in what torch gives
    return _make_recorded, (trace.add(tensor), _make_leaf, (make, *arguments))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
    way = None if writing.leaving is None else writing.leaving.way_of(storage)
    data = contents(writing, storage, 0, size, way)
    if way is None or way[1] is None:
        return _storage_over, (data,)
    return _placed_storage, (data, way[1])


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


def _placed(storage: torch.UntypedStorage, there: str | None) -> torch.UntypedStorage:
    """A storage on the device where it shall be."""
    if there is None:
        return storage
    if now.reading is None:
        raise RuntimeError(f"a tensor for {there} is read only by a Codec")
    return now.reading.put(raw_bytes(storage, 0, storage.nbytes()), there).untyped_storage()


def _placed_storage(data: bytes | bytearray | memoryview, there: str) -> torch.UntypedStorage:
    return _placed(_storage_over(data), there)


def _over(storage: torch.UntypedStorage, name: str, shape: Any, stride: Any, offset: int, flags: int) -> torch.Tensor:
    tensor = torch.empty(0, dtype=_DTYPES[name], device=storage.device)
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


def _make_placed(
    there: str, data: Any, name: str, shape: Any, stride: Any, offset: int | None, flags: int
) -> torch.Tensor:
    return _over(_placed(_storage_over(data, _DTYPES[name].itemsize), there), name, shape, stride, offset or 0, flags)


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
