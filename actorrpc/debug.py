"""Finding out what a world does: who waits for whom (`dump`), also by a signal (`dump_on_signal`); one actor's messages
written to a file (`Recorder`), and run again from it (`replay`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.process import this_process
from actorrpc.recordings import Recorder
from actorrpc.replaying import Replay, ReplayError, Step, replay
from actorrpc.runtime.clock import LockGate
from actorrpc.runtime.completion import check_seconds
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import WAITS
from actorrpc.services.waits import ActorState, CallState, Waiting, WorkerState, state_of
from actorrpc.session import current
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actorrpc.services.waits import Node
    from actorrpc.session import Session

__all__ = [
    "ActorState",
    "CallState",
    "Dump",
    "Recorder",
    "Replay",
    "ReplayError",
    "Step",
    "Waiting",
    "WorkerState",
    "dump",
    "dump_on_signal",
    "replay",
]

log = logging.getLogger("actorrpc")
_VARIABLE = "ACTORRPC_DUMP_ON_SIGUSR1"
_DUMP_SECONDS = 5.0


@dataclass(frozen=True)
class Dump:
    """Who waits for whom in a world. Its `str` is a text.

    Attributes:
        workers: the workers that answered, by their numbers.
        silent: those that did not, by name, and why. What they do is not known; they may be at work, or stopped.
    """

    workers: list[WorkerState]
    silent: dict[str, str] = field(default_factory=dict)

    @property
    def chains(self) -> list[str]:
        """Who waits for whom, from the first that waits to the last; one line for each that nobody waits for."""
        places = _Places(self)
        begun = [wait for wait in places.waits if wait.call and wait.message not in places.called]
        seen: set[Node | None] = set()
        lines = [places.line(wait, seen) for wait in begun]
        # What is left goes in circles.
        lines += [places.line(wait, seen) for wait in places.waits if wait.call and wait.call not in seen]
        return lines

    def __str__(self) -> str:
        lines = [f"{len(self.workers)} workers answered"]
        lines += [f'worker "{name}" did not: {reason}' for name, reason in self.silent.items()]
        lines += ["", "who waits for whom:", *(f"  {line}" for line in self.chains or ["nobody waits for a call"])]
        for worker in self.workers:
            lines += ["", worker.name, *(f"  {line}" for line in _lines_of(worker))]
        return "\n".join(lines)


class _Places:
    """Where messages are, for following chains."""

    def __init__(self, dump: Dump) -> None:
        self.waits = [wait for worker in dump.workers for wait in worker.waits]
        self.called = {wait.call for wait in self.waits if wait.call is not None}
        self._by_message = {wait.message: wait for wait in self.waits if wait.message is not None}
        self._queued = {
            node: (actor, worker) for worker in dump.workers for actor in worker.actors for node in actor.queued
        }

    def line(self, wait: Waiting, seen: set[Node | None]) -> str:
        text, at = wait.who, wait
        while True:
            text += f" -> {at.what}" + (f" on {at.on}" if at.on else "") + _age(at.seconds)
            if at.call is None or at.call in seen:
                return text + (", which stands above" if at.call is not None else "")
            seen.add(at.call)
            if at.call in self._queued:
                actor, _ = self._queued[at.call]
                return f"{text}: waits in the mailbox of {actor.name}, with {actor.depth} messages in it"
            if at.call not in self._by_message:
                return f"{text}: under way, or at work"
            at = self._by_message[at.call]
            text += f": {at.who}"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f" ({seconds:.1f} s)"


def _lines_of(worker: WorkerState) -> Iterator[str]:
    statistics = worker.statistics
    yield f"{statistics.get('running', 0)} handlers run, {statistics.get('queued', 0)} jobs are queued"
    if worker.pending:
        oldest = worker.calls[0] if worker.calls else None
        told = f", the oldest {oldest.what} on {oldest.on}{_age(oldest.seconds)}" if oldest is not None else ""
        yield f"{worker.pending} calls are not answered{told}"
    yield from worker.at_work
    for wait in worker.waits:
        on = f" on {wait.on}" if wait.on else ""
        yield f"{wait.thread}: {wait.who} waits for {wait.what}{on}{_age(wait.seconds)}"
    for actor in worker.actors:
        if actor.depth or actor.running:
            first = f", the first for {actor.seconds:.1f} s" if actor.seconds is not None else ""
            yield (
                f"mailbox of {actor.name}: {actor.depth} wait{first}; {actor.running} in progress, {actor.waiting} of "
                f"them waiting (concurrency {actor.concurrency})"
            )
    yield from worker.passes
    for window in worker.windows:
        yield f"a full window: {window}"


def dump(timeout: float = _DUMP_SECONDS) -> Dump:
    """Asks all workers of the world who waits there and for whom. From any worker; it stops nobody.

    Arguments:
        timeout: seconds that they get to answer; default 5.

    Returns what they say; `print` shows it. Who did not answer is in `silent`.

    Raises:
        NotAMemberError: this process is in no world.
        ValueError, TypeError: `timeout` is not a number above 0.
    """
    check_seconds(timeout)
    if timeout <= 0:
        raise ValueError(f"timeout must be seconds above 0, not {timeout!r}: who is stopped answers nobody")
    return _dump(current(), timeout)


def _dump(session: Session, timeout: float) -> Dump:
    worker, silent, calls = session.worker, dict[str, str](), []
    for number, peer in sorted(worker.peers.items()):
        if number == worker.id or peer.standing is not Standing.MEMBER:
            continue
        try:
            call = worker.request(number, WAITS, ("state",), timeout, "debug.dump", flags=Flag.CONTROL)
            calls.append((peer.record.name, call))
        except ActorRPCError as e:
            silent[peer.record.name] = str(e)
    states = [state_of(worker, session.deadlocks.ages)]
    for name, call in calls:
        try:
            states.append(worker.wait_result(call))
        except ActorRPCError as e:
            silent[name] = str(e)
    return Dump(sorted(states, key=lambda state: state.id), silent)


class _Dumper:
    """Writes a dump to stderr whenever a signal comes. The handler only opens a gate, which takes no lock: it may have
    interrupted anything. A thread of its own does the rest.
    """

    def __init__(self) -> None:
        self._gate = LockGate()
        threading.Thread(target=self._run, name="actorrpc-dumper", daemon=True).start()

    def __call__(self, number: int, frame: Any) -> None:
        self._gate.open()

    def _run(self) -> None:
        while True:
            self._gate.wait()
            try:
                session = this_process.session
                if session is None or not session.worker.open:
                    text = f"process {os.getpid()} is no worker now: it has not called init_rpc, or has shut down"
                else:
                    text = f"dump by {session.worker}:\n{_dump(session, _DUMP_SECONDS)}"
            except Exception as e:
                text = f"process {os.getpid()}: there was no dump: {e!r}"
            try:
                data = f"\nactorrpc {text}\n".encode(errors="replace")
                while data:
                    data = data[os.write(2, data) :]
            except OSError:
                pass  # nobody reads it any more


def dump_on_signal(number: int | None = None) -> None:
    """Has this process write a dump of its world to its stderr whenever it gets a signal. The library does not take a
    signal unasked: call this, or set ACTORRPC_DUMP_ON_SIGUSR1=1, by which `init_rpc` does.

    Arguments:
        number: which; SIGUSR1 (where there is one) by default.

    It takes as long as Python needs to come to the handler: a main thread deep in C code does so later.

    Raises:
        ValueError: there is no such signal, or this is not the main thread.
    """
    if number is None:
        number = getattr(signal, "SIGUSR1", None)
        if number is None:
            raise ValueError("this system has no SIGUSR1; name another signal")
    signal.signal(number, _Dumper())


def dump_if_asked() -> None:
    """Does what ACTORRPC_DUMP_ON_SIGUSR1 asks for."""
    if os.environ.get(_VARIABLE) != "1":
        return
    try:
        dump_on_signal()
    except ValueError as e:
        log.warning("%s=1 has no effect: %s", _VARIABLE, e)
