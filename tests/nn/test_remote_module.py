"""RemoteModule between real processes: calls, gradients, training, sharing, and what it refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import pydoc
import re
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.nn import RemoteModule
from tests.worlds import World, counts, inside, no_references, run_world, until_counts

OTHER = "worker1"


class Net(nn.Module):
    """Two layers, one of which is made of two; the same wherever it is made."""

    def __init__(self, width: int = 4, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.randn(width))
            self.inner = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, width))

    def forward(self, x: Tensor, y: Tensor | None = None, *, factor: float = 2.0) -> Tensor:
        """Says what it does."""
        out: Tensor = self.inner(torch.tanh(x * self.scale)) * factor
        return out if y is None else out + y


class Pair(NamedTuple):
    first: Tensor
    second: dict[str, Any]


class Containers(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Pair(args[0] * 2, {"args": args, "kwargs": kwargs, "list": [args[0], 1, "x"]})


class Local:
    def __reduce__(self) -> Any:
        raise TypeError("it does not travel")

    def __repr__(self) -> str:
        return "Local()"


class Odd(nn.Module):
    """Its signature has a default that cannot be sent."""

    def forward(self, x: Local, /, kind: Any = Local(), *rest: int, word: str = "w", **more: Any) -> Any:  # noqa: B008
        return rest, word, more


class Noisy(nn.Dropout):
    """Says whether it trains, rather than what it drops."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (1.0 if self.training else 0.0)


class Fails(nn.Module):
    def __init__(self, word: str) -> None:
        raise LookupError(word)


class Slow(nn.Module):
    def forward(self, seconds: float) -> None:
        time.sleep(seconds)


class Devices(nn.Module):
    """Says on which devices its arguments are, and its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, nested: Any, *, packed: PackedSequence, plain: int) -> list[str]:
        found = [x, nested[0]["deep"], packed.data, self.own]
        return [*(t.device.type for t in found), str(plain)]


class NoModule:
    def __init__(self, word: str) -> None:
        self.word = word


class Louder(RemoteModule):
    """A RemoteModule of the user's own, which does something of its own around the call."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 100


class Hybrid(nn.Module):
    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote, self.local = remote, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.local(self.remote(x))
        return out


def scripted(width: int) -> Any:
    return torch.jit.script(Scripted(width))


def scripted_and_loaded(width: int) -> Any:
    file = io.BytesIO()
    torch.jit.save(scripted(width), file)
    return torch.jit.load(io.BytesIO(file.getvalue()))  # type: ignore[no-untyped-call]


class Scripted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 3.0))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return x * self.weight * times


def is_training(ref: Any) -> Any:
    return ref.local_value().training


def grads_of(refs: list[Any], context_id: int) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [found.get(ref.local_value()) for ref in refs]


def descend(refs: list[Any], context_id: int, rate: float) -> None:
    """A step of plain gradient descent, on the owner."""
    found = autograd.get_gradients(context_id)
    with torch.no_grad():
        for ref in refs:
            ref.local_value().sub_(rate * found[ref.local_value()])


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=made), torch.randn(5, 4, generator=made)


def train_remotely(remote: RemoteModule, steps: int) -> list[float]:
    """Some steps of training; returns the losses."""
    losses = []
    for step in range(steps):
        x, y = batch(step)
        with autograd.context() as context_id:
            loss = (remote(x) - y).square().mean()
            autograd.backward(context_id, [loss])
            refs = remote.remote_parameters()
            rpc.rpc_sync(remote.on, descend, args=(refs, context_id, 0.1))
        losses.append(loss.item())
    return losses


def train_here(module: nn.Module, steps: int) -> list[float]:
    """The same without any RPC."""
    parameters, losses = list(module.parameters()), []
    for step in range(steps):
        x, y = batch(step)
        loss = (module(x) - y).square().mean()
        with torch.no_grad():
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.sub_(0.1 * grad)
        losses.append(loss.item())
    return losses


