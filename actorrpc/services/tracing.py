"""One worker's part in a recording of its world: functions that whoever conducts it (`actorrpc.profiler`) has called
here, through the executor.

What was recorded is handed over in pieces, as events of Chrome's trace format, with times that are the conductor's. The
two ends of an arrow have the same id, which both sides of a call can make up by themselves.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import zlib
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.handling import here
from actorrpc.services.operators import Operators
from actorrpc.services.spans import key_of
from actorrpc.services.taps import taps_of
from actorrpc.services.witness import BACKWARD, Notes, witness_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.witness import Block, Sent, Served

Event = dict[str, Any]
_PIECE = 1 << 20
"""How many characters of events travel at once, before they are packed."""
_DEVICE_ROWS = 100_000


@dataclass(frozen=True)
class Settings:
    """What is recorded.

    Attributes:
        calls: how many calls a worker keeps; more are counted only.
        operators: how many of torch's events are handed over; 0: torch's profiler is not started.
        shapes: whether they have the shapes of their inputs.
        seconds, growth: how long torch's profiler may be on, and by how many bytes the process may grow meanwhile.
    """

    calls: int = 100_000
    operators: int = 1_000_000
    shapes: bool = False
    seconds: float = 60.0
    growth: int = 1 << 30


@dataclass(frozen=True)
class Clocks:
    """How a worker's clock is turned into the conductor's, which is `offset` nanoseconds behind.

    Attributes:
        at, offset: when it was looked at, on the worker's clock, and what it was.
        later, offset_later: the same once more, towards the end.
        origin: the beginning of the recording, on the conductor's clock.
    """

    at: int
    offset: int
    later: int
    offset_later: int
    origin: int

    def microseconds(self, time: float) -> float:
        """Returns a time of the worker's, in nanoseconds, as microseconds since the origin."""
        offset: float = self.offset
        if self.later > self.at:
            offset += (self.offset_later - self.offset) * (time - self.at) / (self.later - self.at)
        return round((time - offset - self.origin) / 1000, 3)


class _Part:
    """A worker's part in one recording."""

    def __init__(self, worker: Worker, conductor: int, settings: Settings) -> None:
        self.worker, self.conductor, self.settings = worker, conductor, settings
        self.notes, self.witness = Notes(settings.calls), witness_of(worker)
        self.operators: Operators | None = None
        self.ended = 0
        self.pieces: Iterator[bytes] | None = None
        self.witness.begin(self.notes)
        if settings.operators:
            self.operators = Operators(worker, shapes=settings.shapes, seconds=settings.seconds, growth=settings.growth)

    def stop(self) -> None:
        self.witness.end(self.notes)
        self.ended = self.ended or monotonic_ns()
        if self.operators is not None:
            self.operators.stop()

    def drop(self) -> None:
        self.witness.end(self.notes)
        if self.operators is not None:
            self.operators.drop()
        self.pieces = None


class _Parts:
    """A worker's parts, by the recordings' keys; they end with their conductor, or with the worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._parts = worker, dict[str, _Part]()
        self._door = threading.Lock()
        worker.members.watchers.append(self._gone)
        taps_of(worker).put(worker, "stop", self._stop)

    def add(self, key: str, part: _Part) -> None:
        self._parts[key] = part

    def get(self, key: str) -> _Part:
        try:
            return self._parts[key]
        except KeyError:
            raise ActorRPCError(f"{self._worker} has no part in recording {key}") from None

    def drop(self, key: str) -> None:
        part = self._parts.pop(key, None)
        if part is not None:
            part.drop()

    def _gone(self, peer: Peer) -> None:
        for key, part in list(self._parts.items()):
            if part.conductor == peer.record.id and self._worker.open:
                # In a thread of its own: the end of torch's profiler takes its time.
                self._worker.clock.start(functools.partial(self.drop, key), "actorrpc-drop")

    def _stop(self, plain: Any, *args: Any, **kwargs: Any) -> None:
        for key in list(self._parts):
            self.drop(key)
        plain(*args, **kwargs)


_making = threading.Lock()


def _parts() -> _Parts:
    worker: Worker = here.handling.worker  # type: ignore[union-attr]
    with _making:
        parts: _Parts | None = worker.services.get(_Parts)
        if parts is None:
            parts = worker.services[_Parts] = _Parts(worker)
        return parts


# -- what the conductor has called; `key` names the recording


def begin(key: str, conductor: int, settings: Settings) -> str:
    """Begins to record. Returns what is wrong with that, in words; "" for nothing."""
    parts = _parts()
    part = _Part(parts._worker, conductor, settings)
    parts.add(key, part)
    return part.operators.note if part.operators is not None else ""


def clock() -> int:
    """Returns what the clock says by which things are noted down."""
    return monotonic_ns()


def end(key: str) -> None:
    """Records no more."""
    _parts().get(key).stop()


def piece(key: str, clocks: Clocks) -> bytes:
    """Returns the next piece of what was recorded: events with commas between them, packed; b"" after the last."""
    part = _parts().get(key)
    if part.pieces is None:
        part.pieces = _packed(_events(part, clocks))
    return next(part.pieces, b"")


def served(key: str) -> list[Served]:
    """Returns what was noted down of the calls that came."""
    return [record for record in _parts().get(key).notes.served if record.emitted]


def drop(key: str) -> list[str]:
    """Forgets a recording. Returns what is to be known of it: what was left out."""
    parts = _parts()
    part, notes = parts.get(key), []
    if part.notes.dropped:
        notes.append(f"{part.notes.dropped} calls were left out after the first {part.settings.calls} (max_calls)")
    if part.operators is not None and part.operators.note:
        notes.append(part.operators.note)
    parts.drop(key)
    return notes


# -- events


def _packed(events: Iterator[Event]) -> Iterator[bytes]:
    texts: list[str] = []
    size = 0
    for event in events:
        text = json.dumps(event, separators=(",", ":"), default=str)
        texts.append(text)
        size += len(text) + 2
        if size > _PIECE:
            yield zlib.compress(",\n".join(texts).encode(), 1)
            texts, size = [], 0
    if texts:
        yield zlib.compress(",\n".join(texts).encode(), 1)


def row_of(worker: int) -> int:
    """Returns the number of a worker's process in a trace; 0 means something else to viewers."""
    return worker + 1


