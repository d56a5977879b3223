"""Members of a launched world that die and come again, and references by name; the launcher is in `launch`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.launching.member import take_part
from actorrpc.roles import Part, parts_of
from tests.worlds import Outcome, World, run_world, until

Program = Callable[["Driver"], Any]


class Counter(rpc.Actor):
    """Notes each call that it runs in a file, before it does anything else."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count = folder, 0
        self.states: list[Any] = []

    def on_restart(self, state: Any) -> None:
        if state == "crash":
            raise ValueError("a crash in on_restart")
        self.states.append(state)
        self.count = state if isinstance(state, int) else 0

    def _note(self, call: str) -> None:
        with Path(self.folder, "executions").open("a") as file:
            file.write(f"{call}\n")

    def add(self, call: str) -> int:
        self._note(call)
        self.count += 1
        self.checkpoint(self.count)
        return self.count

    def die(self, call: str) -> None:
        self._note(call)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(self, state: Any) -> None:
        self.checkpoint(state)

    def save_a_lock(self) -> None:
        self.checkpoint(threading.Lock())

    def restored(self) -> list[Any]:
        return self.states


class Spawned(Counter):
    """One that is not started again, and keeps nothing."""

    def checkpoint(self, state: object) -> None:
        pass


class Driver(rpc.Actor):
    def __init__(self, program: Program, folder: str) -> None:
        self.program, self.folder = program, folder

    def main(self) -> Any:
        return self.program(self)

    def start_again(self, which: int) -> None:
        Path(self.folder, f"again-{which}").touch()


class Stays(rpc.Actor):
    """Keeps the world from its end for a moment."""

    def main(self) -> None:
        self.serve()
        time.sleep(0.3)


def member(folder: str, parts: list[Part], rank: int, life: int, seconds: float, when: str) -> Any:
    if when:
        until(Path(folder, when).exists, seconds=40)
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", init_timeout=seconds)
    return take_part(parts[rank], rank, len(parts), options, supervised=True, life=life)


def play_out(
    folder: Path, program: Program, again: list[int], *, checkpoints: str | None = None, other: Any = None,
    missing: int = -1, dies: int | None = None, seconds: float = 30.0,
) -> list[Outcome]:  # fmt: skip
    """Runs a world of a driver and two counters, and more; `again`: the ranks that are started again, one by one, as
    the driver says. Returns the outcomes of them all.
    """
    more: dict[str, Any] = {} if other is None else {"other": other}
    counter = rpc.Role(Counter, 2, str(folder), restarts=9, checkpoints=checkpoints)
    parts = parts_of({"driver": rpc.Role(Driver, 1, program, str(folder)), "counter": counter, **more})
    with World(len(parts) + len(again), join=False, strict=False, timeout=60) as world:
        for rank in range(len(parts)):
            if rank != missing:
                world.start(rank, member, str(folder), parts, rank, 0, seconds, "")
        if dies is not None:
            world.let_die(dies)
        for i, rank in enumerate(again):
            world.let_die(rank)
            life = 1 + again[:i].count(rank)
            world.start(len(parts) + i, member, str(folder), parts, rank, life, seconds, f"again-{i}")
            world.let_die(len(parts) + i)
        return world.outcomes()


def value_of(outcomes: list[Outcome]) -> Any:
    assert not outcomes[0].traceback, outcomes[0].traceback
    assert outcomes[0].returned, [o.stderr for o in outcomes]
    return outcomes[0].value


def executions(folder: Path) -> list[str]:
    return (folder / "executions").read_text().split()


def kill_at_random(driver: Driver) -> tuple[list[str], list[str], int]:
    rng = random.Random(3)
    done: list[str] = []
    unsure: list[str] = []
    most = 0
    for death in range(4):
        name = f"counter:{(0, 1, 1, 0)[death]}"
        ref = rpc.named(name, gap=40)
        for i in range(rng.randint(1, 6)):
            ref.rpc_sync().add(call := f"{death}-{i}")
            done.append(call)
        pending = [(f"{death}-p{i}", ref.rpc_async().add(f"{death}-p{i}")) for i in range(rng.randint(0, 4))]
        last = ref.rpc_async().die(f"{death}-die")
        late = [(f"{death}-l{i}", ref.rpc_async().add(f"{death}-l{i}")) for i in range(rng.randint(0, 4))]
        for call, future in [*pending, (f"{death}-die", last), *late]:
            (done if succeeds(future) else unsure).append(call)
        driver.start_again(death)
        most = ref.rpc_sync().add(call := f"{death}-after")
        done.append(call)
    return done, unsure, most


def succeeds(future: rpc.Future[Any]) -> bool:
    """Returns whether a call was answered; one that was not may have run."""
    try:
        future.wait()
    except rpc.WorkerLostError as e:
        if not e.may_have_run:
            raise
        return False
    return True


