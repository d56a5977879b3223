"""What is recorded: all kinds of calls and of tensors, whatever becomes of them."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.errors import RPCTimeoutError
from actorrpc.runtime.handling import NO_CONTEXT, here
from tests.autograd.common import (
    among_three,
    everywhere,
    gradient_at,
    leaf,
    pause,
    same,
    scaled,
    service,
    weight,
)
from tests.worlds import raised_within, until


class Scaler:
    """An object whose methods use the worker's weight."""

    def __init__(self, x: Tensor | None = None) -> None:
        self.x = x

    def scale(self, x: Tensor) -> Tensor:
        return scaled(x)

    def keep(self, x: Tensor) -> None:
        self.x = x

    def scale_kept(self) -> Tensor:
        assert self.x is not None
        return scaled(self.x)

    @staticmethod
    @rpc.functions.async_execution
    def static(x: Tensor) -> rpc.Future[Tensor]:
        return rpc.rpc_async(rpc.get_worker_info(), scaled, args=(x,))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, x: Tensor) -> rpc.Future[Tensor]:
        return rpc.rpc_async(rpc.get_worker_info(), scaled, args=(x,))


class ScalingActor(Scaler, rpc.Actor):
    """The same behind a mailbox."""


@rpc.functions.async_execution
def completed_by_another_thread(x: Tensor) -> rpc.Future[Tensor]:
    future: rpc.Future[Tensor] = rpc.Future()
    y = scaled(x)
    threading.Timer(0.01, lambda: future.set_result(y)).start()
    return future


@rpc.functions.async_execution
def completed_in_a_callback(x: Tensor) -> rpc.Future[Tensor]:
    """The callback of one call makes the next, to a worker that has no part yet."""
    first = rpc.rpc_async(rpc.get_worker_info(), torch.mul, args=(x, 1))
    return first.then(lambda done: rpc.rpc_sync(rpc.get_worker_info(), scaled, args=(done.wait(),)))


def plain_double(x: Tensor) -> Tensor:
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_double = torch.jit.script(plain_double)


def by_tell(x: Tensor, to: Any) -> Tensor:
    scaler = ScalingActor.spawn(to)
    scaler.tell().keep(x)
    y: Tensor = scaler.rpc_sync().scale_kept()
    return y


def by_reference_made_there(x: Tensor, to: Any) -> Tensor:
    y: Tensor = rpc.remote(to, Scaler, args=(x,)).rpc_sync().scale_kept()
    return y


KINDS: dict[str, Any] = {
    "rpc_sync": lambda x, to: rpc.rpc_sync(to, scaled, args=(x,)),
    "keywords": lambda x, to: rpc.rpc_sync(to, scaled, kwargs={"x": x}),
    "rpc_async": lambda x, to: rpc.rpc_async(to, scaled, args=(x,)).wait(),
    "callback": lambda x, to: rpc.rpc_async(to, scaled, args=(x,)).then(lambda f: f.wait() * 1).wait(),
    "remote": lambda x, to: rpc.remote(to, scaled, args=(x,)).to_here(),
    "constructor": by_reference_made_there,
    "proxy rpc_sync": lambda x, to: rpc.remote(to, Scaler).rpc_sync().scale(x),
    "proxy rpc_async": lambda x, to: rpc.remote(to, Scaler).rpc_async().scale(x).wait(),
    "proxy remote": lambda x, to: rpc.remote(to, Scaler).remote().scale(x).to_here(),
    "tell": by_tell,
    "actor": lambda x, to: ScalingActor.spawn(to).rpc_sync().scale(x),
    "actor's constructor": lambda x, to: ScalingActor.spawn(to, x).rpc_sync().scale_kept(),
    "group": lambda x, to: rpc.Group([ScalingActor.spawn(to)]).rpc_sync().scale(x)[0],
    "group, first": lambda x, to: rpc.Group([rpc.remote(to, Scaler)]).any().rpc_sync().scale(x),
    "scattered": lambda x, to: rpc.Group([rpc.remote(to, Scaler)]).scatter([x]).rpc_async().scale().wait()[0],
    "another thread": lambda x, to: rpc.rpc_sync(to, completed_by_another_thread, args=(x,)),
    "another thread, remote": lambda x, to: rpc.remote(to, completed_by_another_thread, args=(x,)).to_here(),
    "in a callback": lambda x, to: rpc.rpc_sync(to, completed_in_a_callback, args=(x,)),
    "static": lambda x, to: rpc.rpc_sync(to, Scaler.static, args=(x,)),
    "class method": lambda x, to: rpc.remote(to, Scaler).rpc_sync().of_class(x),
    "proxy as function": lambda x, to: rpc.rpc_sync(to, rpc.remote(to, Scaler).rpc_sync().scale, args=(x,)),
}


