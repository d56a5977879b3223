"""References in random plays: whatever is sent to whom, in whatever order it comes, and whoever dies, the counts come
out right."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import ActorRPCError
from actorrpc.services.ids import OBJECTS, ROOT
from actorrpc.session import current
from actorrpc.testing import SimWorld

SIZE = 4
STEPS = 8


class Box:
    """An object to refer to, which may hold references itself."""

    def __init__(self, value: int, *inside: Any) -> None:
        self.value, self.inside = value, inside

    def get(self) -> int:
        return self.value

    def swallow(self, ref: Any) -> None:
        """Uses a reference, and keeps it."""
        self.inside = (ref, ref.rpc_sync().get())


class Shelf(dict[int, Any]):
    """What a worker keeps between calls."""


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("it does not load")


def shelf() -> Shelf:
    kept: Shelf = current().worker.services.setdefault(Shelf, Shelf())
    return kept


def put(key: int, ref: Any) -> None:
    shelf()[key] = ref


def take(key: int) -> Any:
    return shelf().pop(key, None)


def hold(ref: Any) -> int:
    """User or owner takes a reference as an argument, uses it and drops it."""
    value: int = ref.rpc_sync().get()
    return value


def value_of(ref: Any) -> int:
    value: int = ref.to_here().value
    return value


def give_back(value: Any) -> Any:
    return value


def make_here(value: int) -> Any:
    """The owner gives out a reference to an object of its own."""
    return rpc.RRef(Box(value))


def pass_on(to: int, ref: Any) -> int:
    """A user shares with another worker, by a call that it does not wait for before it drops its own."""
    future = rpc.rpc_async(to, hold, args=(ref,))
    del ref
    value: int = future.wait()
    return value


def fail(*refs: Any) -> None:
    raise LookupError("as it should")


class Play:
    """What one worker does: draws one verb after the other. It checks the values that it gets.

    Arguments:
        world: where.
        me: its rank.
        seed: of the draws.
        mortal: whether workers may die, so that calls may fail.
        values: of the objects, in order of their creation. A box holds references to older ones only: a ring of
            references through several workers would never end.
    """

    def __init__(self, me: int, seed: int, mortal: bool, values: Iterator[int]) -> None:
        self.mortal, self.values = mortal, values
        self.choice = random.Random(f"{seed} {me}")
        self.held: list[tuple[int, Any]] = []
        self.shelved: list[tuple[int, int, int]] = []
        self.others: list[Any] = []
        self.verbs: list[Callable[[int], None]] = [
            self.make, self.make, self.make_there, self.hold, self.give_back, self.pass_on, self.drop, self.drop,
            self.shelve, self.unshelve, self.hold_by_remote, self.method_by_remote, self.nest, self.swallow,
            self.time_out, self.fail, self.fail_to_load, self.do_not_wait, self.two_in_one,
        ]  # fmt: skip

    def run(self) -> None:
        for _ in range(STEPS):
            verb = self.choice.choice(self.verbs) if self.held else self.make
            try:
                verb(next(self.values))
            except ActorRPCError:
                if not self.mortal:
                    raise
        self.verify()
        if self.choice.random() < 0.5:
            self.end()

    def verify(self) -> None:
        """Checks all that it holds."""
        for value, ref in self.held:
            self.check(value, functools.partial(value_of, ref))

    def end(self) -> None:
        """Drops all that it holds."""
        self.held.clear()
        self.shelved.clear()
        self.others.clear()

    def to(self) -> int:
        return self.choice.randrange(SIZE)

    def one(self) -> tuple[int, Any]:
        return self.choice.choice(self.held)

    def check(self, expected: int, use: Callable[[], Any]) -> None:
        try:
            value = use()
        except ActorRPCError:
            if not self.mortal:
                raise
        else:
            assert value == expected

    # -- the verbs

    def make(self, value: int) -> None:
        self.held.append((value, rpc.remote(self.to(), Box, args=(value,))))

    def make_there(self, value: int) -> None:
        self.held.append((value, rpc.rpc_sync(self.to(), make_here, args=(value,))))

    def hold(self, _: int) -> None:
        value, ref = self.one()
        self.check(value, lambda: rpc.rpc_sync(self.to(), hold, args=(ref,)))

    def give_back(self, _: int) -> None:
        value, ref = self.one()
        self.held.append((value, rpc.rpc_sync(self.to(), give_back, args=(ref,))))

    def pass_on(self, _: int) -> None:
        value, ref = self.held.pop(self.choice.randrange(len(self.held)))
        future = rpc.rpc_async(self.to(), pass_on, args=(self.to(), ref))
        del ref
        self.check(value, future.wait)

    def drop(self, _: int) -> None:
        self.held.pop(self.choice.randrange(len(self.held)))

    def shelve(self, key: int) -> None:
        value, ref = self.held.pop(self.choice.randrange(len(self.held)))
        to = self.to()
        rpc.rpc_sync(to, put, args=(key, ref))
        self.shelved.append((value, to, key))

    def unshelve(self, _: int) -> None:
        if self.shelved:
            value, to, key = self.shelved.pop(self.choice.randrange(len(self.shelved)))
            self.held.append((value, rpc.rpc_sync(to, take, args=(key,))))

    def hold_by_remote(self, _: int) -> None:
        value, ref = self.one()
        result = rpc.remote(self.to(), hold, args=(ref,))
        if self.choice.random() < 0.5:
            self.check(value, result.to_here)

    def method_by_remote(self, _: int) -> None:
        value, ref = self.one()
        result = ref.remote().get()
        if self.choice.random() < 0.5:
            self.check(value, lambda: rpc.rpc_sync(self.to(), give_back, args=(result,)).to_here())

    def nest(self, value: int) -> None:
        """Makes an object that holds references: its end on one worker is that of forks of a third one's."""
        self.held.append((value, rpc.remote(self.to(), Box, args=(value, self.one()[1], [self.one()[1]]))))

    def swallow(self, _: int) -> None:
        (a, older), (b, younger) = sorted([self.one(), self.one()], key=operator.itemgetter(0))
        if a != b:
            younger.tell().swallow(older)

    def time_out(self, _: int) -> None:
        refs = [self.one()[1], self.one()[1]]
        future = rpc.rpc_async(self.to(), give_back, args=(refs,), timeout=self.choice.random() * 1e-3 + 1e-6)
        with contextlib.suppress(rpc.RPCTimeoutError):
            future.wait()

    def fail(self, _: int) -> None:
        ref = self.one()[1]
        if self.choice.random() < 0.5:
            with contextlib.suppress(LookupError):
                rpc.rpc_sync(self.to(), fail, args=(ref,))
        else:
            failed = rpc.remote(self.to(), fail, args=(ref,))
            with contextlib.suppress(LookupError):
                rpc.rpc_sync(self.to(), hold, args=(failed,))

    def fail_to_load(self, _: int) -> None:
        refs = [self.one()[1], Unreadable(), self.one()[1]]
        with contextlib.suppress(rpc.DeserializationError):
            rpc.rpc_sync(self.to(), give_back, args=(refs,))

    def do_not_wait(self, _: int) -> None:
        rpc.rpc_async(self.to(), give_back, args=(self.one()[1],))

    def two_in_one(self, _: int) -> None:
        (value, a), (_, b) = self.one(), self.one()
        back = rpc.rpc_sync(self.to(), give_back, args=({"a": a, "more": [b, a]},))
        self.held.append((value, back["more"][1]))


