"""Looking from time to time at the calls that are under way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actorrpc.runtime.worker import Worker


class Looking:
    """Who looks at a worker's calls from time to time, as long as any are pending: an idle worker is to sleep.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pause = 0.0
        self._door = threading.Lock()
        self._will_look = False

    def _begin(self, pause: float) -> None:
        """Begins to look, with so many seconds between two looks; 0: does not."""
        self._pause = pause
        if pause > 0:
            self._look_later()

    def _look(self) -> None:
        """Looks once, in the control lane."""
        raise NotImplementedError

    def _look_and_go_on(self) -> None:
        worker, self._will_look = self._worker, False
        if not worker.open:
            return
        try:
            self._look()
        finally:  # one look that fails is not the last one
            if worker.calls.pending:
                self._look_later()
            else:
                worker.calls.next_sent.append(self._look_later)
                if worker.calls.pending:  # it was sent before that could be seen
                    self._look_later()

    def _look_later(self) -> None:
        with self._door:
            if self._will_look:
                return
            self._will_look = True
        self._worker.keeper.after(self._pause, self._look_and_go_on)
