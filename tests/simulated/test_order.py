"""Order in the simulated world: what one sender sends is served in order, and no reply overtakes its earlier tells."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import RPCTimeoutError
from actorrpc.session import current
from actorrpc.testing import SimulationError, SimWorld


class Agent(rpc.Actor):
    """Counts the actions it gives and the rewards it is told; checks that no two handlers run at once."""

    def __init__(self) -> None:
        self.actions = self.rewards = 0
        self.inside = False

    def select_action(self, n: int) -> int:
        assert not self.inside
        self.inside = True
        self.actions += 1
        self.inside = False
        return n

    def report_reward(self, n: int) -> None:
        assert not self.inside
        self.rewards += n

    def episodes(self, observers: list[rpc.RRef[Observer]], count: int) -> list[tuple[int, int]]:
        """Runs episodes with all observers, itself waiting as a handler; returns what it has counted after each."""
        seen = []
        for _ in range(count):
            futures = [observer.rpc_async().run_episode(self.rref, 3) for observer in observers]
            for future in futures:
                future.wait()
            seen.append((self.actions, self.rewards))
        return seen


class Observer(rpc.Actor):
    """Asks for actions and tells rewards, the last of which comes right before its own reply."""

    def run_episode(self, agent: rpc.RRef[Agent], steps: int) -> int:
        for n in range(steps):
            assert agent.rpc_sync().select_action(n) == n
            agent.tell().report_reward(1)
        return steps


def episodes_are_whole(seed: int) -> int:
    with SimWorld(size=3, seed=seed, threads=2) as world:

        def program() -> list[tuple[int, int]]:
            agent = Agent.spawn(0)
            observers = [Observer.spawn(1), Observer.spawn(2)]
            result: list[tuple[int, int]] = agent.rpc_sync().episodes(observers, 2)
            return result

        (seen,) = world.run(program)
        # After an episode every action of both observers has its reward: no reply overtook a tell.
        assert seen == [(6, 6), (12, 12)], seed
        return world.simulation.steps


class Driver(Agent):
    """The same, with the episodes in `main`, and by a call to the whole group."""

    def main(self) -> list[tuple[int, int]]:
        seen = []
        for _ in range(2):
            self.world.observer.rpc_sync().run_episode(self.rref, 3)
            seen.append((self.actions, self.rewards))
        return seen


def episodes_of_main_are_whole(seed: int) -> int:
    with SimWorld.of_roles(seed, threads=2, agent=Driver, observer=rpc.Role(Observer, 2)) as world:
        assert world.play() == [(6, 6), (12, 12)], seed
        return world.simulation.steps


@pytest.mark.parametrize("check", [episodes_are_whole, episodes_of_main_are_whole])
def test_a_reply_never_overtakes_the_same_senders_earlier_tell(check: Callable[[int], int]) -> None:
    for seed in range(150):
        check(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", [episodes_are_whole, episodes_of_main_are_whole])
def test_a_reply_never_overtakes_the_same_senders_earlier_tell_in_10000_seeds(check: Callable[[int], int]) -> None:
    for seed in range(10_000):
        check(seed)


class Log(rpc.Actor):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def note(self, sender: int, n: int) -> None:
        self.seen.append((sender, n))

    def read(self) -> list[tuple[int, int]]:
        return self.seen


def test_messages_of_one_sender_are_served_in_order() -> None:
    for seed in range(60):
        with SimWorld(size=3, seed=seed) as world:
            (seen,) = world.run(tell_from_two)
            for sender in (1, 2):
                assert [n for s, n in seen if s == sender] == list(range(11)), seed


def tell_ten(sender: int, log: rpc.RRef[Log]) -> None:
    for n in range(10):
        log.tell().note(sender, n)
    log.rpc_sync().note(sender, 10)


def tell_from_two() -> Any:
    log = Log.spawn(0)
    for future in [rpc.rpc_async(sender, tell_ten, args=(sender, log)) for sender in (1, 2)]:
        future.wait()
    return log.rpc_sync().read()


def test_the_same_seed_gives_the_same_order() -> None:
    assert [episodes_are_whole(n) for n in range(5)] == [episodes_are_whole(n) for n in range(5)]


def slow_answer(seconds: float) -> str:
    session = current()
    session.worker.wait(rpc.Future[None]()._core, session.worker.clock.now() + seconds)
    return "late"


def test_a_call_expires_after_its_time_on_the_virtual_clock() -> None:
    with SimWorld(size=2, seed=1) as world:

        def program() -> float:
            begun = world.simulation.time
            with pytest.raises(RPCTimeoutError, match=r"RPC ran for more than set timeout \(60000 ms\)"):
                rpc.rpc_sync(1, slow_answer, args=(100.0,))
            return world.simulation.time - begun

        (waited,) = world.run(program)
        assert 60.0 <= waited < 60.1
        world.settle(200.0)
        assert world.run(lambda: rpc.rpc_sync(1, operator.add, args=(1, 2))) == [3]


def test_an_async_call_that_nobody_waits_for_expires_too() -> None:
    with SimWorld(size=2, seed=2) as world:
        errors: list[BaseException] = []

        def note(future: rpc.Future[Any]) -> None:
            try:
                future.wait()
            except RPCTimeoutError as e:
                errors.append(e)

        def program() -> None:
            rpc.rpc_async(1, slow_answer, args=(100.0,), timeout=5.0).add_done_callback(note)

        world.run(program)
        world.settle(4.0)
        assert not errors
        world.settle(2.0)
        assert len(errors) == 1


def test_a_world_that_stands_still_is_said_so() -> None:
    world = SimWorld(size=1, seed=0)
    with pytest.raises(SimulationError, match=r"waits outside|stands still"), world:
        world.run(lambda: world.simulation.gate().wait())