# -- calls


def test_the_example_of_the_reference_runs() -> None:
    def program(rank: int) -> tuple[int, ...]:
        if rank == 1:
            return ()
        remote_linear_module = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        input = torch.randn(128, 20)
        ret_fut = remote_linear_module.forward_async(input)
        ret = ret_fut.wait()
        return tuple(ret.shape)

    assert run_world(program, 2) == [(128, 30), ()]


@inside
def test_it_gives_what_the_module_on_its_owner_gives() -> None:
    remote, same = RemoteModule(OTHER, Net, (4,), {"seed": 3}), Net(4, seed=3)
    x, y = batch(0)
    assert isinstance(remote, nn.Module)
    assert isinstance(remote, RemoteModule)
    for given in (remote.forward(x, y), remote(x, y), remote.forward_async(x, y).wait(), remote(x=x, y=y)):
        assert torch.equal(given, same(x, y))
    assert torch.equal(remote(x), same(x))
    assert torch.equal(remote.forward_async(x, factor=5.0).wait(), same(x, factor=5.0))
    assert isinstance(remote.forward_async(x), rpc.Future)
    assert (remote.on, remote.device) == (OTHER, "cpu")
    assert repr(remote) == "RemoteModule(Net on worker1/cpu)"


@inside
def test_forward_async_does_not_wait() -> None:
    remote = RemoteModule(OTHER, Slow)
    future = remote.forward_async(0.5)
    assert not future.done()
    assert future.wait() is None


@inside
def test_its_methods_have_the_signature_of_the_modules_own_forward() -> None:
    remote = RemoteModule(OTHER, Net)
    own = "(x: Tensor, y: Tensor | None = None, *, factor: float = 2.0) -> Tensor"
    assert str(inspect.signature(remote.forward)) == own
    assert str(inspect.signature(remote.forward_async)) == own.replace("-> Tensor", "-> Future[Tensor]")
    assert inspect.signature(remote.forward).parameters["factor"].default == 2.0
    text = pydoc.plain(pydoc.render_doc(remote.forward))
    assert own in text
    assert "Says what it does." in text
    odd = RemoteModule(OTHER, Odd)
    own = "(x: Local, /, kind: Any = Local(), *rest: int, word: str = 'w', **more: Any) -> Any"
    assert str(inspect.signature(odd.forward)) == own
    assert odd(0, 1, 2, 3, word="v", a=4) == ((2, 3), "v", {"a": 4})


@inside
def test_containers_go_in_and_out() -> None:
    remote = RemoteModule(OTHER, Containers)
    x = torch.ones(2)
    out = remote(x, [x, (1, "a")], word={"t": x})
    assert isinstance(out, Pair)
    assert torch.equal(out.first, x * 2)
    assert out.second["kwargs"]["word"]["t"].equal(x)
    assert out.second["args"][1][1] == (1, "a")
    assert out.second["list"][1:] == [1, "x"]


@inside
def test_the_hooks_of_the_module_run_on_its_owner() -> None:
    remote = RemoteModule(OTHER, Net)
    x, _ = batch(0)
    plain = remote(x)
    rpc.rpc_sync(OTHER, hook_in, args=(remote.get_module_rref(),))
    assert torch.equal(remote(x), plain + 1)


def hook_in(ref: Any) -> None:
    ref.local_value().register_forward_hook(lambda module, args, out: out + 1)


@inside
def test_a_module_of_ones_own_worker_is_called_like_any_other() -> None:
    remote, same = RemoteModule("worker0", Net), Net()
    x, y = batch(0)
    assert torch.equal(remote(x, y), same(x, y))
    assert remote.get_module_rref().is_owner()
    assert train_remotely(remote, 2) == train_here(same, 2)


@inside
def test_an_error_of_forward_comes_with_its_remote_traceback() -> None:
    remote = RemoteModule(OTHER, Net)
    with pytest.raises(TypeError, match="factr") as caught:
        remote(torch.ones(4), factr=1)
    assert OTHER in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="must match the size"):
        remote.forward_async(torch.ones(7)).wait()


