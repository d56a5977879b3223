"""What may stand in a message, drawn at random: containers, tensors over shared storages, arrays, objects."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

Draw = st.DrawFn

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits", "torch.float4"))
    },
    key=str,
)
GRADS = [d for d in DTYPES if (d.is_floating_point and d.itemsize > 1) or d.is_complex]
NEGATABLE = [torch.float32, torch.float64, torch.complex64, torch.complex128]
ARRAYS = [
    "?", "i1", "u1", "<i2", ">i4", "i8", "u2", "u4", "u8", "f2", "f4", ">f8", "c8", "c16", "S5", "U3", "M8[ns]",
    "M8[D]", "m8[s]", "V3",
]  # fmt: skip
STRUCTURED = np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", "S3"), ("d", [("e", "M8[s]")])])
"""Without gaps, which numpy does not always copy."""


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


class Thing:
    """Has attributes; equal to none but itself."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Tagged(torch.Tensor):
    tag: str


Pair = collections.namedtuple("Pair", ["left", "right"])
CONTAINERS = [list, tuple, dict, set, frozenset, Point, Thing, Slotted, Pair, collections.OrderedDict]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), st.complex_numbers(),
    st.text(), st.binary(max_size=50),
)  # fmt: skip
hashables = st.one_of(
    scalars, st.sampled_from([torch.float8_e5m2, torch.strided, torch.device("cpu"), torch.Size([2, 3])]),
    st.tuples(scalars, scalars),
)  # fmt: skip
others = st.one_of(
    scalars,
    st.binary(min_size=1, max_size=50).map(bytearray),
    st.sampled_from(DTYPES),
    st.sampled_from(["cpu", "cuda:1", "meta"]).map(torch.device),
    st.lists(st.integers(0, 5), max_size=4).map(torch.Size),
    st.integers(0, 2**40).map(lambda seed: torch.Generator().manual_seed(seed)),
    st.sampled_from([torch.add, torch.relu, len, Point, torch.nn.Linear, np.sum, np.float32]),
)


