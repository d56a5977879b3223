"""Tensors on a real GPU, between two processes that share the first one: what no made-up GPU can show.

One card is enough, and some seconds of it. Where there is none, `tests/services/test_carrying.py` and
`tests/test_moving_tensors.py` test which tensor goes where, and what is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from tests.worlds import World

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
GPU = "cuda:0"
OTHER = "worker1"
_SIZE = 4_000_000


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # The driver's threads and files stay open in a process that has used it once: nothing is looked for at the end.
    with World(2, timeout=120, check=False) as made:
        made.everywhere(warm_up)
        yield made


def warm_up() -> None:
    torch.ones(8, 8, device=GPU).matmul(torch.ones(8, 8, device=GPU)).sum().item()


# -- what runs on the other worker


def double(x: Tensor) -> tuple[str, Tensor, Tensor]:
    return str(x.device), x * 2, x.cpu()


def slow_sum(x: Tensor) -> Tensor:
    """Makes a result on a stream of its own, which the current one waits for, but not the CPU."""
    current, own = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    own.wait_stream(current)
    with torch.cuda.stream(own):
        y = x.double()
        for _ in range(200):
            y = y * 1.0 + 0.0
        total = y.sum().reshape(1)
    current.wait_stream(own)
    return total


def on_gpu(*shape: int) -> Tensor:
    return torch.ones(*shape, device=GPU)


def device_of_parameters(module: nn.Module) -> set[str]:
    return {str(p.device) for p in module.parameters()}


def grads_of(refs: list[rpc.RRef[Any]], context_id: int) -> list[tuple[str, Tensor]]:
    found = autograd.get_gradients(context_id)
    return [(str(found[ref.local_value()].device), found[ref.local_value()].cpu()) for ref in refs]


# -- tests


def test_arguments_and_results_stay_on_the_gpu(world: World) -> None:
    def program() -> None:
        for n in (0, 3, _SIZE):
            x = torch.arange(float(n), device=GPU)
            for call in (
                lambda x=x: rpc.rpc_sync(OTHER, double, args=(x,)),
                lambda x=x: rpc.rpc_async(OTHER, double, args=(x,)).wait(),
                lambda x=x: rpc.remote(OTHER, double, args=(x,)).to_here(),
            ):
                there, twice, copy = call()  # type: ignore[no-untyped-call]
                assert there == GPU
                assert str(twice.device) == GPU
                assert torch.equal(twice, x * 2)
                assert copy.is_cpu
                assert torch.equal(copy, x.cpu())

    world.on(0, program)


def test_views_modules_and_sparse_tensors_keep_what_they_are(world: World) -> None:
    def there(base: Tensor, row: Tensor, module: nn.Module, sparse: Tensor) -> Any:
        assert {str(base.device), str(row.device), str(sparse.device)} == {GPU}
        assert device_of_parameters(module) == {GPU}
        row.add_(1)
        return base, base[1], module, sparse

    def program() -> None:
        base = torch.zeros(3, 4, device=GPU)
        module = nn.Linear(4, 2).to(GPU)
        sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse().to(GPU)
        back, row, same, again = rpc.rpc_sync(OTHER, there, args=(base, base[1], module, sparse))
        assert back.sum().item() == 4
        assert base.sum().item() == 0  # a copy went there
        row.add_(1)
        assert back.sum().item() == 8
        assert device_of_parameters(same) == {GPU}
        assert torch.equal(same.weight, module.weight)
        assert again.is_sparse
        assert again.to_dense().tolist() == [[0.0, 2.0], [0.0, 0.0]]

    world.on(0, program)


def test_what_other_streams_still_compute_is_waited_for(world: World) -> None:
    def program() -> None:
        stream = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]
        for _ in range(20):
            with torch.cuda.stream(stream):
                x = torch.zeros(_SIZE, device=GPU)
                for _ in range(100):
                    x += 1
                future = rpc.rpc_async(OTHER, slow_sum, args=(x,))
                result = future.wait()
                x.zero_()  # after the sending: the callee has a copy
                assert result.item() == 100.0 * _SIZE

    world.on(0, program)


def test_a_result_may_be_used_at_once_on_any_stream(world: World) -> None:
    def program() -> None:
        ref = rpc.remote(OTHER, on_gpu, args=(_SIZE,))
        for _ in range(20):
            x = ref.to_here()
            with torch.cuda.stream(torch.cuda.Stream(GPU)):  # type: ignore[no-untyped-call]
                total = x.sum()
                torch.cuda.current_stream(GPU).synchronize()  # before x's memory may be used again
            assert total.item() == _SIZE

    world.on(0, program)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


def test_gradients_flow_between_gpus_as_in_one_process(world: World) -> None:
    def program() -> None:
        local, ref = Net().to(GPU), rpc.remote(OTHER, Net)
        rpc.rpc_sync(OTHER, to_gpu, args=(ref,))
        x = torch.randn(32, 8)
        scale = torch.full((8,), 0.5, device=GPU, requires_grad=True)
        bias = torch.zeros(1, requires_grad=True)
        inputs = x.to(GPU)
        right = torch.autograd.grad(
            ((local(inputs * scale) + bias.to(GPU)) ** 2).sum(), [scale, bias, *local.parameters()]
        )
        refs = rpc.rpc_sync(OTHER, parameters_of, args=(ref,))
        for _ in range(3):
            with autograd.context() as context_id:
                out = ref.rpc_sync().forward(inputs * scale) + bias.to(GPU)
                assert str(out.device) == GPU
                autograd.backward(context_id, [(out**2).sum()])
                here = autograd.get_gradients(context_id)
                assert (str(here[scale].device), str(here[bias].device)) == (GPU, "cpu")
                far = rpc.rpc_sync(OTHER, grads_of, args=(refs, context_id))
            assert {device for device, _ in far} == {GPU}
            found = [here[scale].cpu(), here[bias], *(grad for _, grad in far)]
            for mine, wanted in zip(found, right, strict=True):
                torch.testing.assert_close(mine, wanted.cpu(), rtol=1e-3, atol=1e-4)

    world.on(0, program)


def to_gpu(ref: rpc.RRef[Any]) -> None:
    ref.local_value().to(GPU)


def parameters_of(ref: rpc.RRef[Any]) -> list[rpc.RRef[Any]]:
    return [rpc.RRef(p) for p in ref.local_value().parameters()]


def test_a_remote_module_on_the_gpu_learns(world: World) -> None:
    def program() -> None:
        remote = RemoteModule(f"{OTHER}/{GPU}", Net)
        optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.05)
        torch.manual_seed(1)
        x = torch.randn(64, 8)
        target = x.sum(1, keepdim=True)
        losses = []
        for step in range(30):
            with autograd.context() as context_id:
                out = remote(x if step % 2 else x.to(GPU))  # inputs may be on either; they are moved
                assert out.is_cpu  # without a device map for the owner
                loss = nn.functional.mse_loss(out, target)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, losses

    world.on(0, program)


def test_with_a_device_map_the_result_of_a_remote_module_stays_on_the_gpu() -> None:
    def come(rank: int, method: str) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=method, init_timeout=60, num_worker_threads=8)
        if rank == 0:
            options.set_device_map(OTHER, {0: 0})
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def program() -> None:
        remote = RemoteModule(f"{OTHER}/{GPU}", Net)
        assert str(remote(torch.ones(2, 8)).device) == GPU
        assert str(remote.forward_async(torch.ones(2, 8, device=GPU)).wait().device) == GPU
        there, twice, _ = rpc.rpc_sync(OTHER, double, args=(torch.ones(2, device=GPU),))
        assert (there, str(twice.device)) == (GPU, GPU)

    with World(2, timeout=120, check=False, join=False) as made:
        for rank in range(2):
            made.start(rank, come, rank, made.plan.init_method)
        made.results()
        made.on(0, program)


def test_a_device_that_is_not_there_is_an_error_that_names_it(world: World) -> None:
    def come(rank: int, method: str, count: int) -> str:
        options = rpc.TensorPipeRpcBackendOptions(init_method=method, init_timeout=60)
        if rank == 0:
            options.set_device_map(OTHER, {0: count})
        with pytest.raises(rpc.DeviceMapError) as caught:
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        return str(caught.value)

    count = torch.cuda.device_count()
    with World(2, timeout=120, check=False, join=False) as made:
        for rank in range(2):
            made.start(rank, come, rank, made.plan.init_method, count)
        for text in made.results():
            assert f'worker "worker0" maps to cuda:{count} of worker "{OTHER}"' in text

    def program() -> None:
        with pytest.raises(RuntimeError, match=f"cannot use the device 'cuda:{count}'"):
            RemoteModule(f"{OTHER}/cuda:{count}", Net)

    world.on(0, program)


def test_where_the_gpu_has_no_room_the_call_fails_and_the_next_one_works(world: World) -> None:
    def shrink(share: float) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share, 0)

    def program() -> None:
        x = torch.zeros(64 << 20, dtype=torch.uint8, device=GPU)
        rpc.rpc_sync(OTHER, shrink, args=(1e-6,))
        try:
            with pytest.raises(rpc.DeserializationError, match=f"cannot put .* bytes of a tensor on its {GPU}"):
                rpc.rpc_sync(OTHER, double, args=(x,))
        finally:
            rpc.rpc_sync(OTHER, shrink, args=(1.0,))
        assert rpc.rpc_sync(OTHER, double, args=(x[:8].clone(),))[0] == GPU

    world.on(0, program)
