"""Device maps from `init_rpc` to the call, in real processes whose GPUs are made up (`gpus`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc.nn import RemoteModule
from actorrpc.services import carrying
from actorrpc.session import current
from tests.gpus import Gpus
from tests.worlds import World, run_world


def pretend(count: int) -> None:
    """Has this process believe that it has so many GPUs, for good."""
    torch.cuda.device_count = lambda: count
    carrying.Cuda = Gpus  # type: ignore[misc, assignment]


def gpus() -> Any:
    return current().worker.services[carrying.Carrying].hardware


def where(x: Tensor) -> str | None:
    found: str | None = gpus().device_of(x)
    return found


def back_and_where(x: Tensor) -> tuple[Tensor, str | None]:
    return x, where(x)


def come(rank: int, method: str, counts: list[int], size: int | None, maps: dict[str, Any]) -> None:
    pretend(counts[rank])
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, init_timeout=20, device_maps=maps)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def send(to: str, device: str) -> tuple[str | None, str | None]:
    """Where a tensor arrives, and where it comes back."""
    back, there = rpc.rpc_sync(to, back_and_where, args=(gpus().on(device, torch.ones(2)),))
    assert back.tolist() == [1.0, 1.0]
    return there, where(back)


@pytest.mark.parametrize("size", [4, None])
def test_all_workers_know_the_maps_and_the_devices_of_all(size: int | None) -> None:
    counts = [1, 2, 0, 2]
    with World(4, join=False) as world:
        method = world.plan.init_method
        for rank in range(4):
            world.start(rank, come, rank, method, counts, size, {"w1": {0: 1}} if rank == 0 else {})
            if size is None:
                world.result(rank)
        world.results()
        assert world.on(0, send, "w1", "cuda:0") == ("cuda:1", "cuda:0")
        assert world.on(1, send, "w0", "cuda:0") == ("cuda:0", "cuda:0")
        assert world.on(1, fails, "w0", "cuda:1") == "that one has 1 CUDA device (cuda:0)"
        assert world.on(1, send, "w3", "cuda:1") == world.on(3, send, "w1", "cuda:1") == ("cuda:1", "cuda:1")
        for rank in (0, 1, 3):
            assert world.on(rank, fails, "w2", "cuda:0") == "that one has no CUDA device"
            world.on(rank, unharmed, "w2")


def fails(to: str, device: str) -> str:
    with pytest.raises(rpc.DeviceMapError) as caught:
        send(to, device)
    text = str(caught.value)
    assert f'cannot send worker "{to}" a tensor on {device}' in text
    return text.split("but ")[1].split(". Say")[0]


def unharmed(to: str) -> None:
    assert rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1)).tolist() == [2.0, 2.0]


class Meta(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_meta
        return x


def test_the_result_of_a_remote_module_travels_by_the_map_where_there_is_one_and_else_by_way_of_the_cpu() -> None:
    run_world(module_program, 2, names=["w0", "w1"])

    with World(2, join=False) as world:
        method = world.plan.init_method
        for rank, maps in enumerate(({"w1": {"cpu": "cpu"}}, {})):
            world.start(rank, come, rank, method, [0, 0], 2, maps)
        world.results()
        world.on(0, module_with_a_map)


def module_program(rank: int) -> None:
    if rank == 0:
        remote = RemoteModule("w1/meta", Meta)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            remote(torch.ones(2))  # which its owner wanted to move to the CPU


def module_with_a_map() -> None:
    remote = RemoteModule("w1/meta", Meta)
    assert remote(torch.ones(2)).is_meta
    assert remote.forward_async(torch.ones(2)).wait().is_meta
