"""RemoteModules with an interface: scripted code runs them, and does not know that they are remote."""

# mypy: disable-error-code="empty-body, no-any-return, untyped-decorator, no-untyped-call"

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.nn import RemoteModule
from tests.nn.test_remote_module import grads_of, is_training
from tests.worlds import counts, inside, no_references, run_world, until_counts

OTHER = "worker1"


class Net(nn.Module):
    """Its forward is the interface's, and takes more besides."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), factor))

    def forward(self, run: Tensor, begin: int, token: str = "w", *, fork: int) -> tuple[str, Tensor, int]:
        if begin < 0:
            raise ValueError("it is negative")
        return token, run * self.weight * begin, fork


class Empty(nn.Module):
    def forward(self) -> int:
        return 3


class PlainFunctions:
    def forward(self) -> int:
        return 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch would have us use something else

    @torch.jit.interface
    class Interface:
        """Its arguments are called what the generated source calls things."""

        def forward(self, run: Tensor, begin: int, token: str = "i", *, fork: int) -> tuple[str, Tensor, int]:
            pass

    @torch.jit.interface
    class RemoteInterface:
        def forward(self, run: Tensor, begin: int, token: str = "i", *, fork: int) -> tuple[str, Tensor, int]:
            pass

        def forward_async(
            self, run: Tensor, begin: int, token: str = "i", *, fork: int
        ) -> torch.jit.Future[tuple[str, Tensor, int]]:
            pass

    @torch.jit.interface
    class NoArguments:
        def forward(self) -> int:
            pass

    @torch.jit.interface
    class Other:
        def forward(self, x: str) -> str:
            pass

    @torch.jit.interface
    class WithoutForward:
        def run(self) -> int:
            pass

    @torch.jit.script
    def runs(module: Interface, x: Tensor) -> tuple[str, Tensor, int]:
        return module.forward(x, 2, "s", fork=5)

    @torch.jit.script
    def runs_later(module: RemoteInterface, x: Tensor, times: int) -> Tensor:
        futures = [module.forward_async(x, n, "s", fork=5) for n in range(times)]
        total = torch.zeros(2)
        for future in futures:
            total = total + future.wait()[1]
        return total

    @torch.jit.script
    def runs_without_arguments(module: NoArguments) -> int:
        return module.forward()


class Hybrid(nn.Module):
    def __init__(self, remote: Any) -> None:
        super().__init__()
        self.remote, self.local = remote, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        later = self.remote.forward_async(x, 3, fork=1)
        return self.remote(x, 1, fork=1)[1] + later.wait()[1] * self.local


def scripted(module: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def remote_net(owner: Any = OTHER, factor: float = 1.0) -> RemoteModule:
    return RemoteModule(owner, Net, (factor,), _module_interface_cls=Interface)


@inside
def test_scripted_code_runs_it_wherever_it_is() -> None:
    x = torch.ones(2)
    for owner in (OTHER, "worker0"):
        one, two = scripted(remote_net(owner, 2.0)), scripted(remote_net(owner, 3.0))
        for module, factor in ((one, 2.0), (two, 3.0)):
            word, out, number = runs(module, x)
            assert (word, out.tolist(), number) == ("s", [2 * factor] * 2, 5)
            assert runs_later(module, x, 4).tolist() == [6 * factor] * 2
            assert module(x, 1, fork=9)[0] == "i"
            assert module.forward_async(x, 1, fork=9).wait()[2] == 9


@inside
def test_a_forward_without_arguments_is_run() -> None:
    assert runs_without_arguments(scripted(RemoteModule(OTHER, Empty, _module_interface_cls=NoArguments))) == 3


@inside
def test_not_scripted_it_has_the_interfaces_signature_and_defaults() -> None:
    remote, x = remote_net(), torch.ones(2)
    assert (remote.is_scriptable, RemoteModule(OTHER, Net).is_scriptable) == (True, False)
    shown = "(run: Tensor, begin: int, token: str = 'i', *, fork: int) -> tuple[str, Tensor, int]"
    assert str(inspect.signature(remote.forward)) == shown
    assert (remote(x, 1, fork=9)[0], remote(run=x, begin=1, fork=9)[2]) == ("i", 9)
    assert remote.forward_async(x, 1, fork=4).wait()[2] == 4
    with pytest.raises(TypeError, match="missing a required argument: 'begin'"):
        remote(x, fork=1)


def compiled_on_the_owner(ref: Any) -> bool:
    return isinstance(ref.local_value(), torch.jit.ScriptModule)


@inside
def test_the_module_is_compiled_on_its_owner() -> None:
    assert rpc.rpc_sync(OTHER, compiled_on_the_owner, args=(remote_net().get_module_rref(),))
    assert not rpc.rpc_sync(OTHER, compiled_on_the_owner, args=(RemoteModule(OTHER, Net).get_module_rref(),))


@inside
def test_a_module_that_it_is_part_of_is_compiled_with_it() -> None:
    x, remote = torch.ones(2), remote_net(factor=2.0)
    model = Hybrid(remote)
    compiled = scripted(model)
    assert isinstance(compiled, torch.jit.ScriptModule)
    with autograd.context() as context_id:
        autograd.backward(context_id, [compiled(x).sum()])
        assert autograd.get_gradients(context_id)[model.local].tolist() == [6, 6]
        there = rpc.rpc_sync(OTHER, grads_of, args=(remote.remote_parameters(), context_id))
        assert [grad.tolist() for grad in there if grad is not None] == [[4, 4]]
    model.eval()
    assert rpc.rpc_sync(OTHER, is_training, args=(remote.get_module_rref(),)) is False


def runs_there(remote: RemoteModule, x: Tensor) -> list[float]:
    values: list[float] = runs(scripted(remote), x)[1].tolist()
    return values


@inside
def test_it_is_compiled_where_it_arrives() -> None:
    remote, x = remote_net(factor=4.0), torch.ones(2)
    assert rpc.rpc_sync(OTHER, runs_there, args=(remote, x)) == [8, 8]
    made = RemoteModule.init_from_module_rref(OTHER, remote.get_module_rref(), Interface)
    assert runs_there(made, x) == [8, 8]
    plain = RemoteModule.init_from_module_rref(OTHER, rpc.remote(OTHER, Net), _module_interface_cls=Interface)
    assert runs_there(plain, x) == [2, 2]


@inside
def test_an_error_of_forward_reaches_the_scripted_caller() -> None:
    module, x = scripted(remote_net()), torch.ones(2)
    with pytest.raises(RuntimeError, match="it is negative"):
        module(x, -1, fork=1)
    with pytest.raises(RuntimeError, match="it is negative"):
        module.forward_async(x, -1, fork=1).wait()


@inside
def test_what_is_not_of_the_interface_is_refused_by_the_owner() -> None:
    with pytest.raises(RuntimeError, match="type Net does not have the interface"):
        RemoteModule(OTHER, Net, _module_interface_cls=Other)
    ref = rpc.remote(OTHER, scripted_net)
    with pytest.raises(RuntimeError, match="type Net does not have the interface"):
        RemoteModule.init_from_module_rref(OTHER, ref, Other)


def scripted_net() -> Any:
    return scripted(Net())


@inside
def test_what_is_no_interface_is_refused_at_once() -> None:
    for wrong in (PlainFunctions, Net, 3):
        with pytest.raises(ValueError, match=r"decorated with @torch\.jit\.interface, not"):
            RemoteModule(OTHER, Net, _module_interface_cls=wrong)
        with pytest.raises(ValueError, match=r"decorated with @torch\.jit\.interface, not"):
            RemoteModule.init_from_module_rref(OTHER, rpc.remote(OTHER, Net), wrong)
    with pytest.raises(ValueError, match="WithoutForward has no forward"):
        RemoteModule(OTHER, Net, _module_interface_cls=WithoutForward)


@inside
def test_a_compiled_one_is_not_sent_saved_or_copied() -> None:
    module = scripted(remote_net())
    for it in (module, scripted(Hybrid(remote_net()))):
        for write in (
            lambda x: rpc.rpc_sync(OTHER, runs_there, args=(x, torch.ones(2))),
            lambda x: torch.save(x, io.BytesIO()),
            lambda x: torch.jit.save(x, io.BytesIO()),
            pickle.dumps,
            copy.deepcopy,
        ):
            with pytest.raises(Exception, match=r"not supported, nor can pickle|does not have a __getstate__"):
                write(it)


# -- how long it lives


def hold(rank: int) -> None:
    if rank == 0:
        gc.disable()  # the reference goes with the last holder, without the collector
        modules = [scripted(remote_net()), scripted(Hybrid(remote_net()))]
        assert runs(modules[0], torch.ones(2))[2] == 5
        assert rpc.rpc_sync(1, counts)["owned"] == 2
        modules.pop()
        until_counts(lambda: rpc.rpc_sync(1, counts)["owned"] == 1)
        modules.pop()
        until_counts(lambda: rpc.rpc_sync(1, counts)["owned"] == 0)
        gc.enable()
        no_references()


def test_the_module_lives_as_long_as_what_was_compiled() -> None:
    run_world(hold, 2)
