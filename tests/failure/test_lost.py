"""Who dies, stops or is cut off is noticed, what hangs on it fails at once, and lost is final. Real processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
import actorrpc.autograd as dist_autograd
from actorrpc import session
from tests.worlds import World, counts, raised_within, stop, until

SHORT = {"heartbeat_timeout": 1.0}
"""So that a test need not last ten seconds."""
SOON = 20.0
"""A generous bound for what is noticed within a second or two; all that is not noticed takes a minute or for ever."""


def kept() -> dict[str, Any]:
    found: dict[str, Any] = session.current().worker.services.setdefault("kept", {})  # type: ignore[call-overload]
    return found


def mark(path: str) -> None:
    with open(path, "a") as file:
        file.write("x")


def marks(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(path)
    return 0


def mark_and_sleep(path: str, seconds: float) -> None:
    mark(path)
    time.sleep(seconds)


def fork_a_child(path: str) -> None:
    """A child that holds all connections open for a while."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    mark(path)


def call_for_ever(rank: int, path: str) -> tuple[dict[str, Any], str]:
    """Calls without a limit of time; returns what the error says."""
    with raised_within(SOON), pytest.raises(rpc.WorkerLostError) as caught:
        rpc.rpc_sync(rank, mark_and_sleep, args=(path, 60), timeout=0)
    return vars(caught.value), str(caught.value)


def lost(rank: int) -> str:
    """Why a peer counts as lost here; "" where it does not."""
    peer = session.current().worker.peers[rank]
    return peer.reason if peer.standing.value == "lost" else ""


@contextlib.contextmanager
def stopped(world: World, rank: int) -> Iterator[None]:
    """The process of a rank stands still in the block."""
    stop(world.pid(rank))
    try:
        yield
    finally:
        os.kill(world.pid(rank), signal.SIGCONT)


@contextlib.contextmanager
def made(n: int, **options: Any) -> Iterator[World]:
    """A world of which nothing is demanded at its end."""
    with World(n, options=options or None, strict=False, timeout=60) as world:
        yield world


# -- death


@pytest.mark.parametrize("child", ["", "with a forked child"])
@pytest.mark.parametrize("how", ["SIGKILL", "os._exit"])
def test_a_death_in_the_midst_of_a_call_is_noticed_at_once(how: str, child: str) -> None:
    with made(2) as world:
        path = f"{world.folder}/marks"
        if child:
            world.on(1, fork_a_child, path + "-child")
        world.start(0, call_for_ever, 1, path)
        until(lambda: marks(path), 20)
        began = time.monotonic()
        world.let_die(1)
        if how == "SIGKILL":
            world.kill(1)
        else:
            world.start(1, os._exit, 3)
        said, text = world.result(0)
        assert time.monotonic() - began < SOON
        assert (said["worker"], said["rank"], said["pid"]) == ("worker1", 1, world.pid(1))
        assert said["may_have_run"]
        assert f"its process {world.pid(1)} has ended" in text
        assert "may or may not have run" in text
        assert os.uname().nodename in text


class Busy:
    """Whether the threads are to go on computing, and how many have ended."""

    on = True
    ended = 0


def compute() -> None:
    while Busy.on:
        sum(range(1000))
    Busy.ended += 1


def be_busy(threads: int) -> None:
    for _ in range(threads):
        threading.Thread(target=compute, daemon=True).start()
        kept().setdefault("busy", []).append(rpc.rpc_async(0, compute, timeout=0))


def rest() -> tuple[int, int]:
    """Ends the computing; returns how many had ended before, and how many there are."""
    before, Busy.on = Busy.ended, False
    for future in kept()["busy"]:
        future.wait()
    return before, len(kept()["busy"])


