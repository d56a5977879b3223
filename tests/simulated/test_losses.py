"""Who is taken for lost, who hears of it and who is told, in the simulated world, over many seeds."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import WorkerLostError
from actorrpc.runtime.peers import Standing
from actorrpc.testing import Faults, SimWorld
from actorrpc.wire.transport import News

SIZE = 4
SEEDS = range(25)


def standings(world: SimWorld, of: int) -> list[Standing]:
    """How a worker stands with each of the others that live."""
    return [
        session.worker.peers[of].standing
        for session in world.sessions
        if session.worker.id != of and session.worker.id not in world.dead
    ]


def against(world: SimWorld, rank: int) -> str:
    return world.sessions[rank].worker.members.verdicts.against


def soon(world: SimWorld, run: Any, *args: Any) -> None:
    """Has something happen a little later, at a moment that the seed decides."""
    simulation = world.simulation
    simulation.at(simulation.time + simulation.random.random() * 1e-2, functools.partial(run, *args))


@pytest.mark.parametrize("who", [0, 1, 3])
def test_what_one_worker_notices_all_hear_and_the_lost_one_too(who: int) -> None:
    """Only one of them has lost worker 2, which lives: so does the world, without it."""
    for seed in SEEDS:
        with SimWorld(size=SIZE, seed=seed) as world:
            soon(world, world.sessions[who].worker.members.lose, 2, "a gap")
            world.settle(1.0)
            assert set(standings(world, 2)) == {Standing.LOST}, seed
            for rank in (0, 1, 3):
                assert set(standings(world, rank)[:2]) <= {Standing.MEMBER, Standing.LOST}
                assert not against(world, rank), seed
            assert "a gap" in against(world, 2), seed

            def call_of_the_lost(seed: int = seed) -> None:
                for rank in (0, 1, 3):
                    with pytest.raises(WorkerLostError, match="taken for lost by the others") as caught:
                        rpc.rpc_sync(rank, abs, args=(-1,))
                    assert caught.value.worker == "w2", seed

            def call_of_others() -> None:
                assert [rpc.rpc_sync(rank, abs, args=(-1,)) for rank in (0, 1, 3)] == [1] * 3
                with pytest.raises(WorkerLostError, match="not sent"):
                    rpc.rpc_sync(2, abs, args=(-1,))

            world.run(call_of_others, call_of_others, call_of_the_lost, call_of_others)


def test_a_connection_that_ends_while_the_peer_answers_is_no_loss() -> None:
    for seed in SEEDS:
        with SimWorld(size=SIZE, seed=seed) as world:

            def call() -> None:
                for _ in range(20):
                    assert rpc.rpc_sync(2, abs, args=(-1,)) == 1

            for news in (News.CUT, News.REFUSED, News.CUT):
                soon(world, world.sessions[1].worker.doubts.hear, 2, news)
            world.run(None, call)
            world.settle(20.0)
            assert set(standings(world, 2)) == {Standing.MEMBER}, seed
            assert not world.sessions[1].worker.doubts.open


def test_a_connection_that_ends_while_the_peer_is_dead_is_a_loss_of_which_all_hear() -> None:
    for seed in SEEDS:
        with SimWorld(size=SIZE, seed=seed) as world:
            world.dead.add(2)
            world.simulation.freeze(2)
            soon(world, world.sessions[3].worker.doubts.hear, 2, News.CUT)

            def call() -> None:
                with pytest.raises(WorkerLostError, match="may or may not have run") as caught:
                    rpc.rpc_sync(2, abs, args=(-1,), timeout=0)
                assert caught.value.may_have_run

            world.run(call, call, None, call)
            assert set(standings(world, 2)) == {Standing.LOST}, seed


def test_when_rank_0_dies_further_losses_are_heard_of_all_the_same() -> None:
    for seed in SEEDS:
        with SimWorld(size=SIZE, seed=seed) as world:
            told: dict[int, list[str]] = {rank: [] for rank in (1, 2)}

            def watch(rank: int, told: dict[int, list[str]] = told) -> None:
                rpc.World().watch(lambda worker, reason: told[rank].append(worker.name))

            world.run(None, functools.partial(watch, 1), functools.partial(watch, 2))
            for session in world.sessions[1:]:
                soon(world, session.worker.members.lose, 0, "it was killed")
            world.dead.add(0)
            world.simulation.freeze(0)
            world.settle(1.0)
            soon(world, world.sessions[2].worker.members.lose, 3, "it was killed")
            world.dead.add(3)
            world.simulation.freeze(3)
            world.settle(1.0)
            assert standings(world, 3) == [Standing.LOST] * 2, seed
            assert told == {1: ["w0", "w3"], 2: ["w0", "w3"]}, seed


def test_two_parts_that_have_lost_each_other_both_go_on_and_one_that_is_alone_knows_it() -> None:
    """As after a cut that has healed: verdicts go back and forth."""
    for seed in SEEDS:
        for here, there in (({0, 1}, {2, 3}), ({0}, {1, 2, 3}), ({0, 1, 2}, {3})):
            with SimWorld(size=SIZE, seed=seed) as world:
                for mine, others in ((here, there), (there, here)):
                    for rank in mine:
                        for other in others:  # all at once: nothing went between the parts until then
                            lose = world.sessions[rank].worker.members.lose
                            world.simulation.at(1e-3, functools.partial(lose, other, "silence"))
                world.settle(5.0)
                for part in (here, there):
                    for rank in part:
                        assert bool(against(world, rank)) == (len(part) == 1), (seed, part, rank)


def test_who_alone_has_lost_the_herald_soon_knows_that_the_world_goes_on_without_it() -> None:
    for seed in SEEDS:
        with SimWorld(size=SIZE, seed=seed) as world:
            soon(world, world.sessions[2].worker.members.lose, 0, "a gap")
            world.settle(1.5)
            assert standings(world, 2) == [Standing.LOST] * 3, seed
            assert [bool(against(world, rank)) for rank in range(SIZE)] == [False, False, True, False], seed


def test_what_one_says_who_is_out_holds_for_nobody_else() -> None:
    """Worker 3 has not heard yet that 1 is out, and calls it; 1 has lost all others, and has the lowest number left."""
    for seed in SEEDS:
        faults = Faults(seed, active=False).drop(kind="tell", when=lambda p: (p.sender, p.to) == (0, 3), times=1)
        with SimWorld(size=SIZE, seed=seed, faults=faults) as world:
            faults.active = True
            soon(world, world.sessions[0].worker.members.lose, 1, "a gap")
            world.settle(0.5)
            assert standings(world, 1) == [Standing.LOST, Standing.LOST, Standing.MEMBER], seed

            def call() -> None:
                with pytest.raises(WorkerLostError, match="it has taken this worker for lost"):
                    rpc.rpc_sync(1, abs, args=(-1,))

            world.run(None, None, None, call)
            assert not against(world, 3), seed


# -- one message of those about a loss comes to harm

HARMS: dict[str, dict[str, float]] = {"drop": {}, "reorder": {}, "repeat": {}, "delay": {"seconds": 2.0}}
waiting: list[rpc.Future[None]] = []


@rpc.functions.async_execution
def wait_for_ever() -> rpc.Future[None]:
    waiting.append(rpc.Future())
    return waiting[-1]


def of_two_minds(size: int, who: int, whom: int, waits: bool, faults: Faults) -> list[str]:
    """One worker loses another, and what follows comes to harm. Returns who has not learnt within the time of silence
    that another has taken it for lost, or waits yet for an answer that cannot come.
    """
    calls: dict[tuple[int, int], rpc.Future[Any]] = {}
    pairs = list(itertools.permutations(range(size), 2))

    def program(rank: int) -> None:
        for other in range(size):
            if other != rank and waits:
                calls[rank, other] = rpc.rpc_async(other, wait_for_ever, timeout=0)
            elif other != rank:
                rpc.rpc_sync(other, abs, args=(-1,))

    with SimWorld(size=size, seed=1, faults=faults) as world:
        for session in world.sessions:
            session.inquiries.start()
        world.run(*(functools.partial(program, rank) for rank in range(size)))
        world.settle(1.0)
        faults.active = True
        world.sessions[who].worker.members.lose(whom, "a gap")
        world.settle(10.0)
        faults.active = False
        waiting.clear()
        gone = {(a, b) for a, b in pairs if world.sessions[a].worker.peers[b].standing is Standing.LOST}
        assert (who, whom) in gone
        found = [f"{b} does not know that {a} has lost it" for a, b in gone if (b, a) not in gone]
        return found + [f"{a} waits for {b}" for a, b in calls if (a, b) in gone and not calls[a, b].done()]


def every_harm(size: int, pairs: list[tuple[int, int]], most: int = 100) -> None:
    for (who, whom), waits, (harm, more) in itertools.product(pairs, (False, True), HARMS.items()):
        for skip in range(most):
            faults = Faults(active=False)
            getattr(faults, harm)(skip=skip, times=1, **more)
            assert not of_two_minds(size, who, whom, waits, faults), (who, whom, waits, harm, skip)
            if not faults.done:  # there were not so many messages
                break


@pytest.mark.parametrize("who,whom", [(0, 1), (1, 0)])
def test_of_two_workers_both_know_of_a_loss_whatever_one_message_comes_to_harm(who: int, whom: int) -> None:
    every_harm(2, [(who, whom)])


@pytest.mark.parametrize("who,whom", [(0, 2), (1, 0), (1, 2)])
def test_of_three_workers_all_know_of_a_loss_whatever_one_message_comes_to_harm(who: int, whom: int) -> None:
    every_harm(3, [(who, whom)])


@pytest.mark.slow
def test_of_four_workers_all_know_of_a_loss_whatever_one_message_comes_to_harm() -> None:
    every_harm(4, list(itertools.permutations(range(4), 2)))


def test_a_worker_that_waits_for_nobody_asks_nobody() -> None:
    with SimWorld(size=2, seed=1) as world:
        for session in world.sessions:
            session.inquiries.start()

        def call() -> None:
            assert rpc.rpc_sync(1, abs, args=(-1,)) == 1

        world.run(call)
        world.settle(100.0)
        sent = world.network.carried
        world.settle(1000.0)
        assert world.network.carried == sent
        world.run(call)  # and it looks again
        assert world.sessions[0].inquiries._will_look
