"""What fails in a pass is raised at its root, soon, with where it happened; nobody else is left waiting."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import weakref
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.errors import RemoteError, RPCTimeoutError, WorkerLostError
from tests.autograd.common import (
    among_three,
    everywhere,
    gradient_at,
    leaf,
    nothing_left,
    put_accumulated_hook,
    put_hook,
    same,
    scaled,
    service,
    weight,
)
from tests.worlds import World, no_references, raised_within, until


class Raises(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Any) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.error


def spoil(x: Tensor, error: BaseException) -> Tensor:
    y: Tensor = Raises.apply(x, error)  # type: ignore[no-untyped-call]
    return y


def along(x: Tensor, way: list[int], error: BaseException) -> Tensor:
    """Goes along a way, at the end of which is a function that fails in backward."""
    if not way:
        return spoil(scaled(x), error)
    return scaled(rpc.rpc_sync(way[0], along, args=(scaled(x), way[1:], error)))


def cause_of(error: BaseException) -> str:
    return str(error.__cause__)


@among_three
def test_an_error_in_backward_is_raised_at_the_root_with_worker_and_traceback() -> None:
    for way in ([1, 2], [1], [2, 1, 2], [1, 0, 2], [0, 1, 2, 0]):
        with autograd.context() as context_id, raised_within(10):
            x = leaf(1, 2, 4)
            y = along(x, way, ZeroDivisionError("spoiled"))
            with pytest.raises(ZeroDivisionError, match="spoiled") as caught:
                autograd.backward(context_id, [y.sum()])
            if way[-1] != 0:
                assert f"worker{way[-1]}" in cause_of(caught.value)
                assert "in backward" in cause_of(caught.value)
            everywhere(no_pass)
            assert x not in autograd.get_gradients(context_id)
            # The context is as good as before.
            autograd.backward(context_id, [rpc.rpc_sync(way[-1], scaled, args=(x,)).sum()])
            same(autograd.get_gradients(context_id)[x], [2, 3, 5])


def no_pass() -> None:
    mine = service()
    until(lambda: not mine.leaves.running and not mine.leaves._held, what=f"a pass still runs: {mine.waits()}")
    until(lambda: not mine.waits(), what=f"a pass waits: {mine.waits()}")


@among_three
def test_an_error_at_the_root_ends_the_pass_everywhere() -> None:
    with autograd.context() as context_id, raised_within(10):
        x = leaf(1, 2, 4)
        y = rpc.rpc_sync(1, hop_on, args=(spoil(x, ZeroDivisionError("at home")),))
        with pytest.raises(ZeroDivisionError, match="at home"):
            autograd.backward(context_id, [y.sum()])
        y = rpc.rpc_sync(1, hop_on, args=(x,))
        with pytest.raises(ZeroDivisionError, match="at home"):
            autograd.backward(context_id, [spoil(y, ZeroDivisionError("at home")).sum()])
        everywhere(no_pass)


def hop_on(x: Tensor) -> Tensor:
    return scaled(rpc.rpc_sync(2, scaled, args=(scaled(x),)))


@among_three
def test_a_worker_that_only_a_failed_one_has_begun_is_told_as_well() -> None:
    """Worker 1 fails after it has begun worker 2, which then waits for gradients that never come."""
    with autograd.context() as context_id, raised_within(10):
        x = leaf(1, 2, 4)
        y = rpc.rpc_sync(1, sends_and_forgets, args=(x,))
        with pytest.raises(ZeroDivisionError):
            autograd.backward(context_id, [y.sum()])
        everywhere(no_pass)


def takes_and_answers(x: Tensor) -> Tensor:
    return scaled(x)


def sends_and_forgets(x: Tensor) -> Tensor:
    there = rpc.rpc_sync(2, takes_and_answers, args=(spoil(x, ZeroDivisionError()),))
    rpc.rpc_sync(2, takes_and_answers, args=(x,))  # without any use
    return spoil(there, ZeroDivisionError())


@among_three
def test_a_hook_that_raises_fails_the_pass_and_frees_its_leaf() -> None:
    x = leaf(1, 2, 4)

    def raising(*_: Any) -> None:
        raise ZeroDivisionError("in a hook")

    for put in (put_hook, put_accumulated_hook):
        handle = put(x, raising)
        x.grad = torch.full_like(x, 7)
        with autograd.context() as context_id, raised_within(10):
            with pytest.raises(ZeroDivisionError, match="in a hook"):
                autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
            assert not autograd.get_gradients(context_id)
            same(x.grad, [7, 7, 7])
            handle.remove()
            autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
            same(autograd.get_gradients(context_id)[x], [2, 3, 5])


@among_three
def test_an_exit_in_a_remote_backward_does_not_end_the_root() -> None:
    for way in ([1], [1, 2]):
        with autograd.context() as context_id:
            y = along(leaf(1, 2, 4), way, SystemExit(3))
            with pytest.raises(RemoteError, match="SystemExit"):
                autograd.backward(context_id, [y.sum()])


@among_three
def test_arguments_of_backward_that_are_none_say_what_is_meant() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        loss: Any = rpc.rpc_sync(1, scaled, args=(x,)).sum()
        wrong: list[tuple[Any, Any, str]] = [
            ([loss], context_id, "context_id must be the number .*, not list"),
            (autograd.context(), [loss], "context_id must be the number .*, not context"),
            (context_id, context_id, r"roots must be a list of tensors, not int; backward\(context_id, \[loss\]\)"),
            (context_id, [rpc.rpc_async(1, scaled, args=(x,))], r"not Future; wait\(\) gives a Future's tensor"),
            (context_id, [rpc.remote(1, scaled, args=(x,))], r"not RRef; .* rref\.backward\(context_id\)"),
        ]
        for number, roots, text in wrong:
            with pytest.raises(TypeError, match=text):
                autograd.backward(number, roots)
        autograd.backward(context_id, [loss])


@among_three
def test_a_graph_that_was_used_up_says_so() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, scaled, args=(x,))
        autograd.backward(context_id, [y.sum()])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
        # one that goes on from it is no better
        z = rpc.rpc_sync(1, scaled, args=(y,))
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            autograd.backward(context_id, [z.sum()])


@among_three
def test_plain_backward_over_workers_says_what_to_use_instead() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, scaled, args=(x,))
        with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
            y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
            torch.autograd.grad(y.sum(), [x], retain_graph=True)
        autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
    with autograd.context() as other, pytest.raises(RuntimeError, match=r"dist_autograd\.backward|context"):
        autograd.backward(other, [y.sum()])


# -- time


class Blocks(torch.autograd.Function):
    """Its backward takes until it is let go."""

    gate = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert Blocks.gate.wait(30)
        return grads[0]


def block_back(x: Tensor) -> Tensor:
    Blocks.gate.clear()
    y: Tensor = Blocks.apply(x * weight()[: len(x)])  # type: ignore[no-untyped-call]
    return y


def let_go() -> None:
    Blocks.gate.set()


@among_three
def test_a_pass_that_waits_too_long_says_for_which_worker_and_tensors() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, block_back, args=(x,))
        rpc._set_rpc_timeout(0.3)
        try:
            with pytest.raises(RPCTimeoutError, match=r"float64\[3\].*worker1") as caught:
                autograd.backward(context_id, [y.sum()])
            assert str(context_id) in str(caught.value)
            assert "worker0" in str(caught.value)
        finally:
            rpc._set_rpc_timeout(20)
            rpc.rpc_sync(1, let_go)
        everywhere(no_pass)


def waits_for(words: str) -> bool:
    return words in autograd.waiting()[0]


def block_own() -> Tensor:
    """The root needs no gradient of it."""
    return block_back(torch.ones(3, dtype=torch.float64))


@among_three
def test_a_pass_that_waits_says_on_demand_for_what() -> None:
    assert autograd.waiting() == []
    calls: list[tuple[Any, tuple[Tensor, ...], str]] = [(block_back, (leaf(1, 2),), "[2]"), (block_own, (), "to end")]
    for call, args, words in calls:
        with autograd.context() as context_id:
            y = rpc.rpc_sync(1, call, args=args)
            thread = threading.Thread(target=autograd.backward, args=(context_id, [y.sum()]))
            thread.start()
            until(autograd.waiting)
            until(functools.partial(waits_for, words), what=f"{autograd.waiting()} without {words}")
            [text] = autograd.waiting()
            assert "worker1" in text
            assert str(context_id) in text
            assert rpc.rpc_sync(1, autograd.waiting) == []  # it computes
            rpc.rpc_sync(1, let_go)
            thread.join()
        assert autograd.waiting() == []


# -- workers that are gone


def die(_: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def die_back(x: Tensor) -> Tensor:
    y: Tensor = Dies.apply(scaled(x))  # type: ignore[no-untyped-call]
    return y


def through(way: list[int], x: Tensor) -> Tensor:
    """Goes along a way, at the end of which is a worker that dies in backward."""
    if not way:
        return die_back(x)
    return scaled(rpc.rpc_sync(way[0], through, args=(way[1:], scaled(x))))


def lose_in_backward(way: list[int]) -> None:
    everywhere(abs, 1)  # a worker is watched from the first message to it on
    with autograd.context() as context_id:
        y = through(way, leaf(1, 2, 4))
        with raised_within(15), pytest.raises(WorkerLostError, match="worker2"):
            autograd.backward(context_id, [y.sum()])
        for rank in (0, 1):
            rpc.rpc_sync(rank, no_pass)
    for rank in (0, 1):
        rpc.rpc_sync(rank, nothing_left)
    with autograd.context() as context_id:
        x = leaf(1, 2, 4)
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])


@pytest.mark.parametrize(
    "way", [[1, 2], pytest.param([2], marks=pytest.mark.slow), pytest.param([1, 1, 2], marks=pytest.mark.slow)]
)
def test_a_worker_that_dies_in_backward_fails_the_pass_soon(way: list[int]) -> None:
    with World(3, options={"rpc_timeout": 60}) as world:
        world.let_die(2)
        world.on(0, lose_in_backward, way)


def die_between(x: Tensor) -> Tensor:
    """When this one dies in backward, worker 1, which only it has begun, still waits for gradients from it."""
    y: Tensor = Dies.apply(rpc.rpc_sync(1, scaled, args=(scaled(x),)))  # type: ignore[no-untyped-call]
    z: Tensor = rpc.rpc_sync(1, scaled, args=(y,))
    return z


def lose_who_began_another() -> None:
    for rank in range(3):
        rpc.rpc_sync(rank, everywhere, args=(abs, 1))
    with autograd.context() as context_id:
        y = rpc.rpc_sync(2, die_between, args=(leaf(1, 2, 4),))
        with raised_within(15), pytest.raises(WorkerLostError, match="worker2"):
            autograd.backward(context_id, [y.sum()])
        for rank in (0, 1):
            rpc.rpc_sync(rank, no_pass)
    for rank in (0, 1):
        rpc.rpc_sync(rank, nothing_left)


def test_a_worker_whose_beginner_died_does_not_wait_for_it() -> None:
    with World(3, options={"rpc_timeout": 60}) as world:
        world.let_die(2)
        world.on(0, lose_who_began_another)


def lose_before_backward() -> None:
    x, other = leaf(1, 2, 4), leaf(1, 2, 4)
    with autograd.context() as context_id, raised_within(20):
        needed = rpc.rpc_sync(2, scaled, args=(x,))
        through_one = rpc.rpc_sync(1, by_way_of_two, args=(other,))
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync(2, die, args=(x,))
        with pytest.raises(WorkerLostError, match="worker2"):
            autograd.backward(context_id, [needed.sum()], retain_graph=True)
        with pytest.raises(WorkerLostError, match="worker2"):
            autograd.backward(context_id, [through_one.sum()], retain_graph=True)
        # What does not go through it is as right as ever.
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
        same(gradient_at(1, context_id), [1, 2, 4])
        for rank in (0, 1):
            rpc.rpc_sync(rank, no_pass)
    for rank in (0, 1):
        rpc.rpc_sync(rank, nothing_left)


def by_way_of_two(x: Tensor) -> Tensor:
    return scaled(rpc.rpc_sync(2, scaled, args=(x,)))


def test_a_worker_that_died_before_fails_the_passes_that_need_it_and_no_others() -> None:
    with World(3, options={"rpc_timeout": 60}) as world:
        world.let_die(2)
        world.on(0, lose_before_backward)


def root_that_dies() -> None:
    for rank in (1, 2):
        rpc.rpc_sync(rank, everywhere, args=(abs, 1))
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, by_way_of_two, args=(leaf(1, 2, 4),))
        autograd.backward(context_id, [Dies.apply(y).sum()])  # type: ignore[no-untyped-call]


def forget_the_dead() -> None:
    until(lambda: service().worker.peers[0].standing.name == "LOST")
    nothing_left()


def test_workers_whose_root_died_are_free_again() -> None:
    with World(3, options={"rpc_timeout": 60}, strict=False) as world:
        world.let_die(0)
        world.start(0, root_that_dies)
        for rank in (1, 2):
            world.on(rank, forget_the_dead)


# -- what is left


def resident() -> int:
    rss: int = psutil.Process().memory_info().rss
    return rss


def tensors() -> int:
    gc.collect()
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


def left() -> tuple[int, int, int]:
    return tensors(), resident(), service().contexts.statistics()["over"]


def a_step() -> None:
    with autograd.context() as context_id:
        x = leaf(1, 2, 4)
        y = rpc.rpc_sync(1, hop_on, args=(x,))
        rpc.rpc_sync(2, scaled, args=(x,))
        autograd.backward(context_id, [y.sum()])
        assert x in autograd.get_gradients(context_id)


def many_steps(steps: int) -> None:
    for _ in range(min(50, steps // 5)):
        a_step()
    everywhere(nothing_left)
    before = everywhere(left)
    for _ in range(steps):
        a_step()
    everywhere(nothing_left)
    for was, now in zip(before, everywhere(left), strict=True):
        assert now[0] <= was[0], f"{now[0] - was[0]} tensors more"
        assert now[2] <= 1, f"{now[2]} contexts are remembered"
        assert now[1] - was[1] < 8e6, f"{now[1] - was[1]} bytes more"
    no_references()


@among_three
def test_nothing_is_left_of_100_contexts() -> None:
    many_steps(100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_of_10000_contexts(trio: World) -> None:
    trio.timeout = 500
    trio.on(0, many_steps, 10_000)


@among_three
def test_leaves_and_graphs_go_without_the_collector() -> None:
    refs: list[weakref.ref[Any]] = []

    def step(fails: bool) -> None:
        with autograd.context() as context_id:
            x = leaf(1, 2, 4)
            refs.append(weakref.ref(x))
            refs.append(weakref.ref(service().contexts.get(context_id)))
            if fails:
                y = rpc.rpc_sync(1, spoil_there, args=(x,))
                with pytest.raises(ZeroDivisionError):
                    autograd.backward(context_id, [y.sum()])
            else:
                y = rpc.rpc_sync(1, hop_on, args=(x,))
                autograd.backward(context_id, [y.sum()], retain_graph=True)
                autograd.backward(context_id, [y.sum()])
        refs.append(weakref.ref(y))

    gc.collect()
    gc.disable()
    try:
        for fails in (False, True):
            step(fails)
            if fails:
                # A thread of the pool may just be letting go; the failed call's own traceback is the test's.
                continue
            until(lambda: all(ref() is None for ref in refs), what=f"left: {[ref() for ref in refs]}")
    finally:
        gc.enable()
    gc.collect()
    until(lambda: all(ref() is None for ref in refs), what=f"left: {[ref() for ref in refs]}")


def spoil_there(x: Tensor) -> Tensor:
    return spoil(scaled(x), ZeroDivisionError())


@among_three
def test_threads_of_failed_passes_are_free_again() -> None:
    for _ in range(5):
        with autograd.context() as context_id:
            y = along(leaf(1, 2, 4), [1, 2], ZeroDivisionError())
            with pytest.raises(ZeroDivisionError):
                autograd.backward(context_id, [y.sum()])
    everywhere(nothing_left)
    for rank in (1, 2):
        until(functools.partial(is_idle, rank), what="threads still wait")


def is_idle(rank: int) -> bool:
    busy: int = rpc.rpc_sync(rank, running)
    return busy <= 1  # the question itself


def running() -> int:
    found: int = service().worker.statistics()["running"]
    return found