def test_calls_to_members_that_are_killed_run_once_at_most(tmp_path: Path) -> None:
    done, unsure, most = value_of(play_out(tmp_path, kill_at_random, [1, 2, 2, 1]))
    ran = executions(tmp_path)
    assert len(ran) == len(set(ran)), "a call has run twice"
    assert set(done) <= set(ran) <= set(done) | set(unsure)
    assert len(unsure) >= 4  # those that killed
    assert most > 3  # counted on from the checkpoints


def look_around(driver: Driver) -> dict[str, Any]:
    ref, lost = rpc.named("counter:0", gap=40), []
    by_group = driver.world.counter[0]
    watch = driver.world.watch(lambda worker, reason: lost.append(worker.name))
    ref.rpc_sync().add("one")
    with pytest.raises(rpc.WorkerLostError):
        ref.rpc_sync().die("die")
    until(lambda: lost)
    in_gap = driver.world.roles["counter"]
    for call in (rpc.named("counter:0", gap=0).rpc_sync().add, rpc.named("counter:0", gap=0.05).tell().add):
        with pytest.raises(rpc.ActorGoneError, match="nobody has had the name 'counter:0'"):
            call("not sent")
    driver.start_again(0)
    found = ref.rpc_sync().restored()
    with pytest.raises(rpc.WorkerLostError):
        by_group.rpc_sync().add("to the old one")  # a reference is to one life
    watch.stop()
    return {
        "lost": lost, "in gap": in_gap, "then": driver.world.roles["counter"], "states": found,
        "worker": ref.now().owner().id, "group": driver.world.counter.rpc_sync().add("all"),
    }  # fmt: skip


def lose_all(driver: Driver) -> dict[str, Any]:
    for counter in driver.world.counter:
        with pytest.raises(rpc.WorkerLostError):
            counter.rpc_sync().die("die")
    until(lambda: "counter" not in driver.world.roles)
    nobody = driver.world.counter
    answers = nobody.rpc_sync().add("nobody"), list(nobody.stream().add("nobody"))
    with pytest.raises(rpc.NotAMemberError, match=r"no role 'counters' in this world; there are: driver"):
        rpc.role("counters")
    driver.start_again(0)
    until(lambda: rpc.role("counter"))
    one = driver.world.counter.rpc_sync().restored()
    driver.start_again(1)
    until(lambda: len(driver.world.counter) == 2)
    return {"nobody": len(nobody), "answers": answers, "one": one}


def test_a_role_that_nobody_plays_for_the_moment_is_an_empty_group(tmp_path: Path) -> None:
    assert value_of(play_out(tmp_path, lose_all, [1, 2])) == {"nobody": 0, "answers": ([], []), "one": [[None]]}
    assert executions(tmp_path) == ["die", "die"]


def test_a_member_that_comes_again_has_its_rank_name_and_checkpoint(tmp_path: Path) -> None:
    assert value_of(play_out(tmp_path, look_around, [1])) == {
        "lost": ["counter:0"], "in gap": 1, "then": 2, "states": [1], "worker": 1, "group": [2, 1],
    }  # fmt: skip
    assert executions(tmp_path) == ["one", "die", *["all"] * 2]


def save_badly(driver: Driver) -> list[Any]:
    ref = rpc.named("counter:0", gap=40)
    ref.rpc_sync().save({"good": 1})
    with pytest.raises(rpc.CheckpointError, match=r"cannot pickle .* the last one stands"):
        ref.rpc_sync().save_a_lock()
    with pytest.raises(rpc.CheckpointError, match="was spawned"):
        Counter.spawn("counter:1", driver.folder).rpc_sync().save(1)
    with pytest.raises(rpc.WorkerLostError):
        ref.rpc_sync().die("die")
    driver.start_again(0)
    found: list[Any] = ref.rpc_sync().restored()
    return found


@pytest.mark.parametrize("where", ["rank 0", "directory"])
def test_a_checkpoint_that_cannot_be_pickled_leaves_the_last_one(tmp_path: Path, where: str) -> None:
    directory = tmp_path / "kept"
    directory.mkdir()
    kept = str(directory) if where == "directory" else None
    assert value_of(play_out(tmp_path, save_badly, [1], checkpoints=kept)) == [{"good": 1}]
    assert [file.name for file in directory.iterdir()] == (["counter-0.checkpoint"] if kept else [])
    # A later run finds the file of the first, and does not take it for its own.
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    for file in [*tmp_path.glob("again-*"), *tmp_path.glob("store*")]:
        file.unlink()
    assert value_of(play_out(tmp_path, die_at_once, [1], checkpoints=kept)) == [None]


def die_at_once(driver: Driver) -> Any:
    ref = rpc.named("counter:0", gap=40)
    with pytest.raises(rpc.WorkerLostError):
        ref.rpc_sync().die("die")
    driver.start_again(0)
    return ref.rpc_sync().restored()