@among_three
def test_all_kinds_of_calls_are_recorded() -> None:
    for to in (1, 0):  # another one, and oneself
        for kind, call in KINDS.items():
            x = leaf(1, 2, 4)
            with autograd.context() as context_id:
                y = call(x * 1, to)
                torch.testing.assert_close(y, torch.tensor([2.0, 6.0, 20.0], dtype=y.dtype), msg=kind)
                autograd.backward(context_id, [y.sum()])
                found = autograd.get_gradients(context_id)
                assert x in found, (kind, to)
                same(found[x], [2, 3, 5])
                same(gradient_at(to, context_id), [1, 2, 4])


@among_three
def test_builtins_and_scripted_functions_are_recorded() -> None:
    for call, expected in (
        (lambda x, y: rpc.rpc_sync(1, torch.add, args=(x, y)), ([1, 1], [1, 1])),
        (lambda x, y: rpc.rpc_sync(1, torch.mul, args=(x, y)), ([3, 4], [1, 2])),
        (lambda x, y: rpc.remote(1, torch.Tensor.mul, args=(x, y)).to_here(), ([3, 4], [1, 2])),
        (lambda x, y: rpc.rpc_sync(1, scripted_double, args=(x,)) + y, ([2, 2], [1, 1])),
    ):
        x, y = leaf(1, 2), leaf(3, 4)
        with autograd.context() as context_id:
            autograd.backward(context_id, [call(x, y).sum()])
            found = autograd.get_gradients(context_id)
            same(found[x], expected[0])
            same(found[y], expected[1])


def context_here(*_: object) -> int:
    return here.context


@among_three
def test_callbacks_run_in_the_context_that_they_were_given_in() -> None:
    gate = threading.Event()
    with autograd.context() as context_id:
        late = rpc.rpc_async(1, pause, args=(0.05,)).then(context_here)
        assert late.wait() == context_id
        own: rpc.Future[int] = rpc.Future()
        seen = own.then(context_here)
        threading.Thread(target=lambda: own.set_result(1)).start()
        assert seen.wait() == context_id
    outside = rpc.rpc_async(1, pause, args=(0.05,)).then(context_here)
    assert outside.wait() == NO_CONTEXT
    done: rpc.Future[int] = rpc.Future()
    seen = done.then(context_here)
    with autograd.context() as context_id:
        done.set_result(1)  # whoever completes it does not lend it a context
        assert here.context == context_id
    assert seen.wait() == NO_CONTEXT
    gate.set()


def hop(x: Tensor, *way: int) -> Tensor:
    """Goes along a way of workers, each of which scales."""
    y = scaled(x)
    return rpc.rpc_sync(way[0], hop, args=(y, *way[1:])) if way else y


@among_three
def test_calls_nest_to_any_depth_and_come_back_to_where_they_began() -> None:
    for way in ((1, 2, 0), (1, 0, 1, 0, 2, 2, 1), (0, 0, 0)):
        x, w = leaf(1, 1, 1), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
        with autograd.context() as context_id:
            y = rpc.rpc_sync(way[0], hop, args=(x, *way[1:]))
            autograd.backward(context_id, [y.sum()])
            same(autograd.get_gradients(context_id)[x], w ** len(way))
            for rank in set(way):
                same(gradient_at(rank, context_id), w ** (len(way) - 1) * way.count(rank))


