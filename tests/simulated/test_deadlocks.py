"""Deadlocks in simulated worlds: what is said to be one is one, and none is missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.runtime.completion import Call
from actorrpc.services.deadlocks import Deadlocks, Hold, circles, stuck
from actorrpc.session import current
from actorrpc.testing import SimWorld

WORKERS = 3
LONG = 400.0
"""What a call gets on the virtual clock: far more than all that a program does takes."""


def pause(seconds: float) -> None:
    """Lets virtual time pass, as something that the library does not see."""
    worker = current().worker
    gate = worker.clock.gate()
    gate.wait(seconds)


class Walker(rpc.Actor):
    """Calls the next one on its way, and so on."""

    def walk(self, seconds: float, way: list[rpc.RRef[Any]], how: str) -> int:
        pause(seconds)
        if not way:
            return 1
        first, rest = way[0], way[1:]
        if how == "sync":
            steps: int = first.rpc_sync(timeout=0).walk(seconds, rest, how)
        elif how == "async":
            steps = first.rpc_async(timeout=0).walk(seconds, rest, how).wait()
        else:
            futures = [first.rpc_async(timeout=0).walk(seconds, rest, how) for _ in range(2)]
            steps = max(future.wait() for future in futures)
        return steps + 1


class Wide(Walker, concurrency=2):
    """Two at a time."""


def ways(seed: int, ordered: bool) -> list[tuple[float, list[int], str]]:
    """Draws what each worker's program has walked; in one order, so that nobody can wait for each other, or any."""
    drawn = random.Random(seed)
    found = []
    for _ in range(WORKERS):
        way = [drawn.randrange(WORKERS + 1) for _ in range(drawn.randint(1, 4))]
        if ordered:
            way.sort()
        found.append((drawn.choice([0.0, 0.01, 0.5, 3.0]), way, drawn.choice(["sync", "async", "both"])))
    return found


def walk_all(world: SimWorld, seed: int, ordered: bool) -> list[BaseException | None]:
    """Has three programs walk at the same time among four actors, one of which takes two at a time."""
    actors: list[Any] = []
    errors: list[BaseException | None] = [None] * WORKERS

    def program(number: int) -> Callable[[], None]:
        def run() -> None:
            if number == 0:
                kinds = [Wide, Walker, Walker, Walker]
                actors.extend(kind.spawn(i % WORKERS) for i, kind in enumerate(kinds))
            while len(actors) <= WORKERS:
                pause(0.01)
            seconds, way, how = ways(seed, ordered)[number]
            try:
                refs = [actors[i] for i in way]
                refs[0].rpc_sync(timeout=LONG).walk(seconds, refs[1:], how)
            except (rpc.DeadlockError, rpc.RPCTimeoutError) as e:
                errors[number] = e

        return run

    world.run(*map(program, range(WORKERS)))
    return errors


