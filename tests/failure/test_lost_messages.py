"""A message that does not arrive, and after which none comes by itself, is noticed all the same. Real processes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from actorrpc.testing.faults import Passing
from tests.failure.test_lost import SHORT, SOON, lost, made, mark, marks
from tests.worlds import raised_within, until

TOKENS = [None, "of three workers"]
"""Without one messages go by direct ways, with one by ZeroMQ."""


def drop_next(what: str) -> None:
    """Has the next message that leaves here get lost: a verdict, or else one of a kind."""
    transport = session.current().worker.transport
    send, dropped = transport.send, list[int]()

    def harm(peer: int, frames: Any, *args: Any, **options: Any) -> None:
        passing = Passing.of(peer, frames)
        fits = peer < 0 if what == "verdict" else passing.kind == what and not passing.control
        if fits and not dropped:
            dropped.append(peer)
        else:
            send(peer, frames, *args, **options)

    transport.send = harm  # type: ignore[method-assign]


def wait_until_cancelled(path: str) -> None:
    mark(path)
    while not rpc.current_call().cancelled:
        time.sleep(0.02)


def call_for_ever(path: str) -> str:
    with raised_within(SOON), pytest.raises(rpc.WorkerLostError) as caught:
        rpc.rpc_sync(1, wait_until_cancelled, args=(path,), timeout=0)
    return str(caught.value)


def lose(rank: int) -> None:
    session.current().worker.members.lose(rank, "a gap")


@pytest.mark.parametrize("token", TOKENS)
def test_who_was_taken_for_lost_learns_it_though_the_word_of_it_is_lost(token: str | None) -> None:
    with made(2, security_token=token) as world:
        path = f"{world.folder}/marks"
        world.start(0, call_for_ever, path)
        until(lambda: marks(path), 20)
        world.on(1, drop_next, "verdict")
        world.on(1, lose, 0)
        assert "it has taken this worker for lost: a gap" in world.result(0)


@pytest.mark.parametrize("token", TOKENS)
def test_who_waits_for_nobody_learns_it_as_well(token: str | None) -> None:
    with made(3, security_token=token, **SHORT) as world:
        assert world.on(2, rpc.rpc_sync, 1, abs, (-1,)) == 1
        world.on(1, drop_next, "tell")  # the herald, who has no word from here, is told again
        world.on(0, drop_next, "verdict")
        world.on(1, lose, 2)
        until(lambda: world.on(2, lambda: session.current().worker.members.verdicts.against), 20)
        assert world.on(0, lost, 2)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("kind", ["request", "reply"])
def test_the_loss_of_a_last_message_is_noticed_by_who_waits_for_an_answer(kind: str, token: str | None) -> None:
    def call() -> str:
        with raised_within(SOON), pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(1, os.getpid, timeout=0)
        return str(caught.value)

    with made(2, security_token=token, **SHORT) as world:
        assert world.on(0, rpc.rpc_sync, 1, abs, (-1,)) == 1
        world.on(0 if kind == "request" else 1, drop_next, kind)
        assert "did not arrive" in world.on(0, call)