@among_three
def test_several_roots_and_several_passes_add_up() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        y, z = rpc.rpc_sync(1, scaled, args=(x,)), rpc.rpc_sync(2, scaled, args=(x,))
        autograd.backward(context_id, [y.sum(), (y * z).sum()], retain_graph=True)
        w = weight().detach()
        expected = w + 2 * w * w * x.detach()
        same(autograd.get_gradients(context_id)[x], expected)
        autograd.backward(context_id, [y.sum(), (y * z).sum()], retain_graph=True)
        same(autograd.get_gradients(context_id)[x], 2 * expected)
        autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[x], 2 * expected + w)
        same(gradient_at(1, context_id), 3 * x.detach() + 2 * w * x.detach() ** 2)
        # another forward run in the same context
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(autograd.get_gradients(context_id)[x], 2 * expected + 2 * w)


@among_three
def test_parts_of_one_forward_run_may_be_gone_back_through_one_by_one() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        for _ in range(3):
            autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(autograd.get_gradients(context_id)[x], [6, 9, 15])
        same(gradient_at(1, context_id), [3, 6, 12])


# -- what nothing uses


@among_three
def test_unused_results_and_unused_tensors_get_no_gradient_and_leave_nobody_waiting() -> None:
    used, unused, alone = leaf(1, 1, 1), leaf(1, 1, 1), leaf(1, 1, 1)
    with autograd.context() as context_id, raised_within(10):
        y = rpc.rpc_sync(1, first_of, args=(used * 1, unused * 1))
        rpc.rpc_sync(2, scaled, args=(alone,))  # the whole result
        never_waited_for = rpc.rpc_async(2, scaled, args=(alone,))
        rpc.remote(2, scaled, args=(alone,))
        autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)
        assert set(found) == {used}
        assert gradient_at(2, context_id) is None
        never_waited_for.wait()


def first_of(first: Tensor, *_: Tensor) -> Tensor:
    return scaled(first)


@among_three
def test_unused_tensors_cost_no_bytes_on_the_way_back() -> None:
    mine = service()
    sizes: list[int] = []
    original = mine.worker.emit

    def emit(to: int, out: Any, frames: Any, hold: int = 0, trace: Any = None, lasting: bool = True) -> None:
        sizes.append(sum(memoryview(frame).nbytes for frame in frames))
        original(to, out, frames, hold, trace, lasting)

    with autograd.context() as context_id:
        results = rpc.rpc_sync(1, three_big_ones, args=(leaf(1.0),))
        mine.worker.emit = emit
        try:
            autograd.backward(context_id, [(results[1] * torch.arange(4000)).sum()])
        finally:
            mine.worker.emit = original
    big = 8 * 4000
    assert big < sum(sizes) < 1.5 * big, sizes


def three_big_ones(x: Tensor) -> list[Tensor]:
    return [x * torch.ones(4000, dtype=torch.float64) for _ in range(3)]


gate = threading.Event()


def held_up(x: Tensor) -> Tensor:
    assert gate.wait(20)
    return scaled(x)


def let_go() -> None:
    gate.set()


def failing(x: Tensor) -> Tensor:
    rpc.rpc_sync(2, scaled, args=(x,))
    raise ZeroDivisionError


def unreadable(x: Tensor) -> Any:
    return [x * 2, threading.Lock()]


