"""Workers of several hosts, as they see it: networks that are cut and heal, that break, that are slow."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.wire.transport import News
from tests.failure.test_heartbeats import hold_the_gil
from tests.failure.test_lost import SHORT, SOON, kept, lost, mark, mark_and_sleep, marks
from tests.relay import Network
from tests.worlds import World, raised_within, until


@contextlib.contextmanager
def hosts(n: int, rate: float = 0.0, **options: Any) -> Iterator[tuple[World, Network]]:
    with World(n, join=False, strict=False, options={**SHORT, **options}, timeout=60) as world:
        with Network(world, rate) as network:
            network.join()
            yield world, network


def call_each(path: str, stop: str, rank: int) -> str:
    """Calls without end; returns how that ended."""
    try:
        while not os.path.exists(stop):
            rpc.rpc_sync(rank, mark, args=(path,), timeout=0)
    except rpc.WorkerLostError as e:
        return str(e)
    return ""


def test_who_is_cut_off_is_lost_and_when_the_network_heals_it_is_told_so_and_its_calls_are_not_run() -> None:
    def call_rank_0(path: str) -> tuple[str, str, bool]:
        with pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(0, mark, args=(path,), timeout=0)
        return caught.value.worker, str(caught.value), caught.value.may_have_run

    with hosts(3) as (world, network):
        path, stop, late = (f"{world.folder}/{name}" for name in ("marks", "stop", "late"))
        world.start(0, call_each, path, stop, 2)  # there is traffic both ways as the network is cut
        world.start(2, call_each, path, stop, 0)
        until(lambda: marks(path) > 20, 20)
        network.cut(2)
        text = world.result(0)
        assert 'worker "worker2" (rank 2' in text
        assert "nothing was heard from it for 1 s" in text
        assert "may or may not have run" in text
        until(lambda: world.on(1, lost, 2), 20)
        assert 'worker "worker0"' in world.result(2)  # it sees the same from the other side
        done = marks(path)
        network.heal(2)
        until(lambda: world.on(2, lambda: session.current().worker.members.verdicts.against), 20)
        worker, text, may_have_run = world.on(2, call_rank_0, late)
        assert worker == "worker2"
        assert "was taken for lost by the others" in text
        assert not may_have_run
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        assert world.on(1, rpc.rpc_sync, 0, abs, (-1,)) == 1
        assert (marks(path), marks(late)) == (done, 0)


def test_a_cut_that_heals_in_time_harms_nobody() -> None:
    with hosts(2, heartbeat_timeout=10.0) as (world, network):
        path, stop = f"{world.folder}/marks", f"{world.folder}/stop"
        world.start(0, call_each, path, stop, 1)
        until(lambda: marks(path) > 5, 20)
        network.cut(1)
        time.sleep(0.5)
        done = marks(path)
        network.heal(1)
        until(lambda: marks(path) > done + 5, 20)
        mark(stop)
        assert world.result(0) == ""


def test_a_connection_that_breaks_and_is_made_again_without_a_loss_is_none() -> None:
    """As where something between the two forgets it: nobody was sent anything meanwhile."""

    def called() -> int:
        return int(rpc.rpc_sync(1, abs, args=(-1,)))

    def listen() -> None:
        worker = session.current().worker
        hear, reassure = worker.doubts.hear, worker.doubts.reassure

        def note(what: Any, then: Any, *args: Any) -> None:
            kept().setdefault("news", []).append(what)
            then(*args)

        worker.transport.told = lambda number, news: note(news, hear, number, news)
        worker.doubts.reassure = lambda *args: note("well", reassure, *args)  # type: ignore[method-assign]

    with hosts(2) as (world, network):
        assert world.on(0, called) == 1
        world.on(0, listen)
        network.break_all()
        until(lambda: "well" in world.on(0, lambda: kept().get("news", [])), 20)
        assert News.CUT in world.on(0, lambda: kept()["news"])
        assert world.on(0, called) == 1
        assert [world.on(rank, lost, 1 - rank) for rank in range(2)] == ["", ""]


def test_what_was_lost_with_a_connection_is_noticed_by_the_gap_that_it_leaves() -> None:
    """The call that was on its way is gone; the question whether the peer is there shows it, long before its time."""

    def call() -> None:
        kept()["future"] = rpc.rpc_async(1, mark_and_sleep, args=(os.devnull, 60), timeout=0)
        time.sleep(0.3)  # it leaves, and does not arrive

    def fail() -> str:
        with raised_within(SOON), pytest.raises(rpc.WorkerLostError) as caught:
            kept()["future"].wait()
        return str(caught.value)

    with hosts(2, heartbeat_timeout=80.0) as (world, network):
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        network.cut(1)
        world.on(0, call)
        network.break_all()
        network.heal(1)
        text = world.on(0, fail)
        assert 'worker "worker1" (rank 1' in text
        assert "it has taken this worker for lost: messages" in text
        assert "did not arrive" in text


def test_a_length_that_was_altered_on_its_way_is_noticed_as_silence_is() -> None:
    """The other side waits for the rest of a frame that has none, and takes all that follows for it."""

    def call() -> str:
        with raised_within(11), pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(1, mark_and_sleep, args=(os.devnull, 60), timeout=0)
        return str(caught.value)

    with hosts(2, heartbeat_timeout=4.0) as (world, network):
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        network.add(1, b"\x02" + (1 << 20).to_bytes(8, "big"))
        assert "it has taken this worker for lost: messages" in world.on(0, call)


def test_with_a_token_a_handler_that_holds_the_gil_is_not_taken_for_dead_by_who_has_just_come_to_know_it() -> None:
    """A handshake needs a thread of Python's there, so connections neither come about nor show anything meanwhile."""

    def call() -> int:
        return int(rpc.rpc_sync(1, hold_the_gil, args=(4.0,), timeout=0))

    with hosts(3, security_token="of three hosts") as (world, _):
        assert world.on(2, call) == 1
        assert [world.on(rank, lost, 1) for rank in (0, 2)] == ["", ""]


def test_an_answer_to_a_question_before_the_last_cut_does_not_reassure() -> None:
    """What was sent between the question and that cut may be lost."""

    def ask_twice() -> list[bool]:
        worker, asked = session.current().worker, list[int]()
        doubts = worker.doubts
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doubts, "ask", lambda number, seconds, question: asked.append(question))
            doubts.hear(1, News.CUT)
            doubts.hear(1, News.REFUSED)
            doubts.hear(1, News.CUT)
            found = []
            for question in asked:
                doubts.reassure(1, question)
                found.append(1 in doubts.open)
        return found

    with hosts(2, heartbeat_timeout=80.0) as (world, _):
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        assert world.on(0, ask_twice) == [True, False]


@pytest.mark.slow
def test_a_large_tensor_over_a_slow_link_is_not_silence() -> None:
    """48 MB at 4 MB a second take twelve times the heartbeat timeout."""

    def send() -> float:
        began = time.monotonic()
        assert rpc.rpc_sync(1, torch.numel, args=(torch.zeros(12_000_000),), timeout=0) == 12_000_000
        return time.monotonic() - began

    with hosts(2, rate=4e6) as (world, _):
        assert world.on(0, send) > 8  # else it was no slow link
        assert [world.on(rank, lost, 1 - rank) for rank in range(2)] == ["", ""]
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
