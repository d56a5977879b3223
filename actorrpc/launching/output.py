"""What the members of a launched world write, shown by their parent: stdout and stderr of each, through one pipe.

The pipe is the system's, so that all that a process writes comes: of C code, of its children, and what it wrote last
before it was killed. One pipe for both streams, since what matters in a log is what came first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection

from actorrpc.services.lines import Allowance, prefix, shown, write

RATE = 200.0
"""Lines a second of one member."""
_IDLE = 0.2  # seconds after which a line that has no end yet, a prompt say, is shown
_MOST_PENDING = 1 << 16
_END_SECONDS = 5.0
_LAST_SECONDS = 1.0


@dataclass
class _Source:
    reader: connection.Connection
    prefix: str
    allowance: Allowance
    pending: bytes = b""
    heard: float = 0.0
    lines: list[str] = field(default_factory=list)


class Output:
    """Shows the output of members. To be closed.

    Args:
        rate: How many lines a second of each are shown.
        show: Takes text to be shown; by default it goes to the ``sys.stdout`` of the moment.
    """

    def __init__(self, rate: float = RATE, show: Callable[[str], None] | None = None) -> None:
        if os.name != "posix":
            raise RuntimeError("logs=True needs a POSIX system, where a process can be given its stdout")
        self._rate, self._show = rate, show or _print
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._sources: list[_Source] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="actorrpc-output", daemon=True)
        self._thread.start()

    def add(self, name: str, pid: int, reader: connection.Connection) -> None:
        """Shows what a member writes; takes over the reading end of its pipe."""
        os.set_blocking(reader.fileno(), False)
        source = _Source(reader, prefix(name, socket.gethostname(), pid), Allowance(self._rate))
        self._sources.append(source)
        self._selector.register(reader, selectors.EVENT_READ, source)
        os.write(self._wake_write, b"+")

    def close(self) -> None:
        """Shows all that was written so far, and ends."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_write, b".")
        self._thread.join(_END_SECONDS)  # longer only where the terminal takes nothing in
        if not self._thread.is_alive():
            for source in self._sources:
                source.reader.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_IDLE):
                if key.data is None:
                    os.read(self._wake_read, 64)
                elif not self._read(key.data):
                    self._selector.unregister(key.data.reader)
            now = time.monotonic()
            for source in list(self._sources):
                if source.pending and now - source.heard > _IDLE:
                    self._take(source, b"\n", now)
                self._put(source, now)
        for source in list(self._sources):  # a member's child may hold a pipe open for ever: what is there will do
            end = time.monotonic() + _LAST_SECONDS
            while self._read(source, at_end=True) and time.monotonic() < end:
                pass
            if source.pending:
                self._take(source, b"\n", time.monotonic())
            self._put(source, time.monotonic(), at_end=True)

    def _read(self, source: _Source, at_end: bool = False) -> bool:
        """Takes in what a pipe has; returns whether there may be more: later, or, at the end, now."""
        try:
            data = os.read(source.reader.fileno(), 1 << 16)
        except BlockingIOError:
            return not at_end
        except OSError:
            return False
        if data:
            self._take(source, data, time.monotonic())
        return bool(data)

    def _take(self, source: _Source, data: bytes, now: float) -> None:
        source.heard = now
        *lines, source.pending = (source.pending + data).split(b"\n")
        if len(source.pending) > _MOST_PENDING:
            lines, source.pending = [*lines, source.pending], b""
        for line in lines:
            if source.allowance.take(now):
                self._notice(source, now)
                source.lines.append(source.prefix + shown(line.decode(errors="replace")))

    @staticmethod
    def _notice(source: _Source, now: float, at_once: bool = False) -> None:
        notice = source.allowance.notice(now, at_once=at_once)
        if notice is not None:
            source.lines.append(source.prefix + notice)

    def _put(self, source: _Source, now: float, at_end: bool = False) -> None:
        self._notice(source, now, at_end)
        lines, source.lines = source.lines, []
        if lines:
            with contextlib.suppress(Exception):  # nobody looks any more
                self._show("\n".join(lines) + "\n")


def redirect(writer: connection.Connection) -> None:
    """Has this process, a member, write to its pipe from now on; line by line, so that nothing is kept back."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(Exception):
            stream.flush()
        os.dup2(writer.fileno(), number)
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    writer.close()


def _print(text: str) -> None:
    write(sys.stdout, text)