@among_three
def test_calls_that_failed_or_ran_out_of_time_do_not_hold_the_rest_up() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id, raised_within(15):
        with pytest.raises(RPCTimeoutError):
            rpc.rpc_sync(1, held_up, args=(x,), timeout=1)
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync(1, failing, args=(x,))
        with pytest.raises(Exception, match="lock"):
            rpc.rpc_sync(1, unreadable, args=(x,))
        with pytest.raises(Exception, match="lock"):
            rpc.rpc_sync(1, scaled, args=(x, threading.Lock()))
        with pytest.raises(TypeError):
            rpc.rpc_sync(1, scaled, args=(x, x))
        y = rpc.rpc_sync(1, scaled, args=(x,))
        autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[x], [2, 3, 5])
        same(gradient_at(1, context_id), [1, 2, 4])
        rpc.rpc_sync(1, let_go)
        rpc.rpc_sync(1, until_idle)
        # The late answer was recorded over a graph that the first pass has freed.
        autograd.backward(context_id, [rpc.rpc_sync(1, scaled, args=(x,)).sum()])
        same(gradient_at(1, context_id), [2, 4, 8])


def until_idle() -> None:
    worker = service().worker
    until(lambda: worker.statistics()["running"] <= 1, what=f"handlers run on: {worker.statistics()}")


# -- what is sent


def product(*tensors: Tensor) -> Tensor:
    y = torch.ones_like(tensors[0])
    for tensor in tensors:
        y = y * tensor
    return y


@among_three
def test_leaves_are_recorded_where_they_are_sent_directly_once_or_often() -> None:
    x = leaf(2, 3)
    for call in (
        lambda: rpc.rpc_sync(1, product, args=(x, x)),
        lambda: rpc.rpc_sync(1, product, args=(x,)) * rpc.rpc_sync(1, product, args=(x,)),
        lambda: rpc.rpc_sync(1, product, args=(x,)) * rpc.rpc_sync(2, product, args=(x,)),
        lambda: rpc.rpc_sync(1, product, args=(x,)) * x,
        lambda: product(*[x * 1] * 2) * rpc.rpc_sync(1, torch.ones_like, args=(x,)),
    ):
        with autograd.context() as context_id:
            autograd.backward(context_id, [call().sum()])  # type: ignore[no-untyped-call]
            same(autograd.get_gradients(context_id)[x], [4, 6])
    assert x.grad is None


@among_three
def test_the_same_tensor_twice_in_a_message_is_one_tensor_there() -> None:
    with autograd.context():
        assert rpc.rpc_sync(1, are_one, args=([y := leaf(1) * 2, y],))
        assert rpc.rpc_sync(1, are_one, args=([y, y],))


def are_one(tensors: list[Tensor]) -> bool:
    return tensors[0] is tensors[1] and tensors[0].requires_grad


@among_three
def test_views_are_recorded_each_with_its_own_part() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    base = x * 1
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, sum_of, args=([base[0], base[:, 1], base.t(), base[1, 2], base.expand(2, 2, 3)],))
        autograd.backward(context_id, [y])
        found = autograd.get_gradients(context_id)[x]
    [again] = torch.autograd.grad(sum_of([(b := x * 1)[0], b[:, 1], b.t(), b[1, 2], b.expand(2, 2, 3)]), [x])
    same(found, again)


def sum_of(tensors: list[Tensor]) -> Tensor:
    parts = [(t * t).sum() * (i + 1) for i, t in enumerate(tensors)]
    return torch.stack(parts).sum()


