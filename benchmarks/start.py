"""How long `init_rpc` takes in worlds of many workers, beside ``torch.distributed.rpc``."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.pairs import (
    ENDING,
    OURS,
    PATIENCE,
    TORCH,
    Lane,
    Plan,
    free_port,
    is_failure,
    join,
    processes_context,
    say,
)
from benchmarks.rows import Result, Row, result_of
from benchmarks.traffic import traffic

SMALL = Row("init 16", "init_rpc, 16 workers", "s", 1.5, 1, group="init")
_TRIES = 2
LATE = 60.0
"""Seconds after which a world that has not begun is given up, and counts as if it had begun then."""
LARGE = Row("init 64", "init_rpc, 64 workers", "s", 1.5, 1, group="init")


def _begin(lane: Lane, rank: int, port: int, pipe: Connection[Any, Any]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rpc: Any = importlib.import_module(lane.library)
    pipe.send("ready")
    pipe.recv()
    begun = time.monotonic()
    join(rpc, lane, rank, port)
    pipe.send((begun, time.monotonic()))
    pipe.recv()
    rpc.shutdown(graceful=False)


def seconds_to_begin(lane: Lane) -> float:
    """Starts a world, ends it, and returns the seconds from the first `init_rpc` begun to the last one done.

    The processes have imported the library and stand ready when the clock starts.

    Returns LATE where they were not enough.

    Raises:
        SystemExit: a process died, or has not even started in time.
    """
    context, port = processes_context(), free_port()
    processes: list[Any] = []
    pipes: list[Connection[Any, Any]] = []

    def everyone(patience: float) -> list[Any] | None:
        left, found, end = set(pipes), [], time.monotonic() + patience
        while left:
            ready = wait(list(left), max(0.0, end - time.monotonic()))
            if not ready:
                return None
            for pipe in ready:
                assert isinstance(pipe, Connection)
                left.discard(pipe)
                try:
                    found.append(pipe.recv())
                except EOFError:
                    raise SystemExit(f"{lane.name}: a worker of {lane.size} died") from None
        return found

    try:
        for rank in range(lane.size):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=_begin, args=(lane, rank, port, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        if everyone(PATIENCE) is None:
            raise SystemExit(f"{lane.name}: {lane.size} processes were not there in {PATIENCE:.0f} s")
        for pipe in pipes:
            pipe.send("go")
        times = everyone(LATE)
        if times is None:
            return LATE
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        end = time.monotonic() + ENDING / 4
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return float(max(done for _, done in times) - min(begun for begun, _ in times))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _of_torch(lane: Lane) -> tuple[float | None, bool]:
    """As `seconds_to_begin`; where a worker dies, says so and tries again, at last by tcp alone.

    Torch's processes connect to each other's Unix sockets all at once, and die where one has too many to let in, as in
    worlds of 48 workers and more on few cores. By tcp they wait.

    Returns the seconds, None where one dies every time, and whether it is by tcp.
    """
    for tried in (*[lane] * _TRIES, replace(lane, tcp=True)):
        try:
            return seconds_to_begin(tried), tried.tcp
        except SystemExit as error:
            if not is_failure(error):
                raise
            say(str(error))
    return None, True


def _beginnings(row: Row, size: int, blocks: int, plan: Plan) -> Result:
    """Compares how long worlds take to begin; blocks in which torch's never did have nothing to be compared with."""
    torch, ours = Lane("torch", traffic, TORCH, size), Lane("ours", traffic, OURS, size)
    pairs: list[tuple[tuple[float | None, bool], float]] = []
    for number in range(plan.rounds):
        say(f"init_rpc of {size} workers: round {number + 1} of {plan.rounds}")
        for block in range(blocks):
            if (number + block) % 2 == 0:
                first = _of_torch(torch)
                pairs.append((first, seconds_to_begin(ours)))
            else:
                second = seconds_to_begin(ours)
                pairs.append((_of_torch(torch), second))
    begun = [(seconds, by_tcp, ours) for (seconds, by_tcp), ours in pairs if seconds is not None]
    samples = {"torch": [seconds for seconds, _, _ in begun], "ours": [ours for _, _, ours in begun]}
    late = {name: sum(seconds >= LATE for seconds in figures) for name, figures in samples.items()}
    notes = [f"{number} of {name} had not begun in {LATE:.0f} s" for name, number in late.items() if number]
    if by_tcp := sum(tcp for _, tcp, _ in begun):
        notes.append(f"{by_tcp} of {len(pairs)} of torch's by tcp: else a worker died, {_TRIES} times in a row")
    if dead := len(pairs) - len(begun):
        notes.append(f"{dead} of {len(pairs)} of torch's did not begin: a worker died, by tcp as well")
    if samples["torch"]:
        return result_of(row, samples, notes)
    return result_of(row, {"ours": [b for _, b in pairs]}, notes)


def init(plan: Plan) -> list[Result]:
    """How long `init_rpc` takes with 16 workers, and with 64 unless it is only a check."""
    found = [_beginnings(SMALL, 16, 2, plan)]
    return found if plan.check else [*found, _beginnings(LARGE, 64, 1, plan)]
