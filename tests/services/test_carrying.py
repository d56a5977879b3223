"""How tensors get from device to device: in the simulated world, with memory of the CPU that stands for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.errors import DeserializationError, DeviceMapError
from actorrpc.services.carrying import Carrying
from actorrpc.services.devices import Devices
from actorrpc.testing import SimWorld
from tests.gpus import Gpus

_gpus: dict[int, Gpus] = {}
"""By worker: all of a simulated world live in this process."""
_found: dict[str, str | None] = {}
"""Where gradients were; not in the tests, as what is local to them is sent by value."""


def gpus() -> Gpus:
    return _gpus[rpc.get_worker_info().id]


def where(x: Tensor) -> str | None:
    return gpus().device_of(x)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    _gpus.clear()
    _found.clear()


def play(everybody: dict[str, Devices], *programs: Callable[[], Any] | None, seed: int = 0) -> list[Any]:
    """Runs programs in a world of so many workers, each of which has GPUs."""
    with SimWorld(len(everybody), seed) as world:
        for session in world.sessions:
            worker = session.worker
            _gpus[worker.id] = Gpus()
            Carrying(worker, _gpus[worker.id])
            Carrying.learn(worker, everybody)
        return world.run(*programs)


def mapped(**maps: dict[str, str]) -> dict[str, Devices]:
    """Worlds of three workers with four GPUs each; w0 has these maps."""
    return {"w0": Devices(4, maps), "w1": Devices(4), "w2": Devices(4)}


def seen(*tensors: Tensor) -> list[tuple[str | None, list[float]]]:
    return [(where(x), x.flatten().tolist()) for x in tensors]


def two_more(x: Tensor) -> tuple[list[str | None], Tensor, Tensor]:
    """What the reference's example does: a result where the argument is, and one on the next device."""
    device = where(x)
    assert device is not None
    following = f"cuda:{int(device[-1]) + 1}"
    return [device], gpus().on(device, x + 1), gpus().on(following, x + 1)


def test_arguments_go_by_the_map_and_results_by_its_inverse() -> None:
    def program() -> None:
        x = gpus().on("cuda:0", torch.ones(2))
        for call in (
            lambda: rpc.rpc_sync("w1", two_more, args=(x,)),
            lambda: rpc.rpc_async("w1", two_more, args=(x,)).wait(),
            lambda: rpc.remote("w1", two_more, args=(x,)).to_here(),
        ):
            there, one, other = call()  # type: ignore[no-untyped-call]
            assert there == ["cuda:1"]
            assert seen(one, other) == [("cuda:0", [2.0, 2.0]), ("cuda:1", [2.0, 2.0])]

    play(mapped(w1={"cuda:0": "cuda:1", "cuda:1": "cuda:2"}), program)


def test_without_a_map_a_device_becomes_the_one_of_the_same_index_and_the_cpu_stays_the_cpu() -> None:
    def program() -> None:
        x, y = gpus().on("cuda:2", torch.ones(2)), torch.zeros(3)
        assert rpc.rpc_sync("w1", seen, args=(x, y)) == [("cuda:2", [1.0, 1.0]), (None, [0.0] * 3)]
        assert seen(*rpc.rpc_sync("w1", passed_on, args=(x, y))) == [("cuda:2", [1.0, 1.0]), (None, [0.0] * 3)]

    play(mapped(), program)


