"""`check` passes where a step over several workers is right, and names the first thing that differs where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc import RRef, autograd
from actorrpc.errors import GradientMismatchError
from actorrpc.nn import RemoteModule
from tests.autograd.common import among_three, leaf, same

faults: set[str] = set()
"""What goes wrong in this process."""


def go_wrong(*kinds: str) -> None:
    faults.clear()
    faults.update(kinds)


class Crooked(torch.autograd.Function):
    """Does nothing, with a gradient that is twice as large, where that is among the faults of this process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.factor = 2.0 if kind in faults else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def crooked(x: Tensor, kind: str) -> Tensor:
    found: Tensor = Crooked.apply(x, kind)  # type: ignore[no-untyped-call]
    return found


class Layer(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(factor * torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64))
        self.inner = nn.Linear(3, 3).double()
        with torch.no_grad():
            self.inner.weight.copy_(torch.arange(9, dtype=torch.float64).reshape(3, 3) / 9)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if "value" in faults:
            scale += 1
        x = x.detach() if "detached" in faults else crooked(x, "argument")
        y = torch.tanh(self.inner(x)) * crooked(self.weight, "weight") * scale
        return y.detach() if "lost" in faults else y

    def mix(self, parts: dict[str, Any], *, more: Tensor) -> dict[str, Any]:
        x, (y, text, _) = parts["first"], parts["rest"]
        same = x is y
        x.mul_(self.weight)  # the sender's own stays as it was
        return {"sum": [x + y, more.sum()], "same": same, "text": text, "product": x * crooked(more, "more")}

    def state(self) -> tuple[bool, bool]:
        """Says whether the gradient is as it was set, and whether a leaf still is one."""
        found = self.weight.grad
        return found is not None and bool((found == 7).all()), self.inner.weight.grad is None

    def set_grad(self) -> None:
        self.weight.grad = torch.full_like(self.weight, 7.0)


class Table:
    """An object that is no module, with a module and a leaf in it."""

    def __init__(self) -> None:
        self.words = nn.Embedding(5, 3, sparse=True).double()
        self.shift = leaf(1, 2, 3)
        self.name = "table"

    def look_up(self, words: Tensor) -> Tensor:
        found: Tensor = self.words(words) + crooked(self.shift, "shift")
        return found


def two_layers() -> list[RRef[Layer]]:
    first, second = Layer(1.0), Layer(2.0)
    second.weight = first.weight
    return [RRef(first), RRef(second)]


x = leaf(0.1, -0.2, 0.3)
own = leaf(1, -1, 2)


def step(first: Any, second: Any) -> Any:
    """Hop 0 is on the first's worker, hop 1 on the second's, hop 2 on the first's again."""
    y = first(x, scale=0.5)
    z = second.forward(crooked(y, "between") * 2)
    return (first(z) * crooked(own, "own") + y).sum()


def layers() -> list[RRef[Layer]]:
    return [rpc.remote("worker1", Layer), rpc.remote("worker2", Layer, args=(2.0,))]


def mismatch(step: Callable[..., Tensor], *refs: Any) -> GradientMismatchError:
    with pytest.raises(GradientMismatchError) as caught:
        autograd.check(step, *refs)
    return caught.value


def fields(error: GradientMismatchError) -> tuple[Any, ...]:
    return error.hop, error.method, error.owner, error.tensor, error.what


@among_three
def test_a_right_step_passes_and_changes_no_grad() -> None:
    first, second = layers()
    first.rpc_sync().set_grad()
    own.grad = torch.full_like(own, 7.0)
    autograd.check(step, first, second)
    autograd.check(step, RRef(Layer()), RemoteModule("worker2", Layer))
    same(own.grad, [7, 7, 7])
    own.grad = None
    assert x.grad is None
    assert first.rpc_sync().state() == (True, True)


