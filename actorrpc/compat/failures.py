"""What handlers raise is shown on the callee's stderr as well, as torch shows it."""

from __future__ import annotations

import logging
import sys


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show() -> None:
    """Has the failures of this process's handlers shown from now on."""
    log = logging.getLogger("actorrpc.failures")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(_Stderr())