def passed_on(*tensors: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = rpc.rpc_sync("w2", echoed, args=tensors)
    return found


def echoed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def test_a_map_may_lead_to_the_cpu_and_back_and_one_that_names_the_cpu_moves_what_is_there() -> None:
    def program() -> None:
        x, y = gpus().on("cuda:0", torch.ones(2)), torch.zeros(1)
        assert rpc.rpc_sync("w1", seen, args=(x, y)) == [(None, [1.0, 1.0]), (None, [0.0])]
        assert seen(rpc.rpc_sync("w1", echoed, args=(x,))[0]) == [("cuda:0", [1.0, 1.0])]
        assert rpc.rpc_sync("w2", seen, args=(y,)) == [("cuda:3", [0.0])]
        assert seen(rpc.rpc_sync("w2", echoed, args=(y,))[0]) == [(None, [0.0])]

    play(mapped(w1={"cuda:0": "cpu"}, w2={"cpu": "cuda:3"}), program)


def test_a_call_to_oneself_takes_the_map_for_oneself() -> None:
    def program() -> None:
        x = gpus().on("cuda:0", torch.ones(1))
        assert rpc.rpc_sync("w0", seen, args=(x,)) == [("cuda:1", [1.0])]
        assert rpc.rpc_sync("w1", calls_itself, args=(x,)) == [("cuda:0", [1.0])]

    play(mapped(w0={"cuda:0": "cuda:1"}), program)


def calls_itself(x: Tensor) -> Any:
    return rpc.rpc_sync(rpc.get_worker_info(), seen, args=(x,))


def test_aliases_stay_aliases_strides_stay_and_large_small_empty_and_sparse_ones_are_moved() -> None:
    def check(on: str, base: Tensor, row: Tensor, large: Tensor, few: Tensor, none: Tensor, sparse: Tensor) -> None:
        assert [where(t) for t in (base, row, large, few, none, sparse)] == [on] * 6
        row.add_(1)
        assert base.tolist() == [[0.0, 1.0], [1.0, 2.0], [0.0, 1.0]]
        assert row.stride() == (2, 1)
        assert large.stride() == (1, 300)
        assert torch.equal(large, torch.arange(90000.0).view(300, 300).t())
        assert torch.equal(few, torch.arange(100_000.0)[7::1000])
        assert none.shape == (0, 3)
        assert sparse.to_dense().tolist() == [0.0, 5.0, 0.0]

    def there(*tensors: Tensor) -> tuple[Tensor, ...]:
        check("cuda:1", *tensors)
        tensors[1].sub_(1)
        return tensors

    def program() -> None:
        base = gpus().on("cuda:0", torch.arange(2.0).repeat(3, 1))
        large = gpus().on("cuda:0", torch.arange(90000.0).view(300, 300)).t()
        few = gpus().on("cuda:0", torch.arange(100_000.0))[7::1000]
        none = gpus().on("cuda:0", torch.zeros(0, 3))
        indices, values = gpus().on("cuda:0", torch.tensor([[1]])), gpus().on("cuda:0", torch.tensor([5.0]))
        sparse = torch.sparse_coo_tensor(indices, values, (3,), is_coalesced=True, check_invariants=False)
        assert where(sparse) == "cuda:0"
        back = rpc.rpc_sync("w1", there, args=(base, base[1:2], large, few, none, sparse))
        check("cuda:0", *back)
        assert not gpus().busy

    play(mapped(w1={"cuda:0": "cuda:1"}), program)


def test_storages_and_modules_with_tied_weights_are_moved_as_a_whole() -> None:
    def there(module: nn.Module, storage: torch.UntypedStorage) -> Any:
        assert [where(p) for p in module.parameters()] == ["cuda:1"]
        assert gpus().device_of(storage) == "cuda:1"
        return module, storage

    def program() -> None:
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[0].weight = module[1].weight = nn.Parameter(gpus().on("cuda:0", torch.eye(2)))
        back, storage = rpc.rpc_sync("w1", there, args=(module, gpus().on("cuda:0", torch.ones(2)).untyped_storage()))
        assert back[0].weight is back[1].weight
        assert isinstance(back[0].weight, nn.Parameter)
        assert back[0].weight.requires_grad
        assert seen(back[0].weight.data) == [("cuda:0", [1.0, 0.0, 0.0, 1.0])]
        assert (gpus().device_of(storage), storage.nbytes()) == ("cuda:0", 8)

    play(mapped(w1={"cuda:0": "cuda:1"}), program)


def test_what_is_under_way_on_a_device_is_waited_for_before_sending_and_after_receiving_and_no_other_device() -> None:
    def there(x: Tensor, y: Tensor) -> Any:
        mine = gpus()
        assert (mine.waits, mine.busy) == (["cuda:1"], False)
        assert (x.tolist(), y.tolist()) == ([7.0], [8.0])
        mine.waits.clear()
        mine.begin("cuda:1", lambda: x.add_(1))
        return x, y

    def program() -> None:
        mine = gpus()
        x, y = mine.on("cuda:0", torch.zeros(1)), mine.on("cuda:0", torch.full((1,), 8.0))
        mine.begin("cuda:0", lambda: x.fill_(7))
        mine.begin("cuda:3", lambda: None)
        back = rpc.rpc_sync("w1", there, args=(x, y))
        assert seen(*back) == [("cuda:0", [8.0]), ("cuda:0", [8.0])]
        assert mine.waits == ["cuda:0", "cuda:0"]  # once each way, however many tensors
        assert _gpus[1].waits == ["cuda:1"]
        assert mine.busy

    play(mapped(w1={"cuda:0": "cuda:1"}), program)


def test_gradients_go_to_the_devices_of_their_tensors_in_both_directions() -> None:
    def program() -> None:
        leaf = gpus().on("cuda:0", torch.tensor([3.0])).requires_grad_()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w1", square, args=(note("argument, here", leaf),))
            assert where(y) == "cuda:1"
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[leaf].tolist() == [6.0]

    # No map says what becomes of the third GPU of w1 on w0, which has none.
    play({"w0": Devices(2, {"w1": {"cuda:0": "cuda:2", "cuda:1": "cuda:1"}}), "w1": Devices(3)}, program)
    assert _found == {"argument, here": "cuda:0", "result, there": "cuda:1"}


def test_gradients_that_stay_on_their_worker_are_waited_for_too() -> None:
    def program() -> None:
        leaf = gpus().on("cuda:0", torch.tensor([3.0])).requires_grad_()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w0", square, args=(note("argument, here", leaf),))
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[leaf].tolist() == [6.0]

    play({"w0": Devices(3, {"w0": {"cuda:0": "cuda:2", "cuda:1": "cuda:1"}})}, program)
    assert _found == {"argument, here": "cuda:0", "result, there": "cuda:1"}


def note(name: str, x: Tensor) -> Tensor:
    """Returns a tensor that notes where its gradient is."""
    mine = gpus()
    x = x.view_as(x)
    x.register_hook(lambda grad: _found.update({name: mine.device_of(grad)}))  # type: ignore[no-untyped-call]
    return x


def square(x: Tensor) -> Tensor:
    # What is made of a fake's tensors is on the CPU, as far as the fake knows.
    assert where(x) == "cuda:2"
    x = Moved.apply(x, gpus(), "cuda:2")  # type: ignore[no-untyped-call]
    y = Moved.apply(x * x, gpus(), "cuda:1")  # type: ignore[no-untyped-call]
    return note("result, there", y)


class Moved(torch.autograd.Function):
    """Puts a value on a fake device, and its gradient on the one that it was on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Gpus, device: str) -> Tensor:
        ctx.on, ctx.device = on, on.device_of(x)
        return on.on(device, x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.device is None:
            return grad.clone(), None, None
        made = ctx.on.on(ctx.device, torch.zeros_like(grad))
        ctx.on.begin(ctx.device, lambda: made.copy_(grad))
        return made, None, None


@pytest.mark.parametrize(
    "everybody, device, words",
    [
        (
            {"w0": Devices(2), "w1": Devices(1)},
            "cuda:1",
            ['worker "w0" cannot send worker "w1" a tensor on cuda:1', "1 CUDA device (cuda:0)", 'worker "w0" (Tensor',
             'set_device_map("w1", {"cuda:1": "cuda:<index>"})', ".cpu()"],
        ),
        ({"w0": Devices(1), "w1": Devices(0)}, "cuda:0", ["cuda:0 there, but that one has no CUDA device"]),
        (
            {"w0": Devices(2, {"w1": {"cuda:0": "cuda:1"}}), "w1": Devices(2)},
            "cuda:1",
            ['the device map of worker "w0" for "w1" (cuda:0 to cuda:1) does not name cuda:1'],
        ),
        ({"w0": Devices(1), "w1": Devices(1)}, "mps:0", ["mps:0", "only tensors on the CPU and on CUDA devices"]),
    ],
)  # fmt: skip
def test_a_tensor_that_can_go_nowhere_is_an_error_of_the_call_that_says_what_to_do(
    everybody: dict[str, Devices], device: str, words: list[str]
) -> None:
    def program() -> None:
        x = gpus().on(device, torch.ones(2))
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(DeviceMapError) as caught:
                call("w1", echoed, args=([{"deep": x}],))
            for word in words:
                assert word in str(caught.value)
        assert list(rpc.rpc_sync("w1", echoed, args=(1,))) == [1]

    play(everybody, program)


def test_a_result_that_can_go_nowhere_is_an_error_of_the_call_too_and_names_the_callers_options() -> None:
    def made(device: str) -> Tensor:
        return gpus().on(device, torch.ones(2))

    def program() -> None:
        with pytest.raises(DeviceMapError) as caught:
            rpc.rpc_sync("w1", made, args=("cuda:1",))
        text = str(caught.value)
        for word in (
            'worker "w1" cannot answer worker "w0" with a tensor on cuda:1',
            'map of worker "w0" for "w1" (cuda:0 to cuda:2), which answers take the other way round, does not name',
            'options of worker "w0" (TensorPipeRpcBackendOptions.set_device_map("w1", {"cuda:<index>": "cuda:1"}))',
        ):
            assert word in text, text
        ref = rpc.remote("w1", made, args=("cuda:1",))
        with pytest.raises(DeviceMapError, match="cannot answer"):
            ref.to_here()
        assert where(rpc.rpc_sync("w1", made, args=("cuda:2",))) == "cuda:0"

    play(mapped(w1={"cuda:0": "cuda:2"}), program)


def test_where_there_is_no_room_on_a_device_the_call_fails_and_says_where() -> None:
    def program() -> None:
        x = gpus().on("cuda:0", torch.ones(2))
        _gpus[1].full.add("cuda:0")
        with pytest.raises(DeserializationError, match=r"w1.* cannot put 8 bytes of a tensor on its cuda:0: OutOfMem"):
            rpc.rpc_sync("w1", echoed, args=(x,))
        _gpus[1].full.clear()
        _gpus[0].full.add("cuda:0")
        with pytest.raises(DeserializationError, match=r"w0.* cannot put 8 bytes of a tensor on its cuda:0"):
            rpc.rpc_sync("w1", echoed, args=(x,))
        assert not _gpus[1].busy

    play(mapped(), program)


def test_devices_that_a_worker_has_not_listed_are_not_used() -> None:
    def program() -> None:
        for device, words in (("cuda:0", "not among the devices that it may use"), ("cuda:2", 'that worker "w1" may')):
            with pytest.raises(DeviceMapError, match=words):
                rpc.rpc_sync("w1", echoed, args=(gpus().on(device, torch.ones(1)),))
        assert rpc.rpc_sync("w1", seen, args=(gpus().on("cuda:1", torch.ones(1)),)) == [("cuda:1", [1.0])]

    play({"w0": Devices(4, {}, ("cuda:1", "cuda:2")), "w1": Devices(4, {}, ("cuda:0", "cuda:1"))}, program)


def test_the_tensors_of_an_error_arrive_on_the_cpu() -> None:
    def failing() -> None:
        raise LookupError(gpus().on("cuda:3", torch.ones(2)))

    def program() -> None:
        with pytest.raises(LookupError) as caught:
            rpc.rpc_sync("w1", failing)
        assert seen(caught.value.args[0]) == [(None, [1.0, 1.0])]

    play({"w0": Devices(0), "w1": Devices(4)}, program)


def test_a_world_without_devices_does_not_look_for_any() -> None:
    def program() -> None:
        assert rpc.rpc_sync("w1", seen, args=(gpus().on("cuda:0", torch.ones(1)),)) == [(None, [1.0])]

    play({"w0": Devices(), "w1": Devices()}, program)
    with SimWorld(2, 0) as world:
        for session in world.sessions:
            assert session.worker.codec.leaving is None
