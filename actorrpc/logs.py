"""What other workers print and log, in this process's terminal: `forward_logs`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from actorrpc.services import forwarding
from actorrpc.services.everyone import Everyone, ask
from actorrpc.services.forwarding import Sinks, Tee
from actorrpc.services.lines import prefix, write
from actorrpc.services.taps import taps_of
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from typing_extensions import Self

    from actorrpc.runtime.clock import Thread
    from actorrpc.runtime.peers import Record
    from actorrpc.session import Session

log = logging.getLogger("actorrpc")
RATE = 200.0
_SECONDS = 30.0
_MOST_QUEUED = 50_000
_LAST_SECONDS = 2.0


class ForwardedLogs:
    """Lines of others on their way to this terminal; see `forward_logs`. Ends by `stop()`, or with a `with` block."""

    def __init__(self, session: Session, level: int, rate: float, stream: TextIO | None) -> None:
        worker = self._worker = session.worker
        self._stream = stream
        self._key = f"{worker.id}-{os.urandom(6).hex()}"
        self._queue: deque[str] = deque()
        self._left_out = 0
        self._asked: list[Record] = []
        self._gate, self._over = worker.clock.gate(), False
        self._stopping = threading.Lock()
        sinks: Sinks = worker.services.setdefault(Sinks, Sinks())
        sinks[self._key] = self._put
        self._thread: Thread = worker.clock.start(self._run, f"{worker.record.name}-terminal")
        self._everyone = Everyone(
            worker, forwarding.begin, (self._key, worker.id, level, rate), self._took, self._failed, own=False,
            timeout=_SECONDS,
        )  # fmt: skip
        self._take_away = taps_of(worker).put(worker, "stop", self._at_end)

    def _took(self, record: Record, _: Any, __: bool) -> None:
        self._asked.append(record)

    def _failed(self, record: Record, error: Exception, _: bool) -> None:
        log.warning("what %s prints is not forwarded: %s", record, error)

    def _put(self, who: tuple[str, str, int], lines: list[str]) -> None:
        if len(self._queue) + len(lines) > _MOST_QUEUED:  # the terminal takes nothing in
            self._left_out += len(lines)
            return
        before = prefix(*who)
        self._queue.extend(before + line for line in lines)
        self._gate.open()

    def _run(self) -> None:
        while not self._over or self._queue:
            self._gate.wait(None if not self._over else 0)
            lines = [self._queue.popleft() for _ in range(len(self._queue))]
            if self._left_out:
                lines.append(f"... {self._left_out} lines left out: they were not taken in here")
                self._left_out = 0
            if not lines:
                continue
            stream: Any = self._stream or sys.stdout
            while isinstance(stream, Tee):  # else two who forward to each other would never end
                stream = stream.plain
            try:
                write(stream, "\n".join(lines) + "\n")
            except Exception:  # nobody looks any more
                self._over = True
                self._queue.clear()

    def stop(self) -> None:
        """Shows what came until now, and nothing more. Does nothing the second time."""
        self._end(ask_them=True)

    def _at_end(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._end(ask_them=False)
        plain(*args, **kwargs)

    def _end(self, ask_them: bool) -> None:
        if not self._stopping.acquire(False):
            return
        self._everyone.stop()
        if ask_them and self._worker.open:
            calls = []
            for record in self._asked:
                try:
                    calls.append(ask(self._worker, record.id, forwarding.end, self._key, timeout=_LAST_SECONDS))
                except Exception:
                    pass  # it is gone
            for call in calls:
                try:
                    self._worker.wait_result(call)
                except Exception:
                    pass
        self._worker.services[Sinks].pop(self._key, None)
        self._over = True
        self._gate.open()
        self._thread.join(_LAST_SECONDS)
        self._take_away()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def forward_logs(
    level: int | str = logging.NOTSET, *, lines_per_second: float = RATE, stream: TextIO | None = None
) -> ForwardedLogs:
    """Shows in this process what the other workers print, and what they log: each line with `[role:index host pid]` in
    front. It includes workers that join later; it ends with the world, by `stop()`, or at the end of a `with` block.

    What they print stays in their own terminals as well: their `sys.stdout` and `sys.stderr` pass it on, and a handler
    at the root of `logging` takes the records that loggers let through. Lines of one worker come in order. What C code
    or child processes write is not seen, nor the last lines of a worker that is killed, for the instant that it takes
    to send them: `launch(logs=True)` shows both.

    Arguments:
        level: of records, below which they are not forwarded; their loggers' own levels hold in any case.
        lines_per_second: of each worker, and five times as many at once after a pause; how many were left out is said.
        stream: where they go; default: the `sys.stdout` of the moment.

    Returns what ends it.

    Raises:
        NotAMemberError: this process is in no world.
        ValueError: there is no such level, or `lines_per_second` is not above 0.
    """
    if not lines_per_second > 0:
        raise ValueError(f"lines_per_second must be above 0, not {lines_per_second!r}")
    number = logging.getLevelName(level) if isinstance(level, str) else level
    if not isinstance(number, int):
        raise ValueError(f"there is no level of logging called {level!r}")
    return ForwardedLogs(current(), number, float(lines_per_second), stream)