def test_a_call_that_takes_too_long_is_named_after_the_module() -> None:
    def program(rank: int) -> str:
        if rank == 1:
            return ""
        remote = RemoteModule(OTHER, Slow)
        rpc._set_rpc_timeout(0.3)
        with pytest.raises(rpc.RPCTimeoutError) as caught:
            remote(1.0)
        rpc._set_rpc_timeout(30.0)
        return str(caught.value)

    text = run_world(program, 2)[0]
    assert "Slow.forward" in text
    assert OTHER in text


def test_a_lost_owner_is_named() -> None:
    with World(2) as world:
        world.on(0, keep_one)
        world.kill(1)
        assert "worker1" in world.on(0, use_of_a_lost_one)


def keep_one() -> None:
    KEPT["module"] = RemoteModule(OTHER, Net)


def use_of_a_lost_one() -> str:
    with pytest.raises(rpc.WorkerLostError) as caught:
        KEPT.pop("module")(torch.ones(4))
    return str(caught.value)


# -- gradients and training


@inside
def test_gradients_are_those_of_a_local_run() -> None:
    remote, same = RemoteModule(OTHER, Net), Net()
    (x, y), weight = batch(0), torch.randn(4, requires_grad=True)
    loss = (same(x * weight) * same(x, y * weight, factor=3.0)).sum()
    right = torch.autograd.grad(loss, [weight, *same.parameters()])
    with autograd.context() as context_id:
        later = remote.forward_async(x, y * weight, factor=3.0)
        autograd.backward(context_id, [(remote(x * weight) * later.wait()).sum()])
        here = autograd.get_gradients(context_id)
        there = rpc.rpc_sync(OTHER, grads_of, args=(remote.remote_parameters(), context_id))
    assert list(here) == [weight]
    for mine, wanted in zip([here[weight], *there], right, strict=True):
        torch.testing.assert_close(mine, wanted)


@inside
def test_a_few_steps_of_training_lose_what_they_lose_locally() -> None:
    remote, same = RemoteModule(OTHER, Net), Net()
    mine, right = train_remotely(remote, 5), train_here(same, 5)
    assert mine == pytest.approx(right, rel=1e-6)
    assert mine[0] != mine[4]
    for name, value in remote.get_module_rref().rpc_sync().state_dict().items():
        torch.testing.assert_close(value, same.state_dict()[name])


@inside
def test_remote_parameters_refer_to_the_parameters_on_their_owner() -> None:
    remote, same = RemoteModule(OTHER, Net), Net()
    refs = remote.remote_parameters()
    assert [tuple(r.to_here().shape) for r in refs] == [tuple(p.shape) for p in same.parameters()]
    assert len(refs) == 5
    assert {ref.owner_name() for ref in refs} == {OTHER}
    assert rpc.rpc_sync(OTHER, are_the_parameters, args=(refs, remote.get_module_rref()))
    (only,) = remote.remote_parameters(recurse=False)
    assert isinstance(only.to_here(), nn.Parameter)
    assert torch.equal(only.to_here(), same.scale)


def are_the_parameters(refs: list[Any], module: Any) -> bool:
    own = list(module.local_value().parameters())
    return all(ref.local_value() is parameter for ref, parameter in zip(refs, own, strict=True))


@inside
def test_train_and_eval_act_on_the_owner() -> None:
    remote, x = RemoteModule(OTHER, Noisy), torch.ones(2)
    module = remote.get_module_rref()
    for mode, change in ((False, remote.eval), (True, remote.train), (False, lambda: remote.train(False))):
        assert change() is remote
        assert rpc.rpc_sync(OTHER, is_training, args=(module,)) is mode
        assert remote.training is mode
        assert torch.equal(remote(x), x * mode)


# -- sharing