def _events(part: _Part, clocks: Clocks) -> Iterator[Event]:
    worker, record, row = part.worker, part.worker.record, row_of(part.worker.id)
    end = part.ended or monotonic_ns()
    threads = dict(part.witness.threads)
    for thread in threading.enumerate():
        threads.setdefault(thread.native_id or 0, thread.name)
    of = f"role {record.role}, " if record.role else ""
    yield _meta("process_name", row, 0, name=record.name)
    yield _meta("process_labels", row, 0, labels=f"{of}rank {record.rank}, host {record.host}, pid {record.pid}")
    yield _meta("process_sort_index", row, 0, sort_index=record.rank)
    seen: set[int] = set()
    drawn = _Drawn(worker, row, clocks, end, overtaken(part.notes.sent))
    for sent in part.notes.sent:
        seen.add(sent.thread)
        yield from drawn.sent(sent)
    for served in part.notes.served:
        if served.begun:
            seen.add(served.thread)
            yield from drawn.served(served)
    for block in part.notes.blocks:
        seen.add(block.thread)
        yield from drawn.block(block)
    seen |= {answer.answerer for answer in part.notes.served} | {sent.reader for sent in part.notes.sent}
    if part.operators is not None:
        for event in part.operators.events(part.settings.operators):
            yield from _placed(event, worker, clocks, seen)
    for number in sorted(seen - {0}):
        yield _meta("thread_name", row, number, name=threads.get(number, f"thread {number}"))


