"""What DistributedOptimizer says when something is wrong."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from tests.optim.programs import inputs, losses, parameter, place, same, step, values
from tests.worlds import World, inside, raised_within


class Failing(torch.optim.SGD):
    """Fails where it is told to: when it is made, or in its step."""

    def __init__(self, params: Any, made: tuple[str, ...] = (), steps: tuple[str, ...] = ()) -> None:
        self.steps = steps
        if rpc.get_worker_info().name in made:
            raise LookupError("not made here")
        super().__init__(params, 0.1)

    def step(self, closure: Any = None) -> Any:
        if rpc.get_worker_info().name in self.steps:
            raise LookupError("no step here")
        return super().step(closure)


def story(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@inside
def test_the_error_of_a_constructor_names_its_owner() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    with pytest.raises(LookupError, match="not made here") as caught:
        DistributedOptimizer(Failing, refs, made=("worker1",))
    told = story(caught.value)
    assert "constructor of Failing failed on 1 of 2 owners: 'worker1'" in told
    assert 'raise LookupError("not made here")' in told
    assert 'On worker "worker1"' in told


@inside
def test_several_owners_that_fail_are_all_named_with_their_tracebacks() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    with pytest.raises(ValueError, match="Invalid learning rate: -1") as caught:
        DistributedOptimizer(torch.optim.SGD, refs, lr=-1.0)
    told = story(caught.value)
    assert "constructor of SGD failed on 2 of 2 owners: 'worker1', 'worker0'" in told
    assert 'On worker "worker1"' in told
    assert 'On worker "worker0"' in told


@inside
def test_the_error_of_a_step_names_its_owner_and_the_others_make_theirs() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    optimizer = DistributedOptimizer(Failing, refs, steps=("worker1",))
    with pytest.raises(LookupError, match="no step here") as caught:
        step(optimizer, refs, inputs(0, [(3,)] * 2))
    assert "step of Failing failed on 1 of 2 owners: 'worker1'" in story(caught.value)
    assert same(values(refs)[0], parameter(0, 3))
    assert not same(values(refs)[1], parameter(1, 3))


def test_a_step_with_a_lost_owner_names_it_soon() -> None:
    def program() -> None:
        refs = [place(0, 1, 3), place(1, 0, 3)]
        optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
        with autograd.context() as context_id:
            autograd.backward(context_id, losses(refs, inputs(0, [(3,)] * 2)))
            with pytest.raises(rpc.WorkerLostError):
                rpc.rpc_sync(1, exit_now)
            with raised_within(10), pytest.raises(rpc.WorkerLostError) as caught:
                optimizer.step(context_id)
        assert "failed on 1 of 2 owners: 'worker1'" in story(caught.value)

    with World(2) as world:
        world.let_die(1)
        world.on(0, program)


def exit_now() -> None:
    import os

    os._exit(0)


@inside
def test_a_context_that_is_over_or_never_was_is_said() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [place(0, 1, 3)], lr=0.1)
    with autograd.context() as context_id:
        assert optimizer.step(context_id)  # nothing of it has come to the owner: there is nothing to do
    for wrong in (context_id, 12345):
        with pytest.raises(RuntimeError, match=f"autograd context with id: {wrong}"):
            optimizer.step(wrong)
    with pytest.raises(TypeError, match=r"context_id must be the number .*, not Tensor"):
        optimizer.step(torch.ones(1))  # type: ignore[arg-type]  # as a loss would be


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Gathers what the library says in the block."""
    handler, log = Log(), logging.getLogger("actorrpc")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


@inside
def test_a_step_without_any_gradient_is_told_once() -> None:
    refs = [place(0, 1, 3), place(1, 0, 3)]
    with logged() as lines:
        good = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
        with autograd.context() as context_id:
            autograd.backward(context_id, [refs[1].to_here().sum()])  # one of the two has a gradient
            assert good.step(context_id)
        assert lines == []
        for _ in range(2):
            outside = torch.ones(3, requires_grad=True).sum()
            with autograd.context() as context_id:
                autograd.backward(context_id, [outside])
                assert good.step(context_id)
    (line,) = lines
    assert f"step({context_id - 1}) changed no parameter" in line
    assert "inside of `with dist_autograd.context()`" in line


@inside
def test_params_that_are_none_are_refused() -> None:
    ref, sgd = place(0, 1, 3), torch.optim.SGD
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "params_rref is empty"),
        ([parameter(0, 3)], TypeError, r"must hold RRefs to parameters, not Parameter; .* RRef\(parameter\) makes one"),
        (7, TypeError, "must be a list of RRefs to parameters, not int"),
        ([{"lr": 0.1}], TypeError, r"params_rref\[0\] must be a dict with a list of RRefs"),
        ([{"params": []}], ValueError, "is empty"),
        ([{"params": [ref]}, ref], TypeError, r"params_rref\[1\] must be a dict"),
        ([rpc.remote(1, dict)], TypeError, "refers to a dict"),
        ([rpc.remote(1, list)], TypeError, r"refers to a list: fetch the references in it with to_here\(\)"),
        ([rpc.remote(1, torch.nn.Linear, args=(2, 2))], TypeError, r"Linear: refer to its parameters"),
        ([ref, ref], ValueError, "two of the references refer to one parameter"),
        ([{"params": [ref]}, {"params": [ref]}], ValueError, "two of the references refer to one parameter"),
        ([rpc.remote(1, result)], ValueError, "can't optimize a non-leaf Tensor"),
    ]
    for params, kind, text in wrong:
        with pytest.raises(kind, match=text):
            DistributedOptimizer(sgd, params, lr=0.1)


def result() -> torch.Tensor:
    return parameter(0, 3) * 2


@inside
def test_classes_that_are_none_or_need_a_closure_are_refused() -> None:
    refs = [place(0, 1, 3)]
    for wrong in ("SGD", torch.nn.Linear, torch.optim.SGD([parameter(0, 3)])):
        with pytest.raises(TypeError, match="optimizer_class must be a class of optimizers"):
            DistributedOptimizer(wrong, refs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS cannot work here: its step needs closure"):
        DistributedOptimizer(torch.optim.LBFGS, refs)
    for kwargs in ({"max_staleness": -1}, {"on_stale": "sleep"}, {"on_stale": "wait"}):
        with pytest.raises(ValueError, match=r"max_staleness|must be"):
            DistributedOptimizer(torch.optim.SGD, refs, **kwargs)
    optimizer = DistributedOptimizer(torch.optim.SGD, refs)
    with pytest.raises(NotImplementedError, match="give all of them to the constructor"):
        optimizer.add_param_group({"params": refs})
    optimizer.zero_grad()  # nothing to do, and no harm