@pytest.mark.parametrize("token", [None, "of the test"])
def test_a_death_is_noticed_by_a_worker_whose_threads_are_all_busy(token: str | None) -> None:
    """With more handlers than it has threads for, and others beside; the dead one leaves a forked child behind."""
    with made(2, num_worker_threads=4, security_token=token) as world:
        path = f"{world.folder}/marks"
        world.on(1, fork_a_child, path + "-child")
        world.start(0, call_for_ever, 1, path)
        until(lambda: marks(path), 20)
        world.start(1, rpc.rpc_sync, 0, be_busy, (8,))
        world.result(1)
        world.let_die(1)
        world.kill(1)
        said, text = world.result(0)
        assert f"its process {world.pid(1)} has ended" in text
        assert said["may_have_run"]
        assert world.on(0, rest) == (0, 8)


def test_a_call_to_somebody_who_is_lost_already_was_not_sent_and_says_so() -> None:
    with made(2) as world:
        world.kill(1)
        until(lambda: world.on(0, lost, 1), 20)

        def call() -> tuple[bool, str]:
            with pytest.raises(rpc.WorkerLostError) as caught:
                rpc.rpc_sync(1, abs, args=(-1,))
            return caught.value.may_have_run, str(caught.value)

        may_have_run, text = world.on(0, call)
        assert not may_have_run
        assert "not sent" in text


# -- silence


