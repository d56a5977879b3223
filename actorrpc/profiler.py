"""What a world does, and when: `profile_world` records all workers into one file for a viewer, `breakdown` says where
the time of single calls goes.

    with actorrpc.profiler.profile_world("trace.json"):
        train()

    with actorrpc.profiler.breakdown() as parts:
        rpc_sync("observer:0", step)
    print(parts)
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from actorrpc.merging import Merge
from actorrpc.runtime.completion import check_seconds
from actorrpc.services import tracing
from actorrpc.services.everyone import Everyone, ask
from actorrpc.services.spans import key_of
from actorrpc.services.tracing import Settings
from actorrpc.services.witness import Notes, witness_of
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.witness import Sent, Served

__all__ = ["Breakdown", "CallParts", "WorldProfile", "breakdown", "profile_world"]

_SECONDS = 60.0
_BREAKDOWN_CALLS = 10_000


@dataclass
class WorldProfile:
    """What became of a `profile_world`; complete when its block has ended. Its `str` is a line or more.

    Attributes:
        path: the file.
        workers: the names of the workers that are in it.
        late: those that joined after the beginning, and how many seconds after.
        missing: those that are not in it, or not whole, and why: they died, left, or did not answer.
        notes: what was left out, by worker.
    """

    path: str
    workers: list[str] = field(default_factory=list)
    late: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.workers)} workers; open it at https://ui.perfetto.dev or chrome://tracing"]
        lines += [f"{name} is not in it, or not whole: {reason}" for name, reason in self.missing.items()]
        lines += [f"{name}: {note}" for name, notes in self.notes.items() for note in notes]
        return "\n".join(lines)


@contextlib.contextmanager
def profile_world(
    path: str | os.PathLike[str],
    *,
    operators: bool = True,
    shapes: bool = False,
    max_calls: int = 100_000,
    max_operators: int = 1_000_000,
    max_seconds: float = 60.0,
    max_growth: int = 1 << 30,
    timeout: float = _SECONDS,
) -> Iterator[WorldProfile]:
    """Records what all workers of the world do while the block lasts, into one file of Chrome's trace format, which
    https://ui.perfetto.dev and chrome://tracing show. One worker calls it.

    The file has a row of each worker's threads with the operators that torch's profiler records; each call, as torch
    names it, at its caller and at its callee, with an arrow there and one back; backward passes. The workers' clocks
    are brought together.

    Arguments:
        path: the file, written over; packed where it ends with ".gz".
        operators: whether torch's own profiler is on. Without it there are calls and backward passes alone, which costs
            much less.
        shapes: whether operators have the shapes of their inputs.
        max_calls: how many calls each worker keeps, those that it makes and those that it serves together; about
            300 bytes each. Later ones are counted.
        max_operators: how many of torch's events of each worker go into the file.
        max_seconds, max_growth: torch's profiler, which has no bound of its own, is ended in a worker when it was on
            for so many seconds, or its process has grown by so many bytes. Calls are recorded all the same.
        timeout: seconds that each worker gets to begin, and for each answer at the end.

    Returns a `WorldProfile`, complete after the block. What was left out is also in the file, under "otherData".

    Raises:
        OSError: the file cannot be written; FileExistsError: another recording is being written to it.
        NotAMemberError: this process is in no world.
        ValueError, TypeError: an argument is not valid.
    """
    check_seconds(timeout)
    if timeout <= 0 or min(max_calls, max_operators, max_seconds, max_growth) < 0:
        raise ValueError("timeout must be seconds above 0; max_calls and the other bounds 0 or more")
    settings = Settings(max_calls, max_operators if operators else 0, shapes, max_seconds, max_growth)
    with _recorded(current().worker, os.fspath(path), settings, timeout, own=True) as found:
        yield found


@contextlib.contextmanager
def profile_others(path: str, seconds: float) -> Iterator[WorldProfile]:
    """`profile_world` for a guest, who is not in the file."""
    with _recorded(current().worker, path, Settings(seconds=max(60.0, seconds)), _SECONDS, own=False) as found:
        yield found


@contextlib.contextmanager
def _recorded(worker: Worker, path: str, settings: Settings, timeout: float, *, own: bool) -> Iterator[WorldProfile]:
    merge = Merge(worker, path, settings, own=own, timeout=timeout)
    found = WorldProfile(path, merge.names, merge.late, merge.missing, merge.notes)
    try:
        yield found
    finally:
        if worker.open:
            merge.finish()
        else:
            merge.abandon()


# -- single calls


@dataclass(frozen=True)
class CallParts:
    """Where the time of one call went, in microseconds; the six parts make up `total`.

    Attributes:
        name: the call, as traces name it.
        total: from the beginning of the request to where its answer was read.
        write: to write the request, and the answer.
        queue: until the request was handed to the system: for room (`max_pending`), for others' messages.
        wire: under way, there and back, until the other side's receiving thread had it.
        wait: for the actor, or a thread of the pool; and until a thread of the caller took the answer up
            (of `rpc_async`: one of the pool, where nobody waits).
        run: in the handler, with whatever that waits for.
        read: to read the request, and the answer.
    """

    name: str
    total: float
    write: float
    queue: float
    wire: float
    wait: float
    run: float
    read: float


_PARTS = [one.name for one in fields(CallParts)][2:]


@dataclass
class Breakdown:
    """Where the time of calls went; complete when the block of `breakdown` has ended. Its `str` is a table.

    Attributes:
        calls: the calls that the block's thread made and that were answered, in order.
        missing: the names of those of which the callee could not say anything, and why.
    """

    calls: list[CallParts] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max([4, *(len(call.name) for call in self.calls)])
        lines = ["call".ljust(width) + "".join(part.rjust(11) for part in ("total us", *_PARTS))]
        for call in self.calls:
            numbers = [call.total, *(getattr(call, part) for part in _PARTS)]
            lines.append(call.name.ljust(width) + "".join(f"{number:11.1f}" for number in numbers))
        lines += [f"{name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines)


@contextlib.contextmanager
def breakdown(timeout: float = _SECONDS) -> Iterator[Breakdown]:
    """Says where the time of the calls goes that the present thread makes in the block: `rpc_sync`, `rpc_async`,
    `remote`, `to_here`, and methods through references. The first 10,000 of them.

    Arguments:
        timeout: seconds that each worker gets to begin, and to say what it knows.

    Returns a `Breakdown`, complete after the block. No clocks are compared: what a worker did not see itself was under
    way.

    Raises:
        NotAMemberError: this process is in no world.
        ValueError, TypeError: `timeout` is no number.
    """
    check_seconds(timeout)
    worker, found, notes = current().worker, Breakdown(), Notes(_BREAKDOWN_CALLS)
    key, settings = f"{worker.id}-{os.urandom(6).hex()}", Settings(_BREAKDOWN_CALLS, 0)
    failed: dict[int, str] = {}
    asked: list[int] = []
    witness = witness_of(worker)

    def took(record: Record, _: Any, __: bool) -> None:
        asked.append(record.id)

    def refused(record: Record, error: Exception, _: bool) -> None:
        failed[record.id] = str(error)
        asked.append(record.id)  # it may have begun all the same

    everyone = Everyone(worker, tracing.begin, (key, worker.id, settings), took, refused, timeout=timeout)
    thread = witness.thread()
    witness.begin(notes)
    try:
        yield found
    finally:
        witness.end(notes)
        everyone.stop()
        calls = [sent for sent in notes.sent if sent.thread == thread and sent.arrived]
        served = _served(worker, key, asked, {sent.peer for sent in calls}, failed, timeout)
        for sent in calls:
            name = key_of(sent.verb, sent.name, worker, sent.peer)
            known = served.get((sent.peer, sent.number))
            if known is not None:
                found.calls.append(_parts_of(name, sent, known))
            else:
                found.missing[name] = failed.get(sent.peer, "its callee sent no answer to it, or did not note it down")


def _served(
    worker: Worker, key: str, asked: list[int], peers: set[int], failed: dict[int, str], timeout: float
) -> dict[tuple[int, int], Served]:
    """Collects what the callees know of this worker's calls."""
    known: dict[tuple[int, int], Served] = {}
    if not worker.open:
        return known
    for number in asked:
        try:
            if number in peers and number not in failed:
                for record in worker.wait_result(ask(worker, number, tracing.served, key, timeout=timeout)):
                    if record.caller == worker.id:
                        known[number, record.number] = record
            ask(worker, number, tracing.drop, key, timeout=timeout)
        except Exception as e:
            failed.setdefault(number, str(e))
    return known


def _parts_of(name: str, sent: Sent, served: Served) -> CallParts:
    """Puts the two sides of a call together."""
    reading = sent.reading or sent.arrived
    end = sent.read or reading
    loaded = served.loaded or served.begun
    times = {
        "write": sent.written - sent.began + served.emitted - served.replying,
        "queue": sent.emitted - sent.written,
        "wire": (sent.arrived - sent.emitted) - (served.emitted - served.arrived),
        "wait": served.begun - served.arrived + reading - sent.arrived,
        "run": served.replying - loaded,
        "read": loaded - served.begun + end - reading,
    }
    return CallParts(name, (end - sent.began) / 1000, **{part: time / 1000 for part, time in times.items()})
