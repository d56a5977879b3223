"""Hooks run once a pass on every worker, the user's `.grad` stays untouched, and passes side by side do not mix."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from actorrpc.runtime.handling import here
from tests.autograd.common import (
    Fails,
    among_three,
    everywhere,
    gradient_at,
    leaf,
    put_accumulated_hook,
    put_hook,
    same,
    scaled,
    service,
    weight,
)
from tests.worlds import World

seen: Counter[str] = Counter()
handles: list[Any] = []


def watch(x: Tensor, name: str) -> None:
    """Puts hooks of every kind on a leaf."""
    node = torch.autograd.graph.get_gradient_edge(x).node

    def count(kind: str, *_: Any) -> None:
        seen[f"{name} {kind}"] += 1

    handles.extend((
        put_hook(x, functools.partial(count, "tensor")),
        put_accumulated_hook(x, functools.partial(count, "accumulated")),
        node.register_prehook(functools.partial(count, "before")),
        node.register_hook(functools.partial(count, "after")),
        node,  # a leaf has a node only as long as somebody holds it
    ))  # fmt: skip


def watch_weight(name: str) -> None:
    seen.clear()
    watch(weight(), name)


def unwatch() -> Counter[str]:
    found = Counter(seen)
    for handle in handles:
        if hasattr(handle, "remove"):
            handle.remove()
    handles.clear()
    seen.clear()
    return found


def scale_and_watch(x: Tensor) -> Tensor:
    """Hooks on what was received, and on what is sent."""
    y = scaled(x)
    put_hook(x, lambda _: seen.update(["received"]))
    put_hook(y, lambda _: seen.update(["sent back"]))
    return y


KINDS = ("tensor", "accumulated", "before", "after")


@among_three
def test_hooks_of_every_kind_run_once_a_pass_on_every_worker() -> None:
    seen.clear()
    x = leaf(1, 2, 4)
    watch(x, "x")
    for rank in (1, 2):
        rpc.rpc_sync(rank, watch_weight, args=(str(rank),))
    with autograd.context() as context_id:
        sent = x * 1
        put_hook(sent, lambda _: seen.update(["sent"]))
        came = rpc.rpc_sync(1, scale_and_watch, args=(sent,))
        put_hook(came, lambda _: seen.update(["came"]))
        loss = (came + rpc.rpc_sync(2, scale_and_watch, args=(came,)) + rpc.rpc_sync(1, scaled, args=(x,))).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        expected = Counter({"sent": 1, "came": 1, **{f"x {kind}": 1 for kind in KINDS}})
        assert seen == expected
        autograd.backward(context_id, [loss])
        assert unwatch() == expected + expected
    for rank in (1, 2):
        expected = Counter({"received": 2, "sent back": 2, **{f"{rank} {kind}": 2 for kind in KINDS}})
        assert rpc.rpc_sync(rank, unwatch) == expected


@among_three
def test_hooks_may_change_gradients_as_in_one_process() -> None:
    x = leaf(1, 2, 4)
    put_hook(x, lambda grad: grad * 10)
    weight_hook(100.0)
    rpc.rpc_sync(1, weight_hook, args=(100.0,))
    try:
        with autograd.context() as context_id:
            came = rpc.rpc_sync(1, scaled, args=(x,))
            put_hook(came, lambda grad: grad * 3)
            autograd.backward(context_id, [came.sum()])
            same(autograd.get_gradients(context_id)[x], [60, 90, 150])
            same(gradient_at(1, context_id), [300, 600, 1200])
    finally:
        everywhere(unwatch)


def weight_hook(factor: float) -> None:
    handles.append(put_hook(weight(), lambda grad: grad * factor))


@among_three
def test_a_hook_sees_the_gradient_where_it_accumulates_and_may_take_it() -> None:
    x, found = leaf(1, 2, 4), []

    def step(leaf: Tensor) -> None:
        found.append(leaf.grad)
        leaf.grad = None

    put_accumulated_hook(x, step)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        assert x not in autograd.get_gradients(context_id)
    same(found[0], [2, 3, 5])


@among_three
def test_hooks_of_a_leaf_are_not_called_for_what_nothing_used() -> None:
    unused, x = leaf(1, 1, 1), leaf(1, 2, 4)
    seen.clear()
    put_hook(unused, lambda grad: grad * 2)  # it would fail on None
    put_accumulated_hook(unused, lambda _: seen.update(["accumulated"]))
    hooks = dict(unused._backward_hooks or {})
    with autograd.context() as context_id:
        rpc.rpc_sync(1, scaled, args=(unused,))
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        assert set(autograd.get_gradients(context_id)) == {x}
    assert not seen
    assert dict(unused._backward_hooks or {}) == hooks
    (unused * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert unused.grad is not None
    same(unused.grad, [4, 4, 4])
    assert seen == Counter(["accumulated"])


@among_three
def test_hooks_may_call_and_may_have_a_context_of_their_own() -> None:
    x = leaf(1, 2, 4)
    results: list[Any] = []

    def hook(grad: Tensor) -> Tensor:
        results.append(here.context)
        with autograd.context() as own, torch.enable_grad():  # hooks run without grad
            y = leaf(1, 1, 1)
            autograd.backward(own, [rpc.rpc_sync(2, scaled, args=(y,)).sum()])
            results.append(autograd.get_gradients(own)[y])
        factor: Tensor = rpc.rpc_sync(1, torch.full, args=((3,), 2.0))
        return grad * factor

    put_hook(x, hook)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(autograd.get_gradients(context_id)[x], [4, 6, 10])
        assert here.context == context_id
    assert results[0] == -1
    same(results[1], [2, 3, 5])


def weight_ref() -> rpc.RRef[Tensor]:
    return rpc.RRef(weight())


def watch_node(kind: str) -> None:
    """Puts one hook on the node that accumulates this process's weight's gradient."""
    seen.clear()
    node = torch.autograd.graph.get_gradient_edge(weight()).node
    register = node.register_prehook if kind == "before" else node.register_hook
    handles.extend((register(lambda *_: seen.update([kind])), node))


@among_three
def test_a_hook_on_the_node_that_accumulates_runs_also_where_it_came_after_an_optimizer() -> None:
    """An optimizer keeps that node, and passes look at the hooks that it knew there."""
    optimizers = [DistributedOptimizer(torch.optim.SGD, [rpc.rpc_sync(1, weight_ref)], lr=0.0) for _ in "ab"]
    x = leaf(1, 2, 4)

    def go_back() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
            same(gradient_at(1, context_id), [1, 2, 4])
            same(autograd.get_gradients(context_id)[x], [2, 3, 5])

    found = []
    for _ in range(3):  # with two optimizers, with one, with none
        for kind in ("before", "after"):
            go_back()
            rpc.rpc_sync(1, watch_node, args=(kind,))
            go_back()
            found.append(rpc.rpc_sync(1, unwatch))
            go_back()
        del optimizers[:1]
    assert found == [Counter(["before"]), Counter(["after"])] * 3


@among_three
def test_gradients_are_memory_of_their_own_and_laid_out_as_their_leaves() -> None:
    for hooked in (False, True):  # the engine's own accumulation runs only where somebody would see it
        x, y = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2).t().requires_grad_()
        if hooked:
            put_accumulated_hook(x, lambda _: None)
        with autograd.context() as context_id:
            came = rpc.rpc_sync(1, torch.mul, args=(torch.ones(2, 3, requires_grad=True), 2))
            autograd.backward(context_id, [((x + y) + came).sum()])
            found = autograd.get_gradients(context_id)
        same(found[x], torch.ones(2, 3))
        same(found[y], torch.ones(2, 3))
        assert found[x].stride() == (3, 1)
        assert found[y].stride() == (1, 2)
        found[x].mul_(5)
        same(found[y], torch.ones(2, 3))


# -- .grad


def set_weight_grad(value: float | None) -> None:
    weight().grad = None if value is None else torch.full_like(weight(), value)


def weight_grad() -> Tensor | None:
    return weight().grad


def refuse(x: Tensor) -> Tensor:
    y: Tensor = Fails.apply(scaled(x))  # type: ignore[no-untyped-call]
    return y


@among_three
def test_grad_of_the_user_is_the_same_after_a_pass_also_after_a_failed_one() -> None:
    x = leaf(1, 2, 4)
    own = x.grad = torch.full_like(x, 7)
    rpc.rpc_sync(1, set_weight_grad, args=(9.0,))
    try:
        for call, fails in ((scaled, False), (refuse, True), (scaled, False)):
            with autograd.context() as context_id:
                loss = (rpc.rpc_sync(1, call, args=(x,)) + rpc.rpc_sync(1, scaled, args=(x,))).sum()
                if fails:
                    with pytest.raises(ZeroDivisionError):
                        autograd.backward(context_id, [loss])
                    assert x not in autograd.get_gradients(context_id)
                else:
                    autograd.backward(context_id, [loss])
                    same(autograd.get_gradients(context_id)[x], [4, 6, 10])
            assert x.grad is own
            same(own, [7, 7, 7])
            same(rpc.rpc_sync(1, weight_grad), [9, 9, 9])
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]
        same(x.grad, [9, 9, 9])
    finally:
        rpc.rpc_sync(1, set_weight_grad, args=(None,))


@among_three
def test_a_plain_backward_beside_a_pass_goes_to_grad() -> None:
    x = leaf(1, 2, 4)
    in_pass, done = threading.Event(), threading.Event()

    def hook(_: Tensor) -> None:
        in_pass.set()
        assert done.wait(10)

    def plain() -> None:
        assert in_pass.wait(10)
        (x * 3).sum().backward()  # type: ignore[no-untyped-call]
        done.set()

    with autograd.context() as context_id:
        came = rpc.rpc_sync(1, scaled, args=(x,))
        put_hook(came, hook)
        thread = threading.Thread(target=plain)
        thread.start()
        autograd.backward(context_id, [came.sum()])
        thread.join()
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
    assert x.grad is not None
    same(x.grad, [3, 3, 3])


# -- side by side


@functools.cache
def shared() -> Tensor:
    return torch.ones(100, dtype=torch.float64, requires_grad=True)


def times_shared(x: Tensor) -> Tensor:
    return x * shared()


def shared_gradient(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(shared())


def train(factor: float, passes: int, to: int) -> list[str]:
    """One trainer's passes, each with a factor of its own, over leaves that all trainers share."""
    wrong = []
    for n in range(passes):
        k = factor + n / 1000
        with autograd.context() as context_id:
            y = rpc.rpc_sync(to, times_shared, args=(shared() * k,)).sum() + (shared() * k).sum()
            autograd.backward(context_id, [y])
            mine = autograd.get_gradients(context_id).get(shared())
            theirs = rpc.rpc_sync(to, shared_gradient, args=(context_id,))
            if mine is None or theirs is None or not torch.allclose(mine, torch.full_like(mine, 2 * k)):
                wrong.append(f"{k}: {mine}")
            elif not torch.allclose(theirs, torch.full_like(theirs, k)):
                wrong.append(f"{k} there: {theirs}")
    return wrong


