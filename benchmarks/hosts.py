"""What large worlds would meet: ``python -m benchmarks.hosts`` counts messages and bytes in simulated worlds.

Each worker is on a host of its own, and all that is above sockets is the real thing. What is counted is what the
library sends by itself: while a world comes about, in a minute in which nobody does anything, when a worker is lost,
when one joins or leaves, at the end. ZeroMQ's heartbeats are not among it: `heartbeats` works those out.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import actorrpc as rpc
from actorrpc.runtime.peers import Standing
from actorrpc.testing import SimCluster, SimProcess
from actorrpc.wire.lookout import PING

if TYPE_CHECKING:
    from actorrpc.runtime.peers import Record
    from actorrpc.testing.network import SimTransport
    from actorrpc.wire.envelope import Frame

SIZES, FEW = (16, 64, 256, 1000), (16, 64)
IDLE_SECONDS = 60.0
_PATIENCE = 600.0
_ALL_LEAVE_UP_TO = 64
"""Each tells all others then, which takes minutes to simulate for many."""


@dataclass
class Count:
    """What was sent in one phase.

    Attributes:
        workers: how many there were.
        phase: which.
        messages, kilobytes: all that was sent together.
        of_rank_0: how many messages rank 0 sent and had.
        of_another: how many another worker sent and had, the one that had most.
        ways: how many others a worker other than rank 0 has a way to afterwards, the one that has most.
        seconds: on the virtual clock, in which no step takes more than 20 us.
    """

    workers: int
    phase: str
    messages: int
    kilobytes: float
    of_rank_0: int
    of_another: int
    ways: int
    seconds: float


def heartbeats(links: int, timeout: float = 10.0) -> float:
    """Returns how many pings and answers a second a worker sends and has, together.

    Arguments:
        links: with how many it is connected; a connection each way, and each carries pings of the side that listens.
        timeout: `heartbeat_timeout`, in seconds.
    """
    return links * 2 * 2 / (PING * timeout)


class Meter:
    """Counts what the network of a cluster carries."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._sent: Counter[str] = Counter()
        """Messages, by who sent or had them."""
        self._bytes = self._messages = 0
        self.counts: list[Count] = []
        carry = cluster.network.carry

        def counted(source: SimTransport, peer: int, frames: Sequence[Frame]) -> None:
            self._messages += 1
            self._bytes += sum(memoryview(frame).nbytes for frame in frames)
            for address in (source.address, source.ways[peer]):
                self._sent[_name(address)] += 1
            carry(source, peer, frames)

        cluster.network.carry = counted  # type: ignore[method-assign]
        tell = cluster._in

        def told(seconds: float, who: SimProcess, record: Record, *more: Any) -> None:
            if record.id in _ways(who):  # a socket hears of those only with whom it is connected
                tell(seconds, who, record, *more)

        cluster._in = told  # type: ignore[method-assign, assignment]

    @contextmanager
    def phase(self, workers: int, name: str) -> Iterator[None]:
        """Counts what is sent in the block."""
        self._sent.clear()
        self._bytes = self._messages = 0
        begun = self._cluster.now
        yield
        others = [number for who, number in self._sent.items() if who != "w0"]
        ways = [len(_ways(process)) for process in self._cluster.processes if process.name != "w0" and process.alive]
        self.counts.append(
            Count(
                workers, name, self._messages, self._bytes / 1000, self._sent["w0"], max(others, default=0),
                max(ways, default=0), self._cluster.now - begun,
            )
        )  # fmt: skip


def _name(address: str) -> str:
    return address.rsplit("/", 1)[1].split(".")[0]


def _ways(process: SimProcess) -> set[int]:
    return {way for session in process.sessions for way in session.worker.transport.ways if way >= 0}  # type: ignore[attr-defined]


