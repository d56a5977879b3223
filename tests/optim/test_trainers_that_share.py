"""Several trainers over one set of parameters."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from actorrpc.optim.local import Steps
from actorrpc.session import current
from tests.optim.programs import inputs, loss_there, losses, parameter, place, same, step, step_here, values
from tests.worlds import World, inside, until

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (3,)


def beside(program: Callable[..., Any], *args: Any) -> Any:
    """Runs something to its end in another thread, as another trainer would."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(program(*args))
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found, "it did not come to its end"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# -- nothing is lost

ROUNDS = 60


def weighted(ref: rpc.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = ref.local_value()
    return (value * x).sum()


def train(rank: int, refs: list[rpc.RRef[Any]]) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=1.0)
    for _ in range(ROUNDS):
        with autograd.context() as context_id:
            roots = [rpc.rpc_sync(ref.owner(), weighted, args=(ref, torch.full(SHAPE, 2.0**rank))) for ref in refs]
            autograd.backward(context_id, roots)
            optimizer.step(context_id)


def zeros() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(SHAPE))


def test_of_the_steps_of_three_trainers_none_is_lost() -> None:
    def program() -> list[torch.Tensor]:
        refs = [rpc.remote(3, zeros), rpc.remote(3, zeros), rpc.remote(0, zeros)]
        for done in [rpc.rpc_async(rank, train, args=(rank, refs)) for rank in range(3)]:
            done.wait()
        return values(refs)

    with World(4) as world:
        for value in world.on(0, program):
            assert same(value, torch.full(SHAPE, -7.0 * ROUNDS))


@inside
def test_an_optimizer_may_be_sent_to_another_worker_and_is_one_with_the_original() -> None:
    refs, here = [place(0, 1, 3), place(1, 0, 3)], [parameter(0, 3), parameter(1, 3)]
    ours, theirs = DistributedOptimizer(torch.optim.Adam, refs, lr=0.1), torch.optim.Adam(here, lr=0.1)
    for number in range(4):
        xs = inputs(number, [SHAPE] * 2)
        rpc.rpc_sync(number % 2, step, args=(ours, refs, xs))
        step_here(theirs, here, xs)
    assert same(values(refs), here)
    assert same(ours.state_dict(), theirs.state_dict())


# -- one step at a time on a worker, and all workers at the same time

entered, left = threading.Semaphore(0), threading.Event()
inside_now = 0


class Alone(torch.optim.SGD):
    """Stays in its step until another one comes, or for a while."""

    def step(self, closure: Any = None) -> Any:
        global inside_now
        inside_now += 1
        entered.release()
        try:
            for _ in range(20):
                left.wait(0.01)
                if inside_now > 1:
                    raise AssertionError("two steps at the same time")
            return super().step(closure)
        finally:
            inside_now -= 1


@inside
def test_steps_of_optimizers_on_one_worker_are_made_one_after_the_other() -> None:
    refs = [place(0, 1, 3), place(1, 1, 3)]  # not the same parameters
    optimizers = [DistributedOptimizer(Alone, [ref], lr=0.1) for ref in refs]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            step(optimizers[i], [refs[i]], inputs(0, [SHAPE]))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert not same(values(refs), [parameter(0, 3), parameter(1, 3)])


here_too = threading.Event()


def arrive() -> None:
    here_too.set()


class Together(torch.optim.SGD):
    """Makes its step when the other worker's has begun as well."""

    def step(self, closure: Any = None) -> Any:
        rpc.rpc_sync(1 - rpc.get_worker_info().id, arrive)
        assert here_too.wait(10), "the other owner has not begun"
        return super().step(closure)


@inside
def test_owners_make_their_steps_at_the_same_time() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    step(DistributedOptimizer(Together, refs, lr=0.1), refs, inputs(0, [SHAPE] * 2))


# -- RULE OP1

in_hook, go_on = threading.Event(), threading.Event()


def hooked(ref: rpc.RRef[Any]) -> None:
    """Stops the next pass between the accumulation of the parameter's gradient and its taking."""
    param, seen = ref.local_value(), list[int]()

    def stop(_: Any) -> None:
        if not seen:
            seen.append(1)
            in_hook.set()
            go_on.wait(10)

    param.register_post_accumulate_grad_hook(stop)


def wait_for_hook() -> None:
    assert in_hook.wait(10)


def let_go() -> None:
    go_on.set()


@inside
def test_a_step_does_not_meddle_with_the_pass_of_another_trainer() -> None:
    ref = place(0, 1, 3)
    ones, twos = torch.ones(SHAPE), torch.full(SHAPE, 2.0)
    optimizer = DistributedOptimizer(torch.optim.SGD, [ref], lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(1, weighted, args=(ref, twos))])
        rpc.rpc_sync(1, hooked, args=(ref,))
        grads = []

        def pass_of_another() -> None:
            with autograd.context() as other:
                autograd.backward(other, [rpc.rpc_sync(1, weighted, args=(ref, ones))])
                grads.append(rpc.rpc_sync(1, gradient, args=(ref, other)))

        thread = threading.Thread(target=pass_of_another)
        thread.start()
        rpc.rpc_sync(1, wait_for_hook)
        optimizer.step(context_id)
        rpc.rpc_sync(1, let_go)
        thread.join(20)
    assert same(values([ref]), [parameter(0, 3) - twos])
    assert same(grads, [ones])