@inside
def test_one_is_made_of_a_module_that_exists() -> None:
    module: rpc.RRef[Any] = rpc.remote(OTHER, Net, kwargs={"seed": 5})
    remote = RemoteModule.init_from_module_rref("worker1/cpu", module)
    x, _ = batch(0)
    assert remote.get_module_rref() is module
    assert torch.equal(remote(x), Net(seed=5)(x))
    assert "factor" in inspect.signature(remote.forward).parameters
    again = RemoteModule.init_from_module_rref(OTHER, remote.get_module_rref())
    train_remotely(again, 1)
    assert torch.equal(remote(x), again(x))
    assert not torch.equal(remote(x), Net(seed=5)(x))
    # the worker that is named need not be the owner, as in torch
    assert RemoteModule.init_from_module_rref("worker0", module).on == OTHER
    own = RemoteModule.init_from_module_rref("worker0", rpc.RRef(Net().eval()))
    assert own.on == "worker0"
    assert own.training is False


@inside
def test_one_is_not_made_of_what_is_no_module() -> None:
    wrong: rpc.RRef[Any] = rpc.remote(OTHER, torch.ones, args=(2,))
    with pytest.raises(ValueError, match=r"`module_rref` refers to an instance of <class .*Tensor"):
        RemoteModule.init_from_module_rref(OTHER, wrong)
    with pytest.raises(TypeError, match="RRef to a module, not Net"):
        RemoteModule.init_from_module_rref(OTHER, Net())  # type: ignore[arg-type]
    with pytest.raises(LookupError, match="in vain"):
        RemoteModule.init_from_module_rref(OTHER, rpc.remote(OTHER, Fails, args=("in vain",)))
    with pytest.raises(rpc.NotAMemberError, match="nobody"):
        RemoteModule.init_from_module_rref("nobody", rpc.remote(OTHER, Net))


KEPT: dict[str, Any] = {}


def keep(remote: Any) -> None:
    KEPT["module"] = remote


def train_kept(steps: int) -> list[float]:
    remote = KEPT["module"]
    assert isinstance(remote, RemoteModule)
    assert "factor" in inspect.signature(remote.forward_async).parameters
    return train_remotely(remote, steps)


def drop_kept() -> None:
    KEPT.clear()
    gc.collect()


def share() -> None:
    """On worker 0: the module is on worker 1, and is trained from worker 2, which has it from here."""
    remote, same = RemoteModule(OTHER, Net), Net()
    remote.note = 1  # type: ignore[assignment]
    remote.eval()
    rpc.rpc_sync("worker2", keep, args=(remote,))
    assert rpc.rpc_sync("worker2", train_kept, args=(3,)) == pytest.approx(train_here(same, 3), rel=1e-6)
    x, _ = batch(0)
    torch.testing.assert_close(remote(x), same(x))
    attributes = rpc.rpc_sync("worker2", vars, args=(remote,))
    assert attributes["on"] == OTHER
    assert "note" not in attributes
    home = rpc.rpc_sync("worker2", hand_back)
    assert home.training is False
    assert torch.equal(home(x), remote(x))
    hybrid = rpc.rpc_sync("worker2", kept_in_a_hybrid)
    assert torch.equal(hybrid.remote(x), remote(x))
    assert torch.equal(rpc.rpc_sync(OTHER, run, args=(remote, x)), remote(x))  # to its owner
    made = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker2", remote.get_module_rref()))
    assert torch.equal(made(x), remote(x))


def run(remote: RemoteModule, x: Tensor) -> Any:
    return remote(x)


def hand_back() -> Any:
    return KEPT["module"]


def kept_in_a_hybrid() -> Any:
    return Hybrid(KEPT["module"])


def only_one_is_left() -> None:
    gc.collect()
    until_counts(lambda: counts()["forks"] == 1)


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    with World(3) as made:
        yield made


