"""What a worker prints and logs, sent to another one's terminal: functions that the other one (`actorrpc.logs`) has
called here, through the executor, and that this one calls there.

Lines go into a queue at once, whoever writes them; a thread of its own sends them, one message after the other, so that
they come in order and nobody who prints waits for a network. They are written here all the same.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.handling import here
from actorrpc.services.directory import Member
from actorrpc.services.everyone import ask
from actorrpc.services.lines import Allowance, shown
from actorrpc.services.taps import taps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

_SEND_SECONDS = 10.0
_LAST_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_MOST_QUEUED = 20_000
_MOST_PENDING = 1 << 16
_MOST_AT_ONCE = 500
_STREAM_EMIT = logging.StreamHandler.emit.__code__
_changing = threading.Lock()
"""Taken to change the process's streams and handlers."""


class Tee:
    """Stands for `sys.stdout` or `sys.stderr`: passes everything on to it, and gives away the lines.

    Arguments:
        plain: the stream.
        give: takes a line.
    """

    def __init__(self, plain: Any, give: Callable[[str], None]) -> None:
        self.plain, self._give = plain, give
        self._pending: dict[int, str] = {}
        """What threads have written since their last line's end."""

    def write(self, text: str) -> Any:
        written = self.plain.write(text)
        # What a handler of logging writes is a record, which is forwarded as such.
        if sys._getframe(1).f_code is not _STREAM_EMIT:
            ident = threading.get_ident()
            *lines, rest = (self._pending.pop(ident, "") + text).split("\n")
            if len(rest) > _MOST_PENDING:
                lines, rest = [*lines, rest], ""
            if rest:
                self._pending[ident] = rest
            for line in lines:
                self._give(shown(line))
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Gives away lines that have no end yet."""
        while self._pending:
            self._give(shown(self._pending.popitem()[1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class _Records(logging.Handler):
    """Forwards records of all loggers that pass them on to the root. Its own level is none, as logging does nothing
    more for a record once there is any handler, even one whose level keeps it out.
    """

    def __init__(self, source: _Source, least: int) -> None:
        super().__init__()
        self._source, self._least = source, least

    def emit(self, record: logging.LogRecord) -> None:
        last = logging.lastResort  # what logging turns to where there is no handler: there is this one now
        if last is not None and record.levelno >= last.level and self._is_first() and _is_alone(record.name):
            last.handle(record)
        if record.levelno < self._least:
            return
        try:
            text = f"{record.levelname} {record.name}: {self.format(record)}"
        except Exception:
            return  # those who write it here have said so, to stderr
        for line in text.split("\n"):
            self._source.give(shown(line))

    def _is_first(self) -> bool:
        """Returns whether no other one, who forwards to somebody else, is asked before this one."""
        return next((one for one in logging.getLogger().handlers if isinstance(one, _Records)), None) is self


def _is_alone(name: str) -> bool:
    """Returns whether the records of a logger meet no handler but those of this module."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _Records) for handler in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


