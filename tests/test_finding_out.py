"""Finding out who waits for whom: dumps, signals, deadlocks. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from tests.worlds import World, run_processes, stop, until

SIZE = 3


@pytest.fixture(scope="module")
def _trio() -> Iterator[World]:
    with World(SIZE, options={"deadlock_after": 0.2}, timeout=60) as world:
        yield world


@pytest.fixture
def trio(_trio: World) -> World:
    return _trio


_doors: dict[str, threading.Event] = {}


def door(name: str) -> threading.Event:
    return _doors.setdefault(name, threading.Event())


def unlock(name: str) -> None:
    door(name).set()


class Box(rpc.Actor):
    """Holds on until it is let go, or has others do so."""

    def hold(self, name: str) -> str:
        assert door(name).wait(30)
        return name

    def ask(self, other: rpc.RRef[Any], name: str) -> Any:
        return other.rpc_sync().hold(name)

    async def cross_soon(self, other: rpc.RRef[Any], gate: str, peer: str) -> str:
        rpc.rpc_async(peer, unlock, args=(gate,))
        assert await asyncio.to_thread(door(gate).wait, 30)
        word: str = await other.rpc_async().nothing()
        return word

    async def cross_for_a_while(self, other: rpc.RRef[Any], gate: str, peer: str) -> str:
        """Waits in a thread, which the coroutine does not wait for for ever."""
        rpc.rpc_async(peer, unlock, args=(gate,))
        assert await asyncio.to_thread(door(gate).wait, 30)
        try:
            word: str = await asyncio.wait_for(asyncio.to_thread(other.rpc_sync().nothing), 1.5)
        except asyncio.TimeoutError:
            return "gave up"
        return word

    def cross(self, other: rpc.RRef[Any], gate: str, peer: str) -> str:
        """Calls the other one when that is in the midst of this as well."""
        rpc.rpc_async(peer, unlock, args=(gate,))
        assert door(gate).wait(30)
        word: str = other.rpc_sync().nothing()
        return word

    def nothing(self) -> str:
        return "nothing"


class Two(Box, concurrency=2):
    """Serves two at a time."""


# -- dumps


def a_chain_of_two() -> tuple[str, rpc.debug.Dump]:
    first, second = Box.spawn("worker1"), Box.spawn("worker2")
    asked = first.rpc_async().ask(second, "chain")
    behind = [second.rpc_async().hold("chain") for _ in range(3)]

    def seen() -> rpc.debug.Dump | None:
        found = rpc.debug.dump()
        depth = max((actor.depth for worker in found.workers for actor in worker.actors), default=0)
        waits = [wait for worker in found.workers for wait in worker.waits if wait.message and wait.seconds is not None]
        return found if depth == 3 and waits else None

    found: rpc.debug.Dump = until(seen)
    text = str(found)
    rpc.rpc_sync("worker2", unlock, args=("chain",))
    for future in [asked, *behind]:
        future.wait()
    return text, found


class Busy(rpc.Actor, concurrency=2):
    """Neither waits through the library."""

    async def block(self, name: str) -> bool:
        return door(name).wait(30)

    def work(self, name: str) -> bool:
        return door(name).wait(30)


def who_is_at_work() -> list[str]:
    busy = Busy.spawn("worker1")
    futures = [busy.rpc_async().block("busy"), busy.rpc_async().work("busy")]

    def seen() -> list[str]:
        found = rpc.debug.dump()
        assert all(line in str(found) for worker in found.workers for line in worker.at_work)
        lines = [line for worker in found.workers if "worker1" in worker.name for line in worker.at_work]
        return lines if len(lines) == 2 else []

    lines: list[str] = until(seen)
    rpc.rpc_sync("worker1", unlock, args=("busy",))
    assert [future.wait() for future in futures] == [True, True]
    assert not any(worker.at_work for worker in rpc.debug.dump().workers)
    return sorted(lines)


def test_a_dump_says_what_is_at_work_and_on_which_line(trio: World) -> None:
    work, loop = sorted(trio.on(0, who_is_at_work), key=lambda line: "loop busy" in line)
    assert "Busy 'worker1/" in work
    assert " is at work, in work (" in work
    assert " keeps the worker's loop busy, in block (" in loop
    assert "test_finding_out.py:" in loop


def test_a_dump_says_who_waits_for_whom_across_the_world(trio: World) -> None:
    text, found = trio.on(0, a_chain_of_two)
    assert not found.silent
    assert [worker.id for worker in found.workers] == [0, 1, 2]
    (wait,) = [wait for wait in found.workers[1].waits if wait.what == "hold"]
    assert (wait.on, wait.message is not None, wait.call is not None) == ("worker2", True, True)
    assert wait.seconds is not None
    assert 0 <= wait.seconds < 60
    (actor,) = [actor for actor in found.workers[2].actors if actor.depth]
    assert (actor.depth, actor.running, actor.concurrency) == (3, 1, 1)
    assert len(found.workers[0].calls) == found.workers[0].pending
    assert {"ask", "hold"} <= {call.what for call in found.workers[0].calls}
    assert f"{wait.who} -> hold on worker2" in text
    assert "3 wait" in text


def a_quiet_dump() -> str:
    return str(rpc.debug.dump())


def test_a_dump_of_a_world_at_rest_names_nobody(trio: World) -> None:
    text = trio.on(1, a_quiet_dump)
    assert "nobody waits for a call" in text
    assert "mailbox of" not in text


def dump_without(name: str, seconds: float) -> rpc.debug.Dump:
    return rpc.debug.dump(timeout=seconds)


def test_a_worker_that_does_not_answer_is_said_so() -> None:
    with World(3, options={"heartbeat_timeout": 0}) as world:
        stop(world.pid(2))
        try:
            found = world.on(0, dump_without, "worker2", 0.5)
        finally:
            os.kill(world.pid(2), signal.SIGCONT)
        assert list(found.silent) == ["worker2"]
        assert "RPC ran for more than set timeout" in found.silent["worker2"]
        assert len(found.workers) == 2
        assert 'worker "worker2" did not' in str(found)


def test_a_dump_needs_a_bound_and_a_world() -> None:
    with pytest.raises(ValueError, match="above 0"):
        rpc.debug.dump(timeout=0)
    with pytest.raises(rpc.NotAMemberError):
        rpc.debug.dump()


def waiting_pass_and_window() -> tuple[list[str], list[str]]:
    slow = Narrow.spawn("worker1")
    sent = [slow.rpc_async().hold("narrow")]
    threading.Thread(target=lambda: sent.append(slow.rpc_async().hold("narrow")), daemon=True).start()

    def windows() -> list[str]:
        return [text for worker in rpc.debug.dump().workers for text in worker.windows]

    found = until(windows)
    rpc.rpc_sync("worker1", unlock, args=("narrow",))
    until(lambda: len(sent) == 2)
    for future in sent:
        future.wait()
    return found, windows()


class Narrow(Box, max_pending=1):
    """Takes one call of each worker."""


def test_a_dump_shows_windows_that_are_waited_for(trio: World) -> None:
    found, after = trio.on(0, waiting_pass_and_window)
    assert any("the limits are 1 calls" in text for text in found)
    assert after == []


# -- signals


ASKED_BY_SIGNAL = """
import os, signal, sys, threading

