"""How things grow: ``python -m benchmarks.scale`` writes curves as JSON and pictures into docs/assets.

Latency and throughput from 2 to 32 workers on one host, with 1 to 10,000 actors in one worker, with up to 100,000 live
references, and from 1 to 64 threads that call. Each curve should be flat, or be explained in docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import actorrpc as rpc
from benchmarks.actors import CounterActor
from benchmarks.memory import census
from benchmarks.pairs import OURS, Lane, Measures, Team, latency, prepare, rpc_world, say
from benchmarks.rows import machine
from benchmarks.traffic import Counter, noop

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
BURST = 500
SERIES = {
    "workers": ("workers in the world", (2, 4, 8, 16, 32), (2, 4)),
    "actors": ("actors in one worker", (1, 10, 100, 1000, 10_000), (1, 10, 100)),
    "references": ("live references to one worker", (0, 100, 1000, 10_000, 100_000), (0, 100, 1000)),
    "threads": ("threads that call", (1, 2, 4, 8, 16, 32, 64), (1, 4)),
}
"""By name: what is varied, over which values, and over which with --quick."""


@dataclass
class Point:
    """What was measured at one place of a curve.

    Attributes:
        at: the place.
        latency: the median of a call, in microseconds.
        rate: calls a second.
        memory: MB of the worker that is called, beyond what it had at the first point.
    """

    at: int
    latency: float
    rate: float
    memory: float = 0.0


def _burst(calls: Sequence[Callable[[], Any]]) -> Callable[[float], float]:
    """Returns what measures how many calls a second there are of those that are begun by turns, many in flight."""

    def measure(seconds: float) -> float:
        turns = itertools.cycle(calls)
        made, begun = 0, time.perf_counter()
        while not made or time.perf_counter() < begun + seconds:
            for future in [next(turns)() for _ in range(BURST)]:
                future.wait()
            made += BURST
        return made / (time.perf_counter() - begun)

    return measure


def _point(at: int, one: Sequence[Callable[[], Any]], many: Sequence[Callable[[], Any]], seconds: float) -> Point:
    """Measures single calls and bursts, which go around the same things."""
    turns = itertools.cycle(one)
    latency(lambda: next(turns)())(seconds / 6)  # to warm up
    latencies = [latency(lambda: next(turns)())(seconds / 3) for _ in range(3)]
    rates = [_burst(many)(seconds / 3) for _ in range(3)]
    return Point(at, statistics.median(latencies), statistics.median(rates))


# The series, as measures of rank 0.


def to_all(size: int, seconds: float) -> Point:
    """One worker calls all others, by turns."""
    names = [f"w{i}" for i in range(1, size)]
    one = [lambda name=name: rpc.rpc_sync(name, noop) for name in names]
    many = [lambda name=name: rpc.rpc_async(name, noop) for name in names]
    return _point(size, one, many, seconds)


def _grown(values: Sequence[int], make: Callable[[], Any], seconds: float) -> list[Point]:
    """Has more and more things made on w1, and measures calls to them."""
    things: list[Any] = []
    found: list[Point] = []
    first = rpc.rpc_sync("w1", census)["memory"]
    for value in values:
        while len(things) < value:
            fresh = [make() for _ in range(min(BURST, value - len(things)))]
            for thing in fresh:
                thing._get_future().wait()
            things += fresh
        called = things[:: max(1, len(things) // 1000)] or [make()]
        one = [lambda thing=thing: thing.rpc_sync().bump() for thing in called]
        many = [lambda thing=thing: thing.rpc_async().bump() for thing in called]
        point = _point(value, one, many, seconds)
        point.memory = rpc.rpc_sync("w1", census)["memory"] - first
        found.append(point)
    return found


def of_actors(values: Sequence[int], seconds: float) -> list[Point]:
    """Actors in one worker, all of which are called."""
    return _grown(values, lambda: CounterActor.spawn("w1"), seconds)


def of_references(values: Sequence[int], seconds: float) -> list[Point]:
    """References to objects of one worker, all of which live."""
    return _grown(values, lambda: rpc.remote("w1", Counter), seconds)


def of_threads(values: Sequence[int], seconds: float) -> list[Point]:
    """Threads of one process that call one worker, each for itself."""
    found = []
    for value in values:
        times: list[list[int]] = [[] for _ in range(value)]
        begin = threading.Barrier(value + 1)
        end = [0.0]

        def call(own: list[int], begin: threading.Barrier = begin, end: list[float] = end) -> None:
            begin.wait()
            while time.perf_counter() < end[0]:
                begun = time.perf_counter_ns()
                rpc.rpc_sync("w1", noop)
                own.append(time.perf_counter_ns() - begun)

        threads = [threading.Thread(target=call, args=(own,)) for own in times]
        for thread in threads:
            thread.start()
        begun = time.perf_counter()
        end[0] = begun + seconds
        begin.wait()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - begun
        every = [each for own in times for each in own]
        found.append(Point(value, statistics.median(every) / 1000, len(every) / took))
    return found


@contextlib.contextmanager
def scaling(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Gives the series; those with "quick" in their names take fewer values."""
    with rpc_world(lane, rank, port):
        measures: dict[str, Callable[[float], Any]] = {"workers": lambda seconds: to_all(lane.size, seconds)}
        for name, grow in (("actors", of_actors), ("references", of_references), ("threads", of_threads)):
            _, values, few = SERIES[name]
            measures[name] = lambda seconds, grow=grow, values=values: grow(values, seconds)  # type: ignore[misc]
            measures[f"{name} quick"] = lambda seconds, grow=grow, few=few: grow(few, seconds)  # type: ignore[misc]
        yield measures if rank == 0 else {}