def _meta(name: str, row: int, thread: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": row, "tid": thread, "args": args}


def _placed(event: Event, worker: Worker, clocks: Clocks, seen: set[int]) -> Iterator[Event]:
    """Puts one of torch's events into the row of its worker; a device has a row of its own."""
    place, row = event.get("pid"), row_of(worker.id)
    if event["ph"] == "M":
        if event["name"] == "process_labels" and isinstance(place, int) and place != os.getpid():
            label = event["args"].get("labels", "")
            if label and label != "CPU":
                yield _meta("process_name", _device_row(row, place), 0, name=f"{worker.record.name} {label}")
        return
    if place == os.getpid():
        event["pid"] = row
        if isinstance(event.get("tid"), int):
            seen.add(event["tid"])
    elif isinstance(place, int):
        event["pid"] = _device_row(row, place)
    else:
        return
    if "id" in event:
        own = event["id"]
        event["id"] = flow_id(worker.id, own) if isinstance(own, int) and event["ph"] in "stf" else f"{worker.id}:{own}"
    event["ts"] = clocks.microseconds(event["ts"] * 1000)
    yield event


def flow_id(worker: int, number: int, back: bool = False) -> str:
    """Returns what an arrow's two ends have in common. Perfetto draws only those whose ids are hexadecimal numbers of
    at most 64 bits; as numbers of JSON they would lose bits beyond 53 in a browser.
    """
    return f"{(worker << 40 | number << 1 | back) % 2**64:x}"


def _device_row(row: int, device: int) -> int:
    return _DEVICE_ROWS * row + device


def _is_read(call: Sent | Served) -> bool:
    """Returns whether somebody reads its answer: that of `remote`, or of a part in a pass, says only "done"."""
    return call.verb != "rpc_remote" and call.name != BACKWARD


def overtaken(calls: list[Sent]) -> set[int]:
    """Returns the numbers of those calls for whose answers their threads did not wait before they went on: a stream
    has several items under way at once. In a row of a thread, slices that overlap are not shown.
    """
    found: set[int] = set()
    around: dict[int, list[Sent]] = {}
    for call in calls:
        if call.verb != "rpc_sync" or call.reader != call.thread:
            continue
        open_ = around.setdefault(call.thread, [])
        while open_ and open_[-1].read <= call.began:
            open_.pop()
        while open_ and open_[-1].read < call.read:
            found.add(open_.pop().number)
        open_.append(call)
    return found


class _Drawn:
    """Turns notes into events."""

    def __init__(self, worker: Worker, row: int, clocks: Clocks, end: int, overtaken: set[int]) -> None:
        self._worker, self._row, self._us, self._end = worker, row, clocks.microseconds, end
        self._overtaken = overtaken

    def _slice(self, name: str, kind: str, thread: int, begun: int, ended: int, /, **args: Any) -> Event:
        start = self._us(begun)
        duration = max(0.0, round(self._us(ended) - start, 3))
        return {
            "ph": "X", "name": name, "cat": kind, "pid": self._row, "tid": thread, "ts": start, "dur": duration,
            "args": args,
        }  # fmt: skip

    def _arrow(self, phase: str, flow: str, thread: int, time: int) -> Event:
        event = {
            "ph": phase, "name": "call", "cat": "call", "id": flow, "pid": self._row, "tid": thread,
            "ts": self._us(time),
        }  # fmt: skip
        if phase == "f":
            event["bp"] = "e"
        return event

    def _lasting(self, name: str, which: str, thread: int, begun: int, ended: int) -> Iterator[Event]:
        """Of what lasts beyond the thread's own part: it has a row of its own, as it may overlap others. A local id
        makes it one of its process; with a plain one viewers may show it apart from all of them.
        """
        event = {"name": name, "cat": "lasting", "id2": {"local": which}, "pid": self._row, "tid": thread}
        yield {**event, "ph": "b", "ts": self._us(begun)}
        yield {**event, "ph": "e", "ts": self._us(ended)}

    def sent(self, sent: Sent) -> Iterator[Event]:
        me, end = self._worker.id, self._end
        key = key_of(sent.verb, sent.name, self._worker, sent.peer)
        waits = sent.verb == "rpc_sync" and sent.number not in self._overtaken
        over = sent.read if waits and sent.reader == sent.thread else sent.sent
        args: dict[str, Any] = {"call": f"{me}.{sent.number}"}
        if sent.parent is not None:
            args["within"] = "{}.{}".format(*sent.parent)
        if sent.failed:
            args["failed"] = True
        if not (sent.arrived or sent.failed or sent.verb == "tell"):
            args["unanswered"] = True
        yield self._slice(key, "call", sent.thread, sent.began, over or sent.arrived or end, **args)
        yield self._slice("write", "part", sent.thread, sent.began, sent.written)
        yield self._slice("send", "part", sent.thread, sent.written, sent.sent or end)
        if sent.emitted:
            yield self._arrow("s", flow_id(me, sent.number), sent.thread, sent.emitted)
        if sent.arrived and not waits:
            yield from self._lasting(key, f"{me}.{sent.number}", sent.thread, sent.began, sent.arrived)
        if sent.reading:
            yield self._slice("read the answer", "part", sent.reader, sent.reading, sent.read or end)
            if _is_read(sent):
                yield self._arrow("f", flow_id(me, sent.number, True), sent.reader, sent.reading)

    def served(self, served: Served) -> Iterator[Event]:
        key = key_of(served.verb, served.name or "?", self._worker, self._worker.id, served.caller)
        which = f"{served.caller}.{served.number}"
        args: dict[str, Any] = {"call": which, "waited_us": round((served.begun - served.arrived) / 1000, 1)}
        if served.failed:
            args["failed"] = True
        over = served.returned or self._end
        yield self._slice(key, "serve", served.thread, served.begun, over, **args)
        yield self._arrow("f", flow_id(served.caller, served.number), served.thread, served.begun)
        if served.loaded:
            yield self._slice("read", "part", served.thread, served.loading, served.loaded)
        if not served.answered:
            return
        yield self._slice("write the answer", "part", served.answerer, served.replying, served.answered)
        if _is_read(served):
            yield self._arrow("s", flow_id(served.caller, served.number, True), served.answerer, served.emitted)
        if served.answered > over:
            yield from self._lasting(key, f"{which}@", served.thread, served.begun, served.answered)

    def block(self, block: Block) -> Iterator[Event]:
        yield self._slice(block.name, "backward", block.thread, block.begun, block.ended or self._end)