import actorrpc as rpc

rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
rpc.debug.dump_on_signal()
held, go = threading.Event(), threading.Event()

def hold_here():
    held.set()
    assert go.wait(30)

def ask():
    while not rpc.debug.dump().chains:
        held.wait(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    sys.stdin.readline()  # until the dump was read
    go.set()

threading.Thread(target=ask).start()
rpc.rpc_sync("a", hold_here)
rpc.shutdown()
"""


def test_a_signal_writes_a_dump_to_stderr_while_the_main_thread_waits(tmp_path: Any) -> None:
    command = [sys.executable, "-c", ASKED_BY_SIGNAL, f"file://{tmp_path}/meet"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not (lines and "MainThread" in lines[-1]):
                line = process.stderr.readline()
                assert line, lines
                lines.append(line)
            process.communicate("\n", timeout=30)
        finally:
            timer.cancel()
            process.kill()
        text = "".join(lines)
        assert '\nactorrpc dump by worker "a"' in text
        assert "the program of a -> hold_here on a" in text
        assert process.returncode == 0


def handlers(_: int, folder: str) -> list[bool]:
    """Joins two worlds; says whether that has changed what the signal does."""
    changes = []
    for value in ("", "1"):
        os.environ["ACTORRPC_DUMP_ON_SIGUSR1"] = value
        before = signal.getsignal(signal.SIGUSR1)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(
            init_method=f"file://{folder}/meet-{value}"))  # fmt: skip
        changes.append(signal.getsignal(signal.SIGUSR1) is not before)
        rpc.shutdown()
    return changes


def test_no_signal_is_taken_unasked(tmp_path: Any) -> None:
    (outcome,) = run_processes(handlers, 1, args=(str(tmp_path),))
    assert outcome.value == [False, True]


# -- deadlocks


def cross(kind: type[Box], method: str, others: int = 0) -> list[BaseException | str]:
    """Has two actors call each other, each in a handler that another thread's chain has begun."""
    name = f"{kind.__name__}-{method}-{others}-{time.monotonic_ns()}"
    one, two = kind.spawn("worker1"), kind.spawn("worker2")
    first = getattr(one.rpc_async(timeout=0), method)(two, name, "worker2")
    second = getattr(two.rpc_async(timeout=0), method)(one, name, "worker1")
    outcomes: list[BaseException | str] = []
    for future in (first, second):
        try:
            outcomes.append(future.wait())
        except rpc.DeadlockError as e:
            outcomes.append(e)
    return outcomes


@pytest.mark.parametrize("method", ["cross", "cross_soon"])
def test_chains_that_block_each_other_are_told_with_the_members_names(trio: World, method: str) -> None:
    outcomes = trio.on(0, cross, Box, method)
    errors = [e for e in outcomes if isinstance(e, rpc.DeadlockError)]
    assert errors
    for e in errors:
        assert len(e.members) == 2
        assert all(word in str(e) for word in ("Box 'worker1/", "Box 'worker2/", "wait for each other"))


def test_a_coroutine_that_gives_up_by_itself_is_in_no_deadlock(trio: World) -> None:
    outcomes = trio.on(0, cross, Box, "cross_for_a_while")
    assert "gave up" in outcomes
    assert not any(isinstance(e, rpc.DeadlockError) for e in outcomes)


def test_actors_with_room_for_one_more_do_not_deadlock(trio: World) -> None:
    assert trio.on(0, cross, Two, "cross") == ["nothing", "nothing"]


class Looks:
    """Counts what a worker has found as it looked."""

    seen = 0


def count_looks() -> None:
    found = session.current().deadlocks
    looks = session.current().worker.services[Looks] = Looks()
    look = found._look

    def counted() -> None:
        looks.seen += bool(found._looks)
        look()

    found._look = counted  # type: ignore[method-assign]


def test_a_long_call_is_no_deadlock(trio: World) -> None:
    trio.on(0, count_looks)
    word, looks = trio.on(0, waits_long)
    assert word == "long"
    assert looks > 3


def waits_long() -> tuple[str, int]:
    worker = session.current().worker
    box = Box.spawn("worker1")
    asker = Box.spawn("worker2")
    threading.Thread(target=let_go_later, args=(worker,), daemon=True).start()
    word: str = asker.rpc_sync().ask(box, "long")
    return word, worker.services[Looks].seen


def let_go_later(worker: Any) -> None:
    until(lambda: worker.services[Looks].seen > 3, 20)
    rpc.rpc_sync("worker1", unlock, args=("long",))


def times_out() -> str:
    one, two = Box.spawn("worker1"), Box.spawn("worker2")
    name = f"times-{time.monotonic_ns()}"
    first = one.rpc_async(timeout=0.1).cross(two, name, "worker2")
    second = two.rpc_async(timeout=0.1).cross(one, name, "worker1")
    with pytest.raises(rpc.RPCTimeoutError):
        first.wait()
    with pytest.raises(rpc.RPCTimeoutError):
        second.wait()
    return "timed out"


def test_a_call_whose_time_runs_out_first_is_a_timeout(trio: World) -> None:
    assert trio.on(0, times_out) == "timed out"
