"""Who asks is told of workers that are gone: `World.watch` and `Actor.on_worker_lost`. Real processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import actorrpc as rpc
from tests.failure.test_lost import SHORT, kept, lost, made, stopped
from tests.worlds import run_world, until


def note(worker: rpc.WorkerInfo, reason: str) -> None:
    kept().setdefault("told", []).append((worker.name, worker.id, reason, threading.current_thread().name))


def watch() -> None:
    kept()["watch"] = rpc.World().watch(note)


def told() -> list[tuple[str, int, str, str]]:
    return list(kept().get("told", []))


def test_a_callback_is_told_of_a_death_that_nobody_else_would_have_noticed() -> None:
    """Of a worker that its own has never spoken to; the callback may call, and runs in the pool."""

    def watch_and_call() -> None:
        def call_the_others(worker: rpc.WorkerInfo, reason: str) -> None:
            note(worker, f"{reason}: {rpc.rpc_sync(0, abs, args=(-7,))}")

        kept()["watch"] = rpc.World().watch(call_the_others)

    with made(3) as world:
        world.on(1, watch_and_call)
        world.kill(2)
        until(lambda: world.on(1, told), 20)
        ((name, rank, reason, thread),) = world.on(1, told)
        assert (name, rank) == ("worker2", 2)
        assert f"its process {world.pid(2)} has ended" in reason
        assert reason.endswith(": 7")
        assert "-hand-" in thread


def test_a_callback_is_told_of_a_worker_that_is_stopped_and_of_one_that_leaves_by_itself() -> None:
    with made(4, **SHORT) as world:
        world.on(0, watch)
        world.on(3, watch)
        world.on(1, rpc.shutdown, False)
        for rank in (0, 3):
            until(lambda rank=rank: [t[0] for t in world.on(rank, told)] == ["worker1"], 20)  # type: ignore[misc]
        with stopped(world, 2):
            for rank in (0, 3):
                until(lambda rank=rank: [t[0] for t in world.on(rank, told)] == ["worker1", "worker2"], 20)  # type: ignore[misc]


def test_who_begins_to_watch_is_told_of_those_who_are_gone_already_and_who_stops_is_told_no_more() -> None:
    with made(4) as world:
        world.kill(1)
        until(lambda: world.on(0, lost, 1), 20)
        world.on(0, watch)
        until(lambda: [t[0] for t in world.on(0, told)] == ["worker1"], 20)
        world.on(0, lambda: kept()["watch"].stop())
        world.on(0, lambda: kept()["watch"].stop())  # once more does nothing
        world.kill(2)
        until(lambda: world.on(0, lost, 2), 20)
        world.on(0, watch)
        until(lambda: len(world.on(0, told)) >= 3, 20)
        assert sorted(t[0] for t in world.on(0, told)) == ["worker1", "worker1", "worker2"]


def test_callbacks_do_not_disturb_each_other_and_one_at_a_time_runs_of_each() -> None:
    def watch_in_three_ways() -> None:
        def fail(worker: rpc.WorkerInfo, reason: str) -> None:
            raise ValueError("on purpose")

        def slow(worker: rpc.WorkerInfo, reason: str) -> None:
            kept()["most"] = max(kept().get("most", 0), kept().get("now", 0) + 1)
            kept()["now"] = kept().get("now", 0) + 1
            time.sleep(0.3)
            kept()["now"] -= 1
            kept()["slow"] = kept().get("slow", 0) + 1

        kept()["watches"] = [rpc.World().watch(callback) for callback in (fail, slow, note)]

    with made(4) as world:
        world.on(0, watch_in_three_ways)
        for rank in (1, 2, 3):
            world.kill(rank)
        until(lambda: len(world.on(0, told)) == 3, 20)
        until(lambda: world.on(0, lambda: kept().get("slow")) == 3, 20)
        assert world.on(0, lambda: kept()["most"]) == 1


def test_a_callback_that_exits_is_told_of_the_next_one_too_and_so_are_the_others() -> None:
    def watch_and_exit() -> None:
        def leave(worker: rpc.WorkerInfo, reason: str) -> None:
            kept().setdefault("left", []).append(worker.name)
            raise SystemExit(3)

        kept()["watches"] = [rpc.World().watch(callback) for callback in (leave, note)]

    with made(4) as world:
        world.on(0, watch_and_exit)
        for rank in (1, 2, 3):
            world.kill(rank)
            until(lambda rank=rank: len(world.on(0, lambda: kept().get("left", []))) == rank, 20)  # type: ignore[misc]
        until(lambda: len(world.on(0, told)) == 3, 20)
        assert world.on(0, rpc.rpc_sync, 0, abs, (-1,)) == 1


def test_the_end_of_a_world_is_no_loss() -> None:
    def program(rank: int) -> list[Any]:
        seen: list[Any] = []
        rpc.World().watch(lambda *what: seen.append(what))
        rpc.rpc_sync(1 - rank, abs, args=(-1,))
        rpc.shutdown()
        return seen

    assert run_world(program, 2) == [[], []]


class Nurse(rpc.Actor):
    """Notes in which order it hears of things."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.busy = 0

    def hear(self, what: str, seconds: float = 0.0) -> None:
        self.busy += 1
        assert self.busy == 1
        time.sleep(seconds)
        self.heard.append(what)
        self.busy -= 1

    def on_worker_lost(self, worker: rpc.WorkerInfo, reason: str) -> None:
        assert "has ended" in reason
        self.hear(worker.name)

    def all(self) -> list[str]:
        return self.heard


