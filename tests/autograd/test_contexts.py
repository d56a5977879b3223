"""Contexts, the arguments of the functions, and `RRef.backward`."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.errors import NotAMemberError
from actorrpc.runtime.handling import NO_CONTEXT, here
from tests.autograd.common import among_three, everywhere, gradient_at, leaf, same, scaled, service, weight
from tests.worlds import until


def ids_of_some(count: int) -> list[int]:
    found = []
    for _ in range(count):
        with autograd.context() as context_id:
            found.append(context_id)
    return found


@among_three
def test_ids_of_contexts_are_unique_in_the_world() -> None:
    futures = [rpc.rpc_async(rank, ids_of_some, args=(20,)) for rank in range(3) for _ in range(3)]
    found = [number for future in futures for number in future.wait()]
    assert len(set(found)) == len(found) == 180


@among_three
def test_a_context_belongs_to_its_thread() -> None:
    seen: list[int] = []

    def other() -> None:
        seen.append(here.context)
        with autograd.context() as own:
            seen.append(own)

    with autograd.context() as context_id:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert here.context == context_id
    assert seen[0] == NO_CONTEXT
    assert seen[1] != context_id
    assert here.context == NO_CONTEXT


@among_three
def test_contexts_do_not_nest() -> None:
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="do not nest"):
            autograd.context().__enter__()
        assert here.context == context_id
        with pytest.raises(RuntimeError, match="do not nest"):
            rpc.rpc_sync(1, ids_of_some, args=(1,))
    assert len(ids_of_some(1)) == 1


@among_three
def test_a_context_ends_with_an_exception_and_the_next_one_begins() -> None:
    ids: list[int] = []

    def step() -> None:
        with autograd.context() as context_id:
            ids.append(context_id)
            rpc.rpc_sync(1, scaled, args=(leaf(1, 1, 1),))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    [first] = ids
    assert here.context == NO_CONTEXT
    with pytest.raises(RuntimeError, match="context"):
        autograd.get_gradients(first)
    with autograd.context() as second:
        assert second != first


@among_three
def test_ctrl_c_in_the_lines_of_a_context_leaves_no_thread_in_it() -> None:
    """Neither as it begins nor as it ends: each later context of the thread would be refused."""
    for event, code in (("return", autograd.context.__enter__.__code__), ("call", autograd.context.__exit__.__code__)):
        sent: list[bool] = []

        def interrupt(frame: Any, what: str, _: Any, event: str = event, code: Any = code, sent: Any = sent) -> Any:
            if frame.f_code is code and what == event and not sent:
                sent.append(True)
                signal.raise_signal(signal.SIGINT)
            return interrupt

        def work(tracer: Any = interrupt) -> None:
            sys.settrace(tracer)
            try:
                with autograd.context():
                    pass
                time.sleep(10)
            finally:
                sys.settrace(None)

        with pytest.raises(KeyboardInterrupt):
            work()
        assert sent
        assert here.context == NO_CONTEXT
    until(lambda: not service().contexts.all())


def test_a_context_needs_a_world() -> None:
    with pytest.raises(NotAMemberError):
        autograd.context().__enter__()
    assert here.context == NO_CONTEXT


@among_three
def test_an_unknown_context_is_refused_by_its_id() -> None:
    loss = leaf(1).sum()
    for call in (
        lambda: autograd.backward(12345, [loss]),
        lambda: autograd.get_gradients(12345),
        lambda: rpc.rpc_sync(1, autograd.get_gradients, args=(12345,)),
        lambda: rpc.RRef(loss).backward(12345),
        lambda: rpc.remote(1, torch.ones, args=(1,)).backward(12345),
    ):
        with pytest.raises(RuntimeError, match="12345"):
            call()


@among_three
def test_roots_that_cannot_be_are_refused_with_words() -> None:
    x = leaf(1, 2)
    unfit: list[tuple[Any, type[Exception], str]] = [
        ([], RuntimeError, "No tensors"),
        ([x * 2], RuntimeError, "scalar"),
        ([x.detach().sum()], RuntimeError, "requires_grad"),
        ([None], TypeError, "NoneType"),
        (None, TypeError, "NoneType"),
        ([x.sum(), 3.0], TypeError, "float"),
        (x * 2, RuntimeError, "scalar"),
    ]
    with autograd.context() as context_id:
        for roots, error, words in unfit:
            with pytest.raises(error, match=words):
                autograd.backward(context_id, roots)
        assert not autograd.get_gradients(context_id)
        autograd.backward(context_id, [x.sum()])
        same(autograd.get_gradients(context_id)[x], [1, 1])


@among_three
def test_roots_may_be_one_tensor_a_leaf_or_the_same_one_twice() -> None:
    x, scalar = leaf(1, 2), leaf(3.0)
    scalar.grad = torch.ones_like(scalar)
    with autograd.context() as context_id:
        y = (rpc.rpc_sync(1, scaled, args=(leaf(1, 1, 1),)).sum() + x.sum()) * 2
        autograd.backward(context_id, y, retain_graph=True)
        same(autograd.get_gradients(context_id)[x], [2, 2])
        autograd.backward(context_id, (y, y), retain_graph=True)
        same(autograd.get_gradients(context_id)[x], [6, 6])
        autograd.backward(context_id, [scalar, y])
        same(autograd.get_gradients(context_id)[scalar], [1])
        assert scalar.grad is not None
        assert scalar.grad.item() == 1


@among_three
def test_the_reference_examples_run() -> None:
    with autograd.context() as context_id:
        a, b = torch.rand((3, 3), requires_grad=True), torch.rand((3, 3), requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.add, args=(a, b)).sum()])
        same(autograd.get_gradients(context_id)[a], torch.ones(3, 3))
        same(autograd.get_gradients(context_id)[b], torch.ones(3, 3))
    with autograd.context() as context_id:  # without any message
        a, b = torch.rand((3, 3), requires_grad=True), torch.rand((3, 3), requires_grad=True)
        autograd.backward(context_id, [(a + b).sum()])
        found = autograd.get_gradients(context_id)
        assert set(found) == {a, b}
        same(found[a], torch.ones(3, 3))


@among_three
def test_gradients_are_a_copy_of_the_map_and_stay_after_the_context() -> None:
    x = leaf(1, 2)
    with autograd.context() as context_id:
        autograd.backward(context_id, [x.sum()])
        found = autograd.get_gradients(context_id)
        found.clear()
        found = autograd.get_gradients(context_id)
    same(found[x], [1, 1])


# -- RRef.backward


@functools.cache
def kept() -> Tensor:
    return torch.tensor([1.0, 2.0]).requires_grad_()


def loss_here(*factors: Tensor) -> Tensor:
    return (kept() * 3 * sum(f.sum() for f in factors) if factors else kept() * 3).sum()


def grad_of_kept(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(kept())


@among_three
def test_backward_of_a_reference_on_its_owner_is_plain_without_a_context() -> None:
    x = leaf(1, 2)
    ref = rpc.RRef((x * 3).sum())
    ref.backward(retain_graph=True)
    ref.backward()
    assert x.grad is not None
    same(x.grad, [6, 6])
    with pytest.raises(RuntimeError, match="second time"):
        ref.backward()


@among_three
def test_backward_of_a_reference_in_a_context_runs_from_its_owner() -> None:
    factor = torch.tensor([2.0], requires_grad=True)
    with autograd.context() as context_id:
        ref = rpc.remote(1, loss_here, args=(factor,))
        ref.backward(context_id)
        found = rpc.rpc_sync(1, grad_of_kept, args=(context_id,))
        same(found, [6, 6])
        same(autograd.get_gradients(context_id)[factor], [9])
    with autograd.context() as context_id:
        own = rpc.RRef((factor * 2).sum())
        own.backward(context_id)
        same(autograd.get_gradients(context_id)[factor], [2])
        assert factor.grad is None


@among_three
def test_backward_of_a_reference_may_be_repeated_where_the_graph_is_kept() -> None:
    factor = torch.tensor([2.0], requires_grad=True)
    with autograd.context() as context_id:
        ref = rpc.remote(1, loss_here, args=(factor,))
        ref.backward(context_id, retain_graph=True)
        ref.backward(context_id, True)
        same(autograd.get_gradients(context_id)[factor], [18])
        ref.backward(context_id)
        same(autograd.get_gradients(context_id)[factor], [27])
        with pytest.raises(RuntimeError, match=r"second time|used by an earlier"):
            ref.backward(context_id)


@among_three
def test_backward_of_a_reference_says_what_it_cannot_do() -> None:
    with pytest.raises(RuntimeError, match="owner"):
        rpc.remote(1, loss_here).backward()
    with autograd.context() as context_id:
        for rank in (0, 1):
            with pytest.raises(RuntimeError, match="tensor"):
                rpc.remote(rank, str, args=("text",)).backward(context_id)
            with pytest.raises(RuntimeError, match="scalar"):
                rpc.remote(rank, scaled, args=(leaf(1, 1, 1),)).backward(context_id)
            with pytest.raises(RuntimeError, match="requires_grad"):
                rpc.remote(rank, torch.ones, args=(1,)).backward(context_id)
            with pytest.raises(ZeroDivisionError):
                rpc.remote(rank, divmod, args=(1, 0)).backward(context_id)
    with pytest.raises(RuntimeError, match="tensor"):
        rpc.RRef("text").backward()


# -- the ends of contexts


def statistics() -> dict[str, int]:
    return service().contexts.statistics()


def relay(*way: int) -> None:
    """Calls along a way without any tensor."""
    if way:
        rpc.rpc_sync(way[0], relay, args=way[1:])


@among_three
def test_a_context_is_known_where_its_calls_went_and_ends_there() -> None:
    with autograd.context() as context_id:
        relay(1, 2)
        assert [found["contexts"] for found in everywhere(statistics)] == [1, 1, 1]
        assert rpc.rpc_sync(2, autograd.get_gradients, args=(context_id,)) == {}


def call_later(gate: rpc.RRef[threading.Event], to: int) -> None:
    """A handler that outlives its context, and then calls a worker which never knew it."""
    assert gate.rpc_sync().wait(10)
    relay(to)


@among_three
def test_a_call_of_a_context_that_is_over_does_not_begin_it_again() -> None:
    gate = threading.Event()
    with autograd.context():
        future = rpc.rpc_async(1, call_later, args=(rpc.RRef(gate), 2))
        x = leaf(1, 1, 1)
        rpc.rpc_sync(1, scaled, args=(x,))
    gate.set()
    future.wait()


@among_three
def test_nothing_is_kept_of_contexts_that_are_over_once_none_is_open() -> None:
    def some() -> None:
        for _ in range(20):
            with autograd.context():
                relay(1)

    threads = [threading.Thread(target=some) for _ in range(4)]
    with autograd.context():  # as long as this one lasts, the others must be remembered one by one
        relay(1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: rpc.rpc_sync(1, statistics)["over"] >= 79, what="ends of contexts have not come")
    until(lambda: rpc.rpc_sync(1, statistics)["over"] == 0, what="contexts are remembered though all are over")


def in_a_handler(x: Tensor) -> Tensor:
    with autograd.context() as context_id:
        y = rpc.rpc_sync(2, scaled, args=(x,)).sum()
        autograd.backward(context_id, [y])
        return autograd.get_gradients(context_id)[x]


@among_three
def test_a_handler_may_have_a_context_of_its_own() -> None:
    same(rpc.rpc_sync(1, in_a_handler, args=(leaf(1, 1, 1),)), [2, 3, 5])


@among_three
def test_a_pass_may_begin_on_a_worker_that_did_not_begin_the_context() -> None:
    with autograd.context() as context_id:
        x = leaf(1, 2, 3)
        rpc.rpc_sync(1, begin_there, args=(context_id, x))
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
        same(gradient_at(1, context_id), [1, 2, 3])


def begin_there(context_id: int, x: Tensor) -> None:
    autograd.backward(context_id, [(x * weight()).sum()])
