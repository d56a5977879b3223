"""What an idle worker costs, beyond a process that has imported torch: memory, descriptors, threads."""

from __future__ import annotations

import compileall
import gc
import importlib
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.pairs import OURS, PATIENCE, Figures, Lane, Plan, free_port, join, rpc_world, say
from benchmarks.rows import Result, Row, result_of

ROWS = [
    Row("memory", "idle worker, resident beyond import torch", "MB", most=12),
    Row("descriptors", "descriptors for each peer", "1", most=6),
    Row("threads", "idle worker, threads beyond import torch", "1", most=6),
]
FEW, MANY = 2, 6
"""Sizes of the worlds whose difference says what a peer costs."""
_SETTLING = 4.0  # longer than a thread of the pool waits for something to do


def census() -> Figures:
    """Returns what this process holds: resident memory in MB, descriptors, threads."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    (resident,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return {
        "memory": int(resident) * 1024 / 1e6,
        "descriptors": float(len(os.listdir("/proc/self/fd")) - 1),
        "threads": float(len(os.listdir("/proc/self/task"))),
    }


def greet() -> None:
    """Is called once by everyone, so that all ways are open."""


def _idle(size: int, rank: int, port: int, pipe: Connection[Any, Any]) -> None:
    importlib.import_module("torch")
    before = census()
    rpc: Any = importlib.import_module(OURS)
    join(rpc, Lane("ours", rpc_world, OURS, size), rank, port)
    for other in range(size):
        if other != rank:
            rpc.rpc_sync(f"w{other}", greet)
    pipe.send("called")
    pipe.recv()
    time.sleep(_SETTLING)
    pipe.send({key: value - before[key] for key, value in census().items()})
    pipe.recv()
    rpc.shutdown()


def idle_workers(size: int) -> list[Figures]:
    """Starts a world of fresh processes that have all called one another, and returns what each has on top of torch.

    Raises:
        SystemExit: a process died, or was not ready in time.
    """
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes: list[Any] = []
    pipes: list[Connection[Any, Any]] = []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=_idle, args=(size, rank, port, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        found: list[Figures] = []
        for wanted in ("called", "figures"):
            found = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(PATIENCE):
                    raise SystemExit(f"rank {rank} of {size} idle workers has not answered in {PATIENCE:.0f} s")
                try:
                    found.append(pipe.recv())
                except EOFError:
                    raise SystemExit(f"rank {rank} of {size} idle workers died") from None
            for pipe in pipes:
                pipe.send(wanted)
        for process in processes:
            process.join(10.0)
        return found
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def footprint() -> Figures:
    """Returns the figures of the rows: the worst worker's memory and threads, and descriptors for each peer."""
    few, many = idle_workers(FEW), idle_workers(MANY)
    descriptors = [statistics.mean(x["descriptors"] for x in world) for world in (few, many)]
    return {
        "memory": max(x["memory"] for x in few),
        "descriptors": (descriptors[1] - descriptors[0]) / (MANY - FEW),
        "threads": max(x["threads"] for x in [*few, *many]),
    }


def compile_ours() -> None:
    """Leaves the package's bytecode beside it, as an installation does: a worker that compiles needs 1 MB more."""
    compileall.compile_dir(importlib.import_module(OURS).__path__[0], quiet=2)


def memory(plan: Plan) -> list[Result]:
    """What an idle worker costs."""
    compile_ours()
    rounds = []
    for number in range(plan.rounds):
        say(f"idle workers: round {number + 1} of {plan.rounds}")
        rounds.append(footprint())
    return [result_of(row, {"ours": [figures[row.key] for figures in rounds]}) for row in ROWS]
