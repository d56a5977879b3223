"""Named actors: found from anywhere, made once, gone with their worker."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from actorrpc.world import World as Roles
from tests.worlds import World, run_world, until


class Counter(rpc.Actor):
    """Notes in a folder that it was made."""

    def __init__(self, folder: str | None = None, seconds: float = 0.0) -> None:
        if folder is not None:
            Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(seconds)
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def identity(self) -> tuple[str, str]:
        return self.name, self.worker.name

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(rpc.Actor):
    def __init__(self) -> None:
        raise KeyError("cannot be made")


class Named(rpc.Actor):
    """Has a name of its own among its arguments."""

    def __init__(self, name: str, word: str) -> None:
        self.words = name, word

    def both(self) -> tuple[str, str]:
        return self.words


@pytest.fixture(scope="module")
def _trio() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture
def trio(_trio: World) -> Iterator[World]:
    """A standing world of three, in which no name is left by the test before."""
    yield _trio
    _trio.on(0, forget_all)


def forget_all() -> None:
    for name in actors():
        rpc.forget_actor(name)
    until(lambda: not actors())


def actors() -> dict[str, rpc.ActorInfo]:
    return Roles(session.current()).actors


# --- a name -----------------------------------------------------------------------------------------------------------


def spawn_counter(to: int, name: str) -> None:
    Counter.spawn(to, name=name)
    rpc.get_actor(name)  # which waits until it is there


def add_by_name(name: str) -> int:
    return int(rpc.get_actor(name).rpc_sync().add())


def test_a_named_actor_is_found_from_any_worker(trio: World) -> None:
    trio.on(1, spawn_counter, 2, "counter")  # of whose references none is left
    assert [trio.on(rank, add_by_name, "counter") for rank in (0, 1, 2)] == [1, 2, 3]
    assert trio.on(2, identity_by_name, "counter") == ("counter", "worker2")
    assert trio.on(1, actors) == {"counter": rpc.ActorInfo("counter", rpc.WorkerInfo("worker2", 2), 1)}


def identity_by_name(name: str) -> Any:
    return rpc.get_actor(name).rpc_sync().identity()


def test_a_name_that_nobody_has_is_an_error_that_names_those_there_are(trio: World) -> None:
    trio.on(0, spawn_counter, 1, "known")
    assert "there is no actor named 'unknown' in this world; there are: 'known'" in trio.on(2, error_of_find, "unknown")


def error_of_find(name: str) -> str:
    with pytest.raises(rpc.NotAMemberError) as caught:
        rpc.get_actor(name)
    return str(caught.value)


def test_a_name_can_be_had_once(trio: World) -> None:
    trio.on(0, spawn_counter, 1, "mine")
    trio.on(2, be_refused, "mine")
    assert trio.on(1, add_by_name, "mine") == 1


def be_refused(name: str) -> None:
    with pytest.raises(rpc.InvalidNameError, match=r"'mine' is taken by an actor on worker \"worker1\".*get_actor"):
        Counter.spawn(0, name=name)
    for bad in ("", 3):
        with pytest.raises(rpc.InvalidNameError, match="a str with something in it"):
            Counter.spawn(0, name=bad)  # type: ignore[arg-type]
    with pytest.raises(rpc.NotAMemberError):
        Counter.spawn(7, name="elsewhere")
    with pytest.raises(rpc.SerializationError, match="lock"):
        Counter.spawn(0, threading.Lock(), name="unwritable")
    until(lambda: not rpc.rpc_sync(0, is_claimed, args=("unwritable",)))
    assert list(actors()) == ["mine"]


def test_a_constructor_may_have_a_name_of_its_own_by_position(trio: World) -> None:
    assert trio.on(0, both_names) == (("inner", "word"), "outer")


def both_names() -> Any:
    Named.spawn(1, "inner", "word", name="outer")
    return rpc.get_actor("outer").rpc_sync().both(), next(iter(actors()))


def test_an_actor_that_cannot_be_made_leaves_its_name_free(trio: World) -> None:
    trio.on(1, fail_and_spawn)
    assert trio.on(2, add_by_name, "again") == 1


def fail_and_spawn() -> None:
    ref = Failing.spawn(2, name="again")
    with pytest.raises(KeyError, match="cannot be made"):
        ref.rpc_sync().anything()  # type: ignore[attr-defined]
    Counter.spawn(0, name="again")
    rpc.get_actor("again")  # which waits until it is there
    assert actors()["again"].incarnation == 2


def test_an_actor_ends_when_its_name_is_forgotten_and_nobody_holds_it(trio: World) -> None:
    trio.on(1, forget_and_see)


def forget_and_see() -> None:
    ref = Counter.spawn(2, name="brief")
    assert ref.rpc_sync().add() == 1
    rpc.forget_actor("brief")
    with pytest.raises(rpc.NotAMemberError):
        rpc.get_actor("brief")
    assert ref.rpc_sync().add() == 2
    del ref
    until(lambda: rpc.rpc_sync(2, owned) == 0)


def owned() -> int:
    return session.current().objects.statistics()["owned"]


# --- get or create ----------------------------------------------------------------------------------------------------


def test_of_many_that_want_the_same_actor_one_makes_it(trio: World, tmp_path: Path) -> None:
    for rank in range(3):
        trio.start(rank, want_all, str(tmp_path), 20)
    counts = trio.results()
    assert sorted(counts[0] + counts[1] + counts[2]) == sorted(list(range(1, 10)) * 20)
    assert len(list(tmp_path.iterdir())) == 20


def want_all(folder: str, names: int) -> list[int]:
    """Asks for the same actors as the others do, from three threads of each worker."""
    counts: list[int] = []

    def want() -> None:
        for i in range(names):
            to = (session.current().worker.id + i) % 3
            counts.append(Counter.get_or_spawn(to, folder, 0.002, name=f"shared-{i}").rpc_sync(timeout=20).add())

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return counts


def test_who_looks_for_an_actor_that_is_being_made_waits_for_it(trio: World, tmp_path: Path) -> None:
    trio.start(1, make_slowly, str(tmp_path))
    until(lambda: list(tmp_path.iterdir()))
    assert trio.on(2, add_by_name, "slow") == 1
    trio.result(1)


def make_slowly(folder: str) -> None:
    Counter.spawn(0, folder, 0.3, name="slow").rpc_sync(timeout=20).identity()


def test_where_the_one_who_makes_it_fails_the_next_one_does(trio: World) -> None:
    trio.start(1, fail_slowly)
    until(lambda: trio.on(0, is_claimed, "fragile"))
    assert trio.on(2, get_counter, "fragile") == 1
    trio.result(1)


class FailingSlowly(rpc.Actor):
    def __init__(self) -> None:
        time.sleep(0.3)
        raise KeyError("cannot be made")


def fail_slowly() -> None:
    with pytest.raises(KeyError):
        FailingSlowly.spawn(0, name="fragile").rpc_sync().anything()  # type: ignore[attr-defined]


def is_claimed(name: str) -> bool:
    return name in session.current().names._table


def get_counter(name: str) -> int:
    return int(Counter.get_or_spawn(1, name=name).rpc_sync(timeout=20).add())


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_name_vanishes_with_its_worker_and_its_next_actor_is_another_incarnation() -> None:
    with World(3) as world:
        world.on(0, spawn_counter, 2, "fated")
        assert world.on(1, add_by_name, "fated") == 1
        world.kill(2)
        world.on(0, until_unknown, "fated")
        world.on(1, find_the_next)


def until_unknown(name: str) -> None:
    until(lambda: name not in actors())


def find_the_next() -> None:
    with pytest.raises(rpc.NotAMemberError, match="no actor named 'fated'"):
        rpc.get_actor("fated")
    assert Counter.get_or_spawn(0, name="fated").rpc_sync().add() == 1
    assert rpc.get_actor("fated").rpc_sync().add() == 2
    assert actors() == {"fated": rpc.ActorInfo("fated", rpc.WorkerInfo("worker0", 0), 2)}


def test_a_claim_is_free_again_when_the_one_who_makes_the_actor_is_lost() -> None:
    with World(3) as world:
        world.let_die(2)
        world.start(2, die_making)
        until(lambda: world.on(0, is_claimed, "orphan"))
        assert world.on(1, get_counter, "orphan") == 1


class Slow(rpc.Actor):
    def __init__(self) -> None:
        time.sleep(1.0)


def die_making() -> None:
    Slow.spawn(0, name="orphan")
    os.kill(os.getpid(), signal.SIGKILL)


def test_names_are_no_leaks(capfd: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        if rank == 1:
            for to in (0, 1, 2):
                Counter.spawn(to, name=f"named-{to}").rpc_sync().add()

    with World(3, options={"report_leaks": True}) as world:
        world.everywhere(program, ranked=True)
    assert all("references" not in outcome.stderr for outcome in world._outcomes)


def test_without_rank_0_there_are_no_names() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            return
        until(lambda: session.current().worker.peers[0].standing.name != "MEMBER")
        for ask in (rpc.get_actor, lambda name: Counter.spawn(1, name=name)):
            with pytest.raises((rpc.WorkerLostError, rpc.NotAMemberError)):
                ask("any")

    run_world(program, 2, graceful=False)
