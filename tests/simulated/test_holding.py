"""What is held back or queued, in simulated worlds: somebody sends it, somebody starts it, also where nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.runtime.calls import BURST
from actorrpc.runtime.crew import TICK
from actorrpc.session import current
from actorrpc.testing import SimWorld
from actorrpc.testing.network import Network, SimTransport
from actorrpc.testing.simulation import Simulation
from actorrpc.wire.transport import AT_ONCE, LATER, SOON

SEEDS = range(12)
LONG = 20.0
"""Seconds on the virtual clock: what comes so late came because something else happened to wake somebody."""
gates: list[Any] = []


def block() -> None:
    """Waits as something that the library does not see."""
    gates.append(current().worker.clock.gate())
    gates[-1].wait()


def release() -> int:
    while gates:
        gates.pop().open()
    return 1


def pause(seconds: float) -> None:
    current().worker.clock.gate().wait(seconds)


def nothing() -> None:
    pass


def test_a_request_that_finds_all_handlers_in_waits_that_nobody_sees_is_begun_after_a_standstill() -> None:
    def program() -> None:
        calls = [rpc.rpc_async(1, block, timeout=0) for _ in range(2)]
        pause(1.0)  # the other worker's keeper sleeps
        assert rpc.rpc_sync(1, release, timeout=LONG) == 1
        for call in calls:
            call.wait()

    for seed in SEEDS:
        with SimWorld(2, seed, threads=2, timeout=0) as world:
            world.run(program)
            assert world.simulation.now() < 2.0, seed


def test_a_call_that_is_held_back_while_nothing_else_happens_leaves_within_a_tick() -> None:
    def program() -> None:
        calls = [rpc.rpc_async(1, block) for _ in range(BURST + 2)]
        pause(1.0)  # the keeper sleeps
        begun = current().worker.clock.now()
        held = rpc.rpc_async(1, nothing)
        assert current().worker.transport.holding
        while not held.done():
            pause(TICK)
            assert current().worker.clock.now() < begun + 5 * TICK
        rpc.rpc_sync(1, release)
        for call in calls:
            call.wait()

    for seed in SEEDS:
        with SimWorld(2, seed, threads=BURST + 4, timeout=0) as world:  # no deadline wakes it
            world.run(program)


def when_a_callbacks_call_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Returns when a callback makes a call that is held back, and when that leaves."""
    called: list[float] = []
    left: list[float] = []
    with SimWorld(2, seed, threads=BURST + 4) as world:
        carry, now = world.network.carry, world.simulation.now

        def carried(source: SimTransport, peer: int, frames: Sequence[Any]) -> None:
            if called and source.address == "sim://0":
                left.append(now())
            carry(source, peer, frames)

        def callback(_: object) -> None:
            rpc.rpc_async(1, nothing)
            called.append(now())
            assert current().worker.transport.holding

        def program() -> None:
            calls = [rpc.rpc_async(1, block) for _ in range(BURST + 2)]
            calls.append(rpc.rpc_async(1, nothing).then(callback))
            pause(0.5)
            rpc.rpc_sync(1, release)
            for call in calls:
                call.wait()

        monkeypatch.setattr(world.network, "carry", carried)
        world.run(program)
    return called[0], left[0]


def test_what_a_callback_calls_does_not_wait_for_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        called, left = when_a_callbacks_call_leaves(seed, monkeypatch)
        assert called == left, seed


def nap() -> None:
    """Returns when the keeper has begun to let ticks out."""
    crew = current().worker.crew
    end = current().worker.clock.now() + 1.0
    while not crew.napping:
        pause(TICK / 8)
        assert current().worker.clock.now() < end


def test_who_holds_something_back_while_the_keeper_lets_ticks_out_has_it_look_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[float] = []

    def program() -> None:
        calls: list[Any] = [rpc.rpc_async(1, block) for _ in range(BURST + 2)]
        nap()
        begun = current().worker.clock.now()
        left.clear()
        calls.append(rpc.rpc_async(1, release))
        assert current().worker.transport.holding
        pause(TICK / 2)
        assert left
        assert left[0] < begun + TICK / 4
        for call in calls:
            call.wait()

    for seed in SEEDS:
        with SimWorld(2, seed, threads=BURST + 4) as world:
            carry, now = world.network.carry, world.simulation.now

            def carried(*what: Any, carry: Any = carry, now: Any = now) -> None:
                if what[0].address == "sim://0":
                    left.append(now())
                carry(*what)

            monkeypatch.setattr(world.network, "carry", carried)
            world.run(program)


def test_a_deadline_is_kept_although_the_keeper_lets_ticks_out() -> None:
    def program() -> None:
        clock = current().worker.clock
        nap()
        begun, seconds = clock.now(), 2.5 * TICK
        call = rpc.rpc_async(1, block, timeout=seconds)
        while not call.done():
            pause(TICK / 8)
        assert seconds <= clock.now() - begun < seconds + 1.5 * TICK
        with pytest.raises(rpc.RPCTimeoutError):
            call.wait()
        rpc.rpc_sync(1, release)

    for seed in SEEDS:
        with SimWorld(2, seed) as world:
            world.run(program)


def test_the_simulated_transport_holds_messages_back_in_their_order_as_a_real_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(Simulation(1))
    here: Any = SimTransport(network, "sim://here")
    here.dial(1, ["sim://there"])
    carried: list[Sequence[Any]] = []
    monkeypatch.setattr(network, "carry", lambda source, peer, frames: carried.append(frames))
    here.send(1, [b"1"], LATER)
    assert here.holding
    here.send(1, [b"2"], SOON)
    assert not carried
    here.send(1, [b"3"], AT_ONCE)
    assert carried == [[b"1"], [b"2"], [b"3"]]
    here.send(1, [b"4"], LATER)
    here.flush()
    assert not here.holding
    for i in range(40):
        here.send(1, [b"%d" % i], LATER)
    assert len(carried) == 4 + 32
    here.send(1, [b"5", b"with another frame"], LATER)
    assert len(carried) == 4 + 40 + 1
    here.send(1, [b"6"], LATER)
    here.hang_up(1)
    here.flush()
    assert len(carried) == 4 + 40 + 1