def trainers(passes: int) -> None:
    everywhere(shared)  # made once, before threads ask for it
    shared().grad = torch.full_like(shared(), 7.0)
    futures = [rpc.rpc_async(rank, train, args=(1.0 + rank, passes, 2), timeout=300) for rank in (0, 1) for _ in "abc"]
    wrong = [text for future in futures for text in future.wait()]
    assert not wrong, wrong[:5]
    assert shared().grad is not None
    same(shared().grad, torch.full_like(shared(), 7.0))


@among_three
def test_passes_side_by_side_over_shared_leaves_do_not_mix() -> None:
    trainers(10)


@pytest.mark.slow
def test_1800_passes_side_by_side_over_shared_leaves_do_not_mix(trio: World) -> None:
    trio.timeout = 110
    trio.on(0, trainers, 300)


runs = 0


class Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        global runs
        runs += 1
        return grads[0]


state: list[Tensor] = []


def recur(x: Tensor, first: bool) -> Tensor:
    """One step of a network whose state stays here."""
    if first:
        state[:] = [torch.zeros(3, dtype=torch.float64)]
    y: Tensor = Count.apply(torch.tanh(state[0] * weight() + x))  # type: ignore[no-untyped-call]
    state[0] = y
    return y


def take_runs() -> int:
    global runs
    found, runs = runs, 0
    state.clear()
    return found


