"""Torch's own profiler in one worker's process: operators of all its threads, into a file of its own.

It keeps what it records in memory without a bound, so it is ended early where it was on for long, or the process has
grown by much meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, supported_activities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actorrpc.runtime.clock import Gate, Thread
    from actorrpc.runtime.worker import Worker

_profiler: Any = profiler
_supported: Any = supported_activities
_C: Any = torch._C
_LOOK_SECONDS = 0.2
_END_SECONDS = 300.0
_DEVICES = {"CUDA": "cuda", "XPU": "xpu", "MTIA": "mtia", "HPU": "hpu"}


class Operators:
    """One recording by torch's profiler.

    Arguments:
        worker: for its clock and name.
        shapes: whether the shapes of operators' inputs are recorded.
        seconds: how long it may last.
        growth: by how many bytes the process may grow meanwhile.

    Attributes:
        note: why it did not begin, or was ended early; "" otherwise.
    """

    def __init__(self, worker: Worker, *, shapes: bool, seconds: float, growth: int) -> None:
        self.note = ""
        self._path: Path | None = None
        self._profile: Any = None
        self._gate: Gate = worker.clock.gate()
        self._thread: Thread | None = None
        self._unwanted = False
        self._wall = 0
        if _profiler._is_profiler_enabled:
            self.note = "torch's profiler is in use there already, so its operators are missing"
            return
        try:
            self._profile = _profiler.profile(
                use_cpu=True, use_device=_device(), record_shapes=shapes, use_kineto=True,
                experimental_config=_C._profiler._ExperimentalConfig(profile_all_threads=True),
            )  # fmt: skip
            self._wall = time.time_ns() - time.monotonic_ns()
            self._profile.__enter__()
        except Exception as e:
            self._profile = None
            self.note = f"torch's profiler could not be started there, so its operators are missing: {e}"
            return
        self._bounds = seconds, growth
        self._thread = worker.clock.start(self._look, f"{worker.record.name}-operators")

    def _look(self) -> None:
        """Ends it when it is asked to, or has grown too large."""
        seconds, growth = self._bounds
        began, size = time.monotonic(), _memory()
        while not self._gate.wait(_LOOK_SECONDS):
            lasted, grown = time.monotonic() - began, _memory() - size
            if lasted > seconds or grown > growth:
                reason = (
                    f"it was on for {lasted:.0f} s" if lasted > seconds else f"the process grew by {grown >> 20} MiB"
                )
                self.note = f"torch's operators are missing after the first {lasted:.1f} s: {reason}"
                break
        try:
            self._profile.__exit__(None, None, None)
            if self._unwanted:
                return
            number, path = tempfile.mkstemp(prefix="actorrpc-trace-", suffix=".json")
            self._path = Path(path)
            os.close(number)
            self._profile.export_chrome_trace(path)
        except Exception as e:
            self.note = f"torch's operators are missing: {e}"
            self._remove()
        self._profile = None

    def stop(self) -> None:
        """Ends it, and writes its file. May be called twice."""
        self._gate.open()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def events(self, most: int) -> Iterator[dict[str, Any]]:
        """Yields the events, `most` at the most, with times in microseconds of the host's monotonic clock, and removes
        the file. More is said in `note`.
        """
        try:
            if self._path is None:
                return
            text = self._path.read_text(errors="replace")
            start = text.find('"traceEvents": [')
            base = json.loads(text[:start].rstrip().rstrip(",") + "}").get("baseTimeNanoseconds", 0)
            shift = (base - self._wall) / 1000
            decoder, at, count = json.JSONDecoder(), text.index("[", start) + 1, 0
            while True:
                while text[at] in " \n\r\t,":
                    at += 1
                if text[at] == "]":
                    return
                event, at = decoder.raw_decode(text, at)
                if event.get("pid") in ("Spans", "Traces", ""):
                    continue
                count += event.get("ph") != "M"
                if count > most:
                    self.note = f"of torch's events there are only the first {most}"
                    return
                if "ts" in event:
                    event["ts"] = event["ts"] + shift
                yield event
        finally:
            self._remove()

    def _remove(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()

    def drop(self) -> None:
        """Ends it, and forgets what it has recorded. May be called twice."""
        self._unwanted = True
        self.stop()
        self._remove()


def _device() -> str | None:
    for activity in _supported():
        if activity is not ProfilerActivity.CPU and activity.name in _DEVICES:
            return _DEVICES[activity.name]
    return None


def _memory() -> int:
    """Returns how many bytes of memory this process has; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
