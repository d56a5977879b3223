"""Questions to those from whom answers are awaited: whether a message to them or from them is missing.

Messages are numbered, so what is lost shows with the next one. After the last one, or after the word that this worker
was taken for lost, there is none: both sides would wait, each for the other, until the calls' own times are over. So
whoever has waited for a call for a while asks its callee whether it is there, and asks again from time to time. The
question and its answer are numbered, too: who sees a gap takes the other for lost, and who has done so says it again.
That there is no answer means nothing: the callee may hold the GIL. A worker that waits for nobody asks nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from actorrpc.runtime.peers import Standing
from actorrpc.services.looking import Looking

if TYPE_CHECKING:
    from actorrpc.runtime.worker import Worker

PAUSE: Final = 0.4
"""The share of the time of silence between two looks: a call is asked after at the second one."""


class Inquiries(Looking):
    """What one worker asks.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._seen: set[int] = set()
        """The calls that were pending at the last look."""

    def start(self) -> None:
        """Begins to ask, unless peers are never taken for lost by their silence."""
        self._begin(self._worker.transport.silence * PAUSE)

    def _look(self) -> None:
        pending = list(self._worker.calls.pending.values())
        late = {call.peer for call in pending if call.id in self._seen}
        self._seen = {call.id for call in pending}
        for number in sorted(late):
            self._ask(number)

    def _ask(self, number: int) -> None:
        worker = self._worker
        peer = worker.peers.get(number)
        if number != worker.id and peer is not None and peer.standing is Standing.MEMBER and worker.doubts.ask:
            worker.doubts.ask(number, self._pause, worker.doubts.new_question())
