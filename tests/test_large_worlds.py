"""What a world sends by itself: how it grows with the size, for rank 0 and for others, as docs/performance.md says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

import actorrpc as rpc
from actorrpc.services import porch
from actorrpc.services.descriptors import _EACH
from actorrpc.services.porch import Porch
from actorrpc.testing import Faults, Passing, SimCluster
from actorrpc.testing.cluster import SimStore
from actorrpc.wire.zeromq import ZmqTransport
from benchmarks import hosts
from benchmarks.hosts import Count
from tests.checks import until
from tests.worlds import run_processes

SIZES = (8, 32)


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, int], Count]:
    found = [count for size in SIZES for world in (hosts.of_fixed_size, hosts.elastic) for count in world(size)]
    return {(count.phase, count.workers): count for count in found}


@pytest.mark.parametrize("size", SIZES)
def test_messages_keep_to_their_formulas(counts: dict[tuple[str, int], Count], size: int) -> None:
    others = size - 1
    begins, idle, lost, ends = (counts[p, size] for p in ("begins", "idle, a minute", "one is lost", "ends"))
    assert begins.of_another <= 6
    assert begins.messages <= 5 * others
    assert idle.messages == 0
    assert lost.of_rank_0 <= 2 * others + 4, "all are told, and told again"
    assert lost.of_another <= 4
    assert ends.of_rank_0 == ends.messages == 6 * (others - 1)  # one was lost
    comes, joins, leaves = (counts[f"elastic: {p}", size] for p in ("all join", "one joins", "one leaves"))
    assert comes.messages <= 5 * others
    assert joins.messages <= 2 * others + 6
    assert joins.of_another <= 8
    assert leaves.of_another == 3 * others
    assert leaves.messages <= 4 * others
    assert all(count.ways <= 1 for count in counts.values())


def test_the_end_of_a_world_takes_as_many_bytes_for_each_worker_however_many_there_are(
    counts: dict[tuple[str, int], Count],
) -> None:
    few, many = (counts["ends", size].kilobytes / (size - 2) for size in SIZES)  # one was lost, one is rank 0
    assert many < 1.1 * few


def test_rank_0_has_many_heartbeats_and_others_few() -> None:
    assert hosts.heartbeats(1) == 2
    assert hosts.heartbeats(1000) == 2000


# -- the list of a large world


def made_of(world_size: int | None) -> Any:
    def program(rank: int) -> int:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
        rpc.shutdown()
        return rank

    return program


def test_a_long_answer_is_not_sent_again_while_it_is_under_way() -> None:
    now = [10.0]
    sent: list[tuple[int, int]] = []
    worker: Any = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: now[0]), greet=lambda way, data: sent.append((way, len(data)))
    )
    door = Porch(worker, "session", lambda hello, way: None)
    door.send((-2, -3), b"x" * (porch._LONG + 1))
    door.send((-4,), b"x")
    assert [way for way in (-2, -3, -4) if door.is_under_way(way)] == [-2, -3]
    now[0] += porch._AGAIN_SECONDS
    assert not door.is_under_way(-2)
    assert len(sent) == 3


@pytest.mark.parametrize("elastic", [False, True])
def test_a_long_answer_that_was_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch, elastic: bool) -> None:
    monkeypatch.setattr(porch, "_LONG", 600)  # so that the list of three workers is long
    long: list[Passing] = []

    def first_long_one(passing: Passing) -> bool:
        if passing.size > 600 and passing.to < -1:
            long.append(passing)
            return len(long) == 1
        return False

    with SimCluster(1, faults=Faults(1).drop(1.0, kind="greeting", when=first_long_one)) as cluster:
        for rank in range(3):
            cluster.start(made_of(None if elastic else 3), rank, host=f"h{rank}", name=f"w{rank}")
        cluster.run(60.0)
    assert [process.value for process in cluster.processes] == [0, 1, 2]
    assert len(long) == (1 if elastic else 3)  # elastic: the first has left meanwhile, and the list is shorter


def test_a_long_answer_that_takes_long_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porch, "_LONG", 600)
    long: list[Passing] = []

    def is_long(passing: Passing) -> bool:
        if passing.size > 600 and passing.to < -1:
            long.append(passing)
        return passing.size > 600

    with SimCluster(2, faults=Faults(2).delay(1.0, seconds=1.9, kind="greeting", when=is_long)) as cluster:
        for rank in range(3):
            cluster.start(made_of(3), rank, host=f"h{rank}", name=f"w{rank}")
        cluster.run(60.0)
    assert len(long) == 2


def test_who_is_answered_leaves_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Any = SimStore.read
    reads = 0

    def counted(self: SimStore, deadline: float) -> bytes | None:
        nonlocal reads
        reads += 1
        found: bytes | None = read(self, deadline)
        return found

    monkeypatch.setattr(SimStore, "read", counted)
    with SimCluster(1) as cluster:
        for rank in range(4):
            cluster.start(made_of(5), rank, host=f"h{rank}", name=f"w{rank}")
        cluster.run_until(lambda: cluster.now >= 20.0)
        begun = reads
        cluster.run_until(lambda: cluster.now >= 40.0)
        assert reads - begun <= 3 * 5  # three wait, and ask twice a second
        cluster.start(made_of(5), 4, host="h4", name="w4")
        cluster.run(60.0)


# -- descriptors


def _open_for_a_while() -> Iterator[int]:
    for _ in range(50):
        yield len(os.listdir("/proc/self/fd"))
        time.sleep(0.01)


def of_peers(rank: int, number: int) -> int:
    """Returns how many descriptors that many peers by tcp take, where both ends of their connections are here."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(number)]
        transport = ZmqTransport(ipc=False)
        stack.callback(transport.close)
        transport.attend(0, os.getpid())  # so that the thread that looks out is there
        before = min(_open_for_a_while())  # that thread opens files, and closes them
        for peer in range(1, number + 1):
            transport.dial(peer, [f"tcp://127.0.0.1:{port}"])
        for dealer in dealers:
            dealer.connect(transport.endpoints[-1])
            dealer.send(b"x")
        for _dealer in dealers:
            assert transport.receive(30.0) is not None
        expected = number * (_EACH - 1 + 2)
        with contextlib.suppress(AssertionError):
            until(lambda: len(os.listdir("/proc/self/fd")) - before == expected, 30)
        return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
def test_a_peer_of_another_host_takes_one_descriptor_less_than_is_allowed_for() -> None:
    (outcome,) = run_processes(of_peers, 1, args=(8,), timeout=90)  # where nothing else comes and goes
    assert outcome.value == 8 * (_EACH - 1 + 2), outcome