def save_where_nothing_can_be(driver: Driver) -> str:
    directory = Path(driver.folder, "kept")
    Path(directory, "counter-0.checkpoint", "in the way").mkdir(parents=True)
    with pytest.raises(rpc.CheckpointError, match=r"counter-0\.checkpoint") as caught:
        rpc.named("counter:0").rpc_sync().save(1)
    rpc.named("counter:1").rpc_sync().save(1)
    assert sorted(file.name for file in directory.iterdir()) == ["counter-0.checkpoint", "counter-1.checkpoint"]
    return str(caught.value)


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_its_actor(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    said = value_of(play_out(tmp_path, save_where_nothing_can_be, [], checkpoints=str(kept)))
    assert 'worker "counter:0"' in said
    assert "the last one stands" in said


def crash(driver: Driver) -> None:
    ref = rpc.named("counter:0", gap=8)
    ref.rpc_sync().save("crash")
    with pytest.raises(rpc.WorkerLostError):
        ref.rpc_sync().die("die")
    driver.start_again(0)
    with pytest.raises((rpc.WorkerLostError, rpc.ActorGoneError, ValueError)):  # as soon as it is there it fails
        ref.rpc_sync().add("never")


def test_a_crash_in_on_restart_is_the_members_end(tmp_path: Path) -> None:
    outcomes = play_out(tmp_path, crash, [1])
    value_of(outcomes)
    assert isinstance(outcomes[3].error, ValueError)
    assert str(outcomes[3].error) == "a crash in on_restart"
    assert executions(tmp_path) == ["die"]


def fall(driver: Driver) -> None:
    driver.world.counter.rpc_sync().restored()  # so both know that they are there
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_end_with_rank_0_of_a_supervised_world(tmp_path: Path) -> None:
    outcomes = play_out(tmp_path, fall, [], dies=0)[1:3]
    for outcome in outcomes:
        assert isinstance(outcome.error, rpc.WorkerLostError), outcome
        assert outcome.error.worker == "driver:0"


def end_at_once(driver: Driver) -> str:
    with pytest.raises(rpc.WorkerLostError):
        rpc.named("counter:0").rpc_sync().die("die")
    driver.start_again(0)
    return "over"


def test_a_member_that_is_started_again_as_the_world_ends_ends_with_it(tmp_path: Path) -> None:
    outcomes = play_out(tmp_path, end_at_once, [1], other=Stays)
    assert value_of(outcomes) == "over"
    assert not outcomes[-1].traceback


def test_a_supervised_world_begins_when_all_are_there(tmp_path: Path) -> None:
    outcomes = play_out(tmp_path, end_at_once, [], missing=2, seconds=1.0)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, (rpc.RendezvousError, rpc.WorkerLostError)), outcome
    assert any("missing: ranks [2]" in str(outcome.error) for outcome in outcomes[:2])


# --- names of spawned actors


def test_a_reference_by_name_goes_to_the_next_actor_of_that_name(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        if rank:
            return None
        Spawned.spawn("worker1", str(tmp_path), name="counter")
        ref = rpc.named("counter", gap=20)
        assert ref.rpc_sync().add("first") == 1
        with pytest.raises(rpc.WorkerLostError) as caught:
            ref.rpc_sync().die("die")
        assert caught.value.may_have_run
        with pytest.raises(rpc.ActorGoneError, match="was not sent"):
            rpc.named("counter", gap=0).rpc_sync().add("never")
        timer = threading.Timer(0.2, lambda: Spawned.spawn("worker2", str(tmp_path), name="counter"))
        timer.start()
        found = ref.rpc_async().add("second").wait(), ref.remote().add("third").to_here()
        ref.tell().add("fourth")
        assert rpc.rpc_sync("worker2", ask, args=(ref, "fifth")) == 4
        timer.join()
        return found, repr(ref)

    with World(3, timeout=40) as world:
        world.let_die(1)
        world.start(0, program, 0)
        assert world.result(0) == ((1, 2), "Named('counter', gap=20)")
    assert executions(tmp_path) == ["first", "die", "second", "third", "fourth", "fifth"]


def ask(ref: rpc.Named, call: str) -> Any:
    return ref.rpc_sync().add(call)


class Relay(rpc.Actor):
    """Its own call fails, of which its caller hears."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def pass_on(self) -> None:
        with Path(self.folder, "executions").open("a") as file:
            file.write("pass_on\n")
        raise rpc.WorkerLostError("somebody else is gone; the message was not sent", worker="somebody")


def use(relay: rpc.Named, verb: str) -> None:
    answer = getattr(relay, verb)().pass_on()
    answer.wait()


def test_an_error_of_the_method_is_no_reason_to_call_it_again(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            Relay.spawn("worker1", str(tmp_path), name="relay")
            for verb in ("rpc_sync", "rpc_async"):
                with pytest.raises(rpc.WorkerLostError, match="somebody else"):
                    use(rpc.named("relay", gap=0.2), verb)

    run_world(program, 2)
    assert executions(tmp_path) == ["pass_on"] * 2


def test_a_gap_is_a_number_of_seconds() -> None:
    with pytest.raises(ValueError, match="gap must be seconds"):
        rpc.named("x", gap=-1)
    with pytest.raises(ValueError, match="restarts"):
        rpc.Role(None, restarts=-1)
    with pytest.raises(ValueError, match="backoff"):
        rpc.Role(None, backoff=-1)