def note_only(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Has deadlocks noted and not broken."""
    noted: list[Call] = []

    def give_up(self: Deadlocks, numbers: list[int], text: str, members: Any) -> None:
        pending = self._worker.calls.pending
        noted.extend(pending[number] for number in numbers if number in pending)

    monkeypatch.setattr(Deadlocks, "_give_up", give_up)
    return noted


def alarms_are_true(seed: int, monkeypatch: pytest.MonkeyPatch, ordered: bool) -> bool:
    """Runs one program; returns whether there was a deadlock in it."""
    with monkeypatch.context() as patch:
        noted = note_only(patch)
        answered: list[Call] = []
        with SimWorld(WORKERS, seed, threads=3, deadlock_after=1.0) as world:
            world.simulation.at(LONG - 1.0, lambda: answered.extend(call for call in noted if call.done))
            errors = walk_all(world, seed, ordered)
    assert not answered, seed  # until times run out
    assert bool(noted) == any(isinstance(e, rpc.RPCTimeoutError) for e in errors), (seed, errors)
    return bool(noted)


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_what_is_said_to_be_a_deadlock_is_never_answered_and_none_is_missed(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [alarms_are_true(seed, monkeypatch, False) for seed in range(first, first + 20)]
    assert any(found)
    assert not all(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_over_many_seeds_alarms_are_true(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [alarms_are_true(seed, monkeypatch, False) for seed in range(first, first + 50)]
    assert any(found)
    assert not all(found)


def test_where_all_wait_in_one_order_there_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(alarms_are_true(seed, monkeypatch, True) for seed in range(20))


def test_a_deadlock_is_broken_and_its_callers_are_told() -> None:
    broken = 0
    for seed in range(20):
        with SimWorld(WORKERS, seed, threads=3, deadlock_after=1.0) as world:
            errors = walk_all(world, seed, False)
            assert not any(isinstance(e, rpc.RPCTimeoutError) for e in errors), (seed, errors)
            assert world.simulation.time < LONG / 2, seed
            world.settle()
            for session in world.sessions:
                assert not session.worker.calls.pending, seed
                assert not session.worker.serving.requests, seed
        for e in errors:
            if e is not None:
                broken += 1
                assert isinstance(e, rpc.DeadlockError)
                assert len(e.members) > 1
                assert all(member in str(e) for member in e.members)
    assert broken


# -- programs made for one case each

Steps = list[Any]
"""("pause", seconds), ("call", actor, steps), ("tell", actor, steps)."""


class Doer(rpc.Actor):
    """Does what it is told, step by step."""

    def do(self, refs: list[rpc.RRef[Any]], steps: Steps) -> None:
        for step in steps:
            if step[0] == "pause":
                pause(step[1])
            elif step[0] == "call":
                refs[step[1]].rpc_sync(timeout=0).do(refs, step[2])
            else:
                refs[step[1]].tell().do(refs, step[2])


class WideDoer(Doer, concurrency=2):
    """Two at a time."""


def outcomes(seed: int, kinds: list[type[Doer]], programs: list[tuple[str, int, Steps]]) -> list[BaseException | None]:
    """Has a program call, or tell, actors what to do, all at the same time; returns how each call ended."""

    def program() -> list[BaseException | None]:
        refs = [kind.spawn(n % WORKERS) for n, kind in enumerate(kinds)]
        futures = []
        for how, number, steps in programs:
            if how == "tell":
                refs[number].tell().do(refs, steps)
            else:
                futures.append(refs[number].rpc_async(timeout=LONG).do(refs, steps))
        errors: list[BaseException | None] = []
        for future in futures:
            try:
                errors.append(future.wait())
            except (rpc.DeadlockError, rpc.RPCTimeoutError) as e:
                errors.append(e)
        return errors

    with SimWorld(WORKERS, seed, deadlock_after=1.0) as world:
        (errors, *_) = world.run(program, lambda: None, lambda: None)
    return list(errors)


def found_in(errors: list[BaseException | None]) -> bool:
    assert not any(isinstance(e, rpc.RPCTimeoutError) for e in errors), errors
    return any(isinstance(e, rpc.DeadlockError) for e in errors)


SEEDS = range(5)


def test_who_waits_for_a_place_that_will_be_free_is_in_no_deadlock() -> None:
    programs: list[tuple[str, int, Steps]] = [
        ("call", 0, [("pause", 30.0)]),
        ("call", 0, [("pause", 1.0), ("call", 1, [])]),
        ("call", 1, [("pause", 2.0), ("call", 0, [])]),
    ]
    for seed in SEEDS:
        assert outcomes(seed, [WideDoer, Doer], programs) == [None, None, None]


def test_when_all_places_are_taken_by_who_waits_it_is_one() -> None:
    programs: list[tuple[str, int, Steps]] = [
        ("call", 0, [("pause", 1.0), ("call", 1, [])]),
        ("call", 0, [("pause", 1.0), ("call", 1, [])]),
        ("call", 1, [("pause", 2.0), ("call", 0, [])]),
    ]
    assert all(found_in(outcomes(seed, [WideDoer, Doer], programs)) for seed in SEEDS)


def test_the_handler_of_a_tell_can_be_in_a_deadlock() -> None:
    programs: list[tuple[str, int, Steps]] = [
        ("tell", 0, [("pause", 1.0), ("call", 1, [])]),
        ("call", 1, [("pause", 2.0), ("call", 0, [])]),
    ]
    assert all(found_in(outcomes(seed, [Doer, Doer], programs)) for seed in SEEDS)


def test_a_handler_waits_for_those_above_it_in_its_mailbox() -> None:
    # 0 has called 1, which has its answer and is below what 2 has told it; that waits for 3, which waits for 0.
    above: Steps = [("pause", 0.5), ("call", 3, [])]
    programs: list[tuple[str, int, Steps]] = [
        ("call", 0, [("call", 1, [("call", 2, [("tell", 1, above)])])]),
        ("call", 3, [("pause", 1.0), ("call", 0, [])]),
    ]
    assert all(found_in(outcomes(seed, [Doer] * 4, programs)) for seed in SEEDS)


def test_what_only_one_of_two_looks_saw_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = {one.node: one for one in (hold(1, 2), hold(2, 1))}
    other = {one.node: one for one in (hold(1, 2), hold(2, 3), hold(3, 1))}
    with SimWorld(1, 0) as world:
        deadlocks = world.sessions[0].deadlocks
        for again, count in ((circle, 2), (other, 0), ({}, 0)):
            told: list[Any] = []
            looks = [circle, again]
            with monkeypatch.context() as patch:
                patch.setattr(deadlocks, "_collect", lambda calls, looks=looks: looks.pop(0))
                patch.setattr(deadlocks, "_break", told.append)
                deadlocks._probe([])
            assert len(told[0]) == count


# -- the rule itself


def hold(node: int, *on: int, any_of: bool = False) -> Hold:
    return Hold((0, 0, node), any_of, tuple((0, 0, n) for n in on), (0, 0, on[0]) if on else None, str(node), "")


def names(holds: list[Hold]) -> set[str]:
    left = stuck({one.node: one for one in holds})
    return {member.who for circle in circles(left) for member in circle}


def test_a_circle_of_calls_is_a_deadlock_and_who_waits_for_it_is_not_in_it() -> None:
    assert names([hold(1, 2), hold(2, 3), hold(3, 1), hold(4, 1)]) == {"1", "2", "3"}


def test_a_message_that_any_place_would_serve_is_stuck_only_when_all_are() -> None:
    queue = hold(1, 2, 3, any_of=True)
    assert names([queue, hold(2, 1)]) == set()  # 3 can come to its end
    assert names([queue, hold(2, 1), hold(3, 1)]) == {"1", "2", "3"}


def test_who_waits_for_two_is_stuck_when_one_of_them_is() -> None:
    assert names([hold(1, 2, 5), hold(2, 1)]) == {"1", "2"}


def test_a_message_that_waits_for_nothing_known_is_free() -> None:
    assert names([hold(1, 2), hold(2)]) == set()
