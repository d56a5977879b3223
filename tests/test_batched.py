"""Batched methods: many callers, one run, to each its own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import session
from actorrpc.autograd import backward, context, get_gradients
from actorrpc.services.batches import Batches
from tests.worlds import World, until

OTHER = "worker1"
released = threading.Event()


def release() -> None:
    released.set()


def scaled(x: Tensor, factor: float) -> Tensor:
    return torch.sin(x) * factor


class Server(rpc.Actor):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []

    @rpc.batched(max_size=4, max_wait=60)
    def when_full(self, xs: list[int]) -> list[int]:
        self.runs.append(xs)
        return [x * 10 for x in xs]

    @rpc.batched(max_size=100, max_wait=0.05)
    def in_time(self, xs: list[int], factors: list[int] = 2, *, plus: list[int] = 0) -> tuple[int, ...]:  # type: ignore[assignment]  # its callers' default
        self.runs.append(xs)
        return tuple(x * factor + more for x, factor, more in zip(xs, factors, plus, strict=True))

    @rpc.batched(max_size=100)
    def queued(self, xs: list[Any]) -> list[Any]:
        self.runs.append(xs)
        return xs

    @rpc.batched(max_size=3)
    def by_threes(self, xs: list[int]) -> list[int]:
        self.runs.append(xs)
        return xs

    @rpc.batched(max_size=100, max_wait=0.02)
    async def later(self, xs: list[int]) -> list[int]:
        await asyncio.sleep(0)
        self.runs.append(xs)
        if 0 in xs:
            raise ValueError("a zero")
        return [-x for x in xs]

    @rpc.batched(max_size=100, max_wait=0.02)
    def halves(self, xs: list[Any]) -> Any:
        self.runs.append(xs)
        if "all" in xs:
            raise KeyError("all of them")
        if "few" in xs:
            return xs[1:]
        if "none" in xs:
            return None
        return [ValueError("odd") if x % 2 else x // 2 for x in xs]

    @rpc.batched(max_size=100, max_wait=60)
    def for_ever(self, xs: list[int]) -> list[int]:
        return xs

    def hold(self) -> None:
        released.clear()
        assert released.wait(20)

    def calls_itself(self) -> Any:
        """Its batched method is open for others; the turn of theirs cannot come before this one ends."""
        return self.rref.rpc_sync(timeout=10).in_time(3)

    def took(self) -> list[list[Any]]:
        runs, self.runs = self.runs, []
        return runs


class Plain:
    """No actor."""

    @rpc.batched(max_size=2, max_wait=60)
    def pairs(self, xs: list[int]) -> list[int]:
        return [sum(xs)] * len(xs)


class Model(rpc.Actor):
    def __init__(self, seed: int) -> None:
        self.weight = weight_of(seed)
        self.sizes: list[int] = []

    @rpc.batched(max_size=5, max_wait=0.01)
    def forward(self, xs: list[Tensor], factors: list[float]) -> Tensor:
        self.sizes.append(len(xs))
        return scaled(torch.stack(xs) @ self.weight, 1.0) * torch.tensor(factors, dtype=torch.float64).unsqueeze(1)

    def gradient(self, context_id: int) -> Tensor:
        return get_gradients(context_id)[self.weight]

    def took(self) -> list[int]:
        return self.sizes


def weight_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()


def relay(model: rpc.RRef[Any], x: Tensor, factor: float) -> Tensor:
    """Calls from another worker, in the context of its caller."""
    found: Tensor = model.rpc_sync().forward(x * 2, factor)
    return found + x


@pytest.fixture(scope="module")
def _trio() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture
def trio(_trio: World) -> Iterator[World]:
    yield _trio
    _trio.everywhere(nothing_open)


def nothing_open() -> None:
    batches = session.current().worker.services.get(Batches)
    assert batches is None or not batches.open
    until(lambda: not session.current().worker.afoot)


# --- on rank 0


def _fills() -> None:
    server = Server.spawn(OTHER)
    futures = [server.rpc_async().when_full(i) for i in range(8)]
    assert [future.wait() for future in futures] == [i * 10 for i in range(8)]
    assert server.rpc_sync().took() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def _time_is_up() -> None:
    server = Server.spawn(OTHER)
    futures = [server.rpc_async().in_time(1), server.rpc_async().in_time(2, 3), server.rpc_async().in_time(5, plus=1)]
    assert [future.wait() for future in futures] == [2, 6, 11]
    assert [x for run in server.rpc_sync().took() for x in run] == [1, 2, 5]


def _others_are_served() -> None:
    server = Server.spawn(OTHER)
    waiting = [server.rpc_async().when_full(i) for i in range(3)]
    assert server.rpc_sync().took() == []  # the actor is not held by a batch that waits
    assert server.rpc_sync().when_full(3) == 30
    assert [future.wait() for future in waiting] == [0, 10, 20]


def _what_is_queued() -> None:
    server = Server.spawn(OTHER)
    held = server.rpc_async().hold()
    futures = [server.rpc_async().queued(i) for i in range(7)] + [server.rpc_async().by_threes(i) for i in range(7)]
    rpc.rpc_sync(OTHER, release)
    held.wait()
    assert [future.wait() for future in futures] == list(range(7)) * 2
    assert sorted(server.rpc_sync().took(), key=len) == [[6], [0, 1, 2], [3, 4, 5], list(range(7))]


def _coroutines() -> None:
    server = Server.spawn(OTHER)
    assert [f.wait() for f in [server.rpc_async().later(i) for i in (1, 2)]] == [-1, -2]
    failed = [server.rpc_async().later(0), server.rpc_async().later(0)]
    for future in failed:
        with pytest.raises(ValueError, match="a zero"):
            future.wait()
    assert server.rpc_sync().took()


def _errors() -> None:
    server = Server.spawn(OTHER)
    four, odd, misspelt = server.rpc_async().halves(4), server.rpc_async().halves(3), server.rpc_async().halves(y=3)
    assert four.wait() == 2
    with pytest.raises(ValueError, match="odd"):
        odd.wait()
    with pytest.raises(TypeError, match="'xs'"):
        misspelt.wait()
    for future in [server.rpc_async().halves("all") for _ in range(2)]:
        with pytest.raises(KeyError, match="all of them"):
            future.wait()
    with pytest.raises(TypeError, match=r"of 1 calls it must return .* returned a list of 0"):
        server.rpc_sync().halves("few")
    with pytest.raises(TypeError, match="returned a NoneType"):
        server.rpc_sync().halves("none")
    with pytest.raises(TypeError, match="is batched, and answers each call with one result"):
        list(server.stream().halves(1))


def _left_out() -> None:
    server = Server.spawn(OTHER)
    held = server.rpc_async().hold()
    cancelled, late, kept = (
        server.rpc_async().queued("cancelled"), server.rpc_async(timeout=0.05).queued("late"),
        server.rpc_async().queued("kept"),
    )  # fmt: skip
    cancelled.cancel()
    with pytest.raises(rpc.RPCTimeoutError):
        late.wait()
    rpc.rpc_sync(OTHER, release)
    held.wait()
    assert kept.wait() == "kept"
    assert server.rpc_sync().took() == [["kept"]]


def _left_out_while_it_waits() -> None:
    server = Server.spawn(OTHER)
    first = [server.rpc_async().when_full(0), server.rpc_async(timeout=0.05).when_full(1)]
    made = server.remote(timeout=0.05).when_full(2)
    server.rpc_sync().took()  # they were taken down, and wait for others
    first[0].cancel()
    for ends in (first[1].wait, made.to_here):
        with pytest.raises(rpc.RPCTimeoutError):
            ends()
    futures = [server.rpc_async().when_full(i) for i in range(3, 7)]
    assert [future.wait() for future in futures] == [30, 40, 50, 60]
    assert server.rpc_sync().took() == [[3, 4, 5, 6]]


def _all_cancelled() -> None:
    server = Server.spawn(OTHER)
    futures = [server.rpc_async().in_time(i) for i in range(3)]
    for future in futures:
        future.cancel()
    server.rpc_sync().took()
    assert server.rpc_sync().in_time(7) == 14
    assert server.rpc_sync().took()[-1][-1] == 7


def _own_call() -> None:
    server = Server.spawn(OTHER)
    others = [server.rpc_async().in_time(i) for i in range(2)]
    assert server.rpc_sync().calls_itself() == 6
    assert [future.wait() for future in others] == [0, 2]


def _other_ways() -> None:
    server = Server.spawn(OTHER)
    refs = [server.remote().when_full(i) for i in range(3)]
    server.tell().when_full(3)
    assert [ref.to_here() for ref in refs] == [0, 10, 20]
    plain = rpc.remote(OTHER, Plain)
    assert [f.wait() for f in [plain.rpc_async().pairs(1), plain.rpc_async().pairs(2)]] == [3, 3]
    assert Server().when_full([1]) == [10]  # a plain call is a plain call


def _gone() -> None:
    server = Server.spawn(OTHER)
    first = server.rpc_async(timeout=20).in_time(1)
    server.rpc_sync().took()
    del server
    assert first.wait() == 2  # whoever has called is served


def _gradients() -> None:
    rng = random.Random(7)
    most = 0
    for seed in range(6):
        model = Model.spawn(OTHER, seed)
        group = rpc.Group([model, Model.spawn("worker2", seed + 100)])
        plans = [
            [
                (rng.choice((0, 1, 2)), torch.randn(3, dtype=torch.float64), rng.uniform(1, 3))
                for _ in range(rng.randint(1, 7))
            ]
            for _ in range(3)
        ]
        errors: list[BaseException] = []

        def train(
            plan: list[tuple[int, Tensor, float]], seed: int = seed, model: Any = model, group: Any = group,
            errors: list[BaseException] = errors,
        ) -> None:  # fmt: skip
            try:
                compare(plan, seed, model, group)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=train, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        most = max(most, *model.rpc_sync().took())
    assert most > 1, "nothing was batched"


def compare(plan: list[tuple[int, Tensor, float]], seed: int, model: Any, group: Any) -> None:
    """Runs calls in a context of this thread's, then the same in one process, and compares gradients."""
    own = [x.clone().requires_grad_() for _, x, _ in plan]
    both = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as number:
        futures = [
            model.rpc_async().forward(x, factor) if to == 0 else rpc.rpc_async(to, relay, args=(model, x, factor))
            for (to, _, factor), x in zip(plan, own, strict=True)
        ]
        members = group.rpc_async().forward(both, 2.0)
        loss = torch.stack([future.wait() for future in futures]).sum() + torch.stack(members.wait()).sum()
        backward(number, [loss])
        found = get_gradients(number)
        weights = group.rpc_sync().gradient(number)
    local = [x.clone().requires_grad_() for _, x, _ in plan]
    alone = torch.ones(3, dtype=torch.float64, requires_grad=True)
    theirs = [weight_of(seed), weight_of(seed + 100)]
    outs = []
    for (to, _, factor), x in zip(plan, local, strict=True):
        way = x if to == 0 else x * 2
        out = scaled(way @ theirs[0], factor)
        outs.append(out if to == 0 else out + x)
    expected = torch.stack(outs).sum() + sum(scaled(alone @ weight, 2.0).sum() for weight in theirs)
    torch.autograd.backward([expected])
    torch.testing.assert_close(loss, expected)
    for mine, right in zip([*own, both], [*local, alone], strict=True):
        torch.testing.assert_close(found[mine], right.grad)
    for gradient, weight in zip(weights, theirs, strict=True):
        torch.testing.assert_close(gradient, weight.grad)