def curves(names: Sequence[str], seconds: float, quick: bool) -> dict[str, list[Point]]:
    """Measures series, each in a world of its own.

    Raises:
        SystemExit: a worker has failed or died.
    """
    found: dict[str, list[Point]] = {}
    for name in names:
        title, values, few = SERIES[name]
        say(f"{name}: {title}")
        if name == "workers":
            found[name] = []
            for size in few if quick else values:
                with Team(Lane("ours", scaling, OURS, size)) as team, team.going_on():
                    found[name].append(team.have(name, seconds))
            continue
        with Team(Lane("ours", scaling, OURS)) as team, team.going_on():
            found[name] = team.have(f"{name} quick" if quick else name, seconds)
    return found


def table(found: dict[str, list[Point]]) -> str:
    """Returns the curves as a table."""
    lines = []
    for name, points in found.items():
        lines.append(f"{SERIES[name][0]:>32}{'us a call':>12}{'calls/s':>12}{'MB':>10}")
        lines += [f"{p.at:>32,}{p.latency:>12,.0f}{p.rate:>12,.0f}{p.memory:>10,.1f}" for p in points]
        lines.append("")
    return "\n".join(lines)


def draw(name: str, points: Sequence[Point], folder: Path) -> Path:
    """Draws one series; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    places = range(len(points))  # equal steps, since the values are about equal factors apart, and one may be 0
    for axes, title, values in (
        (left, "median of a call, us", [p.latency for p in points]),
        (right, "calls a second", [p.rate for p in points]),
    ):
        axes.plot(places, values, "o-")
        axes.set(title=title, xlabel=SERIES[name][0])
        axes.set_xticks(places, [f"{p.at:,}" for p in points])
        axes.set_ylim(0, 1.1 * max(values))
        axes.grid(alpha=0.3)
    path = folder / f"scale-{name}.png"
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="How things grow.")
    parser.add_argument("--only", action="append", choices=SERIES, metavar="SERIES", help=f"of {', '.join(SERIES)}")
    parser.add_argument("--seconds", type=float, default=3, help="for each place, latency and rate (default: 3)")
    parser.add_argument("--quick", action="store_true", help="fewer places, for a tenth of the time")
    parser.add_argument("--into", type=Path, default=ASSETS, metavar="FOLDER", help="default: docs/assets")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error("--seconds must be above 0")
    prepare()
    names = list(options.only or SERIES)
    found = curves(names, options.seconds / 10 if options.quick else options.seconds, options.quick)
    print(table(found))
    options.into.mkdir(parents=True, exist_ok=True)
    written = options.into / "scale.json"
    record: dict[str, Any] = json.loads(written.read_text()) if options.only and written.exists() else {}
    record |= {"machine": machine()} | {name: [asdict(p) for p in points] for name, points in found.items()}
    written.write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        say("matplotlib is not installed; no pictures are drawn")
        return 0
    for name, points in found.items():
        say(f"drew {draw(name, points, options.into)}")
    return 0


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.scale import main as main_by_name

    sys.exit(main_by_name())