def fresh(storage: torch.UntypedStorage, dtype: torch.dtype, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@st.composite
def views(draw: Draw, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor over a storage, of any dtype, shape and stride that fits, and any flags."""
    kind = draw(st.sampled_from(["plain", "parameter", "grad", "conj", "neg", "tagged", "plain"]))
    dtypes = {"conj": [torch.complex64, torch.complex128], "neg": NEGATABLE, "tagged": NEGATABLE, "grad": GRADS}
    dtype = draw(st.sampled_from(dtypes.get(kind, DTYPES)))
    room = storage.nbytes() // dtype.itemsize
    shape: list[int] = []
    stride: list[int] = []
    extent = 1
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([2, 3, 1, 5, 6, 0]))
        # dense ones as often as wild ones; 0 is an expanded dimension
        step = draw(st.one_of(st.just(extent), st.integers(0, max(1, room // 6))))
        if size and extent + (size - 1) * step > room:
            step = 0
        shape.insert(0, size)
        stride.insert(0, step)
        extent += max(0, size - 1) * step
    if draw(st.booleans()) and room > 10:  # one large dimension
        size = draw(st.integers(1, room))
        shape, stride, extent = [size], [draw(st.sampled_from([0, 1, max(1, room // size)]))], 0
        extent = 1 + (size - 1) * stride[0]
        if extent > room:
            stride, extent = [1], size
    offset = draw(st.integers(0, max(0, room - extent)))
    tensor = fresh(storage, dtype, shape, stride, offset) if room else torch.empty(0, dtype=dtype)
    if kind == "parameter":
        return nn.Parameter(tensor, requires_grad=dtype in GRADS and draw(st.booleans()))
    if kind == "grad":
        return tensor.requires_grad_()
    if kind == "conj":
        return tensor.conj()
    if kind == "neg":
        return torch._neg_view(tensor)
    if kind == "tagged":
        tagged = tensor.as_subclass(Tagged)
        tagged.tag = "t"
        return tagged
    return tensor


def typed(storage: torch.UntypedStorage) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]


@st.composite
def sparse(draw: Draw) -> torch.Tensor:
    dense = torch.zeros(draw(st.integers(1, 4)), 5, dtype=draw(st.sampled_from([torch.float32, torch.int64])))
    for _ in range(draw(st.integers(0, 4))):
        dense[draw(st.integers(0, len(dense) - 1)), draw(st.integers(0, 4))] = draw(st.integers(-9, 9))
    kind = draw(st.sampled_from(["coo", "uncoalesced", "csr", "csc"]))
    if kind == "uncoalesced":
        twice = torch.tensor([[0, 0], [1, 1]])
        return torch.sparse_coo_tensor(twice, torch.tensor([1.0, 2.0]), (3, 3))
    back: torch.Tensor = getattr(dense, "to_sparse" if kind == "coo" else f"to_sparse_{kind}")()
    return back


@st.composite
def quantized(draw: Draw) -> torch.Tensor:
    values = torch.randn(draw(st.integers(1, 4)), draw(st.integers(1, 600)))
    dtype = draw(st.sampled_from([torch.qint8, torch.quint8, torch.qint32]))
    if draw(st.booleans()):
        return torch.quantize_per_tensor(values, 0.1, 3, dtype)
    n = len(values)
    return torch.quantize_per_channel(values, torch.full((n,), 0.1), torch.zeros(n, dtype=torch.int64), 0, dtype)


@st.composite
def arrays(draw: Draw) -> np.ndarray[Any, Any]:
    dtype = STRUCTURED if draw(st.integers(0, 5)) == 0 else np.dtype(draw(st.sampled_from(ARRAYS)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    if draw(st.integers(0, 5)) == 0:
        shape = [draw(st.integers(1, 5000)), 2]
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = np.resize(np.arange(1, 120, dtype=np.uint8), nbytes)
    if dtype.kind in "?bU":  # not every byte is a bool, not every word a letter
        data = (data % 2 if dtype.kind != "U" else data * 0).astype(np.uint8)
    array: np.ndarray[Any, Any] = np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()
    if array.ndim and draw(st.booleans()):
        array = array[:: draw(st.sampled_from([2, -1, 1]))]
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


@st.composite
def modules(draw: Draw) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    if draw(st.booleans()):
        module[1].weight = module[0].weight
    if draw(st.booleans()):
        module[0].bias.requires_grad_(False)
    return module.train(draw(st.booleans()))


def container(kind: Any, first: Any, some: list[Any], keys: list[Any]) -> Any:
    """A container of a kind, with parts in it; sets hold the keys."""
    if kind in (list, tuple, Slotted):
        return Slotted(some) if kind is Slotted else kind(some)
    if kind in (set, frozenset):
        return kind(keys)
    if kind is dict:
        return dict(zip(keys, some, strict=True))
    if kind is Thing:
        return Thing(a=first, b=some)
    return collections.OrderedDict(enumerate(some)) if kind is collections.OrderedDict else kind(first, some)


@st.composite
def messages(draw: Draw, plainly: bool = False) -> Any:
    """A message: containers of containers, in which the same object may stand twice, and two tensors share a storage.

    Arguments:
        plainly: leaves the kinds out that take long to make.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = []
        for _ in range(draw(st.integers(1, 2))):
            nbytes = draw(st.sampled_from([64, 200_000, 200, 8200, 16, 8192, 40_000, 0]))
            # bytes that are valid for bool, too, and are no NaN of any float
            pool.append((torch.arange(nbytes) % 2).to(torch.uint8).untyped_storage())
        kinds: list[st.SearchStrategy[Any]] = [views(storage) for storage in pool] * 3 + [arrays(), others]
        if not plainly:
            kinds += [sparse(), quantized(), modules(), st.sampled_from(pool)]
            kinds.append(st.sampled_from(pool).map(typed))
        leaves = draw(st.lists(st.one_of(*kinds), min_size=2, max_size=8))
        parts: list[Any] = list(leaves)  # what is made last may hold what was made before, more than once
        part = st.sampled_from(range(1000)).map(lambda i: parts[i % len(parts)])
        for _ in range(draw(st.integers(1, 6))):
            some = draw(st.lists(part, max_size=4))
            keys = draw(st.lists(hashables, min_size=len(some), max_size=len(some)))
            first = some[0] if some else None
            parts.append(container(draw(st.sampled_from(CONTAINERS)), first, some, keys))
        return [parts[-1], *draw(st.lists(part, max_size=4)), *leaves]