def play(
    seed: int,
    *,
    spoil: Callable[[SimWorld, random.Random], int | None] | None = None,
    stalls: float = 0.0,
) -> SimWorld:
    """Plays, lets go of everything, and checks that no survivor counts anything.

    Arguments:
        spoil: what disturbs the world, called before the play; returns the rank that may die.
        stalls: the share of messages that take much longer than others.
    """
    with SimWorld(size=SIZE, seed=seed, threads=2) as world:
        world.network.stalls = stalls
        dies = spoil(world, random.Random(f"spoiled {seed}")) if spoil is not None else None
        values = itertools.count()
        plays = [Play(me, seed, dies is not None, values) for me in range(SIZE)]
        world.run(*(one.run for one in plays))
        world.settle(0.01)
        if dies is not None and dies not in world.dead:
            world.kill(dies)
        living = [rank for rank in range(SIZE) if rank not in world.dead]
        for rank in living:
            plays[rank].end()
        world.run(*(_clear if rank in living else None for rank in range(SIZE)))
        world.settle(0.2)
        for seconds in (0.1, 6.0, 0.1):  # what came before its object is given up after 5 s
            if _left(world, living):
                gc.collect()  # what an exception holds may be a ring
                world.settle(seconds)
        assert not _left(world, living), (seed, _left(world, living))
    return world


def _clear() -> None:
    shelf().clear()


def _left(world: SimWorld, living: list[int]) -> dict[int, Any]:
    left = {}
    for rank in living:
        objects = world.sessions[rank].objects
        counts, entries = objects.statistics(), [ref for ref in objects._entries if ref != ROOT]
        if any(counts.values()) or entries:
            left[rank] = counts, entries
    return left


def a_death(world: SimWorld, choice: random.Random) -> int:
    """Kills a worker at some moment of the play."""
    rank, simulation = choice.randrange(SIZE), world.simulation
    noticed = choice.choice([1e-4, 1e-3, 1e-2])
    simulation.at(choice.random() * 4e-3, lambda: world.kill(rank, noticed))
    return rank


def all_twice(world: SimWorld, _: random.Random) -> None:
    """Has each record, accept and delete come twice."""
    for session in world.sessions:
        objects, worker = session.objects, session.worker
        tell, request = objects._tell, worker.request

        def tell_twice(to: int, body: object, tell: Any = tell) -> None:
            tell(to, body)
            tell(to, body)

        def request_twice(to: int, target: Any, body: Any, *more: Any, request: Any = request, **options: Any) -> Any:
            call = request(to, target, body, *more, **options)
            if target == OBJECTS:
                with contextlib.suppress(ActorRPCError):
                    request(to, target, body, 0.0)
            return call

        objects._tell = tell_twice  # type: ignore[method-assign]
        worker.request = request_twice  # type: ignore[method-assign]


KINDS: dict[str, Callable[[int], object]] = {
    "any order": play,
    "some messages late": functools.partial(play, stalls=0.1),
    "a worker dies": functools.partial(play, spoil=a_death, stalls=0.02),
    "every message of the counting twice": functools.partial(play, spoil=all_twice, stalls=0.05),
}


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a failed tell goes to the log, and pytest keeps what is logged, with frames and what they hold."""
    for name in ("actorrpc", "actorrpc.failures"):  # the second one speaks where the stand-in has been installed
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_return_to_nothing(kind: str) -> None:
    for seed in range(25):
        KINDS[kind](seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_counts_return_to_nothing_in_10000_seeds(kind: str, part: int) -> None:
    for seed in range(part * 500, (part + 1) * 500):  # in all 10,000: 500 in each of 5 parts of 4 kinds
        KINDS[kind](seed)
