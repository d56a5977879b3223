"""Workers that come and go in a simulated world, in any order of messages."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.services import elastic
from actorrpc.services.ids import ROOT
from actorrpc.session import Session, current
from actorrpc.testing import SimWorld, network
from actorrpc.workers import present

SIZE = 4
VISITS = 3


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


class Shelf(dict[Any, Any]):
    """What a worker keeps between calls."""


def shelf() -> Shelf:
    kept: Shelf = current().worker.services.setdefault(Shelf, Shelf())
    return kept


def count(word: str) -> int:
    kept = shelf()
    kept[word] = kept.get(word, 0) + 1
    return kept[word]  # type: ignore[no-any-return]


def keep(value: int, ref: Any) -> None:
    shelf()["ref"] = value, ref


def use_kept() -> None:
    """Uses what somebody has passed on who may have left since; its owner may have, too."""
    value, ref = shelf().get("ref", (0, None))
    if ref is not None:
        with contextlib.suppress(rpc.WorkerLostError):
            assert ref.rpc_sync().get() == value


def name_here() -> str:
    return rpc.get_worker_info().name


def call_back(to: str) -> str:
    name: str = rpc.rpc_sync(to, name_here)
    return name


def names(session: Session) -> list[str]:
    return [record.name for record in present(session.worker)]


def others(session: Session) -> list[str]:
    return [name for name in names(session) if name != session.worker.record.name]


def wait(session: Session, seconds: float) -> None:
    session.worker.clock.gate().wait(seconds)


@pytest.fixture(autouse=True)
def _slow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some messages take much longer than leaving takes, where nothing is waited for."""
    monkeypatch.setattr(network, "_STALL_SECONDS", 0.5)
    monkeypatch.setattr(elastic, "DOOR_SECONDS", 0.0)


def check(future: rpc.Future[Any]) -> None:
    """A call that was not answered when its caller left was never sent, or tells of one that was not."""
    assert future.done()
    try:
        future.wait()
    except rpc.WorkerLostError as e:
        lost = str(e)
    else:
        return
    assert "not sent" in lost, lost


class Visits:
    """Workers that come and go; what they find is checked.

    Arguments:
        seed: of the world, and of what they do.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.stay = seed, True
        self.visitors, self.values = SIZE - 1, 0
        self.here: set[int] = set()
        """Those whose `init_rpc` has returned and who have not begun to leave."""

    def play(self) -> None:
        with SimWorld(SIZE, self.seed, threads=2, elastic=True) as world:
            world.network.stalls = 0.05
            world.run(lambda: self.host(world), *(self.visitor(world, rank) for rank in range(1, SIZE)))

    def host(self, world: SimWorld) -> None:
        with world.member(0) as session:
            while self.visitors:
                wait(session, 0.001)
            assert names(session) == ["w0"]
            shelf().clear()
            wait(session, 0.1)
            gc.collect()
            wait(session, 6.0)
            statistics = session.objects.statistics()
            assert not any(statistics.values()), statistics
            assert [ref for ref in session.objects._entries if ref != ROOT] == []

    def visitor(self, world: SimWorld, rank: int) -> Callable[[], None]:
        choice = random.Random(f"{self.seed} {rank}")

        def visit() -> None:
            try:
                visit_all()
            finally:
                self.visitors -= 1

        def visit_all() -> None:
            for _ in range(VISITS):
                with world.member(rank) as session:
                    self.here.add(rank)
                    assert {f"w{other}" for other in self.here} <= set(names(session))
                    for other in sorted(self.here - {rank}):
                        with contextlib.suppress(rpc.WorkerLostError):  # it may just leave
                            assert rpc.rpc_sync(f"w{other}", call_back, args=(f"w{rank}",)) == f"w{rank}"
                    held: list[tuple[int, Any]] = []
                    pending: list[rpc.Future[Any]] = []
                    for _ in range(choice.randrange(6)):
                        self.use(choice, session, held, pending)
                    self.here.discard(rank)
                for future in pending:
                    check(future)

        return visit

    def use(
        self, choice: random.Random, session: Session, held: list[tuple[int, Any]], pending: list[rpc.Future[Any]]
    ) -> None:
        """Calls somebody. A call that was sent is answered: nobody goes without a word here."""
        to, kind, failure = choice.choice(["w0", *others(session)]), choice.randrange(5), None
        try:
            if kind == 0:
                assert rpc.rpc_sync(to, count, args=(session.worker.record.name,)) > 0
            elif kind == 1:
                self.values += 1
                held.append((self.values, rpc.remote(to, Box, args=(self.values,))))
            elif kind == 2 and held:
                value, ref = choice.choice(held)
                assert ref.rpc_sync().get() == value
            elif kind == 3 and held:
                value, ref = choice.choice(held)
                pending.append(rpc.rpc_async(to, keep, args=(value, ref)))
            elif kind == 4:
                pending.append(rpc.rpc_async(to, call_back, args=(choice.choice(names(session)),)))
                rpc.rpc_sync(to, use_kept)
        except rpc.WorkerLostError as e:
            failure = str(e)
        assert failure is None or "not sent" in failure or "not made" in failure, (self.seed, kind, failure)


def test_workers_come_and_go_in_any_order_of_messages() -> None:
    for seed in range(12):
        Visits(seed).play()


def test_what_a_leaver_has_passed_on_lives() -> None:
    def owner(world: SimWorld) -> None:
        with world.member(0) as session:
            while len(names(session)) < 3:
                wait(session, 0.001)
            while len(names(session)) > 1:
                wait(session, 0.001)

    def leaver(world: SimWorld) -> None:
        with world.member(1) as session:
            while len(names(session)) < 3:
                wait(session, 0.001)
            ref = rpc.remote("w0", Box, args=(7,))
            rpc.rpc_async("w2", keep, args=(7, ref))

    def heir(world: SimWorld) -> None:
        with world.member(2) as session:
            while "w1" in names(session) or not shelf():
                wait(session, 0.001)
            wait(session, 0.1)
            assert shelf()["ref"][1].rpc_sync().get() == 7

    for seed in range(15):
        with SimWorld(3, seed, elastic=True) as world:
            world.network.stalls = 0.4
            world.run(*(functools.partial(part, world) for part in (owner, leaver, heir)))


def test_who_was_started_with_a_rank_0_that_has_nothing_to_do_gets_in_and_who_comes_later_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic, "DOOR_SECONDS", 3.0)
    came: list[int] = []

    def host(world: SimWorld) -> None:
        with world.member(0):
            pass

    def visitor(world: SimWorld) -> None:
        world.simulation.gate().wait(2.0)
        with world.member(1) as session:
            assert names(session) == ["w0", "w1"]
            came.append(1)
            while came[-1] != 3:
                wait(session, 0.1)

    def too_late(world: SimWorld) -> None:
        world.simulation.gate().wait(20.0)
        with pytest.raises(rpc.RendezvousError, match=r"rank 0.*has left.*nobody can join any more"), world.member(3):
            pass
        came.append(3)

    for seed in range(3):
        with SimWorld(SIZE, seed, elastic=True) as world:
            world.run(lambda w=world: host(w), lambda w=world: visitor(w), None, lambda w=world: too_late(w))  # type: ignore[misc]
    assert came == [1, 3] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(12, 1012, 100))
def test_workers_come_and_go_in_1000_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        Visits(seed).play()