class _Source:
    """Forwards what one process prints and logs to one other worker."""

    def __init__(self, worker: Worker, key: str, target: int, level: int, rate: float) -> None:
        self._worker, self._key, self.target = worker, key, target
        self._allowance = Allowance(rate)
        self._queue: deque[str] = deque()
        # Reentrant: a signal handler or a finalizer of the user's may print.
        self._gate, self._door = worker.clock.gate(), threading.RLock()
        self._over = False
        self._sender = 0
        with _changing:
            self._tees = []
            for name in ("stdout", "stderr"):
                plain = getattr(sys, name)
                if plain is not None:
                    tee = Tee(plain, self.give)
                    setattr(sys, name, tee)
                    self._tees.append((name, tee))
            self._handler = _Records(self, level)
            logging.getLogger().addHandler(self._handler)
        self._thread = worker.clock.start(self._run, f"{worker.record.name}-lines")

    def give(self, line: str) -> None:
        """Takes a line. Never waits."""
        if threading.get_ident() == self._sender or self._over:
            return  # what sending itself says would never end
        now = monotonic()
        with self._door:
            if len(self._queue) < _MOST_QUEUED and self._allowance.take(now):
                notice = self._allowance.notice(now)
                if notice is not None:
                    self._queue.append(notice)
                self._queue.append(line)
        self._gate.open()

    def _run(self) -> None:
        self._sender = threading.get_ident()
        while not self._over:
            self._gate.wait(_LOOK_SECONDS)
            if not self._send(_SEND_SECONDS):
                self._restore()
                return

    def _batch(self, at_end: bool) -> list[str]:
        with self._door:
            batch = [self._queue.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._queue)))]
            if not self._queue:
                notice = self._allowance.notice(monotonic(), at_once=at_end)
                if notice is not None:
                    batch.append(notice)
            return batch

    def _send(self, seconds: float, at_end: bool = False) -> bool:
        """Sends what there is; returns whether anybody is there who takes it."""
        while batch := self._batch(at_end):
            record = self._worker.record
            who = record.name, record.host, record.pid
            try:
                call = ask(self._worker, self.target, deliver, self._key, who, batch, timeout=seconds)
                if not self._worker.wait_result(call):
                    return False
            except Exception:
                return False
        return True

    def stop(self) -> None:
        """Forwards what was written so far, and nothing more."""
        if self._over:
            return
        self._restore()
        self._gate.open()
        self._thread.join(_SEND_SECONDS + _LAST_SECONDS)
        self._send(_LAST_SECONDS, at_end=True)

    def _restore(self) -> None:
        """Gives the process its streams back, unless somebody has replaced them meanwhile."""
        for _, tee in self._tees:
            tee.finish()
        self._over = True
        with _changing:
            logging.getLogger().removeHandler(self._handler)
            for name, tee in self._tees:
                if getattr(sys, name) is tee:
                    setattr(sys, name, tee.plain)


class _Sources:
    """A worker's sources, by key; they end with those who asked for them, or with the worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.known: dict[str, _Source] = {}
        worker.members.watchers.append(self._gone)
        taps = taps_of(worker)
        taps.put(worker.services[Member], "say_goodbye", self._stop)  # after which nobody listens
        taps.put(worker, "stop", self._stop)

    def drop(self, key: str) -> None:
        source = self.known.pop(key, None)
        if source is not None:
            source.stop()

    def _gone(self, peer: Peer) -> None:
        for key, source in list(self.known.items()):
            if source.target == peer.record.id and self.worker.open:
                self.worker.clock.start(functools.partial(self.drop, key), "actorrpc-drop")

    def _stop(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for key in list(self.known):
            self.drop(key)
        plain(*args, **kwargs)


class Sinks(dict[str, Any]):
    """What takes lines at the worker that has asked for them, by key."""


# -- what others have called here


def begin(key: str, target: int, level: int, rate: float) -> None:
    """Forwards what this process prints and logs to a worker, from now on."""
    worker: Worker = here.handling.worker  # type: ignore[union-attr]
    with _changing:
        sources: _Sources | None = worker.services.get(_Sources)
        if sources is None:
            sources = worker.services[_Sources] = _Sources(worker)
    if key not in sources.known:
        sources.known[key] = _Source(worker, key, target, level, rate)


def end(key: str) -> None:
    """Forwards nothing more."""
    worker: Worker = here.handling.worker  # type: ignore[union-attr]
    sources: _Sources | None = worker.services.get(_Sources)
    if sources is not None:
        sources.drop(key)


def deliver(key: str, who: tuple[str, str, int], lines: list[str]) -> bool:
    """Takes lines of another worker; returns whether anybody here still wants them."""
    worker: Worker = here.handling.worker  # type: ignore[union-attr]
    sinks: Sinks | None = worker.services.get(Sinks)
    sink = None if sinks is None else sinks.get(key)
    if sink is None:
        return False
    sink(who, lines)
    return True
