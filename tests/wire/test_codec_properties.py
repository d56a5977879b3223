"""What stands in a message arrives equal in all that a user can see; whatever happens to its bytes, nothing crashes.

Equal means: type, value, dtype, shape, stride, flags, `requires_grad`; what was one object is one, what shared memory
shares it, and nothing else does; all can be written to, and the sender's own does not change.
"""

from __future__ import annotations

import resource
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import actorrpc as rpc
from actorrpc.errors import DeserializationError
from actorrpc.wire.codec import Codec
from actorrpc.wire.spans import SMALL
from tests.wire.strategies import Point, Slotted, Tagged, Thing, messages
from tests.worlds import World, inside, run_processes

QUICK = settings(
    max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
MANY = settings(QUICK, max_examples=500, derandomize=False, print_blob=True)
FEW = settings(QUICK, max_examples=15)

DELIVERIES: list[Callable[[Any], Any]] = [
    lambda frame: frame,  # the sender's own memory, as in a call to oneself
    bytes,
    bytearray,
    lambda frame: memoryview(bytearray(b"x" + bytes(frame)))[1:],  # writable, and not aligned
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.detach().untyped_storage()


def _steps(array: Any) -> list[tuple[int, int]]:
    """Sizes and strides, but for those dimensions that have one item at most: their stride means nothing."""
    return [(n, step) for n, step in zip(array.shape, array.strides, strict=True) if n > 1] if array.size else []


def content(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's items, in order, as they lie in memory (neither conjugated nor negated)."""
    size, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.element_size()]
    plain = torch.empty(0, dtype=kind).set_(storage_of(tensor), offset, size, stride)
    return bytes(plain.numpy().tobytes())


class Comparison:
    """Compares what was sent with what has come."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arrays: list[tuple[Any, Any]] = []
        self.storages: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def same(self, a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if id(a) in self.pairs:
            if not isinstance(a, int | float | complex | str | bytes | tuple | frozenset | types.NoneType):
                assert self.pairs[id(a)][1] is b, "one object has become two"
            return
        self.pairs[id(a)] = a, b
        if isinstance(a, torch.Tensor):
            self._same_tensors(a, b)
        elif isinstance(a, torch.UntypedStorage):
            assert bytes(a) == bytes(b)
            self.storages.append((a, b))
        elif isinstance(a, torch.TypedStorage):
            assert a.dtype == b.dtype
            assert bytes(a._untyped_storage) == bytes(b._untyped_storage)
            self.storages.append((a._untyped_storage, b._untyped_storage))
        elif isinstance(a, torch.Generator):
            assert torch.equal(a.get_state(), b.get_state())
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()
            assert b.flags.writeable or not a.flags.writeable
            assert b.flags.aligned or not a.flags.aligned
            if a.flags.c_contiguous or a.flags.f_contiguous:  # numpy's own pickles make all others so
                assert _steps(a) == _steps(b)
            self.arrays.append((a, b))
        elif isinstance(a, nn.Module):
            self.same(*({k: v for k, v in vars(m).items() if k[0] != "_"} for m in (a, b)))
            for part in ("_parameters", "_buffers", "_modules"):
                self.same(dict(getattr(a, part)), dict(getattr(b, part)))
        elif isinstance(a, dict):
            assert len(a) == len(b)
            for (k, v), (m, w) in zip(a.items(), b.items(), strict=True):
                self.same(k, m)
                self.same(v, w)
        elif isinstance(a, list | tuple):
            assert len(a) == len(b)
            for v, w in zip(a, b, strict=True):
                self.same(v, w)
        elif isinstance(a, Point | Thing):
            self.same(vars(a), vars(b))
        elif isinstance(a, Slotted):
            self.same(a.x, b.x)
        elif isinstance(a, set | frozenset):
            assert sorted(map(repr, a)) == sorted(map(repr, b))
        else:
            assert repr(a) == repr(b)

    def _same_tensors(self, a: torch.Tensor, b: torch.Tensor) -> None:
        assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
        assert b.is_leaf
        assert a.__dict__ == b.__dict__
        if a.layout is not torch.strided:
            assert torch.equal(a.to_dense(), b.to_dense())
            assert a.layout is not torch.sparse_coo or a.is_coalesced() == b.is_coalesced()
        elif a.is_quantized:
            assert a.qscheme() == b.qscheme()
            assert torch.equal(a.int_repr(), b.int_repr())
            assert torch.equal(a.dequantize(), b.dequantize())
        else:
            assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
            assert content(a) == content(b)
            assert not b._is_view() or type(b) is Tagged  # which torch makes of a plain one
            assert b.data_ptr() % b.element_size() == 0
            self.tensors.append((a, b))

    def check_memory(self) -> None:
        """What shared memory shares it, in the same places; nothing else does."""
        held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for a, b in self.tensors:
            if a.numel():
                held.setdefault(storage_of(a)._cdata, []).append((a, b))
        whole = {a._cdata: b for a, b in self.storages if a.nbytes()}
        owners: dict[int, int] = {}
        for key, pairs in held.items():
            extents = [1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) for a, _ in pairs]
            begins = [int(a.storage_offset()) * a.element_size() for a, _ in pairs]
            ends = [begin + n * a.element_size() for begin, n, (a, _) in zip(begins, extents, pairs, strict=True)]
            seen = [min(a.nbytes, n * a.element_size()) for (a, _), n in zip(pairs, extents, strict=True)]
            nbytes, span = storage_of(pairs[0][0]).nbytes(), max(ends) - min(begins)
            stays = nbytes <= SMALL or span + 16 <= max(SMALL, 2 * sum(seen)) or key in whole
            for a, b in pairs:
                # a copy that was made of a small view is as dense as it can be, and is so already where it was
                if stays or a.is_contiguous():
                    assert a.stride() == b.stride()
                if stays:
                    first, other = pairs[0]
                    moved = b.data_ptr() - other.data_ptr(), a.data_ptr() - first.data_ptr()
                    assert moved[0] == moved[1], "an alias is none any more"
                    if key in whole:
                        assert b.untyped_storage().data_ptr() == whole[key].data_ptr()
                if not stays and len(pairs) == 1:
                    assert b.untyped_storage().nbytes() <= max(SMALL, 2 * sum(seen)) + 32, "a view took much along"
                assert owners.setdefault(b.untyped_storage().data_ptr(), key) == key, "two storages have become one"

    def check_use(self) -> None:
        """All that has come can be written to, and what was sent does not change by it."""
        before = [content(a) for a, _ in self.tensors], [a.tobytes() for a, _ in self.arrays]
        for _, b in self.tensors:
            if b.numel():
                with torch.no_grad():
                    b.detach().view(b.shape)  # the tensor can be used
                    torch.empty(0, dtype=torch.uint8).set_(b.untyped_storage()).fill_(1)
                if not b.requires_grad and 0 not in b.stride() and b.dtype is torch.float32 and b.is_contiguous():
                    b.add_(1)
        for _, b in self.arrays:
            memory = b.view(np.uint8) if b.flags.c_contiguous and b.dtype.kind not in "OV" and b.ndim else None
            if memory is not None and b.size and b.flags.writeable:
                memory[...] = 0
        assert before == ([content(a) for a, _ in self.tensors], [a.tobytes() for a, _ in self.arrays])


def compare(sent: Any, come: Any) -> None:
    comparison = Comparison()
    comparison.same(sent, come)
    comparison.check_memory()
    comparison.check_use()


def arrives_equal(message: Any, deliver: Callable[[Any], Any], by_cloudpickle: bool) -> None:
    codec = Codec()
    sent = [message, (lambda: message)] if by_cloudpickle else [message]
    come = codec.loads([deliver(frame) for frame in codec.dumps(sent)])
    compare(sent[0], come[0])


everything = given(messages(), st.sampled_from(DELIVERIES), st.booleans())


def test_messages_of_all_kinds_arrive_equal_with_their_aliases_and_writable() -> None:
    QUICK(everything(arrives_equal))()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_messages_of_all_kinds_arrive_equal_with_their_aliases_and_writable() -> None:
    MANY(everything(arrives_equal))()


def give_back(message: Any) -> Any:
    return message


@inside
def test_messages_of_all_kinds_go_to_another_worker_and_come_back_equal() -> None:
    def there_and_back(message: Any) -> None:
        # Twice the journey: what was a copy of a small view the first time is whole the second.
        compare(message, rpc.rpc_sync(1, give_back, args=(message,), timeout=30))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FEW(given(messages())(there_and_back))()


# -- broken frames: in a process of their own, with little memory, which a crash would end

KINDS = st.sampled_from(["cut", "flip", "drop", "twice", "swap", "grow"])
INJURIES = st.lists(st.tuples(KINDS, st.integers(0, 10**9)), min_size=1, max_size=4)


def breaks(message: Any, injuries: list[tuple[str, int]], deliver: Callable[[Any], Any]) -> None:
    codec = Codec()
    frames: list[Any] = [bytearray(frame) for frame in codec.dumps(message)]
    for kind, number in injuries:
        i = number % len(frames)
        frame, at = frames[i], number // 7 % max(1, len(frames[i]))
        if kind == "cut":
            del frame[at:]
        elif kind == "flip" and frame:
            frame[at] ^= 1 << number % 8
        elif kind == "drop" and len(frames) > 1:
            del frames[i]
        elif kind == "twice":
            frames.insert(i, bytearray(frame))
        elif kind == "swap":
            frames[i], frames[at % len(frames)] = frames[at % len(frames)], frames[i]
        elif kind == "grow":
            frame += bytes(number % 100)
    try:
        codec.loads([deliver(frame) for frame in frames])
    except DeserializationError as e:
        str(e)


def injure(_: int, examples: int, seeded: bool) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # a flipped length may ask for any amount
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = given(messages(plainly=True), INJURIES, st.sampled_from(DELIVERIES[1:]))(breaks)
        settings(QUICK, max_examples=examples, derandomize=seeded)(run)()


def test_broken_frames_give_an_error_of_ours_or_a_value_and_never_a_crash() -> None:
    (outcome,) = run_processes(injure, 1, args=(150, True), timeout=60)
    assert outcome.returned, f"it crashed: {outcome}"
    assert not outcome.traceback, outcome.traceback


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_broken_frames_give_an_error_of_ours_or_a_value_and_never_a_crash() -> None:
    (outcome,) = run_processes(injure, 1, args=(2000, False), timeout=500)
    assert outcome.returned, f"it crashed: {outcome}"
    assert not outcome.traceback, outcome.traceback


def test_a_world_survives_a_message_that_cannot_be_read(pair: World) -> None:
    pair.on(0, _send_broken)


def _send_broken() -> None:
    from actorrpc import session
    from actorrpc.services.ids import EXECUTOR

    worker = session.current().worker
    whole = worker.codec.dumps((give_back, (torch.zeros(100_000),), {}))
    for frames in (whole[:1], [whole[0][:20], *whole[1:]], [b""], [whole[0], b"", b""], [b"\x80\x05N."]):
        call = worker.calls.post(1, EXECUTOR, frames, 10.0, "broken")
        with pytest.raises((DeserializationError, TypeError)):  # the last can be read
            worker.wait_result(call)
    assert rpc.rpc_sync(1, give_back, args=(1,)) == 1