@among_three
def test_containers_keywords_in_place_changes_and_tensors_sent_twice_pass() -> None:
    first, second = layers()
    parameter = nn.Parameter(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
    seen = []

    def step(first: Any, second: Any) -> Any:
        y = x * 3
        mixed = second.mix({"first": y, "rest": (y, "text", None)}, more=first(parameter))
        seen.append((mixed["same"], mixed["text"]))
        mixed["sum"][0].add_(1)
        return (mixed["sum"][0] * mixed["product"] * y).sum() + mixed["sum"][1]

    autograd.check(step, first, second)
    assert seen == [(True, "text")] * 2
    rpc.rpc_sync(2, go_wrong, args=("more",))
    try:
        error = mismatch(step, first, second)
    finally:
        rpc.rpc_sync(2, go_wrong)
    assert fields(error) == (1, "mix", "worker2", "argument['more']", "gradient")


@among_three
def test_parameters_that_two_objects_share_and_sparse_gradients_pass() -> None:
    first, second = rpc.rpc_sync(1, two_layers)
    autograd.check(step, first, second)
    words = torch.tensor([1, 3, 3])
    table = rpc.remote(2, Table)

    def look(table: Any, layer: Any) -> Any:
        return layer(table.look_up(words)).sum()

    autograd.check(look, table, first)
    rpc.rpc_sync(2, go_wrong, args=("shift",))
    try:
        error = mismatch(look, table, first)
    finally:
        rpc.rpc_sync(2, go_wrong)
    assert fields(error) == (0, "look_up", "worker2", "parameter 'shift'", "gradient")


@among_three
def test_the_first_thing_that_differs_is_named() -> None:
    first, second = layers()
    expected: dict[tuple[int, str], tuple[Any, ...]] = {
        (2, "argument"): (1, "forward", "worker2", "argument[0]", "gradient"),
        (1, "argument"): (2, "__call__", "worker1", "argument[0]", "gradient"),
        (2, "detached"): (1, "forward", "worker2", "argument[0]", "gradient"),
        (1, "lost"): (0, "__call__", "worker1", "result", "value"),
        (2, "weight"): (1, "forward", "worker2", "parameter 'weight'", "gradient"),
        (1, "weight"): (2, "__call__", "worker1", "parameter 'weight'", "gradient"),
        (2, "value"): (1, "forward", "worker2", "result", "value"),
    }
    for (rank, kind), named in expected.items():
        rpc.rpc_sync(rank, go_wrong, args=(kind,))
        try:
            error = mismatch(step, first, second)
        finally:
            rpc.rpc_sync(rank, go_wrong)
        assert fields(error) == named, kind
        autograd.check(step, first, second)


@among_three
def test_what_goes_wrong_in_the_step_itself_is_named() -> None:
    def in_second_run(*kinds: str) -> Callable[..., Tensor]:
        runs: list[int] = []

        def wrong_later(first: Any, second: Any) -> Any:
            runs.append(1)
            go_wrong(*kinds if len(runs) == 2 else ())
            return step(first, second)

        return wrong_later

    try:
        error = mismatch(in_second_run("between"), *layers())
        assert fields(error) == (0, "__call__", "worker1", "result", "gradient")
        error = mismatch(in_second_run("own"), *layers())
        assert (error.hop, error.tensor, error.what) == (-1, "leaf", "gradient")
        assert "worker0" in error.owner
    finally:
        go_wrong()


@among_three
def test_the_error_says_where_how_much_and_where_to_look() -> None:
    rpc.rpc_sync(2, go_wrong, args=("argument",))
    try:
        text = str(mismatch(step, *layers()))
        for part in ("gradient of argument[0]", "hop 1", "forward on 'worker2'", "shape (3,)", "on the owner"):
            assert part in text
        assert "Greatest absolute difference" in text
        rpc.rpc_sync(2, go_wrong, args=("detached",))
        assert "there is none" in str(mismatch(step, *layers()))
        rpc.rpc_sync(2, go_wrong, args=("lost",))
        text = str(mismatch(lambda _, layer: layer(x).sum(), *layers()))
        assert "requires_grad is False; in one process it is True" in text
        rpc.rpc_sync(2, go_wrong, args=("argument",))
        autograd.check(step, *layers(), rtol=1e9, atol=1e9)
    finally:
        rpc.rpc_sync(2, go_wrong)


@among_three
def test_what_the_step_draws_here_is_the_same_in_both_runs_and_what_others_draw_is_named() -> None:
    def noisy(layer: Any) -> Any:
        return layer(x * torch.rand(3)).sum()

    before = torch.get_rng_state()
    autograd.check(noisy, layers()[0])
    assert torch.equal(torch.get_rng_state(), before)
    drops = rpc.remote(1, nn.Dropout, args=(0.5,))

    def drop(module: Any) -> Any:
        return module(torch.ones(1000, requires_grad=True)).sum()

    error = mismatch(drop, drops)
    assert fields(error) == (0, "__call__", "worker1", "result", "value")
    assert "eval()" in str(error)
    drops.rpc_sync().train(False)
    autograd.check(drop, drops)


class Calls:
    """An object that calls another one."""

    def __init__(self, other: RRef[Layer]) -> None:
        self.other = other

    def run(self, x: Tensor) -> Tensor:
        found: Tensor = self.other.rpc_sync().forward(x)
        return found


@among_three
def test_what_cannot_be_checked_is_refused() -> None:
    first, second = layers()
    with pytest.raises(RuntimeError, match="made no call"):
        autograd.check(lambda *_: x.sum(), first, second)
    with pytest.raises(TypeError, match=r"scalar tensor, not a tensor of shape \(3,\)"):
        autograd.check(lambda a: a(x), first)
    with pytest.raises(TypeError, match="not a NoneType"):
        autograd.check(lambda a: a.set_grad(), first)
    with pytest.raises(TypeError, match="requires grad"):
        autograd.check(lambda a: a(x).sum().detach(), first)
    with pytest.raises(TypeError, match="not a Layer"):
        autograd.check(step, Layer(), second)  # type: ignore[arg-type]
    with autograd.context(), pytest.raises(RuntimeError, match="outside of any"):
        autograd.check(step, first, second)
    with pytest.raises(RuntimeError, match="another way"):
        autograd.check(lambda a: a.run(x).sum(), rpc.remote(1, Calls, args=(second,)))
    with pytest.raises(RuntimeError, match="another way"):
        autograd.check(lambda a: (a(x) + second.rpc_sync().forward(x)).sum(), first)
    more = iter(range(2))
    with pytest.raises(RuntimeError, match=r"same twice.*nothing more, then argument\[0\] of hop 1"):
        autograd.check(lambda a, b: (a(x) + sum(b(x) for _ in range(next(more)))).sum(), first, second)
    with pytest.raises(ZeroDivisionError):
        autograd.check(lambda a: a(x).sum() / (1 // 0), first)
