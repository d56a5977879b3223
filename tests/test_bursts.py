"""Calls that leave together (TR9), the answers that are taken in together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.errors import CancelledError
from actorrpc.runtime.calls import BURST
from actorrpc.session import current
from actorrpc.wire import direct
from actorrpc.wire.transport import AT_ONCE, LATER, SOON
from actorrpc.wire.zeromq import ZmqTransport
from tests.worlds import inside, until

MANY = 5 * BURST
OTHER = 1


def same(value: int) -> int:
    return value


def failing(value: int) -> int:
    raise ValueError(value)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class Notes(rpc.Actor):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def note(self, number: int) -> None:
        self.taken.append(number)

    def all(self) -> list[int]:
        return self.taken


@inside
def test_what_a_burst_holds_back_leaves_though_nobody_waits() -> None:
    futures = [rpc.rpc_async(OTHER, same, args=(i,)) for i in range(MANY + 3)]
    until(lambda: all(future.done() for future in futures))
    assert [future.value() for future in futures] == list(range(MANY + 3))


@inside
def test_callbacks_of_a_burst_run_though_nobody_waits() -> None:
    found: list[int] = []
    for i in range(MANY):
        rpc.rpc_async(OTHER, same, args=(i,)).then(lambda future: found.append(future.value()))
    until(lambda: len(found) == MANY)
    assert sorted(found) == list(range(MANY))


@inside
def test_an_error_among_the_answers_of_a_burst_is_its_own_calls_alone() -> None:
    futures = [rpc.rpc_async(OTHER, failing if i % 7 == 3 else same, args=(i,)) for i in range(MANY)]
    for i, future in enumerate(futures):
        if i % 7 == 3:
            with pytest.raises(ValueError, match=str(i)):
                future.wait()
        else:
            assert future.wait() == i


@inside
def test_a_call_after_a_burst_does_not_overtake_it() -> None:
    notes = Notes.spawn(OTHER)
    for i in range(MANY):
        notes.rpc_async().note(i)
    assert notes.rpc_sync().all() == list(range(MANY))


def around_sends(before: Callable[[int], object]) -> Callable[[], None]:
    """Has something called with how long each message may be held back, before it is; returns what ends that."""
    transport: Any = current().worker.transport
    send = transport.send

    def watched(peer: int, frames: Sequence[Any], hold: int = AT_ONCE, lasting: bool = True) -> None:
        before(hold)
        send(peer, frames, hold, lasting)

    transport.send = watched
    return lambda: delattr(transport, "send")


@inside
def test_a_call_that_is_held_back_while_the_keeper_falls_asleep_wakes_it() -> None:
    crew, transport = current().worker.crew, current().worker.transport
    busy = [rpc.rpc_async(OTHER, sleep, args=(0.3,)) for _ in range(BURST + 4)]
    met: list[int] = []

    def before(hold: int) -> None:
        if hold == LATER:
            until(lambda: not crew.active)
            met.append(hold)

    end = around_sends(before)
    try:
        future = rpc.rpc_async(OTHER, same, args=(1,))
        awake, held = crew.active, transport.holding  # in this order: it may have sent it already, and sleep again
    finally:
        end()
    assert met
    assert awake or not held
    assert future.wait() == 1
    for other in busy:
        other.wait()


@inside
def test_calls_of_which_each_waits_for_the_last_ones_answer_are_not_held_back() -> None:
    holds: list[int] = []
    end = around_sends(holds.append)
    try:
        for i in range(MANY):
            assert rpc.rpc_async(OTHER, same, args=(i,)).wait() == i
    finally:
        end()
    assert LATER not in holds


@inside
def test_what_coroutines_hold_back_leaves_before_their_loop_waits() -> None:
    transport: Any = current().worker.transport
    flush, flushed = transport.flush, set()

    def watched() -> None:
        flushed.add(threading.get_ident())
        flush()

    async def calls() -> None:
        for _ in range(200):  # the keeper may come first
            await asyncio.gather(*(one(i) for i in range(BURST + 4)))
            if threading.get_ident() in flushed:
                return

    async def one(i: int) -> None:
        assert await rpc.rpc_async(OTHER, same, args=(i,)) == i

    transport.flush = watched
    try:
        asyncio.run(calls())
    finally:
        del transport.flush
    assert threading.get_ident() in flushed


@inside
def test_everything_is_taken_out_of_the_limits_after_a_burst() -> None:
    for future in [rpc.rpc_async(OTHER, same, args=(i,)) for i in range(MANY)]:
        future.wait()
    until(lambda: current().worker.limits.statistics()["counted"] == 0)
    assert current().worker.limits.statistics()["windows"] <= 1  # the peer's own


@inside
def test_the_future_of_a_creation_can_be_cancelled_and_the_reference_says_so() -> None:
    busy = [rpc.rpc_async(OTHER, sleep, args=(0.3,)) for _ in range(2 * BURST)]
    ref = rpc.remote(OTHER, same, args=(1,))
    future = ref._get_future()
    assert future is ref._get_future()
    if future.cancel():
        with pytest.raises(CancelledError):
            future.wait()
        with pytest.raises(CancelledError):
            ref.to_here()
    for other in busy:
        other.wait()


@inside
def test_the_future_of_a_creation_and_the_reference_raise_the_same_each_time() -> None:
    ref = rpc.remote(OTHER, failing, args=(5,))
    for _ in range(2):
        with pytest.raises(ValueError, match="5"):
            ref._get_future().wait()
        with pytest.raises(ValueError, match="5"):
            ref.to_here()


# -- transports alone


@pytest.fixture
def two() -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
    here, there = ZmqTransport(), ZmqTransport()
    here.dial(1, there.endpoints)
    yield here, there
    here.close()
    there.close()


needs_direct = pytest.mark.skipif(not direct.AVAILABLE, reason="this system has no direct way")


@needs_direct
def test_a_leader_sends_held_answers_before_it_sleeps_and_leaves_held_calls_to_others(
    two: tuple[ZmqTransport, ZmqTransport],
) -> None:
    here, there = two
    here.send(1, [b"a call"], hold=LATER)
    assert here.receive(0.01) is None
    held = [here.holding]
    assert there.receive(0.01) is None
    here.send(1, [b"an answer"], hold=SOON)
    assert here.receive(0.01) is None
    held.append(here.holding)
    assert held == [True, False]
    assert [there.receive(20), there.receive(20)] == [[b"a call"], [b"an answer"]]
