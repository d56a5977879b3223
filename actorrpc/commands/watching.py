"""A world's figures, looked at again and again; as data, and as lines of a screen."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from actorrpc.runtime.peers import Standing
from actorrpc.services.figures import Rates, WorldFigures, gather, rates

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.services.figures import WorkerFigures
    from actorrpc.session import Session

NO_RATES = Rates(0.0, 0.0, 0.0, 0.0, None, None)
_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A world at one moment, and what it did since the one before.

    Attributes:
        time: when, in seconds since 1970.
        world: its figures.
        rates: by name; none for workers that are seen for the first time.
    """

    time: float
    world: WorldFigures
    rates: dict[str, Rates]

    def as_json(self, address: str) -> dict[str, Any]:
        """Returns it as plain data; `address` is that of the world."""
        workers = []
        for figures in self.world.workers:
            told = dataclasses.asdict(figures)
            for name in ("at", "times", "lost"):
                del told[name]
            own = self.rates.get(figures.name, NO_RATES)
            told["loads"] = list(told["loads"])
            workers.append({**told, "rates": dataclasses.asdict(own)})
        return {
            "address": address, "time": self.time, "workers": workers, "silent": self.world.silent,
            "lost": self.world.lost,
        }  # fmt: skip


class Watcher:
    """Looks at a world from within.

    Arguments:
        session: the guest's.
        timeout: seconds that workers get to answer.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self._session, self._timeout = session, timeout
        self._before: dict[str, WorkerFigures] = {}

    def look(self) -> Snapshot:
        """Asks all workers."""
        world = gather(self._session.worker, self._timeout)
        found = {}
        for figures in world.workers:
            before = self._before.get(figures.name)
            between = rates(before, figures) if before is not None else None
            if between is not None:
                found[figures.name] = between
        self._before = {figures.name: figures for figures in world.workers}
        return Snapshot(time.time(), world, found)

    def pause(self, seconds: float) -> None:
        """Waits a while, or until the world has told that it ends."""
        worker = self._session.worker
        worker.wait(self._session.member.ended, worker.clock.now() + seconds, lead=False)

    def end(self) -> tuple[str, bool] | None:
        """Returns how the world has ended, in words, and whether that was in order; None while it goes on."""
        member = self._session.member
        peers = [peer for peer in list(self._session.worker.peers.values()) if not peer.record.guest]
        if member.ended.done and member.orphaned is None:
            return "has ended", True
        if member.ended.done or not any(peer.standing is Standing.MEMBER for peer in peers):
            gone = member.orphaned or max(peers, key=lambda peer: peer.standing is Standing.LOST)
            if gone.standing is Standing.LOST:
                return f"has ended: {gone.record} was lost: {gone.reason}", False
            return "has ended", True
        return None


class Line(NamedTuple):
    """A line of the screen, and what kind of line it is: "title", "head", "row", "silent", "lost" or "note"."""

    text: str
    kind: str = "row"


class _Column(NamedTuple):
    """A column of the table of workers.

    Attributes:
        title: its head.
        cell: what it has for a worker.
        left: whether it is flush left.
        keep: how important it is: where the screen is narrow, those with the smallest number go first.
    """

    title: str
    cell: Callable[[WorkerFigures, Rates], str]
    left: bool = False
    keep: int = 9


_COLUMNS = (
    _Column("worker", lambda f, r: f.name, left=True, keep=99),
    _Column("host", lambda f, r: f.host, left=True, keep=1),
    _Column("pid", lambda f, r: str(f.pid), keep=2),
    _Column("up", lambda f, r: _time(f.uptime), keep=4),
    _Column("calls/s", lambda f, r: _count(r.served), keep=20),
    _Column("sent/s", lambda f, r: _count(r.sent), keep=12),
    _Column("p50", lambda f, r: _short(r.p50), keep=10),
    _Column("p99", lambda f, r: _short(r.p99), keep=18),
    _Column("waiting", lambda f, r: str(f.waiting + f.queued), keep=19),
    _Column("running", lambda f, r: str(f.running), keep=6),
    _Column("open", lambda f, r: str(f.pending), keep=5),
    _Column("in/s", lambda f, r: _size(r.bytes_in), keep=8),
    _Column("out/s", lambda f, r: _size(r.bytes_out), keep=7),
    _Column("memory", lambda f, r: "?" if f.memory is None else _size(f.memory), keep=17),
)

SORTS: dict[str, Callable[[WorkerFigures, Rates], Any]] = {
    "rank": lambda f, r: f.rank,
    "calls": lambda f, r: -r.served,
    "p99": lambda f, r: -(r.p99 or 0.0),
    "waiting": lambda f, r: -(f.waiting + f.queued),
    "memory": lambda f, r: -(f.memory or 0),
}


def lines_of(
    shot: Snapshot, address: str, width: int, height: int | None = None, sort: str = "rank", foot: str = ""
) -> list[Line]:
    """Returns the lines that show a snapshot: who is lost or does not answer, the workers, and their busiest actors.

    Arguments:
        shot: what to show.
        address: that of the world.
        width: of the screen, in characters.
        height: of the screen, in lines; None: as many as it takes.
        sort: by what; a key of SORTS.
        foot: the last line.
    """
    top = [Line(text, "title") for text in _titles(shot, address, width)]
    faults = [Line(f"{name} is lost: {why}", "lost") for name, why in sorted(shot.world.lost.items())]
    faults += [Line(f"{name} does not answer: {why}", "silent") for name, why in sorted(shot.world.silent.items())]
    key = SORTS[sort]
    workers = sorted(shot.world.workers, key=lambda f: (key(f, shot.rates.get(f.name, NO_RATES)), f.rank))
    table = _table(workers, shot.rates, width)
    actors = _actors(workers, width)
    bottom = [Line(foot, "note")] if foot else []
    if height is not None:
        room = height - len(top) - len(bottom)
        faults = _cut(faults, max(2, room // 3))
        room -= len(faults)
        table = table[:1] + _cut(table[1:], max(1, room - 1 - min(len(actors), room // 3)))
        room -= len(table)
        actors = _cut(actors, room) if room > 2 else []  # a blank line and a head at least
    found = [*top, *faults, *table, *actors, *bottom]
    return [Line(_fitted(line.text, width), line.kind) for line in found]


def _titles(shot: Snapshot, address: str, width: int) -> list[str]:
    world, own = shot.world, list(shot.rates.values())
    roles: dict[str, int] = {}
    for figures in world.workers:
        if figures.role:
            roles[figures.role] = roles.get(figures.role, 0) + 1
    told = ", ".join(f"{number} {role}" for role, number in roles.items())
    number = len(world.workers)
    parts = [f"{number} worker{'s' if number != 1 else ''}" + (f" ({told})" if told else "")]
    parts += [f"{len(world.silent)} silent"] if world.silent else []
    parts += [f"{len(world.lost)} lost"] if world.lost else []
    parts += [f"{_count(sum(r.served for r in own))} calls/s", f"{_size(sum(r.bytes_in for r in own))}/s"]
    clock = time.strftime("%H:%M:%S", time.localtime(shot.time))
    first = _fitted(f"actorrpc top  {address}", max(0, width - len(clock) - 1))
    return [f"{first:<{max(0, width - len(clock))}}{clock}", ", ".join(parts), ""]


def _table(workers: list[WorkerFigures], found: dict[str, Rates], width: int) -> list[Line]:
    cells = [[column.cell(f, found.get(f.name, NO_RATES)) for column in _COLUMNS] for f in workers]
    widths = [max([len(column.title), *(len(row[i]) for row in cells)]) for i, column in enumerate(_COLUMNS)]
    shown = list(range(len(_COLUMNS)))
    while len(shown) > 1 and sum(widths[i] + len(_GAP) for i in shown) - len(_GAP) > width:
        shown.remove(min(shown, key=lambda i: _COLUMNS[i].keep))

    def row(texts: list[str]) -> str:
        return _GAP.join(f"{texts[i]:{'<' if _COLUMNS[i].left else '>'}{widths[i]}}" for i in shown)

    return [Line(row([column.title for column in _COLUMNS]), "head"), *(Line(row(texts)) for texts in cells)]


def _actors(workers: list[WorkerFigures], width: int) -> list[Line]:
    loads = [(load, figures.name) for figures in workers for load in figures.loads]
    if not loads:
        return []
    loads.sort(key=lambda one: (-one[0].depth, -one[0].running))
    texts = [(load.name, name, str(load.depth), str(load.running)) for load, name in loads]
    heads = ("busiest actors", "worker", "waiting", "in progress")
    sizes = [max(len(heads[i]), *(len(row[i]) for row in texts)) for i in range(4)]
    sizes[0] = max(len(heads[0]), min(sizes[0], width - sum(sizes[1:]) - 3 * len(_GAP)))

    def row(one: tuple[str, ...]) -> str:
        first = f"{_fitted(one[0], sizes[0]):<{sizes[0]}}"
        return _GAP.join((first, f"{one[1]:<{sizes[1]}}", f"{one[2]:>{sizes[2]}}", f"{one[3]:>{sizes[3]}}"))

    return [Line(""), Line(row(heads), "head"), *(Line(row(one)) for one in texts)]


def _cut(lines: list[Line], most: int) -> list[Line]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], Line(f"and {len(lines) - most + 1} more", "note")]


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def _count(number: float) -> str:
    if number and number < 10:
        return f"{number:.1f}"
    return f"{number:,.0f}"


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def _time(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"
