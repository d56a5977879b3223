"""References in the simulated world, one situation at a time: the four ways in which they travel, messages that
overtake others, and death. Random plays of all of it are in test_counts.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import ActorRPCError, WorkerLostError
from actorrpc.services.forks import OwnerForks, UserForks
from actorrpc.session import current
from actorrpc.testing import SimWorld

SIZE = 3


class Box:
    """An object to refer to."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


def hold(ref: rpc.RRef[Box]) -> int:
    """User or owner takes a reference as an argument, uses it and drops it."""
    value: int = ref.rpc_sync().get()
    return value


def pass_on(to: int, ref: rpc.RRef[Box]) -> int:
    """A user shares with another worker, by a call that it does not wait for before it drops its own."""
    future = rpc.rpc_async(to, hold, args=(ref,))
    del ref
    value: int = future.wait()
    return value


def statistics(world: SimWorld) -> list[dict[str, int]]:
    return [session.objects.statistics() for session in world.sessions]


def keep(ref: rpc.RRef[Box], kept: list[Any] = []) -> None:  # noqa: B006  kept on purpose, until the process dies
    kept.append(ref)


def test_what_a_dead_worker_held_is_released() -> None:
    for seed in range(30):
        with SimWorld(size=SIZE, seed=seed) as world:

            def program() -> None:
                ref = rpc.RRef(Box(1))
                rpc.rpc_sync(2, keep, args=(ref,))

            world.run(program)
            world.settle(0.5)
            assert statistics(world)[0]["forks"] == 1, seed
            world.kill(2)
            world.settle(0.5)
            assert not any(statistics(world)[0].values()), (seed, statistics(world))
            with pytest.raises(ActorRPCError):
                world.run(lambda: rpc.rpc_sync(2, hold, args=(rpc.RRef(Box(2)),)))


def use_twice(ref: rpc.RRef[Box]) -> int:
    """A third worker uses a reference, and uses it again when it knows whether the owner has recorded its fork."""
    value: int = ref.rpc_sync().get()
    assert ref.rpc_sync().get() == value
    return value


def early_use(seed: int) -> int:
    """Worker 0 makes an object on 1 and hands it to 2 at once, so that 2's use may arrive before the creation."""
    with SimWorld(size=SIZE, seed=seed) as world:

        def program() -> int:
            futures = [rpc.rpc_async(2, use_twice, args=(rpc.remote(1, Box, args=(n,)),)) for n in range(4)]
            assert [f.wait() for f in futures] == list(range(4)), seed
            return 4

        world.run(program)
        world.settle(1.0)
        assert all(not any(counts.values()) for counts in statistics(world)), (seed, statistics(world))
        return world.network.carried


def test_a_reference_that_comes_home_before_the_creation_waits_for_it() -> None:
    for seed in range(10):
        with SimWorld(size=SIZE, seed=seed) as world:

            def program() -> None:
                # What worker 0 sends to 1 now takes longer than the way by 2.
                world.network._last["sim://0", "sim://1"] = world.simulation.time + 0.005
                futures = [rpc.rpc_async(2, pass_on, args=(1, rpc.remote(1, Box, args=(n,)))) for n in range(4)]
                assert [f.wait() for f in futures] == list(range(4))

            world.run(program)
            world.settle(1.0)
            assert all(not any(counts.values()) for counts in statistics(world)), (seed, statistics(world))


def test_a_use_that_arrives_before_the_creation_waits_for_it() -> None:
    for seed in range(100):
        early_use(seed)


# -- the four ways in which a reference travels, each checked at rest while it is held, and after


def shelf() -> list[Any]:
    """What a worker keeps between calls."""
    kept: list[Any] = current().worker.services.setdefault(Box, [])
    return kept


def put(ref: rpc.RRef[Box]) -> int:
    shelf().append(ref)
    value: int = ref.rpc_sync().get()
    return value


def put_all(size: int) -> None:
    for kept in shelf():
        assert kept.to_here().value == size


def make_box(value: int) -> rpc.RRef[Box]:
    return rpc.RRef(Box(value))


def user_to_owner_as_return_value() -> None:
    shelf().append(rpc.remote(1, Box, args=(SIZE,)))


