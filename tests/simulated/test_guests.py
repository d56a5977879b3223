"""Guests of simulated worlds, elastic ones and others, in any order of messages."""

from __future__ import annotations

import time

import pytest

import actorrpc as rpc
from actorrpc.session import current
from actorrpc.testing import SimCluster
from actorrpc.world import World


def twice(n: int) -> int:
    return 2 * n


def resident(rank: int, told: list[str], size: int | None) -> None:
    options = rpc.RpcBackendOptions(init_method="tcp://sim:1")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    World().watch(lambda worker, reason: told.append(worker.name))
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for worker in World().workers:
            assert worker.name.startswith("w")
            assert rpc.rpc_sync(worker, twice, args=(2,)) == 4
        time.sleep(0.5)
    if rank or size is not None:
        rpc.shutdown()
    else:
        time.sleep(5)
        assert [worker.name for worker in World().workers] == ["w0"]
        rpc.shutdown()


def guest(wait: float) -> int:
    time.sleep(wait)
    done = 0
    for _ in range(3):
        with rpc.attach("tcp://sim:1", timeout=20) as world:
            for worker in world.workers:
                assert worker.name.startswith("w")
                assert rpc.rpc_sync(worker, twice, args=(done,)) == 2 * done
                done += 1
    return done


def dying_guest(wait: float) -> None:
    time.sleep(wait)
    rpc.attach("tcp://sim:1", timeout=20)
    time.sleep(100)


def lingering_guest() -> bool:
    """Stays until the world has ended; returns whether it was told so."""
    time.sleep(2.0)
    world = rpc.attach("tcp://sim:1", timeout=20)
    member = current().member
    while not member.ended.done:
        time.sleep(0.1)
    world.close()
    return member.orphaned is None


def visits(seed: int, size: int | None = None) -> None:
    told: list[str] = []
    with SimCluster(seed) as cluster:
        for rank in range(3):
            cluster.start(resident, rank, told, size, name=f"w{rank}")
        guests = [cluster.start(guest, 0.3 + 0.1 * n, name=f"guest{n}") for n in range(2)]
        dying = cluster.start(dying_guest, 1.0, name="dying")
        cluster.at(8.0, dying.kill)
        lingering = [cluster.start(lingering_guest, name="lingering")] if size is not None else []
        cluster.run(limit=300)
        assert all(one.value for one in lingering), seed
        assert all(one.value >= 3 for one in guests), seed
    assert told == [], seed


@pytest.mark.parametrize("size", [None, 3])
def test_guests_come_and_go_and_die_without_anybody_noticing(size: int | None) -> None:
    for seed in range(3):
        visits(seed, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 3])
def test_guests_over_many_seeds(size: int | None) -> None:
    for seed in range(100, 140):
        visits(seed, size)
