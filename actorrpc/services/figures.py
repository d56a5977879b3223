"""How much each worker has to do: what `actorrpc top` shows.

Calls, messages and bytes are counted in any case. How long calls take is measured only while somebody looks on: from
the first question until nobody has asked for a while.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import FIGURES
from actorrpc.services.objects import Objects
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker

BOUNDS = tuple(1e-5 * 2 ** (i / 4) for i in range(97))
"""The upper bounds, in seconds, of the classes in which times are counted: from 10 microseconds to 168 s. What takes
longer is in one more class.
"""
_WATCHED_SECONDS = 60.0
"""For how long times are measured after the last question."""
_MOST = 10
"""So many actors of a worker are told of."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class ActorLoad:
    """An actor with work to do.

    Attributes:
        name: the actor, in words.
        depth: how many messages wait in its mailbox.
        running: how many are in progress.
    """

    name: str
    depth: int
    running: int


@dataclass(frozen=True)
class WorkerFigures:
    """One worker at one moment. Counts are of its whole life, but for times; house-keeping is left out of calls.

    Attributes:
        name, role, index, rank, host, pid, incarnation: who it is; `role` is "" where it was not launched in one.
        at: when this was, in seconds on a clock of its own.
        uptime: seconds since it was made.
        served: calls and tells that came to it.
        sent: calls and tells that it sent.
        bytes_in, bytes_out: how large all messages from and to others were, in bytes.
        times: how many calls took how long from their coming until they were answered, in the classes of BOUNDS; those
            that were answered while somebody looked on.
        seconds: how long these took together.
        pending: calls of its own that are not answered.
        running: handlers that run, and do not wait.
        queued: handlers that wait for a thread.
        waiting: messages that wait in the mailboxes of its actors.
        actors: how many actors it has.
        loads: those of them that have most to do; not more than ten.
        memory: resident memory of its process, in bytes; None where the system does not say.
        lost: the workers that it has lost, and why.
    """

    name: str
    role: str
    index: int
    rank: int
    host: str
    pid: int
    incarnation: int
    at: float
    uptime: float
    served: int
    sent: int
    bytes_in: int
    bytes_out: int
    times: tuple[int, ...]
    seconds: float
    pending: int
    running: int
    queued: int
    waiting: int
    actors: int
    loads: tuple[ActorLoad, ...] = ()
    memory: int | None = None
    lost: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """What a worker did between two moments.

    Attributes:
        served, sent: calls and tells, a second.
        bytes_in, bytes_out: bytes, a second.
        p50, p99: how long calls took, in seconds, at half and at 99 of 100 of them; None where none was answered.
    """

    served: float
    sent: float
    bytes_in: float
    bytes_out: float
    p50: float | None
    p99: float | None


@dataclass(frozen=True)
class WorldFigures:
    """All workers of a world.

    Attributes:
        workers: those that answered, by rank.
        silent: those that did not in time, and why.
        lost: those that were lost, and have not come again, and why.
    """

    workers: list[WorkerFigures]
    silent: dict[str, str]
    lost: dict[str, str]


class _Meter:
    """Counts how long calls take. See `runtime.message.Meter`."""

    def __init__(self, worker: Worker) -> None:
        self._now = worker.clock.now
        self.times = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def answered(self, message: Message) -> None:
        # Threads may do so at the same time. None is put aside within one of these lines, as long as there is a GIL;
        # without one a count may be lost, which nobody would see.
        took = self._now() - message.came
        self.times[bisect_left(BOUNDS, took)] += 1
        self.seconds += took


