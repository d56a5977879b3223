"""Guests: processes that look into a world that runs, call, and leave. Real processes."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from actorrpc.world import World as Roles
from tests.joining import add, options
from tests.worlds import World, until

Told = list[tuple[str, str]]


class Counter(rpc.Actor):
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count


class Standing:
    """What a worker keeps."""

    told: Told


def come(rank: int, method: str, size: int | None = None, **more: Any) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options(method, **more))
    kept = session.current().worker.services[Standing] = Standing()
    kept.told = []
    Roles().watch(lambda worker, reason: kept.told.append((worker.name, reason)))


def told() -> Told:
    kept: Standing = session.current().worker.services[Standing]
    return kept.told


def names() -> list[str]:
    return [worker.name for worker in Roles().workers]


def everybody() -> list[str]:
    return [p.record.name for p in session.current().worker.peers.values() if p.standing.value == "member"]


def visit(method: str, **more: Any) -> tuple[int, int, list[str], list[str]]:
    with rpc.attach(method, **more) as world:
        counted = rpc.get_actor("counter").rpc_sync().add(2)
        summed = rpc.rpc_sync("w1", add, args=(1, 2))
        return counted, summed, [worker.name for worker in world.workers], rpc.rpc_sync("w1", names)


def make_counter() -> None:
    Counter.spawn("w0", name="counter")


def begin(trio: World, method: str, **more: Any) -> None:
    for rank in (0, 1):
        trio.on(rank, lambda rank=rank: come(rank, method, **more))
    trio.on(0, make_counter)


def test_a_guest_looks_and_calls_and_leaves_and_is_not_counted(trio: World, method: str) -> None:
    begin(trio, method)
    for n in (1, 2):  # it may come again
        assert trio.on(2, visit, method) == (2 * n, 3, ["w0", "w1"], ["w0", "w1"])
        assert not trio.on(2, session.is_available)
    for rank in (0, 1):
        until(lambda rank=rank: trio.on(rank, everybody) == ["w0", "w1"])  # type: ignore[misc]
        assert trio.on(rank, told) == []


def attach_and_stay(method: str) -> str:
    rpc.attach(method, name="visitor")
    return session.current().worker.record.name


def test_a_guest_that_dies_is_nobodys_loss() -> None:
    with World(3, join=False, timeout=60, strict=False) as world:
        method = f"file://{world.folder}/guests"
        begin(world, method)
        assert world.on(2, attach_and_stay, method) == "visitor"
        assert "visitor" in world.on(1, everybody)
        world.kill(2, signal.SIGKILL)
        for rank in (0, 1):
            until(lambda rank=rank: "visitor" not in world.on(rank, everybody))  # type: ignore[misc]
            assert world.on(rank, told) == []
        for rank in (0, 1):
            world.on(rank, rpc.shutdown, False)


def test_a_guest_brings_the_token(trio: World, method: str) -> None:
    begin(trio, method, security_token="secret")
    assert trio.on(2, lambda: visit(method, token="secret"))[:2] == (2, 3)


def refused(method: str, name: str = "", **more: Any) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(rpc.RendezvousError) as caught:
        rpc.attach(method, name=name, **more)
    assert not session.is_available()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("token", ["other", None])
def test_a_guest_with_another_token_is_told_so(trio: World, method: str, token: str | None) -> None:
    begin(trio, method, security_token="secret")
    kind, text, _ = trio.on(2, lambda: refused(method, token=token))
    assert kind == "AuthenticationError"
    assert "token" in text


def begin_fixed(world: World, method: str) -> None:
    for rank in (0, 1):
        world.start(rank, come, rank, method, 2)
    for rank in (0, 1):
        world.result(rank)
    world.on(0, make_counter)


def test_a_world_of_fixed_size_takes_guests_who_are_not_counted(trio: World, method: str) -> None:
    begin_fixed(trio, method)
    for n in (1, 2):
        assert trio.on(2, visit, method) == (2 * n, 3, ["w0", "w1"], ["w0", "w1"])
    for rank in (0, 1):
        until(lambda rank=rank: trio.on(rank, everybody) == ["w0", "w1"])  # type: ignore[misc]
        assert trio.on(rank, told) == []
    _, text, _ = trio.on(2, refused, method, "w1")
    assert 'name "w1"' in text
    assert "is taken by" in text


def test_a_world_of_fixed_size_ends_when_its_workers_have_ended_whatever_guests_do(trio: World, method: str) -> None:
    begin_fixed(trio, method)
    assert trio.on(2, attach_and_stay, method) == "visitor"
    for rank in (0, 1):
        trio.start(rank, rpc.shutdown)
    for rank in (0, 1):
        trio.result(rank)
    trio.on(2, call_nobody)


def call_nobody() -> None:
    with pytest.raises((rpc.WorkerLostError, rpc.NotAMemberError)):
        rpc.rpc_sync("w1", add, args=(1, 2))
    rpc.shutdown(timeout=10)


def test_a_guest_of_a_world_that_is_not_complete_waits_and_says_for_whom(trio: World, method: str) -> None:
    trio.start(0, come, 0, method, 2)
    _, text, _ = trio.on(2, lambda: refused(method, timeout=2.0))
    assert "the world is not complete yet: missing rank 1" in text
    trio.on(1, come, 1, method, 2)  # nor was it kept from coming about
    trio.result(0)
    assert trio.on(1, names) == ["w0", "w1"]


_held: list[rpc.attaching.Attached] = []


def attach_and_hold(method: str) -> None:
    _held.append(rpc.attach(method))


def leave_a_call() -> None:
    rpc.rpc_async("w1", time.sleep, args=(0.5,))


def see_the_end() -> tuple[bool, float]:
    """Waits for the end of the world; returns whether it was told, and how long leaving took."""
    member = session.current().member
    until(lambda: member.ended.done, what="the guest was not told of the end")
    began = time.monotonic()
    _held.pop().close()
    return member.orphaned is None, time.monotonic() - began


@pytest.mark.parametrize("busy", [False, True])
def test_a_world_of_fixed_size_does_not_wait_for_its_guest_to_end(trio: World, method: str, busy: bool) -> None:
    begin_fixed(trio, method)
    trio.on(2, attach_and_hold, method)
    if busy:  # it has calls under way, and has made some before
        trio.on(2, lambda: [rpc.rpc_sync(w, add, args=(1, 2)) for w in ("w0", "w1")])
        trio.on(2, leave_a_call)
    for rank in (0, 1):
        trio.start(rank, rpc.shutdown, True, 20.0)
    trio.result(0)
    trio.result(1)
    in_order, seconds = trio.on(2, see_the_end)
    assert in_order
    assert seconds < 5
    assert not trio.on(2, session.is_available)


def test_a_guest_that_dies_keeps_no_world_of_fixed_size_from_its_end() -> None:
    with World(3, join=False, timeout=60) as world:
        method = f"file://{world.folder}/guests"
        begin_fixed(world, method)
        world.on(2, attach_and_hold, method)
        world.kill(2, signal.SIGKILL)
        for rank in (0, 1):
            world.start(rank, rpc.shutdown, True, 20.0)
        world.result(0)
        world.result(1)


def orphaned_within(seconds: float) -> str:
    member = session.current().member
    until(lambda: member.ended.done, seconds)
    assert member.orphaned is not None
    _held.pop().close()
    return member.orphaned.reason


def test_a_guest_hears_of_the_death_of_a_fixed_worlds_rank_0() -> None:
    with World(3, join=False, timeout=60, strict=False) as world:
        method = f"file://{world.folder}/guests"
        begin_fixed(world, method)
        world.on(2, attach_and_hold, method)
        world.kill(0, signal.SIGKILL)
        assert "its process" in world.on(2, orphaned_within, 10.0)
        world.on(1, rpc.shutdown, False)


def test_where_there_is_no_world_the_guest_is_told_in_time(trio: World, method: str) -> None:
    _, text, took = trio.on(2, lambda: refused(method, timeout=0.5))
    assert text.startswith("this process waited 0.5 s")
    assert method in text
    assert took < 20


def test_a_world_that_is_over_is_no_world(trio: World, method: str) -> None:
    begin(trio, method)
    trio.on(1, rpc.shutdown, False)
    trio.on(0, rpc.shutdown, False)
    _, text, _ = trio.on(2, lambda: refused(method, timeout=1.0))
    assert "rank 0" in text


def attach_twice(method: str) -> None:
    with rpc.attach(method), pytest.raises(RuntimeError, match=r"already initialized.* as guest .*close the world"):
        rpc.attach(method)
    with pytest.raises(ZeroDivisionError), rpc.attach(method):
        1 / 0  # noqa: B018
    assert not session.is_available()


def test_a_guest_is_one_at_a_time_and_an_error_in_its_block_has_it_leave(trio: World, method: str) -> None:
    begin(trio, method)
    trio.on(2, attach_twice, method)
    until(lambda: trio.on(0, everybody) == ["w0", "w1"])
    assert trio.on(0, told) == []
