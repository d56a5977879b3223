"""The process side of ``launch``: start processes, watch them, end them. It knows nothing of messaging.

Every member runs in a process of its own, spawned and never forked (ZeroMQ contexts and torch's thread pools do not
survive a fork). Parent and child share one duplex channel:

    child -> parent   "ready": modules are imported, Ctrl-C is armed
    parent -> child   the pickled function and its arguments
    child -> parent   one Report: how the function ended

The arguments travel only after "ready" because ``Process.start`` writes what it is given into a pipe that the child
reads after importing ``__main__`` (seconds, with torch): more than 64 KiB would hold up the parent, deaf to Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker

from actorrpc import reducers
from actorrpc.launching import child
from actorrpc.launching.child import Report
from actorrpc.launching.deaths import UNGUARDED, died
from actorrpc.launching.interrupts import sigint_deferred
from actorrpc.launching.output import Output

log = logging.getLogger(__name__)

_AFTERSHOCKS = 0.3  # seconds in which others may die of the first death
_CAUSE_WAIT = 1.5  # seconds to wait for the first death, where so far only its consequences were seen
_TERM_TO_KILL = 1.0
_MOST_BACKOFF = 60.0
_WELL = 10  # a life that was so many times longer than the pause before it went well
_POLL = 0.25  # a forked grandchild keeps a dead child's sentinel open, so deaths are looked for this often as well

# os.environ is the process's, so that two runs starting at once would see, and then undo, each other's change.
_environment_lock = threading.Lock()


@dataclass(frozen=True)
class Member:
    """One process to start: its name (``"observer:0"``), and the module-level function and arguments it runs.

    If it fails it is started again, ``restarts`` times at most, with the keyword ``life`` (1, 2, ...), after
    ``backoff`` seconds, twice as many each further time that comes soon after. Not so the driver.
    ``environment`` is what it has in its environment beside, or other than, this process.
    """

    name: str
    target: Callable[..., object]
    args: tuple[object, ...] = ()
    restarts: int = 0
    backoff: float = 0.5
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Process:
    """A started member as the parent sees it."""

    name: str
    member: Member
    life: int
    payload: bytes
    process: multiprocessing.process.BaseProcess
    channel: connection.Connection | None
    ready: bool = False
    report: Report | None = None
    exitcode: int | None = None
    failed_at: float | None = None
    stopped: bool = False  # we have sent it a signal
    again_at: float | None = None  # it has failed, and is to be started again
    pause: float = 0.0  # how long that was waited for the last time
    output: Output | None = None  # what shows its output
    started_at: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def lost_a_peer(self) -> bool:
        """Whether it died of somebody else's death."""
        return self.report is not None and self.report.lost_a_peer


def run(members: Sequence[Member], *, grace: float = 5.0, output: Output | None = None) -> object:
    """Run every member in a process of its own until the first one, the driver, has returned.

    Args:
        members: What to start; ``members[0]`` is the driver. Their functions and arguments must be picklable.
        grace: Seconds the others have to end by themselves once the driver has returned; then they are stopped.
        output: Shows what they write; None leaves them this process's stdout and stderr.

    Returns:
        What the driver's function returned (None where it called ``sys.exit(0)``).

    Raises:
        MemberDiedError: A member raised or died before the driver had returned; all others were ended.
        TypeError: A member cannot be pickled; nothing was started.
        KeyboardInterrupt: Ctrl-C; all members were ended (at once on a second Ctrl-C).
    """
    if not members:
        raise ValueError("run() needs at least one member: the first is the driver")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A child is importing the script that started it, and the script has no guard: one quiet exit code for each
        # child instead of one traceback, and the parent says what to do.
        raise SystemExit(UNGUARDED)
    payloads = [_pickled(member) for member in members]
    crew: list[_Process] = []
    interrupted = False
    try:
        _start(members, payloads, crew, output)
        return _supervise(crew, grace)
    except KeyboardInterrupt:
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt):  # the second one: do not wait any longer
            _hang_up(crew)
            _end(crew, patience=1.0)
        raise
    finally:
        with sigint_deferred(discard=interrupted):
            _hang_up(crew)
            _end(crew, patience=0.0, kill=True)
            _close(crew)


# --- the parent: start ------------------------------------------------------------------------------------------------


def _pickled(member: Member, life: int = 0) -> bytes:
    """The member's function and arguments as bytes; TypeError, naming the member, where that is impossible."""
    job = (member.target, member.args, {"life": life} if life else {})
    try:
        if _main_can_be_imported():  # things of __main__ then go by reference and keep their identity
            with contextlib.suppress(Exception):
                return reducers.dumps(job, by_name=True)
        return reducers.dumps(job, by_name=False)
    except Exception as exc:
        raise TypeError(
            f'member "{member.name}" cannot be started: its function or arguments cannot be pickled ({exc}). '
            "Make such things (sockets, locks, environments, open files) in the member itself."
        ) from exc