class _Crowd:
    """Processes that join, and leave when they are told."""

    def __init__(self, cluster: SimCluster, world_size: int | None) -> None:
        self._cluster, self._size = cluster, world_size
        self.joined: set[int] = set()
        self.dismissed: set[int] = set()
        self.processes: dict[int, SimProcess] = {}

    def start(self, *ranks: int) -> None:
        """Starts some."""
        for rank in ranks:
            self.processes[rank] = self._cluster.start(self._live, rank, name=f"w{rank}", host=f"h{rank}")

    def _live(self, rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=self._size)
        self.joined.add(rank)
        while rank not in self.dismissed:
            time.sleep(IDLE_SECONDS / 6)
        rpc.shutdown()

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until something holds."""
        self._cluster.run_until(condition, _PATIENCE)

    def know(self, rank: int, standing: Standing, but: int = -1) -> bool:
        """Returns whether all who are there know how a worker stands."""
        for number, process in self.processes.items():
            if number in (rank, but) or not process.alive:
                continue
            peer = process.sessions[0].worker.peers.get(rank)
            if peer is None or (peer.standing is not standing and not (standing is Standing.LEFT and peer.leaving)):
                return False
        return True


def of_fixed_size(size: int, seed: int = 1) -> list[Count]:
    """A world of fixed size: comes about, does nothing, loses a worker, ends."""
    with SimCluster(seed) as cluster:
        meter, crowd = Meter(cluster), _Crowd(cluster, size)
        with meter.phase(size, "begins"):
            crowd.start(*range(size))
            crowd.until(lambda: len(crowd.joined) == size)
        _let_pass(cluster, 2.0)
        with meter.phase(size, "idle, a minute"):
            _let_pass(cluster, IDLE_SECONDS)
        with meter.phase(size, "one is lost"):
            crowd.processes[size - 1].kill()
            crowd.until(lambda: crowd.know(size - 1, Standing.LOST))
            _let_pass(cluster, 2.0)
        crowd.dismissed.update(range(size))
        with meter.phase(size, "ends"):
            cluster.run(_PATIENCE)
    return meter.counts


def elastic(size: int, seed: int = 1) -> list[Count]:
    """An elastic world: workers come all at once, one more joins, one leaves; then all, where they are few."""
    with SimCluster(seed) as cluster:
        meter, crowd = Meter(cluster), _Crowd(cluster, None)
        crowd.start(0)
        crowd.until(lambda: len(crowd.joined) == 1)
        with meter.phase(size, "elastic: all join"):
            crowd.start(*range(1, size - 1))
            crowd.until(lambda: len(crowd.joined) == size - 1)
        _let_pass(cluster, 10.0)
        with meter.phase(size, "elastic: one joins"):
            crowd.start(size - 1)
            crowd.until(lambda: len(crowd.joined) == size)
        _let_pass(cluster, 10.0)
        with meter.phase(size, "elastic: one leaves"):
            crowd.dismissed.add(size - 1)
            crowd.until(lambda: not crowd.processes[size - 1].alive)
            _let_pass(cluster, 2.0)
        if size <= _ALL_LEAVE_UP_TO:
            crowd.dismissed.update(range(size))
            with meter.phase(size, "elastic: all leave"):
                cluster.run(_PATIENCE)
    return meter.counts


def _let_pass(cluster: SimCluster, seconds: float) -> None:
    end = cluster.now + seconds
    cluster.run_until(lambda: cluster.now >= end, seconds + 1)


def table(counts: Sequence[Count]) -> str:
    """Returns the counts as a table."""
    lines = [f"{'workers':>8}  {'phase':22}{'messages':>10}{'kB':>12}{'rank 0':>9}{'another':>9}{'its ways':>9}"]
    lines += [
        f"{c.workers:>8,}  {c.phase:22}{c.messages:>10,}{c.kilobytes:>12,.0f}{c.of_rank_0:>9,}{c.of_another:>9,}"
        f"{c.ways:>9,}"
        for c in sorted(counts, key=lambda c: list(dict.fromkeys(c.phase for c in counts)).index(c.phase))
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description="What large worlds would meet.")
    parser.add_argument("--size", action="append", type=int, metavar="N", help=f"of the world (default: {SIZES})")
    parser.add_argument("--quick", action="store_true", help=f"only {FEW}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    logging.getLogger("actorrpc").setLevel(logging.ERROR)  # each tells whom it lost
    counts: list[Count] = []
    for size in options.size or (FEW if options.quick else SIZES):
        if size < 3:
            parser.error("--size must be at least 3")
        for world in (of_fixed_size, elastic):
            begun = time.monotonic()
            counts += world(size)
            print(f"{world.__name__}, {size}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    print(table(counts))
    print()
    for size in dict.fromkeys(count.workers for count in counts):
        beats = f"{heartbeats(size - 1):,.0f}; at another worker: {heartbeats(1):.0f}"
        print(f"heartbeats a second at rank 0 of {size:,}: {beats}")
    if options.json:
        told: list[dict[str, Any]] = [asdict(count) for count in counts]
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
