"""What torch's legacy profiler records on one thread. Times of ours may be nested, those of the profiler may not."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch.autograd.profiler_legacy

log = logging.getLogger("actorrpc")
_legacy: Any = torch.autograd.profiler_legacy


class Tape:
    """What is recorded on the present thread from `begin` to `end`.

    Attributes:
        records: as `_disable_profiler_legacy` returns them.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.records: list[Any] = []

    def begin(self) -> bool:
        """Starts to record; returns False where another profiler is on, which is not ours to end."""
        outer = _local.tapes[-1] if _local.tapes else None
        if outer is not None:
            _cut()
        try:
            _legacy._enable_profiler_legacy(self._config)
        except RuntimeError as e:
            log.debug("nothing is recorded: %s", e)
            if outer is not None:
                _legacy._enable_profiler_legacy(outer._config)
            return False
        _local.tapes.append(self)
        return True

    @property
    def begun(self) -> int:
        """When it began, on the clock of `time.time_ns`; from which the times of the records count."""
        marks = (record for thread in self.records for record in thread if record.name() == "__start_profile")
        return int(next(marks).start_us() * 1000)

    def end(self) -> None:
        """Ends the recording."""
        _cut()
        _local.tapes.pop()
        if _local.tapes:
            _legacy._enable_profiler_legacy(_local.tapes[-1]._config)


def _cut() -> None:
    """Has all tapes of the thread take what was recorded up to now: the profiler itself cannot be nested."""
    records = _legacy._disable_profiler_legacy()
    for tape in _local.tapes:
        tape.records += records


class _Local(threading.local):
    def __init__(self) -> None:
        self.tapes: list[Tape] = []


_local = _Local()