@among_three
def test_a_pass_over_recurrent_calls_runs_each_node_and_hook_once_and_sends_a_message_for_each() -> None:
    mine = service()
    for steps in (10, 20, 40, 80):
        x = leaf(0.1, 0.2, 0.3)
        rpc.rpc_sync(1, watch_weight, args=("w",))
        value, w, h, local = x * 1, weight().detach().requires_grad_(), torch.zeros(3, dtype=torch.float64), x * 1
        with autograd.context() as context_id:
            for step in range(steps):
                value = rpc.rpc_sync(1, recur, args=(value, step == 0)) * 0.5
                h = torch.tanh(h * w + local)
                local = h * 0.5
            sent = mine.worker.peers[1].sent
            autograd.backward(context_id, [value.sum()])
            sent = mine.worker.peers[1].sent - sent
            [dx, dw] = torch.autograd.grad(local.sum(), [x, w])
            same(autograd.get_gradients(context_id)[x], dx)
            same(gradient_at(1, context_id), dw)
        assert rpc.rpc_sync(1, take_runs) == steps
        assert rpc.rpc_sync(1, unwatch) == Counter({f"w {kind}": 1 for kind in KINDS})
        assert sent <= steps + 5, (steps, sent)


@pytest.mark.slow
def test_a_pass_over_3000_recurrent_calls_comes_through(trio: World) -> None:
    trio.timeout = 110
    trio.on(0, go_deep)


def go_deep() -> None:
    x = leaf(0.1, 0.2, 0.3)
    with autograd.context() as context_id:
        value = x * 1
        for step in range(3000):
            value = rpc.rpc_sync(1, recur, args=(value, step == 0))
        autograd.backward(context_id, [value.sum()])
        assert x in autograd.get_gradients(context_id)
    assert rpc.rpc_sync(1, take_runs) == 3000