class Figures:
    """A worker's part in it.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._meter = _Meter(worker)
        self._began = worker.clock.now()
        self._asked = 0.0
        worker.services[Figures] = self
        worker.cells[FIGURES] = ServiceCell(worker, Lane.CONTROL, self._handle)

    def _handle(self, message: Message) -> None:
        message.reply(self.here())

    def here(self) -> WorkerFigures:
        """Returns how this worker stands, and has times measured for a while."""
        self._watch()
        worker, meter, record = self._worker, self._meter, self._worker.record
        now, peers = worker.clock.now(), list(worker.peers.values())
        objects: Objects = worker.services[Objects]
        loads = [ActorLoad(cell.what, len(cell.mailbox), cell.mailbox.in_progress) for cell in objects.mailboxes()]
        busy = sorted((load for load in loads if load.depth or load.running), key=_weight, reverse=True)
        counts, itself = worker.crew.statistics(), worker.outbox.to_itself
        return WorkerFigures(
            record.name, record.role, record.index, record.rank, record.host, record.pid, record.incarnation,
            now, now - self._began,
            served=sum(peer.heard for peer in peers) + itself,
            sent=sum(peer.told for peer in peers) + itself,
            bytes_in=sum(peer.bytes_in for peer in peers),
            bytes_out=sum(peer.bytes_out for peer in peers),
            times=tuple(meter.times),
            seconds=meter.seconds,
            pending=len(worker.calls.pending),
            running=counts["running"],
            queued=counts["queued"],
            waiting=sum(load.depth for load in loads),
            actors=len(loads),
            loads=tuple(busy[:_MOST]),
            memory=_memory(),
            lost=_lost(worker),
        )  # fmt: skip

    def _watch(self) -> None:
        self._asked = self._worker.clock.now()
        if self._worker.meter is None:
            self._worker.meter = self._meter
            self._worker.keeper.after(_WATCHED_SECONDS, self._look)

    def _look(self) -> None:
        left = self._asked + _WATCHED_SECONDS - self._worker.clock.now()
        if left > 0:
            self._worker.keeper.after(left, self._look)
        else:
            self._worker.meter = None


def gather(worker: Worker, timeout: float) -> WorldFigures:
    """Asks all workers of a world, from any of them or from a guest. Guests are left out.

    Arguments:
        worker: who asks.
        timeout: seconds that they get to answer.
    """
    calls, silent = [], dict[str, str]()
    found = [] if worker.record.guest else [worker.services[Figures].here()]
    for number, peer in sorted(worker.peers.items()):
        if number == worker.id or peer.standing is not Standing.MEMBER or peer.record.guest:
            continue
        try:
            call = worker.request(number, FIGURES, None, timeout, "a question for its figures", flags=Flag.CONTROL)
            calls.append((peer, call))
        except ActorRPCError as e:
            silent[peer.record.name] = str(e)
    for peer, call in calls:
        try:
            found.append(worker.wait_result(call))
        except ActorRPCError as e:
            if peer.standing is Standing.MEMBER:
                silent[peer.record.name] = str(e)
    found.sort(key=lambda figures: figures.rank)
    names = {figures.name for figures in found} | silent.keys()
    lost = _lost(worker)
    for figures in found:
        lost.update(figures.lost)
    return WorldFigures(found, silent, {name: why for name, why in lost.items() if name not in names})


def rates(before: WorkerFigures, after: WorkerFigures) -> Rates | None:
    """Returns what a worker did between two moments; None where these are of two workers of one name, or the same."""
    seconds = after.at - before.at
    if before.incarnation != after.incarnation or seconds <= 0:
        return None
    times = [b - a for a, b in zip(before.times, after.times, strict=True)]
    return Rates(
        (after.served - before.served) / seconds,
        (after.sent - before.sent) / seconds,
        (after.bytes_in - before.bytes_in) / seconds,
        (after.bytes_out - before.bytes_out) / seconds,
        quantile(times, 0.5),
        quantile(times, 0.99),
    )


def quantile(times: Sequence[int], share: float) -> float | None:
    """Returns below which time, in seconds, a share of the counted ones lies, about; None where there are none.

    Arguments:
        times: counts in the classes of BOUNDS.
        share: from 0 to 1.
    """
    wanted, seen = share * sum(times), 0
    for i, count in enumerate(times):
        if count and seen + count >= wanted:
            if i == len(BOUNDS):
                return BOUNDS[-1]
            return BOUNDS[i] * 2 ** ((max(0.0, wanted - seen) / count - 1) / 4)
        seen += count
    return None


def _weight(load: ActorLoad) -> tuple[int, int]:
    return load.depth, load.running


def _lost(worker: Worker) -> dict[str, str]:
    peers = list(worker.peers.values())
    return {p.record.name: p.reason for p in peers if p.standing is Standing.LOST and not p.record.guest}


def _memory() -> int | None:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # not Linux
        return None
