"""References in the simulated world: whatever the order of messages, the counts come out right."""

from __future__ import annotations

import random
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import ActorRPCError
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


def give_back(ref: rpc.RRef[Box]) -> rpc.RRef[Box]:
    """Returns a reference that came as an argument."""
    return ref


def make_here(value: int) -> rpc.RRef[Box]:
    """The owner gives out a reference to an object of its own."""
    return rpc.RRef(Box(value))


def pass_on(to: int, ref: rpc.RRef[Box]) -> int:
    """A user shares with another worker, by a call that it does not wait for before it drops its own."""
    future = rpc.rpc_async(to, hold, args=(ref,))
    del ref
    value: int = future.wait()
    return value


def statistics(world: SimWorld) -> list[dict[str, int]]:
    return [session.objects.statistics() for session in world.sessions]


def play(seed: int) -> None:
    choice = random.Random(seed)
    with SimWorld(size=SIZE, seed=seed, threads=2) as world:

        def program(me: int) -> Any:
            held: list[tuple[int, rpc.RRef[Box]]] = []

            def run() -> None:
                for n in range(5):
                    verb, to, value = choice.randrange(6), choice.randrange(SIZE), me * 100 + n
                    if verb == 0 or not held:
                        held.append((value, rpc.remote(to, Box, args=(value,))))
                    elif verb == 1:
                        held.append((value, rpc.rpc_sync(to, make_here, args=(value,))))
                    elif verb == 2:
                        value, ref = choice.choice(held)
                        assert rpc.rpc_sync(to, hold, args=(ref,)) == value, seed
                    elif verb == 3:
                        value, ref = choice.choice(held)
                        held.append((value, rpc.rpc_sync(to, give_back, args=(ref,))))
                    elif verb == 4:
                        value, ref = held.pop(choice.randrange(len(held)))
                        future = rpc.rpc_async(to, pass_on, args=(choice.randrange(SIZE), ref))
                        del ref
                        assert future.wait() == value, seed
                    else:
                        held.pop(choice.randrange(len(held)))
                assert all(ref.to_here().value == value for value, ref in held), seed

            return run

        world.run(*(program(me) for me in range(SIZE)))
        world.settle(1.0)
        assert all(not any(counts.values()) for counts in statistics(world)), (seed, statistics(world))


def test_counts_return_to_nothing_in_any_order_of_messages() -> None:
    for seed in range(120):
        play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_counts_return_to_nothing_in_2000_seeds() -> None:
    for seed in range(2_000):
        play(seed)


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