def change_in_place(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(3)
    y[0] = 0
    return x + y.mul_(weight())


@among_three
def test_changes_in_place_after_sending_are_right_on_both_sides() -> None:
    a, b = leaf(1, 2, 4), leaf(1, 1, 1)
    with autograd.context() as context_id:
        x, y = a * 2, b * 1
        z = rpc.rpc_sync(1, change_in_place, args=(x, y))
        x.mul_(5)
        y[1] = 0
        z.add_(x).add_(y)
        autograd.backward(context_id, [z.sum()])
        found = autograd.get_gradients(context_id)
        same(found[a], [16, 16, 16])
        same(found[b], [1, 3, 6])
        same(gradient_at(1, context_id), [0, 1, 1])


DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def there_and_back(x: Tensor) -> Tensor:
    return x.view_as(x)


@among_three
def test_every_float_and_complex_dtype_is_recorded() -> None:
    for dtype in DTYPES:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = torch.tensor([1.0, 2.0, 4.0], dtype=wide).requires_grad_()
        with autograd.context() as context_id:
            y = rpc.rpc_sync(1, there_and_back, args=(x.to(dtype),))
            assert y.dtype == dtype
            assert y.requires_grad
            autograd.backward(context_id, [y.to(wide).abs().sum()])
            found = autograd.get_gradients(context_id)[x]
            assert found.dtype == wide
            same(found.abs(), torch.ones(3, dtype=torch.float64))
        own = torch.tensor([1.0, 2.0, 4.0], dtype=wide).to(dtype).requires_grad_()
        with autograd.context() as context_id:
            y = rpc.rpc_sync(1, there_and_back, args=(own,))
            autograd.backward(context_id, [y.to(wide).abs().sum()])
            assert autograd.get_gradients(context_id)[own].dtype == dtype
        with autograd.context():
            assert not rpc.rpc_sync(1, there_and_back, args=(torch.arange(3),)).requires_grad


def times_matrix(s: Tensor, d: Tensor) -> Tensor:
    assert s.layout == torch.sparse_coo
    product: Tensor = torch.sparse.mm(s, d)
    return product


def sparse_of(d: Tensor) -> Tensor:
    return (d * 2).to_sparse()


@among_three
def test_sparse_tensors_are_recorded_as_arguments_and_results() -> None:
    d = torch.tensor([[1.0, 0.0], [0.0, 3.0]], requires_grad=True)
    s = torch.tensor([[0.0, 2.0], [5.0, 0.0]]).to_sparse().requires_grad_()
    [ds, dd] = torch.autograd.grad(times_matrix(s, d).sum(), [s, d])
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(1, times_matrix, args=(s, d)).sum()])
        found = autograd.get_gradients(context_id)
        same(found[d], dd)
        same(found[s].to_dense(), ds.to_dense())
        assert found[s].layout == ds.layout
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, sparse_of, args=(d,))
        assert y.layout == torch.sparse_coo
        autograd.backward(context_id, [(y.to_dense() * torch.tensor([[1.0, 9.0], [9.0, 2.0]])).sum()])
        [expected] = torch.autograd.grad((sparse_of(d).to_dense() * torch.tensor([[1.0, 9.0], [9.0, 2.0]])).sum(), [d])
        same(autograd.get_gradients(context_id)[d], expected)


def table_rows(table: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, table, sparse=True)


@among_three
def test_sparse_gradients_travel_and_add_up() -> None:
    table, rows = torch.arange(8.0).reshape(4, 2).requires_grad_(), torch.tensor([1, 3, 1])
    with autograd.context() as context_id:
        for _ in range(2):
            y = rpc.rpc_sync(1, table_rows, args=(table, rows)) + table_rows(table, rows)
            autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)[table]
        assert found.is_sparse
        same(found.to_dense(), torch.tensor([[0.0, 0], [8, 8], [0, 0], [4, 4]]))


@dataclass
class Batch:
    """An object of the user's with tensors in it."""

    first: Tensor
    rest: dict[str, list[Tensor]]

    def product(self) -> Batch:
        """Multiplies all, into another one."""
        return Batch(product(self.first, *self.rest["some"], *self.rest["more"]), {})


@among_three
def test_tensors_in_containers_and_objects_are_recorded() -> None:
    leaves = [leaf(2, 3) for _ in range(4)]
    with autograd.context() as context_id:
        batch = Batch(leaves[0], {"some": [leaves[1] * 1, leaves[2]], "more": [leaves[3]]})
        result = rpc.rpc_sync(1, batch.product)
        autograd.backward(context_id, [result.first.sum()])
        found = autograd.get_gradients(context_id)
        for x in leaves:
            same(found[x], [8, 27])


class Attributed(Tensor):
    """A tensor class of the user's."""


