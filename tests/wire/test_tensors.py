"""Tensors, storages and arrays through the codec: equal in all that a user can see, and in memory of their own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actorrpc.wire.codec import Codec

Roundtrip = Callable[[Any], Any]

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits", "torch.float4"))
    },
    key=str,
)
SMALL_AND_LARGE = [3, 20_000]


@pytest.fixture(params=["immutable", "writable", "misaligned", "direct"])
def roundtrip(request: pytest.FixtureRequest) -> Roundtrip:
    """Through the codec, with frames as different transports hand them over."""
    kind = request.param
    codec = Codec()

    def deliver(frame: Any) -> Any:
        if kind == "direct":
            return frame
        if kind == "immutable":
            return bytes(frame)
        if kind == "writable":
            return bytearray(frame)
        return memoryview(bytearray(b"x" + bytes(frame)))[1:]

    return lambda obj: codec.loads([deliver(frame) for frame in codec.dumps(obj)])


@pytest.fixture
def plain() -> Roundtrip:
    codec = Codec()
    return lambda obj: codec.loads(codec.dumps(obj))


@pytest.fixture(autouse=True)
def _quiet_experimental_kinds() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel")
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def size(frames: list[Any]) -> int:
    return sum(len(frame) for frame in frames)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    assert (a.requires_grad, a.is_leaf or a.requires_grad) == (b.requires_grad, b.is_leaf)
    assert torch.equal(raw(a), raw(b))
    assert b.data_ptr() % b.element_size() == 0
    assert not b._is_view()


@pytest.mark.parametrize("n", SMALL_AND_LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bytes(dtype: torch.dtype, n: int, plain: Roundtrip) -> None:
    data = torch.randint(0, 2 if dtype is torch.bool else 120, (n * dtype.itemsize,), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (n,), (1,))
    back = plain(tensor)
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    received = torch.empty(0, dtype=torch.uint8).set_(back.untyped_storage())
    assert torch.equal(received, data)
    assert back.data_ptr() % dtype.itemsize == 0


@pytest.mark.parametrize("n", SMALL_AND_LARGE)
def test_a_received_tensor_owns_writable_memory(n: int, roundtrip: Roundtrip) -> None:
    tensor = torch.randn(n)
    before = tensor.clone()
    back = roundtrip(tensor)
    assert_same(tensor, back)
    back.add_(1)
    assert torch.equal(tensor, before)
    assert torch.equal(back, before + 1)


@pytest.mark.parametrize("n", SMALL_AND_LARGE)
def test_complex128_is_aligned_to_its_items(n: int, roundtrip: Roundtrip) -> None:
    assert_same(tensor := torch.randn(n, dtype=torch.complex128), roundtrip(tensor))


def test_a_large_writable_frame_becomes_the_memory_of_the_tensor() -> None:
    codec = Codec()
    head, body = codec.dumps(torch.zeros(100_000))
    memory = bytearray(body)
    tensor = codec.loads([head, memory])
    memory[3] = 1
    assert tensor[0] != 0


def test_a_large_tensor_is_written_without_a_copy_and_read_only() -> None:
    tensor = torch.zeros(100_000)
    frames = Codec().dumps(tensor)
    tensor[0] = 1.0
    assert isinstance(frames[1], memoryview)
    assert frames[1].readonly
    assert frames[1][3] != 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2, dtype=torch.int32),
        lambda: torch.randn(100, 100)[5:5],
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(300, 200).t(),
        lambda: torch.randn(5).expand(7, 5),
        lambda: torch.randn(1).expand(100_000),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(10)[2:7],
        lambda: torch.randn(10)[::3],
        lambda: torch.randn(200, 200)[17],
        lambda: torch.randn(10_000)[100:150],
        lambda: torch.as_strided(torch.randn(100), (3, 1), (1, 50)),
        lambda: torch.as_strided(torch.randn(20_000), (100, 100), (1, 1), 7),
        lambda: torch.randn(4, requires_grad=True),
        lambda: torch.randn(4, requires_grad=True) * 2,
        lambda: torch.randn(400, 400, requires_grad=True)[3],
        lambda: nn.Parameter(torch.randn(3)),
        lambda: nn.Parameter(torch.randn(3), requires_grad=False),
        lambda: nn.Parameter(torch.randint(3, (3,)), requires_grad=False),
    ],
)
def test_shape_stride_kind_and_requires_grad_arrive(make: Callable[[], torch.Tensor], roundtrip: Roundtrip) -> None:
    torch.manual_seed(0)
    assert_same(tensor := make(), roundtrip(tensor))


def test_a_received_leaf_that_requires_grad_can_be_used_and_changed_in_place(roundtrip: Roundtrip) -> None:
    for n in SMALL_AND_LARGE:
        for leaf in (torch.ones(n, requires_grad=True), nn.Parameter(torch.ones(n))):
            back = roundtrip(leaf)
            with torch.no_grad():
                back.mul_(3)
            (back * 2).mul_(2).sum().backward()
            assert back.grad is not None
            assert back.grad[0] == 4
            back.detach_()


def test_a_small_received_tensor_can_be_resized(roundtrip: Roundtrip) -> None:
    assert roundtrip(torch.ones(3)).resize_(1000).shape == (1000,)


def test_views_that_share_memory_still_do(roundtrip: Roundtrip) -> None:
    for n in (4, 200):
        base = torch.arange(float(n * n)).reshape(n, n)
        row, column, bits, all_ = roundtrip((base[1], base[:, 1], base.view(torch.int32), base))
        all_[1, 1] = -1
        assert row[1] == -1
        assert column[1] == -1
        assert bits[1, 1] == torch.tensor(-1.0).view(torch.int32)
        assert column.stride() == (n,)
        assert not any(t._is_view() for t in (row, column, bits, all_))


def test_views_met_before_their_base_share_memory_with_it(roundtrip: Roundtrip) -> None:
    base = torch.zeros(300, 300)
    again = roundtrip([base[7], base[:, 7], base])
    again[2].fill_(5)
    assert again[0].eq(5).all()
    assert again[1].eq(5).all()


def test_a_row_of_a_large_matrix_costs_a_row(roundtrip: Roundtrip) -> None:
    base = torch.randn(1000, 1000)
    frames = Codec().dumps([base[3], base[800]])
    assert size(frames) < 2 * 4000 + 1000
    near, far = roundtrip([base[3], base[800]])
    assert torch.equal(near, base[3])
    assert torch.equal(far, base[800])
    assert near.untyped_storage().nbytes() <= 4016


@pytest.mark.parametrize(
    "kib, viewed, whole",
    [(8, 4, True), (8 + 1 / 256, 4, False), (16, 8192, True), (16, 8188, False), (16, 4, False)],
)
def test_a_view_is_cut_out_of_a_storage_over_8_kib_and_over_twice_its_bytes(
    kib: float, viewed: int, whole: bool, roundtrip: Roundtrip
) -> None:
    base = torch.arange(int(kib * 256), dtype=torch.float32)
    back = roundtrip(base[: viewed // 4])
    assert torch.equal(back, base[: viewed // 4])
    assert (back.untyped_storage().nbytes() >= base.untyped_storage().nbytes()) is whole


def test_overlapping_slices_of_a_large_tensor_share_memory_without_the_rest(roundtrip: Roundtrip) -> None:
    base = torch.zeros(1_000_000)
    pair = [base[1000:9000], base[5000:11000], base[900_001:900_101]]
    assert size(Codec().dumps(pair)) < 4 * 10_000 + 2000
    a, b, c = roundtrip(pair)
    b[0] = 7
    assert a[4000] == 7
    assert c.eq(0).all()


def test_sparse_views_of_a_large_tensor_are_copied(roundtrip: Roundtrip) -> None:
    base = torch.randn(1000, 1000)
    column = base[:, 3]
    assert size(Codec().dumps([column, column.view(10, 100), column.view_as(column)])) < 2 * 4000 + 2000
    first, same = roundtrip([column, column.view_as(column)])
    assert torch.equal(first, column)
    assert first.is_contiguous()
    first[0] = 9
    assert same[0] == 9  # equal views share one copy


def test_an_expanded_view_of_a_large_storage_costs_what_it_spans(roundtrip: Roundtrip) -> None:
    wide = torch.randn(1_000_000)[500:600].expand(1000, 100)
    assert size(Codec().dumps(wide)) < 2000
    assert_same(wide, roundtrip(wide))


def test_tensors_are_read_alike_under_any_modes_of_the_reader(roundtrip: Roundtrip) -> None:
    base = torch.randn(100, 100)
    sent = [torch.ones(3), base, base[3], nn.Parameter(torch.ones(2)), torch.zeros(0)]
    with torch.device("meta"), torch.no_grad():
        back = roundtrip(sent)
    for before, after in zip(sent, back, strict=True):
        assert_same(before, after)


def test_close_small_views_of_a_large_storage_keep_stride_and_aliasing(roundtrip: Roundtrip) -> None:
    base = torch.zeros(1_000_000)
    odd, all_ = roundtrip([base[5001:5101:7], base[5000:5101]])
    all_.fill_(2)
    assert odd.stride() == (7,)
    assert odd.eq(2).all()


def test_views_of_several_dtypes_of_one_large_storage_line_up(roundtrip: Roundtrip) -> None:
    base = torch.arange(100_000, dtype=torch.uint8)
    wide = base[1024 : 1024 + 64].view(torch.float64)
    narrow = base[1021:1050]
    got_narrow, got_wide = roundtrip([narrow, wide])
    assert_same(narrow, got_narrow)
    assert_same(wide, got_wide)
    got_wide.zero_()
    assert got_narrow[3:].eq(0).all()


def test_the_same_tensor_twice_is_one_tensor(roundtrip: Roundtrip) -> None:
    tensor = torch.zeros(5000)
    a, b = roundtrip([tensor, tensor])
    assert a is b


def test_messages_do_not_mix_their_storages() -> None:
    codec = Codec()
    base = torch.zeros(10)
    first, second = codec.loads(codec.dumps(base)), codec.loads(codec.dumps(base[2:]))
    first.add_(1)
    assert second.eq(0).all()
    # Storages that die during a message must not lend their identity to new ones.
    grown = [torch.full((3,), float(i)) * 1 for i in range(100)]
    assert [t[0].item() for t in codec.loads(codec.dumps(grown))] == list(range(100))


def test_conjugate_and_negative_bits_are_kept(roundtrip: Roundtrip) -> None:
    for n in SMALL_AND_LARGE:
        tensor = torch.randn(n, dtype=torch.complex64)
        conj = roundtrip(tensor.conj())
        assert conj.is_conj()
        assert torch.equal(conj, tensor.conj())
        neg = roundtrip(tensor.conj().imag)
        assert neg.is_neg()
        assert torch.equal(neg, tensor.conj().imag)
        base, view = roundtrip([tensor, tensor.conj()])
        base.fill_(1j)
        assert view.eq(-1j).all()
    row = torch.randn(500, 500, dtype=torch.complex64)[4].conj()
    assert torch.equal(roundtrip(row), row)


@pytest.mark.parametrize("n", [4, 300])
def test_sparse_layouts_arrive(n: int, roundtrip: Roundtrip) -> None:
    dense = torch.eye(n) * 3
    for tensor in (
        dense.to_sparse(),
        dense.to_sparse().requires_grad_(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (n,)),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ):
        back = roundtrip(tensor)
        assert (back.layout, back.shape, back.requires_grad) == (tensor.layout, tensor.shape, tensor.requires_grad)
        assert back.is_leaf
        assert torch.equal(back.to_dense(), tensor.to_dense())
        if tensor.layout is torch.sparse_coo:
            assert back.is_coalesced() == tensor.is_coalesced()


def test_quantized_tensors_arrive(roundtrip: Roundtrip) -> None:
    for n in (4, 300):
        source = torch.randn(n, n)
        per_tensor = torch.quantize_per_tensor(source, 0.1, 3, torch.qint8)
        per_channel = torch.quantize_per_channel(source, torch.full((n,), 0.1), torch.zeros(n), 0, torch.quint8)
        for tensor in (per_tensor, per_channel):
            back = roundtrip(tensor)
            assert back.qscheme() == tensor.qscheme()
            assert torch.equal(back.int_repr(), tensor.int_repr())
            assert torch.equal(back.dequantize(), tensor.dequantize())


def test_nested_tensors_arrive(roundtrip: Roundtrip) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        parts = [torch.ones(2), torch.zeros(3)]
        for layout in (torch.strided, torch.jagged):
            back = roundtrip(torch.nested.nested_tensor(parts, layout=layout))
            assert back.is_nested
            assert [part.tolist() for part in back.unbind()] == [[1, 1], [0, 0, 0]]


def test_meta_tensors_arrive_without_data(roundtrip: Roundtrip) -> None:
    back = roundtrip(torch.empty(5, 6, device="meta", dtype=torch.float16))
    assert (back.is_meta, back.shape, back.dtype) == (True, (5, 6), torch.float16)


class Tagged(torch.Tensor):
    tag = ""


class Scaled(nn.Parameter):
    pass


def test_subclasses_keep_their_type_attributes_and_aliases(roundtrip: Roundtrip) -> None:
    for n in SMALL_AND_LARGE:
        tagged = torch.zeros(n).as_subclass(Tagged)
        tagged.tag = "x"
        back, view = roundtrip([tagged, tagged[1:]])
        assert type(back) is Tagged
        assert back.tag == "x"
        back.fill_(3)
        assert view.eq(3).all()
        assert isinstance(roundtrip(Scaled(torch.zeros(n))), nn.Parameter)  # torch forgets which one


def test_a_view_of_a_subclass_does_not_take_all_of_it_along(roundtrip: Roundtrip) -> None:
    row: Any = torch.arange(200_000.0).as_subclass(Tagged)[7:9]
    row.tag = "x"
    back = roundtrip(row)
    assert (type(back), back.tag, back.tolist()) == (Tagged, "x", [7, 8])
    assert back.untyped_storage().nbytes() < 1000
    assert not back.requires_grad
    leaf: Any = torch.ones(3).as_subclass(Tagged).requires_grad_()
    leaf.tag = "y"
    assert (roundtrip(leaf).requires_grad, roundtrip(leaf).tag) == (True, "y")


def test_a_tensor_with_attributes_keeps_them(roundtrip: Roundtrip) -> None:
    tensor = torch.zeros(3)
    tensor.note = "hello"  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.zeros(3))
    parameter.note = "there"  # type: ignore[attr-defined]
    assert roundtrip(tensor).note == "hello"
    assert roundtrip(parameter).note == "there"
    assert isinstance(roundtrip(parameter), nn.Parameter)


def test_storages_arrive_and_share_memory_with_tensors(roundtrip: Roundtrip) -> None:
    for n in SMALL_AND_LARGE:
        tensor = torch.zeros(n)
        for obj in ([tensor, tensor.untyped_storage()], [tensor.untyped_storage(), tensor]):
            got = roundtrip(obj)
            storage = next(item for item in got if isinstance(item, torch.UntypedStorage))
            received = next(item for item in got if isinstance(item, torch.Tensor))
            assert storage.data_ptr() == received.data_ptr()
            assert storage.nbytes() == n * 4
    large = torch.zeros(100_000)
    row, whole = roundtrip([large[5:10], large.untyped_storage()])
    assert whole.nbytes() == 400_000
    assert row.data_ptr() == whole.data_ptr() + 20


def test_tied_weights_of_a_module_stay_tied(roundtrip: Roundtrip) -> None:
    model = nn.Sequential(nn.Embedding(100, 50), nn.Linear(50, 100, bias=False))
    model[1].weight = model[0].weight
    back = roundtrip(model)
    assert back[0].weight is back[1].weight
    assert isinstance(back[0].weight, nn.Parameter)
    back(torch.tensor([1])).sum().backward()
    with torch.no_grad():
        back[0].weight.sub_(back[1].weight.grad)


def test_recurrent_modules_and_packed_sequences_work_after_the_journey(roundtrip: Roundtrip) -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))
    module = nn.LSTM(3, 5)
    got_module, got_packed = roundtrip((module, packed))
    assert torch.equal(got_module(got_packed)[0].data, module(packed)[0].data)


@pytest.mark.parametrize("n", SMALL_AND_LARGE)
def test_numpy_arrays_are_writable_aligned_and_their_own(n: int, roundtrip: Roundtrip) -> None:
    array = np.arange(float(n))
    back = roundtrip(array)
    assert np.array_equal(back, array)
    assert back.flags.writeable
    assert back.flags.aligned
    back[0] = 42
    assert array[0] == 0
    frozen = array.copy()
    frozen.flags.writeable = False
    assert not roundtrip(frozen).flags.writeable
    assert np.array_equal(roundtrip(np.ones((n, 2), order="F")), np.ones((n, 2)))


def test_many_small_tensors_and_arrays_share_one_frame() -> None:
    codec = Codec()
    many = [torch.full((16,), float(i)) for i in range(500)] + [np.zeros(5)]
    frames = codec.dumps(many)
    assert len(frames) == 1
    assert all(math.isclose(float(t[0]), i) for i, t in enumerate(codec.loads(frames)[:-1]))


def test_large_buffers_of_many_kinds_keep_their_order(roundtrip: Roundtrip) -> None:
    base = torch.randn(1000, 1000)
    obj = [np.full(50_000, 1.0), torch.full((50_000,), 2.0), base[5:30], np.full(50_000, 3.0), base[700:720]]
    back = roundtrip(obj)
    for sent, got in zip(obj, back, strict=True):
        assert np.array_equal(np.asarray(sent), np.asarray(got))
