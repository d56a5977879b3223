"""What handlers raise, as programs for torch expect it: shown on the callee's stderr as well, and of torch's kind.

With torch, `rpc_sync` and the futures of `rpc_async` keep ValueErrors and TypeErrors, and turn all others into
RuntimeErrors; `to_here` keeps the type. A program may catch either, so that an error is of both kinds here.
"""

from __future__ import annotations

import logging
import sys

from actorrpc.runtime.copies import as_torch_raises
from actorrpc.runtime.worker import Worker


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


def be_runtime_errors() -> None:
    """Has the errors of this process's calls be RuntimeErrors as well from now on, but for those that torch keeps."""
    setattr(Worker, "raised_as", staticmethod(_raised))  # noqa: B010


def _raised(error: Exception) -> BaseException:
    return error if isinstance(error, ValueError | TypeError) else as_torch_raises(error)