@among_three
def test_tensors_with_attributes_and_of_subclasses_are_recorded() -> None:
    plain, parameter = leaf(2, 3), torch.nn.Parameter(leaf(2, 3).detach())
    plain.note = parameter.note = "attribute"  # type: ignore[attr-defined]
    middle = plain * 1
    middle.note = "attribute"  # type: ignore[attr-defined]
    own = leaf(2, 3).detach().as_subclass(Attributed).requires_grad_()
    for x, sent in ((plain, plain), (plain, middle), (parameter, parameter), (own, own), (own, own * 1)):
        with autograd.context() as context_id:
            kind, note, y = rpc.rpc_sync(1, looked_at, args=(sent,))
            assert kind == type(sent).__name__
            assert note == getattr(sent, "note", None)
            autograd.backward(context_id, [y.sum()])
            found = autograd.get_gradients(context_id)
            assert x in found, (kind, note)
            same(torch.Tensor(found[x]), [4, 6])


def looked_at(x: Tensor) -> tuple[str, str | None, Tensor]:
    return type(x).__name__, getattr(x, "note", None), (x * x).as_subclass(Tensor)


# -- Parameters and modules


@among_three
def test_a_parameter_arrives_as_one_and_its_gradient_comes_home() -> None:
    p = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    with autograd.context() as context_id:
        is_one, y = rpc.rpc_sync(1, is_parameter, args=(p,))
        assert is_one
        autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[p], [4, 6])
    is_one, y = rpc.rpc_sync(1, is_parameter, args=(p,))
    assert is_one


def is_parameter(p: Tensor) -> tuple[bool, Tensor]:
    return isinstance(p, torch.nn.Parameter), p * p


class Tied(torch.nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x))) * self.scale
        return y


def run_module(module: torch.nn.Module, x: Tensor) -> tuple[int, Tensor]:
    assert module.two.weight is module.one.weight  # type: ignore[union-attr]
    return len(list(module.parameters())), module(x)


@among_three
def test_a_module_sent_by_value_gets_the_gradients_of_its_parameters_ties_included() -> None:
    torch.manual_seed(3)
    module, x = Tied(), torch.ones(1, 2, requires_grad=True)
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).sum(), leaves)
    with autograd.context() as context_id:
        count, y = rpc.rpc_sync(1, run_module, args=(module, x))
        assert count == 3
        autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)
        for one, right in zip(leaves, expected, strict=True):
            same(found[one], right)
    assert all(p.grad is None for p in module.parameters())


@among_three
def test_functions_by_value_take_their_tensors_along() -> None:
    x, inside = leaf(2, 3), leaf(5, 7)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, lambda v: v * inside, args=(x,))
        autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)
        same(found[x], [5, 7])
        same(found[inside], [2, 3])


# -- outside


@among_three
def test_nothing_is_recorded_without_grad_and_outside_of_contexts() -> None:
    x = leaf(1, 2, 4)
    with autograd.context():
        with torch.no_grad():
            y = rpc.rpc_sync(1, scaled, args=(x,))
            assert y.is_leaf
        assert rpc.rpc_sync(1, recorded) == 0
        assert len(service().contexts.all()[0].sent) == 0
    y = rpc.rpc_sync(1, scaled, args=(x,))
    assert y.is_leaf
    assert y.requires_grad  # as a leaf
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None


def recorded() -> int:
    return sum(len(context.sent) + len(context.received) for context in service().contexts.all())


@among_three
def test_a_result_with_grad_that_came_from_outside_of_the_context_is_recorded_when_fetched() -> None:
    made_before = rpc.remote(1, weight)
    everywhere(abs, 1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(made_before.to_here() * 2).sum()])
        same(gradient_at(1, context_id), [2, 2, 2])


def checkpointed(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(scaled, x, use_reentrant=False)
    return y


@among_three
def test_checkpointed_parts_are_computed_again_in_the_pass() -> None:
    x = leaf(1, 2, 4)
    with autograd.context() as context_id:
        y = checkpointed(rpc.rpc_sync(1, checkpointed, args=(x,)) * 1)
        autograd.backward(context_id, [y.sum()])
        same(autograd.get_gradients(context_id)[x], [4, 9, 25])
        same(gradient_at(1, context_id), [2, 6, 20])
