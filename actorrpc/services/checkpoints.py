"""What actors of roles want to have after a restart: kept by rank 0, or in a directory.

A file begins with the run that it belongs to: what an earlier run has left is not taken for this one's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.errors import CheckpointError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.services.ids import CHECKPOINTS

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker


class Checkpoints:
    """The service of one worker; rank 0's has the checkpoints of those that have no directory.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._kept: dict[str, bytes] = {}
        self._directory: Path | None = None
        self._run = b""
        worker.services[Checkpoints] = self
        worker.cells[CHECKPOINTS] = ServiceCell(worker, Lane.CONTROL, self._handle)

    def use(self, directory: str | None, run: str) -> None:
        """Says where this worker's own checkpoints go: to a directory, or (None) to rank 0; and which run it is."""
        self._directory, self._run = None if directory is None else Path(directory), run.encode()

    def keep(self, data: bytes) -> None:
        """Keeps a checkpoint of this worker in the place of its last one; returns when it is kept.

        Raises:
            CheckpointError: it cannot be written; the last one stands.
            WorkerLostError: rank 0 is gone.
        """
        worker = self._worker
        if self._directory is None:
            call = worker.request(0, CHECKPOINTS, ("keep", worker.record.name, data), what="keeping a checkpoint")
            worker.wait_result(call)
            return
        path = self._path(self._directory)
        temporary = ""
        try:
            number, temporary = tempfile.mkstemp(prefix=f"{path.name}-", dir=self._directory)
            with open(number, "wb") as file:
                file.write(self._run + b"\n" + data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as e:
            with contextlib.suppress(OSError):
                if temporary:
                    os.unlink(temporary)
            raise CheckpointError(f"{worker} could not write its checkpoint to {path}: {e}; the last one stands") from e

    def last(self) -> bytes | None:
        """Returns the last checkpoint of this worker's earlier lives in this run; None if there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        worker = self._worker
        if self._directory is None:
            call = worker.request(0, CHECKPOINTS, ("last", worker.record.name), what="looking for a checkpoint")
            found: bytes | None = worker.wait_result(call)
            return found
        path = self._path(self._directory)
        try:
            run, _, data = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as e:
            raise CheckpointError(f"{worker} could not read its checkpoint, {path}: {e}") from e
        return data if run == self._run else None

    def _path(self, directory: Path) -> Path:
        return directory / f"{self._worker.record.name.replace(':', '-')}.checkpoint"

    def _handle(self, message: Message) -> None:
        verb, name, *data = message.load()
        if verb == "keep":
            self._kept[name] = data[0]
            message.reply(None)
        else:
            message.reply(self._kept.get(name))