def gradient(ref: rpc.RRef[Any], context_id: int) -> torch.Tensor:
    return autograd.get_gradients(context_id)[ref.local_value()]


# -- staleness


def stale(refs: list[rpc.RRef[Any]], others: list[list[rpc.RRef[Any]]], **kwargs: Any) -> Any:
    """Makes a step with gradients of before a number of others, each for some of the parameters."""
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1, **kwargs)
    other = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, losses(refs, inputs(0, [SHAPE] * len(refs))))
        for used in others:
            beside(step, other, used, inputs(1, [SHAPE] * len(used)))
        before = values(refs)
        try:
            return optimizer.step(context_id)
        finally:
            stale.moved = [not same(a, b) for a, b in zip(values(refs), before, strict=True)]  # type: ignore[attr-defined]


@inside
def test_a_step_with_gradients_that_are_too_old_is_refused() -> None:
    refs = [place(0, 1, 3)]
    assert stale(refs, [refs], max_staleness=1)
    with pytest.raises(rpc.StaleGradientsError, match="'worker1' by 2 steps; max_staleness=1") as caught:
        stale(refs, [refs, refs], max_staleness=1)
    assert caught.value.steps == {"worker1": 2}
    assert stale.moved == [False]  # type: ignore[attr-defined]
    assert stale(refs, [], max_staleness=0)  # a new context is up to date
    assert stale(refs, [refs] * 5)  # nobody has asked


@inside
def test_a_step_with_gradients_that_are_too_old_can_be_dropped() -> None:
    refs = [place(0, 1, 3)]
    assert stale(refs, [refs, refs], max_staleness=1, on_stale="drop") is False
    assert stale.moved == [False]  # type: ignore[attr-defined]
    assert stale(refs, [refs], max_staleness=1, on_stale="drop") is True


@inside
def test_a_step_that_is_refused_on_one_owner_is_made_on_none() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    with pytest.raises(rpc.StaleGradientsError, match="no owner has made the step") as caught:
        stale(refs, [refs[:1]], max_staleness=0)
    assert caught.value.steps == {"worker1": 1}
    assert stale.moved == [False, False]  # type: ignore[attr-defined]


@inside
def test_steps_count_for_the_parameters_that_they_move() -> None:
    refs, others = [place(0, 1, 3)], [place(1, 1, 3)]
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1, max_staleness=0)
    with autograd.context() as context_id:
        autograd.backward(context_id, losses(refs, inputs(0, [SHAPE])))
        beside(step, DistributedOptimizer(torch.optim.SGD, others), others, inputs(0, [SHAPE]))
        optimizer.step(context_id)


def waiting() -> int:
    """How many steps wait on this worker."""
    return Steps.of(current().worker).waiting


def fast_and_slow(max_staleness: int, others: int, slow_steps: bool) -> None:
    """Has a trainer make steps while another's gradients are on their way, the last of which waits for that one's."""
    ref = place(0, 1, 3)
    slow, fast = (
        DistributedOptimizer(torch.optim.SGD, [ref], lr=0.1, max_staleness=max_staleness, on_stale="wait")
        for _ in range(2)
    )
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(step(fast, [ref], inputs(1, [SHAPE])))
        except BaseException as e:
            made.append(e)

    thread = threading.Thread(target=run)
    with autograd.context() as context_id:
        autograd.backward(context_id, losses([ref], inputs(0, [SHAPE])))
        for _ in range(others):
            beside(step, fast, [ref], inputs(1, [SHAPE]))
        thread.start()
        until(lambda: rpc.rpc_sync(1, waiting) == 1)
        if slow_steps:
            assert slow.step(context_id)
    thread.join(20)
    if not max_staleness:
        assert isinstance(made[0], rpc.StaleGradientsError), made
    else:
        assert made == [True]


@inside
def test_a_fast_trainer_waits_for_the_step_of_a_slow_one() -> None:
    fast_and_slow(1, 1, True)
    fast_and_slow(3, 3, True)


@inside
def test_a_fast_trainer_waits_for_the_end_of_a_context_without_a_step() -> None:
    fast_and_slow(1, 1, False)


@inside
def test_a_step_that_waits_too_long_is_given_up_and_not_made_later() -> None:
    ref, normal = place(0, 1, 3), rpc.get_rpc_timeout()
    fast = DistributedOptimizer(torch.optim.SGD, [ref], lr=0.1, max_staleness=0, on_stale="wait")

    def hurry() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, losses([ref], inputs(1, [SHAPE])))
            rpc._set_rpc_timeout(1)
            try:
                with pytest.raises(rpc.RPCTimeoutError):
                    fast.step(context_id)
            finally:
                rpc._set_rpc_timeout(normal)
            until(lambda: rpc.rpc_sync(1, waiting) == 0)

    with autograd.context() as context_id:
        autograd.backward(context_id, losses([ref], inputs(0, [SHAPE])))
        beside(hurry)
    assert same(values([ref]), [parameter(0, 3)])