def _main_can_be_imported() -> bool:
    """Whether a spawned child will have this process's ``__main__`` (not so in a notebook, ``-c`` or stdin)."""
    main = sys.modules["__main__"]
    spec_name = getattr(getattr(main, "__spec__", None), "name", None)
    return spec_name is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _start(
    members: Sequence[Member], payloads: Sequence[bytes], crew: list[_Process], output: Output | None
) -> None:
    """Start all, appending to ``crew`` one by one so that an interrupt half-way leaves none unknown."""
    if os.name == "posix":
        # Its first start unblocks SIGINT behind our back, in the very window below that must be closed to it.
        resource_tracker.ensure_running()
    with _surroundings(len(members)):
        for index, (member, payload) in enumerate(zip(members, payloads, strict=True)):
            with sigint_deferred():
                crew.append(_started(member, payload, index == 0, output))


def _start_again(crew: list[_Process], index: int) -> None:
    """Put a new process in the place of one that has failed."""
    old = crew[index]
    payload = _pickled(old.member, old.life + 1)
    with _surroundings(len(crew)), sigint_deferred():
        crew[index] = _started(old.member, payload, False, old.output, old.life + 1)
        crew[index].pause = old.pause
    _hang_up([old])
    _close([old])


@contextlib.contextmanager
def _surroundings(members: int) -> Iterator[None]:
    threads = {} if members == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    with _environment_lock, _environment(threads), _main_without_file():
        yield


def _started(member: Member, payload: bytes, is_driver: bool, output: Output | None, life: int = 0) -> _Process:
    """Start one. In a block of ``sigint_deferred``: children inherit the blocked mask and so cannot be interrupted
    before they are ready to end quietly; and here an interrupt stays pending until the child is in the list.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=True)
    reader, writer = context.Pipe(duplex=False) if output is not None else (None, None)
    try:
        process = context.Process(
            target=child.main, args=(theirs, os.getpid(), is_driver, writer), name=member.name, daemon=False
        )
        with _environment(member.environment):
            process.start()
    except BaseException:
        ours.close()
        if reader is not None:
            reader.close()
        raise
    finally:
        theirs.close()
        if writer is not None:
            writer.close()
    if output is not None and reader is not None:
        output.add(member.name, process.pid or 0, reader)
    return _Process(member.name, member, life, payload, process, ours, output=output)


@contextlib.contextmanager
def _main_without_file() -> Iterator[None]:
    """Hide the ``__file__`` of a main module that is no file ("<stdin>"): multiprocessing would have it imported."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_can_be_imported():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started in this block.

    They must be in the environment at exec: a child that imports ``__main__`` has loaded OpenMP before our code runs.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- the parent: watch ------------------------------------------------------------------------------------------------


def _supervise(crew: list[_Process], grace: float) -> object:
    """Watch until the driver has returned (its value) or a member has failed for good (MemberDiedError)."""
    driver = crew[0]
    while True:
        _step(crew, _pause(crew))
        if any(p.failed_at is not None and not _may_come_again(p, driver) for p in crew):
            break
        if driver.report is not None:  # returned, else it would have failed
            return _finish(crew, driver.report, grace)
        for index, p in enumerate(crew):
            if p.failed_at is not None:
                _see_to(crew, index)
    # Others may die of the first death, and even be noticed before it: a process takes its time to end.
    first = time.monotonic()
    while _alive(crew):
        is_known = any(p.failed_at is not None and p.again_at is None and not p.lost_a_peer for p in crew)
        left = first + (_AFTERSHOCKS if is_known else _CAUSE_WAIT) - time.monotonic()
        if left <= 0:
            break
        _step(crew, min(left, _POLL))
    failed = sorted(
        (p for p in crew if p.failed_at is not None and p.again_at is None),
        key=lambda p: (p.lost_a_peer, p.failed_at),
    )
    _wait_for_all([p for p in crew if p.report is not None], _TERM_TO_KILL)  # for exit codes of their own
    _end(crew, patience=0.0)
    raise died(failed[0], [p.name for p in failed[1:]], failed[0] is driver)


def _may_come_again(p: _Process, driver: _Process) -> bool:
    interrupted = p.report is not None and p.report.kind == "interrupted"
    return p is not driver and p.life < p.member.restarts and not interrupted


