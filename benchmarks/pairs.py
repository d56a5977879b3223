"""Pairs of processes that run one program under one library or another, and what their figures come to."""

import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

WARM_UP = 200
PATIENCE = 300.0  # seconds after which a pair of processes is given up

Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A line of the table: a time (less is better) or a rate (more is better)."""

    key: str
    title: str
    unit: str

    def ahead(self, theirs: float, ours: float) -> float:
        return ours / theirs if self.unit == "calls/s" else theirs / ours


def median_us(call: Callable[[], object], times_called: int, warm_up: int = WARM_UP) -> float:
    """Returns the median of what a call takes, in microseconds."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(times_called):
        begun = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1000


def child(
    run: Callable[[str, int, int], Figures], library: str, rank: int, port: int, results: "Connection[Any, Any]"
) -> None:
    try:
        results.send((run(library, rank, port), None))
    except BaseException:
        results.send(({}, traceback.format_exc()))
        raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_pair(run: Callable[[str, int, int], Figures], library: str) -> Figures:
    """Runs both ranks in processes of their own, and returns the figures that they found."""
    spawn, port, figures = get_context("spawn"), free_port(), {}
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it
    pairs = []
    for rank in range(2):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=child, args=(run, library, rank, port, theirs), name=f"{library} rank {rank}")
        process.start()
        theirs.close()
        pairs.append((process, ours))
    try:
        ends = time.monotonic() + PATIENCE
        for process, results in pairs:
            if not results.poll(max(0.0, ends - time.monotonic())):
                raise SystemExit(f"{process.name} has not finished in {PATIENCE:.0f} s")
            try:
                found, error = results.recv()
            except EOFError:
                raise SystemExit(f"{process.name} died without a word") from None
            if error is not None:
                raise SystemExit(f"{process.name} failed:\n{error}")
            figures.update(found)
        for process, _ in pairs:
            process.join(max(0.0, ends - time.monotonic()))
    finally:
        for process, results in pairs:
            results.close()
            if process.is_alive():
                process.kill()
            process.join()
    return figures


def run_both(number: int, run: Callable[[str, int, int], Figures], turns: list[tuple[list[Figures], str]]) -> None:
    """Runs a round of several libraries, in turn or the other way round, and adds their figures to their lists."""
    for rounds, library in turns if number % 2 == 0 else reversed(turns):
        rounds.append(run_pair(run, library))


def medians(rounds: list[Figures]) -> Figures:
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