def test_it_is_shared_with_a_third_worker_which_trains_it(three: World) -> None:
    three.on(0, share)
    three.on(1, only_one_is_left)  # worker 2 still holds it
    assert len(three.on(2, train_kept, 1)) == 1
    three.on(2, drop_kept)
    three.everywhere(no_references)


def begin_to_hold() -> None:
    gc.disable()  # there are no cycles
    KEPT["module"] = RemoteModule(OTHER, Net)
    KEPT["parameters"] = KEPT["module"].remote_parameters(recurse=False)


def let_go(what: str) -> None:
    del KEPT[what]


def owns(number: int) -> None:
    until_counts(lambda: counts()["owned"] == number)


def test_a_module_lives_as_long_as_anybody_refers_to_it(three: World) -> None:
    three.on(0, begin_to_hold)
    three.on(1, owns, 2)
    three.on(0, let_go, "module")
    three.on(1, owns, 1)
    three.on(0, let_go, "parameters")
    three.on(1, owns, 0)


@inside
def test_a_subclass_keeps_its_ways_also_elsewhere() -> None:
    remote = Louder(OTHER, Net)
    x, _ = batch(0)
    assert torch.equal(remote(x), Net()(x) + 100)
    assert torch.equal(rpc.rpc_sync(OTHER, run, args=(remote, x)), remote(x))
    assert isinstance(Louder.init_from_module_rref(OTHER, remote.get_module_rref()), Louder)
    assert torch.equal(RemoteModule.forward(remote, x), Net()(x))


@inside
def test_pickle_and_copy_are_refused() -> None:
    remote = RemoteModule(OTHER, Net)
    for it in (remote, Hybrid(remote), [remote]):
        for write in (
            pickle.dumps,
            cloudpickle.dumps,
            copy.deepcopy,
            lambda x: torch.save(x, io.BytesIO()),
            lambda x: rpc.rpc_sync(OTHER, len, args=(Pickled(x),)),
        ):
            with pytest.raises(RuntimeError, match=r"only be pickled when using RPC|[Cc]an ?not (be )?pickle"):
                write(it)
    with pytest.raises(RuntimeError, match=r"(?s)Cannot pickle RemoteModule in python pickler.*worker1.*to_here"):
        copy.copy(remote)


