"""Lines of text on their way to somebody's terminal: how many may go, and how one looks."""

from __future__ import annotations

from typing import Any

MOST_CHARACTERS = 8192
"""How much of a line is shown."""


class Allowance:
    """How many lines may go: so many a second, and some more at once after a pause.

    Arguments:
        rate: lines a second.
        burst: how many at once.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate, self._burst = rate, 5 * rate if burst is None else burst
        self._left, self._at = self._burst, 0.0
        self._out, self._told = 0, 0.0

    def take(self, now: float) -> bool:
        """Returns whether one more may go at a time; counts it if not."""
        self._refill(now)
        if self._left < 1:
            self._out += 1
            return False
        self._left -= 1
        return True

    def notice(self, now: float, *, at_once: bool = False) -> str | None:
        """Returns a line that says how many were left out, once there is room again, and at most once a second; None
        where there is no need.

        Arguments:
            at_once: whether there is no time to wait for room.
        """
        self._refill(now)
        if not self._out or not (at_once or (self._left >= 1 and now >= self._told + 1)):
            return None
        count, self._out, self._told = self._out, 0, now
        return f"... {count} lines left out, of more than {self._rate:g} a second"

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)


def shown(line: str) -> str:
    """Returns a line as it is shown: what was written over (a progress bar's earlier states) and what is too long is
    left out.
    """
    line = line.rstrip("\r").rsplit("\r", 1)[-1]
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}... ({len(line)} characters)"


def prefix(name: str, host: str, pid: int) -> str:
    """Returns what stands before the lines of a worker."""
    return f"[{name} {host} {pid}] "


def write(stream: Any, text: str) -> None:
    """Writes text to a stream at once; characters that its encoding lacks as escapes, so that others are not lost."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
