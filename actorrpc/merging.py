"""One file of what all workers of a world recorded: who is asked, how their clocks are brought together, what is
written. `profiler` is what users see.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, BinaryIO

from actorrpc.claims import claim, release
from actorrpc.errors import ActorRPCError
from actorrpc.runtime.peers import Standing
from actorrpc.services import tracing
from actorrpc.services.everyone import Everyone, ask
from actorrpc.services.tracing import Clocks, Settings
from actorrpc.version import VERSION

if TYPE_CHECKING:
    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker

_ROUNDS = 12
_ROUND_SECONDS = 2.0


class Clock:
    """How far another worker's clock is ahead of this one's, in nanoseconds.

    Arguments:
        at: when it was looked at, on the other's clock.
        offset: how far it is ahead.
        within: how wrong that may be: half of the round trip.
    """

    def __init__(self, at: int, offset: int, within: int) -> None:
        self.at, self.offset, self.within = at, offset, within


def best_of(rounds: list[tuple[int, int, int]]) -> Clock:
    """Returns what round trips tell of a clock: by the quickest, in the midst of which the other one is taken to have
    looked at its clock.

    Arguments:
        rounds: when each was sent, by the clock here; what the other clock said; when its answer came.
    """
    sent, there, back = min(rounds, key=lambda one: one[2] - one[0])
    return Clock(there, there - (sent + back) // 2, (back - sent + 1) // 2)


def look_at_clock(worker: Worker, record: Record) -> Clock:
    """Looks at another worker's clock. Workers of one host have the same.

    Raises:
        ActorRPCError: it does not answer.
    """
    if record.boot == worker.record.boot:
        return Clock(monotonic_ns(), 0, 0)
    rounds = []
    for _ in range(_ROUNDS):
        sent = monotonic_ns()
        there = worker.wait_result(ask(worker, record.id, tracing.clock, timeout=_ROUND_SECONDS))
        rounds.append((sent, there, monotonic_ns()))
    return best_of(rounds)


class Merge:
    """A recording of a world.

    Arguments:
        worker: who conducts it.
        path: the file, written over.
        settings: what is recorded.
        own: whether this worker is recorded as well.
        timeout: seconds that each worker gets to begin, and for each thing that it is asked for at the end.

    Attributes:
        names: the workers that are in the file.
        late: those that joined later, with the seconds after the beginning.
        missing: those that are not, or not whole, in the file, and why.
        notes: what else is to be known, by worker.
        calls: how many calls the file has.

    Raises:
        OSError: the file cannot be written, or another recording is being written to it.
    """

    def __init__(self, worker: Worker, path: str, settings: Settings, *, own: bool, timeout: float) -> None:
        self._worker, self.path, self._timeout = worker, path, timeout
        self.names: list[str] = []
        self.late: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}
        self._file: BinaryIO = claim(path)  # now, so that one that cannot be written is seen early
        self._key = f"{worker.id}-{os.urandom(6).hex()}"
        self._clocks: dict[int, Clock] = {}
        self._records: list[Record] = []
        self._doubtful: list[Record] = []
        """Those that did not say that they had begun: they may have."""
        self.origin, self._wall = monotonic_ns(), time_ns()
        try:
            self._everyone = Everyone(
                worker, tracing.begin, (self._key, worker.id, settings), self._took, self._failed, own=own,
                timeout=timeout,
            )  # fmt: skip
        except BaseException:
            release(self._file)
            raise

    def _took(self, record: Record, note: str, later: bool) -> None:
        self._records.append(record)
        if note:
            self.notes.setdefault(record.name, []).append(note)
        if later:
            self.late[record.name] = round((monotonic_ns() - self.origin) / 1e9, 3)
        try:
            self._clocks[record.id] = look_at_clock(self._worker, record)
        except ActorRPCError as e:
            self.missing[record.name] = str(e)

    def _failed(self, record: Record, error: Exception, later: bool) -> None:
        self.missing[record.name] = str(error)
        self._doubtful.append(record)

    # -- the end

    def finish(self) -> None:
        """Ends the recording everywhere, and writes the file. Does nothing the second time.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file.closed:
            return
        self._everyone.stop()
        try:
            last = {record.id: self._last_look(record) for record in self._records}
            calls = [(record, self._ask(record, tracing.end, self._key)) for record in self._records]
            standing = [record for record, call in calls if call is not None and self._done(record, call)]
            self._name_the_lost()
            self._write(standing, last)
        finally:
            release(self._file)
            for record in self._records:  # those too that could not be asked for what they have
                if record.name not in self.names:
                    self._ask(record, tracing.drop, self._key)
            for record in self._doubtful:
                self._ask(record, tracing.drop, self._key)

    def abandon(self) -> None:
        """Ends the recording without a file."""
        self._everyone.stop()
        release(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        for record in (*self._records, *self._doubtful):
            self._ask(record, tracing.drop, self._key)

    def _last_look(self, record: Record) -> Clock | None:
        if self._worker.peers[record.id].standing is not Standing.MEMBER:
            return None
        try:
            return look_at_clock(self._worker, record)
        except ActorRPCError:
            return None  # the first one has to do

    def _ask(self, record: Record, function: Any, *args: Any) -> Any:
        """Asks a worker for something; returns the call, or None where it is gone."""
        try:
            return ask(self._worker, record.id, function, *args, timeout=self._timeout)
        except ActorRPCError as e:
            self.missing.setdefault(record.name, str(e))
            return None

    def _done(self, record: Record, call: Any) -> bool:
        try:
            self._worker.wait_result(call)
        except Exception as e:
            self.missing.setdefault(record.name, str(e))
            return False
        return True

    def _name_the_lost(self) -> None:
        for record in self._records:
            peer = self._worker.peers[record.id]
            if peer.standing is not Standing.MEMBER:
                how = "was lost" if peer.standing is Standing.LOST else peer.standing.value
                self.missing[record.name] = f"it {how} while it was recorded: {peer.reason}"

    def _write(self, records: list[Record], last: dict[int, Clock | None]) -> None:
        packed = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=5) if self.path.endswith(".gz") else None
        out: Any = packed if packed is not None else self._file
        head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self._wall}
        out.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
        first = True
        for record in records:
            first = self._write_one(out, record, last[record.id], first)
        about = json.dumps(self._about(records), indent=1)
        out.write(f'\n], "otherData": {about}}}\n'.encode())
        if packed is not None:
            packed.close()
        self._file.flush()

    def _write_one(self, out: Any, record: Record, last: Clock | None, first: bool) -> bool:
        clock = self._clocks.get(record.id)
        if clock is None:
            return first
        end = last or clock
        clocks = Clocks(clock.at, clock.offset, end.at, end.offset, self.origin)
        try:
            while True:
                call = ask(self._worker, record.id, tracing.piece, self._key, clocks, timeout=self._timeout)
                data = self._worker.wait_result(call)
                if not data:
                    break
                out.write((b"" if first else b",\n") + zlib.decompress(data))
                first = False
            notes = self._worker.wait_result(
                ask(self._worker, record.id, tracing.drop, self._key, timeout=self._timeout)
            )
        except OSError:
            raise
        except Exception as e:
            self.missing[record.name] = f"its part is not whole: {e}"
        else:
            known = self.notes.setdefault(record.name, [])
            known += [note for note in notes if note not in known]
            self.names.append(record.name)
        return first

    def _about(self, records: list[Record]) -> dict[str, Any]:
        clocks = {}
        for record in records:
            clock = self._clocks.get(record.id)
            if clock is not None:
                clocks[record.name] = {
                    "offset_us": clock.offset / 1000, "within_us": clock.within / 1000, "same_host": not clock.within,
                }  # fmt: skip
        return {
            "recorded by": f"actorrpc {VERSION}, {self._worker.record.name}",
            "workers": self.names,
            "joined late (seconds)": self.late,
            "not in the file, or not whole": self.missing,
            "left out": {name: notes for name, notes in self.notes.items() if notes},
            "clocks": clocks,
        }