class Pickled:
    """Pickles something inside of a message that is being written."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return bytes, (pickle.dumps(self.value),)


# -- making one


@inside
def test_what_the_constructor_raises_is_raised_at_once() -> None:
    with pytest.raises(LookupError, match="no such") as caught:
        RemoteModule("worker1/cpu", Fails, ("no such",))
    assert "raise LookupError(word)" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ValueError, match=re.escape("Expect `module_cls(*args, **kwargs)` returns an instance of")):
        RemoteModule(OTHER, NoModule, ("w",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        RemoteModule(OTHER, Net, kwargs={"height": 2})


@inside
def test_what_is_no_class_of_modules_is_refused_before_it_is_sent() -> None:
    with pytest.raises(TypeError, match=r"a class of modules, .* not Net\("):
        RemoteModule(OTHER, Net())
    with pytest.raises(TypeError, match=r"a class of modules, .* not 'Net'"):
        RemoteModule(OTHER, "Net")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="args must be a tuple, not Tensor"):
        RemoteModule(OTHER, Net, torch.ones(2))  # type: ignore[arg-type]


@inside
def test_a_function_may_make_the_module() -> None:
    seed = 7
    remote = RemoteModule(OTHER, lambda width: Net(width, seed=seed).double(), [4])
    assert remote.remote_parameters()[0].to_here().dtype is torch.float64
    assert repr(remote) == "RemoteModule(Net on worker1/cpu)"


@inside
def test_a_worker_is_named_by_name_or_rank_with_a_device_or_without() -> None:
    for place, device in (
        ("worker1", "cpu"),
        ("worker1/cpu", "cpu"),
        ("rank:1", "cpu"),
        ("rank:1/cpu:0", "cpu:0"),
    ):
        remote = RemoteModule(place, nn.Linear, (2, 2))
        assert (remote.on, remote.device) == (OTHER, device)
        assert remote(torch.ones(2)).shape == (2,)
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        ("nobody", rpc.NotAMemberError, "nobody.*worker0, worker1"),
        ("nobody/cpu", rpc.NotAMemberError, "nobody"),
        ("rank:9/cpu", rpc.NotAMemberError, "rank 9"),
        ("rank:x/cpu", ValueError, "Could not parse remote_device: rank:x/cpu. .* with a number"),
        ("rank:-1", ValueError, "Could not parse remote_device: rank:-1"),
        ("worker1/cpu/cpu", ValueError, "Could not parse remote_device: worker1/cpu/cpu. The valid format is"),
        ("/", ValueError, "Could not parse remote_device: /. The valid format is '<workername>/<device>'"),
        ("/cpu", ValueError, "Could not parse remote_device: /cpu. The valid format is"),
        ("", ValueError, "Could not parse"),
        ("cpu", ValueError, "'cpu' names a device but no worker.*'worker0'"),
        ("cuda:0", ValueError, "'cuda:0' names a device but no worker"),
        ("worker1/", RuntimeError, "'worker1/': Device string must not be empty"),
        ("worker1/cpu2", RuntimeError, "Invalid device string: 'cpu2'"),
        ("worker1/foo", RuntimeError, "Expected one of .+ device type at start of device string"),
        (1, TypeError, "'worker1/cpu', not 1 of type int"),
        (None, TypeError, "of type NoneType"),
    )
    for name, kind, text in wrong:
        with pytest.raises(kind, match=text):
            RemoteModule(name, nn.Linear, (2, 2))


def test_a_worker_of_a_role_has_a_colon_in_its_name() -> None:
    def program(rank: int) -> str:
        return "" if rank else RemoteModule("ps:0/cpu", nn.Linear, (2, 2)).on + RemoteModule("rank:1", Net).on

    assert run_world(program, 2, names=["trainer:0", "ps:0"])[0] == "ps:0ps:0"


def test_a_workers_name_goes_before_what_else_it_could_mean() -> None:
    def program(rank: int) -> list[str]:
        places = ["rank:1", "rank:1/cpu", "cpu", "cpu/cpu", "rank:0"]
        return [] if rank else [RemoteModule(place, Net).on for place in places]

    owners = run_world(program, 2, names=["rank:1", "cpu"])[0]
    assert owners == ["rank:1", "rank:1", "cpu", "cpu", "rank:1"]


@inside
def test_a_device_that_the_owner_lacks_is_named_by_it() -> None:
    text = r"worker \"worker1\" \(rank 1, .* cannot use the device 'cuda:99'"
    with pytest.raises(RuntimeError, match=text):
        RemoteModule("worker1/cuda:99", Net)
    with pytest.raises(RuntimeError, match=text):
        RemoteModule.init_from_module_rref("worker1/cuda:99", rpc.remote(OTHER, Net))


@inside
def test_arguments_are_moved_to_the_modules_device_however_deep_they_are() -> None:
    remote, x = RemoteModule("worker1/meta", Devices), torch.ones(2)
    packed = pack_sequence([torch.ones(2, 1)])
    assert remote(x, [{"deep": x}], packed=packed, plain=3) == ["meta"] * 4 + ["3"]
    assert remote.forward_async(x, [{"deep": x}], packed=packed, plain=4).wait() == ["meta"] * 4 + ["4"]


@inside
def test_a_scripted_module_runs_and_a_remote_one_cannot_be_scripted() -> None:
    x = torch.ones(2)
    for make in (scripted, scripted_and_loaded):
        remote = RemoteModule(OTHER, make, (2,))
        assert str(inspect.signature(remote.forward)).startswith("(x: Tensor, times: int = 2)")
        assert repr(remote) == "RemoteModule(Scripted on worker1/cpu)"
        assert torch.equal(remote(x), x * 6)
        assert torch.equal(remote.forward_async(x, times=3).wait(), x * 9)
        assert len(remote.remote_parameters()) == 1
        with pytest.raises(RuntimeError, match="a RemoteModule cannot be compiled by"):
            torch.jit.script(remote)


# -- the rest of nn.Module

WORK = {"eval", "forward", "train"}
FOR_PARENTS = {"get_extra_state", "set_extra_state"}
METHODS = sorted(n for n in dir(nn.Module) if not n.startswith("_") and callable(getattr(nn.Module, n)))
REFUSED = [name for name in METHODS if name not in WORK | FOR_PARENTS]


@inside
def test_every_other_method_of_a_module_is_refused_and_says_what_to_do() -> None:
    remote = RemoteModule(OTHER, Net)
    assert {"state_dict", "load_state_dict", "to", "zero_grad", "apply", "register_forward_hook"} < set(REFUSED)
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule. .*") as caught:
            getattr(remote, name)()
        assert re.search(r"Please use ``remote_parameters``|'worker1': .*get_module_rref\(\)", str(caught.value))
    with pytest.raises(ValueError, match="``register_parameter`` not supported"):
        remote.extra = nn.Parameter(torch.ones(1))


@inside
def test_what_the_refusals_say_to_do_works() -> None:
    remote, x = RemoteModule(OTHER, Net, kwargs={"seed": 1}), batch(0)[0]
    module, other = remote.get_module_rref(), Net(seed=2)
    module.rpc_sync().load_state_dict(other.state_dict())
    assert torch.equal(remote(x), other(x))
    assert module.rpc_sync().state_dict().keys() == other.state_dict().keys()
    assert rpc.rpc_sync(OTHER, to_double, args=(module,)) == torch.float64
    assert remote(x.double()).dtype is torch.float64
    assert next(iter(module.to_here().named_parameters()))[0] == "scale"


def to_double(ref: Any) -> Any:
    return ref.local_value().double().scale.dtype


@inside
def test_an_attribute_that_the_module_has_on_its_owner_only_is_told_of() -> None:
    remote = RemoteModule(OTHER, Net)
    with pytest.raises(AttributeError, match=r"no attribute 'inner'; the module is on 'worker1': .*remote_parameters"):
        remote.inner  # noqa: B018
    assert not hasattr(remote, "_nothing")


@inside
def test_as_a_part_of_a_module_it_has_no_parts_of_its_own() -> None:
    hybrid = Hybrid(RemoteModule(OTHER, Net))
    assert [name for name, _ in hybrid.named_parameters()] == ["local.weight", "local.bias"]
    assert [name for name, _ in hybrid.named_modules()] == ["", "remote", "local"]
    assert len(list(nn.ModuleList([hybrid.remote, hybrid.remote]).modules())) == 2
    assert "RemoteModule(Net on worker1/cpu)" in repr(hybrid)
    hybrid.zero_grad()
    assert hybrid.eval().remote.training is False
    assert rpc.rpc_sync(OTHER, is_training, args=(hybrid.remote.get_module_rref(),)) is False
    hybrid.double().float()
    assert hybrid.remote.remote_parameters()[0].to_here().dtype is torch.float32
    local = dict(Hybrid(hybrid.remote).named_parameters())
    hybrid.load_state_dict(local)
    with pytest.raises(ValueError, match="``state_dict`` not supported for RemoteModule"):
        hybrid.state_dict()
    x = batch(0)[0]
    with autograd.context() as context_id:
        autograd.backward(context_id, [hybrid(x).sum()])
        assert set(autograd.get_gradients(context_id)) == set(hybrid.parameters())
        refs = hybrid.remote.remote_parameters()
        assert None not in rpc.rpc_sync(OTHER, grads_of, args=(refs, context_id))


def test_without_a_world_it_says_so() -> None:
    with pytest.raises(rpc.NotAMemberError, match="call init_rpc first"):
        RemoteModule("worker1", Net)