@inside
def test_of_two_steps_that_would_make_each_other_too_old_one_is_made_and_one_refused() -> None:
    fast_and_slow(0, 0, True)


@inside
def test_a_fast_trainer_leaves_room_for_the_steps_of_two_slow_ones() -> None:
    ref = place(0, 1, 3)
    optimizers = [
        DistributedOptimizer(torch.optim.SGD, [ref], lr=0.1, max_staleness=2, on_stale="wait") for _ in range(3)
    ]
    begun, go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    made: list[Any] = []

    def slow(i: int) -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, losses([ref], inputs(0, [SHAPE])))
            begun[i].set()
            go[i].wait(10)
            made.append(optimizers[i].step(context_id))

    def fast() -> None:
        made.append(step(optimizers[2], [ref], inputs(1, [SHAPE])))
        made.append(step(optimizers[2], [ref], inputs(1, [SHAPE])))  # would bring both of the others to their limit

    threads = [threading.Thread(target=slow, args=(i,)) for i in range(2)]
    for i in range(2):
        threads[i].start()
        begun[i].wait(10)
    threads.append(threading.Thread(target=fast))
    threads[2].start()
    until(lambda: rpc.rpc_sync(1, waiting) == 1)
    for i in (1, 0):  # the younger one first: it may, since the older one can bear it
        go[i].set()
        threads[i].join(20)
    threads[2].join(20)
    assert made == [True] * 4


def train_waiting(rank: int, refs: list[rpc.RRef[Any]]) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=1.0, max_staleness=2, on_stale="wait")
    for _ in range(ROUNDS // 3):
        with autograd.context() as context_id:
            roots = [rpc.rpc_sync(ref.owner(), weighted, args=(ref, torch.full(SHAPE, 2.0**rank))) for ref in refs]
            autograd.backward(context_id, roots)
            assert optimizer.step(context_id)


def test_three_trainers_that_wait_for_each_other_make_all_their_steps() -> None:
    def program() -> list[torch.Tensor]:
        refs = [rpc.remote(3, zeros), rpc.remote(3, zeros)]
        for done in [rpc.rpc_async(rank, train_waiting, args=(rank, refs)) for rank in range(3)]:
            done.wait()
        return values(refs)

    with World(4) as world:
        for value in world.on(0, program):
            assert same(value, torch.full(SHAPE, -7.0 * (ROUNDS // 3)))


stepping, finish = threading.Event(), threading.Event()


class Slow(torch.optim.SGD):
    """Waits in its step, before it changes anything."""

    def step(self, closure: Any = None) -> Any:
        stepping.set()
        finish.wait(10)
        return super().step(closure)


def is_stepping() -> bool:
    return stepping.is_set()


def let_finish() -> None:
    finish.set()


@inside
def test_a_context_that_begins_during_a_step_counts_it() -> None:
    refs = [place(0, 1, 3)]
    slow = DistributedOptimizer(Slow, refs, lr=0.1)
    strict = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1, max_staleness=0)
    thread = threading.Thread(target=step, args=(slow, refs, inputs(0, [SHAPE])))
    thread.start()
    until(lambda: rpc.rpc_sync(1, is_stepping))
    with autograd.context() as context_id:  # it sees the parameter as it was before
        roots = losses(refs, inputs(0, [SHAPE]))
        rpc.rpc_sync(1, let_finish)
        thread.join(20)
        autograd.backward(context_id, roots)
        with pytest.raises(rpc.StaleGradientsError):
            strict.step(context_id)


def pass_over_a_change(max_staleness: int | None) -> None:
    ref = place(0, 1, 3)
    made = [DistributedOptimizer(torch.optim.SGD, [ref], lr=0.1, max_staleness=max_staleness) for _ in range(2)]
    x = torch.ones(SHAPE, requires_grad=True)  # so that the parameter is needed for x's gradient
    with autograd.context() as context_id:
        root = rpc.rpc_sync(1, loss_there, args=(ref, x))
        beside(step, made[0], [ref], inputs(0, [SHAPE]))
        autograd.backward(context_id, [root])
        made[1].step(context_id)


@inside
def test_a_pass_may_meet_a_step_of_another_trainer_where_staleness_is_allowed() -> None:
    pass_over_a_change(1)


@inside
def test_a_pass_that_meets_a_step_of_another_trainer_fails_where_it_is_not() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pass_over_a_change(None)


def kept(ref: rpc.RRef[Any]) -> int:
    """How many steps are remembered of a parameter."""
    return len(Steps.of(current().worker).moves[ref.local_value()])


@inside
def test_steps_that_no_context_can_be_behind_are_forgotten() -> None:
    refs = [place(0, 1, 3)]
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
    for _ in range(20):
        step(optimizer, refs, inputs(0, [SHAPE]))
    assert rpc.rpc_sync(1, kept, args=(refs[0],)) <= 2