class Deaf(rpc.Actor):
    def on_worker_lost(self, worker: rpc.WorkerInfo, reason: str) -> None:
        raise ValueError("on purpose")

    def all(self) -> list[str]:
        return []


def test_an_actor_hears_of_a_loss_in_its_turn_among_its_messages() -> None:
    """Behind those that were there before, ahead of later ones, and never beside another one."""

    def begin() -> None:
        nurses: list[Any] = [Nurse.spawn(0), Nurse.spawn(1), Deaf.spawn(0)]
        kept()["nurses"] = nurses
        kept()["copy"] = rpc.RRef(nurses[0].local_value())  # one more place of the same actor
        for nurse in nurses[:2]:
            nurse.rpc_sync().all()
            nurse.tell().hear("slow", 1.0)
            nurse.tell().hear("early")

    def late() -> list[list[str]]:
        for nurse in kept()["nurses"][:2]:
            nurse.tell().hear("late")
        return [nurse.rpc_sync().all() for nurse in kept()["nurses"]]

    with made(3) as world:
        world.on(0, begin)
        world.on(0, watch)  # who watches is told after the actors
        world.on(1, watch)
        world.kill(2)
        for rank in (0, 1):
            until(lambda rank=rank: world.on(rank, told), 20)  # type: ignore[misc]
        assert world.on(0, late) == [["slow", "early", "worker2", "late"]] * 2 + [[]]


@pytest.mark.slow
def test_the_driver_of_a_launched_world_hears_of_a_member_that_dies(tmp_path: Any) -> None:
    """As `launch` ends a world with a dead member, it is one whose worker goes without its process."""

    class Driver(rpc.Actor):
        def main(self) -> list[str]:
            self.heard: list[str] = []
            self.world.helper.tell().go()
            until_heard = time.monotonic() + 20
            while not self.heard and time.monotonic() < until_heard:
                self.serve(0.05)
            return self.heard

        def on_worker_lost(self, worker: rpc.WorkerInfo, reason: str) -> None:
            self.heard.append(worker.name)

    class Helper(rpc.Actor):
        def go(self) -> None:
            threading.Thread(target=rpc.shutdown, args=(False,)).start()

    assert rpc.launch(driver=Driver, helper=Helper) == ["helper:0"]