def user_to_owner_as_argument() -> None:
    ref = rpc.remote(1, Box, args=(SIZE,))
    future = rpc.rpc_async(1, put, args=(ref,))
    del ref
    assert future.wait() == SIZE


def owner_to_user() -> None:
    ref = rpc.RRef(Box(SIZE))
    future = rpc.rpc_async(1, put, args=(ref,))
    del ref
    assert future.wait() == SIZE
    shelf().append(rpc.rpc_sync(1, make_box, args=(SIZE,)))


def user_to_user() -> None:
    ref = rpc.remote(1, Box, args=(SIZE,))
    future = rpc.rpc_async(2, put, args=(ref,))
    del ref
    assert future.wait() == SIZE


WAYS: list[tuple[Callable[[], None], dict[int, tuple[int, int]]]] = [
    (user_to_owner_as_return_value, {0: (0, 1), 1: (1, 0)}),
    (user_to_owner_as_argument, {}),
    (owner_to_user, {0: (1, 1), 1: (1, 1)}),
    (user_to_user, {1: (1, 0), 2: (0, 1)}),
]
"""Each with what is left at rest, by rank: forks of its objects, and forks that it holds."""


@pytest.mark.parametrize("way, left", WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_at_rest_the_owner_has_one_fork_for_each_holder_and_no_more(
    way: Callable[[], None], left: dict[int, tuple[int, int]]
) -> None:
    for seed in range(60):
        with SimWorld(size=SIZE, seed=seed) as world:
            world.network.stalls = 0.1 if seed % 2 else 0.0
            world.run(way)
            world.settle(0.2)
            for rank, counts in enumerate(statistics(world)):
                owned, held = left.get(rank, (0, 0))
                assert (counts["forks"], counts["held"], counts["children"]) == (owned, held, 0), (seed, rank, counts)
            world.run(*[lambda: put_all(SIZE)] * SIZE)
            world.run(*[lambda: shelf().clear()] * SIZE)
            world.settle(0.2)
            assert all(not any(counts.values()) for counts in statistics(world)), (seed, statistics(world))


def test_the_owner_as_argument_keeps_its_object_itself() -> None:
    for seed in range(30):
        with SimWorld(size=SIZE, seed=seed) as world:
            world.run(user_to_owner_as_argument)
            world.settle(0.2)
            (ref,) = world.sessions[1].worker.services[Box]
            assert ref.is_owner()
            assert ref.local_value().value == SIZE


# -- death


def test_a_parent_is_freed_when_the_worker_that_it_was_sent_to_dies() -> None:
    """Worker 0 hands 1's object to 2, which dies at some moment before or after it has recorded its fork."""
    for seed in range(150):
        with SimWorld(size=SIZE, seed=seed) as world:
            world.network.stalls = 0.1

            def program() -> None:
                ref = rpc.remote(1, Box, args=(SIZE,))
                future = rpc.rpc_async(2, put, args=(ref,))
                del ref
                with contextlib.suppress(ActorRPCError):
                    future.wait()

            world.simulation.at(seed * 1e-5, lambda: world.kill(2, 1e-4))
            world.run(program)
            world.settle(6.0)
            assert not any(any(counts.values()) for counts in statistics(world)[:2]), (seed, statistics(world))


def test_a_child_outlives_its_parent_whose_worker_dies() -> None:
    """Worker 2 keeps what worker 0 has handed to it, once it knows that the owner has recorded its fork."""
    for seed in range(60):
        with SimWorld(size=SIZE, seed=seed) as world:
            world.run(user_to_user)
            world.settle(0.2)
            world.kill(0)
            world.settle(0.2)
            world.run(None, None, lambda: put_all(SIZE))
            assert statistics(world)[1]["forks"] == statistics(world)[2]["held"] == 1
            world.run(None, None, lambda: shelf().clear())
            world.settle(0.2)
            assert not any(any(counts.values()) for counts in statistics(world)[1:]), (seed, statistics(world))


def test_the_death_of_an_owner_voids_its_references_everywhere() -> None:
    for seed in range(100):
        with SimWorld(size=SIZE, seed=seed) as world:
            world.network.stalls = 0.1

            def program() -> None:
                refs = [rpc.remote(1, Box, args=(SIZE,)) for _ in range(3)]
                with contextlib.suppress(ActorRPCError):
                    rpc.rpc_sync(2, put, args=(refs[0],))
                    rpc.rpc_sync(2, hold, args=(refs[1],))
                for ref in refs:
                    assert world.dead or ref.to_here().value == SIZE
                shelf().extend(refs)

            world.simulation.at(seed * 2e-5, lambda: world.kill(1, 1e-4))
            with contextlib.suppress(ActorRPCError):
                world.run(program)
            world.settle(0.2)

            def use() -> None:
                for ref in shelf():
                    with pytest.raises(WorkerLostError, match="w1"):
                        ref.to_here()
                    with pytest.raises(WorkerLostError, match="w1"):
                        ref.rpc_sync().get()
                shelf().clear()

            world.run(use, None, use)
            world.settle(6.0)
            living = [statistics(world)[rank] for rank in (0, 2)]
            assert not any(any(counts.values()) for counts in living), (seed, living)


# -- what may come twice


def test_record_accept_and_delete_may_come_twice() -> None:
    """RULE RR5, on the plain logic; the random plays have every such message come twice."""
    users, owner = UserForks(), OwnerForks()
    parent = users.add((1, 1), (0, 1), 1, confirmed=True)
    users.open_child(parent, (0, 2), 2)
    for _ in range(2):
        owner.record((0, 1), 0)
        owner.record((0, 2), 2)
    assert owner.holders == {(0, 1): 0, (0, 2): 2}
    assert users.drop(parent) is None  # a child is open
    delete = users.close_child((0, 2))
    assert delete is not None
    assert users.close_child((0, 2)) is None
    assert users.confirm((0, 1)) is None
    assert users.drop(parent) is None
    assert not owner.delete(delete.fork)
    assert not owner.delete(delete.fork)
    assert owner.delete((0, 2))
    assert not users.forks
    assert not users.parents


def fail() -> None:
    raise ValueError("none made")


def test_a_finalizer_may_use_a_reference_that_failed_as_another_failure_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over: list[bool] = []

    def program() -> None:
        refs = [rpc.remote(1, fail), rpc.remote(1, fail)]
        for ref in refs:
            with pytest.raises(ValueError, match="none made"):
                ref.to_here()
        worker = current().worker
        plain = worker.answers.read

        def result(call: Any) -> Any:
            monkeypatch.undo()
            for ref in refs:  # as the collector may run something that does
                with pytest.raises(ValueError, match="none made"):
                    ref.tell().get()
            return plain(call)

        monkeypatch.setattr(worker.answers, "read", result)
        with pytest.raises(ValueError, match="none made"):
            refs[0].tell().get()

    def run() -> None:
        with SimWorld(size=2, seed=1) as world:
            world.run(program)
        over.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert over, "a thread waits for itself"


def test_nobody_waits_for_the_crews_lock_under_that_of_the_objects() -> None:
    """Whose holder may be in a finalizer of the user's, which sends a reference."""
    under: list[bool] = []
    early = 0
    for seed in range(10):
        with SimWorld(size=SIZE, seed=seed) as world:
            for session in world.sessions:
                objects: Any = session.objects

                def submit(job: Any, objects: Any = objects, plain: Any = session.worker.crew.submit) -> bool:
                    under.append(objects.door._is_owned())
                    done: bool = plain(job)
                    return done

                def record(*what: Any, plain: Any = objects._early.record) -> None:
                    nonlocal early
                    early += 1
                    plain(*what)

                session.worker.crew.submit = submit  # type: ignore[method-assign]
                objects._early.record = record

            def program() -> None:
                # What worker 0 sends to 1 now takes longer than the way by 2.
                world.network._last["sim://0", "sim://1"] = world.simulation.time + 0.005
                futures = [rpc.rpc_async(2, use_twice, args=(rpc.remote(1, Box, args=(n,)),)) for n in range(4)]
                assert [f.wait() for f in futures] == list(range(4))

            world.run(program)
            world.settle(1.0)
    assert early
    assert under
    assert not any(under)