def test_a_stopped_worker_is_lost_and_everything_that_hangs_on_it_fails_at_once() -> None:
    """A call, a group's call, a reference held on it, one that it holds, a backward pass through it; then it wakes."""

    class Box:
        def __init__(self, value: float) -> None:
            self.weight = torch.tensor(value, requires_grad=True)

        def times(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    class Member(rpc.Actor):
        def name_of(self) -> str:
            return self.name

    def prepare() -> None:
        kept()["box"] = box = rpc.remote(1, Box, args=(2.0,))
        kept()["group"] = rpc.Group([Member.spawn(rank) for rank in (1, 2)])
        assert len(kept()["group"].rpc_sync().name_of()) == 2
        kept()["context"] = context = dist_autograd.context()
        kept()["id"] = context.__enter__()
        kept()["loss"] = box.rpc_sync().times(torch.ones(1, requires_grad=True)).sum()

    def hold_something_of_rank_0() -> None:
        kept()["held"] = rpc.remote(0, list)
        assert kept()["held"].to_here() == []

    def fails(what: str) -> Callable[[], Any]:
        box, group = kept()["box"], kept()["group"]
        return {
            "call": lambda: rpc.rpc_sync(1, time.sleep, args=(60,), timeout=0),
            "async": lambda: rpc.rpc_async(1, abs, args=(1,), timeout=0).wait(),
            "reference": lambda: box.rpc_sync(timeout=0).times(torch.ones(1)),
            "to_here": lambda: box.to_here(timeout=0),
            "group": lambda: group.rpc_sync(timeout=0).name_of(),
            "backward": lambda: dist_autograd.backward(kept()["id"], [kept()["loss"]]),
        }[what]

    def fail() -> dict[str, str]:
        """All at the same time, as all of them are under way when the loss is noticed."""
        errors: dict[str, str] = {}

        def run(what: str) -> None:
            try:
                fails(what)()
            except Exception as e:
                errors[what] = repr(e)

        kinds = ["call", "async", "reference", "to_here", "group", "backward"]
        for what in kinds:
            threading.Thread(target=run, args=(what,), daemon=True).start()
        with contextlib.suppress(AssertionError):
            until(lambda: len(errors) == len(kinds), SOON)
        return {what: errors.get(what, "it hangs") for what in kinds}

    def released() -> bool:
        gc.collect()
        return not counts()["forks"]

    def call_again() -> tuple[str, str]:
        with pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(0, abs, args=(-1,))
        return caught.value.worker, str(caught.value)

    with made(3, **SHORT) as world:
        world.on(1, hold_something_of_rank_0)
        world.on(0, prepare)
        assert world.on(0, counts)["forks"] == 1
        with stopped(world, 1):
            errors = world.on(0, fail)
            for what, error in errors.items():
                assert 'worker "worker1" (rank 1' in error, what
                assert f"pid {world.pid(1)}" in error, what
                assert "is stopped" in error, what
            assert errors["group"].startswith("GroupError")
            assert "1 of 2" in errors["group"]
            until(lambda: world.on(0, released), 20)
            until(lambda: world.on(2, lost, 1), 20)  # which has never spoken to it
            assert world.on(0, lambda: rpc.rpc_sync(2, abs, args=(-1,))) == 1
        until(lambda: world.on(1, lambda: session.current().worker.members.verdicts.against), 20)
        worker, text = world.on(1, call_again)
        assert worker == "worker1"
        assert "was taken for lost by the others" in text
        assert "worker0" in text  # who says so
        world.start(0, rpc.shutdown)
        world.start(2, rpc.shutdown)
        world.result(0)
        world.result(2)


def test_a_graceful_end_does_not_wait_for_a_worker_that_is_stopped() -> None:
    with made(3, **SHORT) as world:
        with stopped(world, 2):
            for rank in (0, 1):
                world.start(rank, rpc.shutdown)
            for rank in (0, 1):
                world.result(rank)  # bounded by the world's own limit
        assert not world.on(0, session.is_available)


def test_a_worker_that_is_stopped_as_soon_as_it_is_known_is_noticed_as_well() -> None:
    """Before the first heartbeat has come from it."""

    def stop_at_once() -> None:
        os.kill(rpc.rpc_sync(1, os.getpid), signal.SIGSTOP)

    with made(2, heartbeat_timeout=4.0) as world:
        try:
            world.on(0, stop_at_once)
            until(lambda: world.on(0, lost, 1), 30)
        finally:
            os.kill(world.pid(1), signal.SIGCONT)


# -- after it has stood still


class Noting(rpc.Actor):
    """One message at a time."""

    def note(self, path: str) -> None:
        mark(path)

    def hold(self, path: str, until_there: str) -> None:
        mark(path)
        while not os.path.exists(until_there):
            time.sleep(0.01)

    def marks(self, path: str) -> int:
        return marks(path)


def tell_and_call(path: str, several: int) -> None:
    """All that may lie in an inbox: calls of functions and methods, and tells."""
    noting = kept()["noting"]
    for _ in range(several):
        kept().setdefault("futures", []).append(rpc.rpc_async(1, mark, args=(path,), timeout=0))
        kept()["futures"].append(noting.rpc_async(timeout=0).note(path))
        noting.tell().note(path)


def make_noting() -> None:
    kept()["noting"] = Noting.spawn(1)
    kept()["noting"].rpc_sync().marks("")


@pytest.mark.parametrize("token", [None, "of the test"])
def test_of_a_worker_that_is_lost_nothing_is_run_when_it_wakes(token: str | None) -> None:
    """Neither what lay in its inbox nor what was queued before its actor."""
    with made(3, **SHORT, security_token=token) as world:
        early, late = f"{world.folder}/early", f"{world.folder}/late"
        for rank in (0, 2):
            world.on(rank, make_noting)
        world.on(0, lambda: kept()["noting"].tell().hold(early, late + "-go"))
        until(lambda: marks(early), 20)
        world.on(0, tell_and_call, late, 1)  # the function's is run; the actor has no time
        until(lambda: marks(late) == 1, 20)
        with stopped(world, 1):
            for rank in (0, 2):
                world.on(rank, tell_and_call, late, 5)
            for rank in (0, 2):
                until(lambda rank=rank: world.on(rank, lost, 1), 20)  # type: ignore[misc]
            mark(late + "-go")
        until(lambda: world.on(1, lambda: session.current().worker.members.verdicts.against), 20)
        time.sleep(2.0)  # for what must not be run
        assert marks(late) == 1
        assert marks(early) == 1


@pytest.mark.parametrize("token", [None, "of the test"])
def test_what_lay_before_a_worker_that_stood_still_and_is_a_member_yet_is_run(token: str | None) -> None:
    with made(2, heartbeat_timeout=4.0, security_token=token) as world:
        path = f"{world.folder}/marks"
        world.on(0, make_noting)
        with stopped(world, 1):
            world.on(0, tell_and_call, path, 5)
            time.sleep(2.4)  # long enough for it to ask, and not for it to be lost
        until(lambda: marks(path) == 15, 20)
        assert world.on(0, lost, 1) == ""