@pytest.mark.parametrize(
    "body",
    [
        _fills, _time_is_up, _others_are_served, _what_is_queued, _coroutines, _errors, _left_out,
        _left_out_while_it_waits, _all_cancelled, _own_call, _other_ways, _gone,
    ],
    ids=lambda body: body.__name__[1:],
)  # fmt: skip
def test_a_batch(trio: World, body: Any) -> None:
    trio.on(0, body)


def test_gradients_of_batches_are_those_of_one_process(trio: World) -> None:
    trio.on(0, _gradients)


def test_calls_of_two_contexts_are_two_batches(trio: World) -> None:
    def body() -> None:
        model = Model.spawn(OTHER, 1)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with context():
            one = model.rpc_async().forward(x, 1.0)
            with_it = model.rpc_async().forward(x, 1.0)
        with context():
            two = model.rpc_async().forward(x, 1.0)
        for future in (one, with_it, two, model.rpc_async().forward(x, 1.0)):
            future.wait()
        sizes = model.rpc_sync().took()
        assert sum(sizes) == 4
        assert max(sizes) <= 2

    trio.on(0, body)


def test_a_batch_of_an_actor_that_has_ended_says_so(trio: World) -> None:
    def body() -> None:
        ref = Server.spawn(0)
        future = ref.rpc_async(timeout=20).for_ever(1)
        ref.rpc_sync().took()
        entry = ref._handle.entry  # type: ignore[union-attr]
        assert entry.mailbox is not None
        entry.mailbox.mailbox.close()
        (batch,) = session.current().worker.services[Batches].open.values()
        batch.due()
        with pytest.raises(rpc.ActorGoneError, match="was not run: its actor has ended"):
            future.wait()

    trio.on(0, body)


def nothing() -> None:
    """No method."""


def decorated(function: Any) -> Any:
    return rpc.batched(max_size=2)(function)


@pytest.mark.parametrize(
    "make,kind,words",
    [
        (lambda: decorated(lambda self, *xs: xs), TypeError, r"\*args"),
        (lambda: decorated(nothing), TypeError, "is no method"),
        (lambda: decorated(staticmethod(len)), TypeError, "plain methods"),
        (lambda: decorated(decorated(lambda self, x: x)), TypeError, "plain methods"),
        (lambda: rpc.batched(max_size=0), ValueError, "at least 1"),
        (lambda: rpc.batched(max_size=1, max_wait=-1), ValueError, "0 or more"),
    ],
    ids=["args", "no method", "static", "twice", "size", "wait"],
)
def test_what_cannot_be_batched_is_refused(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_a_generator_cannot_be_batched() -> None:
    def items(self: Any, xs: list[int]) -> Iterator[int]:
        yield from xs

    with pytest.raises(TypeError, match="generator"):
        decorated(items)