def _see_to(crew: list[_Process], index: int) -> None:
    """Do what is next for a member that has failed and is to be started again: wait for its end, wait, start it."""
    p, now = crew[index], time.monotonic()
    assert p.failed_at is not None
    if p.exitcode is None:
        if now - p.failed_at > _TERM_TO_KILL:
            p.stopped = True
            p.process.kill()
    elif p.again_at is None:
        soon = p.life and p.failed_at - p.started_at < _WELL * p.pause
        p.pause = seconds = min(_MOST_BACKOFF, 2 * p.pause if soon else p.member.backoff)
        p.again_at = now + seconds
        which = p.life + 1, p.member.restarts
        log.warning("%s\n(it is started again in %g s: restart %d of %d)", died(p, []), seconds, *which)
    elif now >= p.again_at:
        _start_again(crew, index)


def _pause(crew: Iterable[_Process]) -> float:
    """How long to wait for news at most."""
    now = time.monotonic()
    return max(0.0, min([_POLL, *(p.again_at - now for p in crew if p.again_at is not None)]))


def _finish(crew: Sequence[_Process], returned: Report, grace: float) -> object:
    """The driver has returned: let the others end, say what did not end well, load the value."""
    stopped = _end(crew, patience=grace)
    at_work = [p.name for p in crew if p.name in stopped and p.report is None]
    if at_work:
        log.warning("stopped %s, still at work %g s after the driver had returned", ", ".join(at_work), grace)
    for p in crew:
        if p.failed_at is not None and p.again_at is None and p.name not in stopped:
            log.warning("after the driver had returned: %s", died(p, []))
    if not returned.value:
        return None
    try:
        return pickle.loads(returned.value)
    except Exception as exc:
        raise TypeError(f'the return value of "{crew[0].name}" cannot be read here: {exc}') from exc


def _step(crew: Sequence[_Process], seconds: float) -> None:
    """Wait up to ``seconds`` for news of the living, and take in all there is."""
    alive = _alive(crew)
    sources: list[connection.Connection | int] = [p.process.sentinel for p in alive]
    sources += [p.channel for p in alive if p.channel is not None]
    connection.wait(sources, max(0.0, seconds))
    for p in alive:
        exitcode = p.process.exitcode  # before the channel is drained: its last words come before its death
        _drain(p)
        if exitcode is not None:
            p.exitcode = exitcode
            ended_well = p.report is not None and p.report.kind == "returned"
            if ended_well and exitcode != 0 and not p.stopped:
                log.warning('member "%s" (pid %d) ended with code %d after its work was done', p.name, p.pid, exitcode)
            elif not ended_well and (exitcode != 0 or p is crew[0]):
                p.failed_at = p.failed_at or time.monotonic()


def _drain(p: _Process) -> None:
    """Read what a member has sent, and answer "ready" with its work."""
    try:
        while p.channel is not None and p.channel.poll():
            message = p.channel.recv_bytes()
            if message == child.READY:
                p.ready = True
                p.channel.send_bytes(p.payload)
                p.payload = b""
            else:
                p.report = pickle.loads(message)
                if p.report.kind != "returned":
                    p.failed_at = time.monotonic()
    except (EOFError, OSError):  # it is gone; its exit code says the rest
        if p.channel is not None:
            p.channel.close()
            p.channel = None


# --- the parent: end --------------------------------------------------------------------------------------------------


def _alive(crew: Iterable[_Process]) -> list[_Process]:
    return [p for p in crew if p.exitcode is None]


def _end(crew: Sequence[_Process], *, patience: float, kill: bool = False) -> list[str]:
    """End all: wait ``patience`` seconds, SIGTERM, SIGKILL; with ``kill``, SIGKILL at once. Names the ended ones."""
    _wait_for_all(crew, patience)
    stopped = _alive(crew)
    if stopped and not kill:
        for p in stopped:
            p.stopped = True
            p.process.terminate()
        _wait_for_all(stopped, _TERM_TO_KILL)
    for p in _alive(stopped):
        p.stopped = True
        p.process.kill()
    _wait_for_all(stopped, 2.0)
    return [p.name for p in stopped]


def _wait_for_all(crew: Sequence[_Process], seconds: float) -> None:
    """Keep reading meanwhile: a member that is writing its report to a full pipe could not end otherwise."""
    horizon = time.monotonic() + seconds
    while _alive(crew) and (left := horizon - time.monotonic()) > 0:
        _step(crew, min(left, _POLL))


def _hang_up(crew: Iterable[_Process]) -> None:
    """Read no more. An interrupt may have fallen into the middle of a message: what follows it is not to be trusted."""
    for p in crew:
        if p.channel is not None:
            p.channel.close()
            p.channel = None


def _close(crew: Iterable[_Process]) -> None:
    """Give back what the processes hold here."""
    for p in crew:
        if p.exitcode is None:
            log.error('member "%s" (pid %d) does not die, even of SIGKILL: it is stuck in the kernel', p.name, p.pid)
            continue
        p.process.join(1.0)
        p.process.close()
