"""What the workers do while things break: calls that are counted in files, which no death takes away."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actorrpc as rpc
from actorrpc import session
from tests.worlds import Plan, World, join

LIMIT = 40.0
"""Seconds that each call has: what ends only then was not noticed."""
_PATIENCE = 20.0


@dataclass
class Ended:
    """What came of a call: "value", "lost" (WorkerLostError), "limit" (its own time has run out), "hung", or else the
    type of its error. Times are of the clock that all processes of a host share.
    """

    key: str
    kind: str
    text: str
    sent: float
    at: float


def append(path: str, line: str) -> None:
    """Adds a line to a file, whole, whoever else does so and whatever becomes of this process."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def lines(path: str | Path) -> list[str]:
    """Returns the lines of a file, none if it is not there."""
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []


def runs(path: str | Path) -> Counter[str]:
    """Returns how many times each call has run."""
    return Counter(lines(path))


def counted(path: str, key: str, seconds: float = 0.0) -> str:
    """A handler with a side effect that is counted."""
    append(path, key)
    if seconds:
        time.sleep(seconds)
    return key


def kind_of(error: BaseException) -> str:
    """Names what a call has ended with."""
    if isinstance(error, rpc.WorkerLostError):
        return "lost"
    if isinstance(error, rpc.RPCTimeoutError):
        return "limit"
    return type(error).__name__


def call_many(
    to: str, path: str, keys: Sequence[str], seconds: float = 0.0, limit: float = LIMIT, at_once: int = 1000
) -> list[Ended]:
    """Makes counted calls, so many at once, and returns what came of them; comes to an end in any case."""
    waiting: list[tuple[str, float, Any, list[float]]] = []
    ended: list[Ended] = []
    for key in keys:
        sent, at = time.monotonic(), list[float]()
        try:
            future = rpc.rpc_async(to, counted, args=(path, key, seconds), timeout=limit)
        except Exception as e:
            ended.append(Ended(key, kind_of(e), str(e), sent, time.monotonic()))
            continue
        future.add_done_callback(functools.partial(_stamp, at))
        waiting.append((key, sent, future, at))
        if len(waiting) >= at_once:
            ended.append(_ended(*waiting.pop(0), limit))
    return ended + [_ended(*one, limit) for one in waiting]


def _stamp(at: list[float], done: Any) -> None:
    at.append(time.monotonic())


def _ended(key: str, sent: float, future: Any, at: list[float], limit: float) -> Ended:
    end = sent + limit + _PATIENCE
    while not (future.done() and at) and time.monotonic() < end:
        time.sleep(0.002)
    if not future.done():
        return Ended(key, "hung", "it did not end, not even with its limit", sent, time.monotonic())
    noted = at[0] if at else time.monotonic()
    try:
        value = future.wait()
    except Exception as e:
        return Ended(key, kind_of(e), str(e), sent, noted)
    kind = "value" if value == key else "another value"
    return Ended(key, kind, repr(value), sent, noted)


def one_call(to: str, path: str, key: str, limit: float = LIMIT) -> Ended:
    """Makes one counted call."""
    return call_many(to, path, [key], 0.0, limit)[0]


def leave() -> None:
    """Leaves at once, whatever has become of the others."""
    rpc.shutdown(graceful=False)


def leave_all(world: World, *ranks: int) -> None:
    """Has ranks leave at once."""
    for rank in ranks:
        world.on(rank, leave)


def join_wrapped(rank: int, plan: Plan, wrap: Callable[[Any], Any]) -> None:
    """Joins a world with a transport that is put into something."""
    from actorrpc.process import process

    process().wrap = wrap
    join(rank, plan)


def pid_of_fork(seconds: float = 600.0) -> int:
    """Leaves a forked child behind, which holds all that its parent had open."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def tables() -> dict[str, int]:
    """Returns what this worker's tables hold that should be nothing when all is over."""
    from actorrpc.services.autograd import Autograd

    worker = session.current().worker
    found = {f"references {name}": n for name, n in session.current().objects.statistics().items()}
    found["pending calls"] = len(worker.calls.pending)
    contexts = worker.services[Autograd].contexts
    found["contexts"] = len(contexts._known) + len(contexts._own)
    for name in ("running", "queued"):
        found[name] = worker.statistics()[name]
    return found
