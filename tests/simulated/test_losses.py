"""Who is taken for lost, who hears of it and who is told, in the simulated world, over many seeds."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import WorkerLostError
from actorrpc.runtime.peers import Standing
from actorrpc.testing import SimWorld
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
