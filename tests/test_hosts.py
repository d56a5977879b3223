"""Worlds on several hosts, in network namespaces: what the wires between them do to them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.hosts import Hosts, ip, needs_hosts, needs_slow_links
from tests.joining import join_world
from tests.worlds import World, until

SIZE = 3


@pytest.fixture
def world(hosts: Hosts) -> Iterator[World]:
    with World(SIZE, join=False, strict=False, timeout=100) as made:
        for rank in range(SIZE):
            made.on(rank, hosts.enter, rank)
        yield made


def joined(world: World, hosts: Hosts, **more: Any) -> None:
    for rank in range(SIZE):
        world.start(rank, come, rank, hosts.method, more)
    world.results()


def come(rank: int, method: str, more: dict[str, Any]) -> None:
    join_world(rank, SIZE, method, **more)


def call_all() -> list[str]:
    return [rpc.rpc_sync(to, socket.gethostname, timeout=20) for to in range(SIZE)]


def end() -> None:
    rpc.shutdown(graceful=False)


def went_by_tcp() -> bool:
    transport: Any = session.current().worker.transport
    return all(outbox.endpoint.startswith("tcp://10.77.0.") for outbox in transport._ways.values())


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as e:
        return e


def test_workers_on_three_hosts_call_each_other_by_their_addresses(world: World, hosts: Hosts) -> None:
    joined(world, hosts)
    assert world.everywhere(call_all) == [["host0", "host1", "host2"]] * SIZE
    assert world.everywhere(went_by_tcp) == [True] * SIZE
    world.everywhere(end)


def call_through_a_cut(to: int) -> Any:
    return rpc.rpc_sync(to, abs, args=(-1,), timeout=60)


@pytest.mark.slow
def test_a_cut_that_is_healed_soon_costs_no_call(world: World, hosts: Hosts) -> None:
    joined(world, hosts)
    world.everywhere(call_all)
    hosts.cut(0, 1)
    world.start(0, call_through_a_cut, 1)
    assert world.on(2, call_through_a_cut, 1) == 1, "the third one reaches both"
    assert world.on(2, call_through_a_cut, 0) == 1
    time.sleep(2.0)  # long enough for TCP to send again in vain
    assert 0 in world._busy, "nothing passes"
    hosts.heal()
    assert world.result(0) == 1
    world.everywhere(call_all)
    world.everywhere(end)


@pytest.mark.slow
def test_a_call_to_a_host_that_is_cut_off_ends_with_its_own_time_at_the_latest(world: World, hosts: Hosts) -> None:
    def call() -> str:
        with pytest.raises((rpc.RPCTimeoutError, rpc.WorkerLostError)) as caught:
            rpc.rpc_sync(1, time.sleep, args=(3600,), timeout=25)
        return str(caught.value)

    joined(world, hosts)
    world.everywhere(call_all)
    hosts.isolate(1)
    assert "w1" in world.on(0, call)
    world.let_die(1)
    for rank in (0, 2):
        world.on(rank, end)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slow_link_carries_a_large_tensor_and_nobody_is_lost(world: World, hosts: Hosts) -> None:
    def send() -> float:
        began = time.monotonic()
        total = rpc.rpc_sync(1, torch.sum, args=(torch.ones(1 << 23),), timeout=90)
        assert float(total) == float(1 << 23)
        assert rpc.rpc_sync(2, abs, args=(-1,)) == 1
        return time.monotonic() - began

    needs_slow_links()
    joined(world, hosts)
    world.everywhere(call_all)
    hosts.throttle(0, 2.0)
    assert world.on(0, send) > 10.0, "32 MiB at 2 MB/s: the link is slow indeed"
    assert world.everywhere(call_all) == [["host0", "host1", "host2"]] * SIZE
    world.everywhere(end)


@pytest.mark.slow
def test_of_two_interfaces_the_one_that_is_named_is_used() -> None:
    needs_hosts()
    with Hosts(SIZE, second=True) as hosts, World(SIZE, join=False, strict=False, timeout=100) as world:
        for rank in range(SIZE):
            world.on(rank, hosts.enter, rank)
        joined(world, hosts, address="eth1")
        for rank in range(SIZE):
            found = world.on(rank, lambda: list(session.current().worker.transport.endpoints))
            assert any(f"tcp://10.88.0.{rank + 1}:" in endpoint for endpoint in found), found
        hosts.cut(0, 1, 2, net=77)  # where they met is not needed any more
        assert world.everywhere(call_all) == [["host0", "host1", "host2"]] * SIZE
        world.everywhere(end)


@pytest.mark.slow
def test_a_wrong_route_is_an_error_at_the_start_that_says_who_is_missing(world: World, hosts: Hosts) -> None:
    def try_to_come(rank: int, method: str) -> str:
        return str(outcome(lambda: join_world(rank, SIZE, method, init_timeout=6.0)))

    hosts.misroute(2, 0)
    for rank in range(SIZE):
        world.start(rank, try_to_come, rank, hosts.method)
    said = world.results()
    assert "rank 2" in said[0], said
    assert "rank 2" in said[1], said
    assert "10.77.0.1" in said[2], said


@pytest.mark.slow
def test_a_wrong_route_between_two_workers_is_mended_while_they_run(world: World, hosts: Hosts) -> None:
    joined(world, hosts)
    hosts.misroute(2, 1)
    world.start(2, call_through_a_cut, 1)
    assert world.on(0, call_through_a_cut, 1) == 1
    hosts.route(2, 1)
    assert world.result(2) == 1
    world.everywhere(end)


def test_nothing_is_left_of_the_hosts() -> None:
    needs_hosts()
    before = ip("netns", "list"), ip("link")
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        assert 1 / (hosts.name(1) not in ip("netns", "list"))
    until(lambda: (ip("netns", "list"), ip("link")) == before)
