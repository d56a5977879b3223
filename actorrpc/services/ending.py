"""The end of a world, on rank 0: all are in shutdown, then nobody works and no message is under way, twice over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.services.ids import ENDING, MEMBER
from actorrpc.services.newcomers import members, tell

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker


class Ending:
    """Ends worlds of fixed size, and those that were launched.

    Arguments:
        worker: rank 0.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._done: set[int] = set()
        self._round = 0
        self._answers: dict[int, tuple[bool, dict[int, tuple[int, int]]]] = {}
        self._last: dict[tuple[int, int], int] | None = None
        self._busy: list[int] = []
        worker.services[Ending] = self
        worker.cells[ENDING] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "done":
            self._done.add(message.caller)
            self._check()
        elif verb == "quiet" and rest[0] == self._round:
            self._answers[message.caller] = rest[1]
            if self._answers.keys() >= set(self._members()):
                self._judge()
        elif verb == "late?":
            message.reply(self._late())

    def _late(self) -> str:
        """Says in words what the end of the world waits for."""
        members = self._members()
        late = [n for n in members if n not in self._done]
        who = ", ".join(str(self._worker.peers[n].record) for n in late or self._busy if n in members)
        if late:
            return f"not in shutdown yet: {who}"
        return f"all are in shutdown; calls or handlers are under way at {who or 'some of them'}"

    def end_world(self) -> None:
        """Tells all members that the world's work is done, whether or not theirs is."""
        self._tell_all(("over",))

    def stop_all(self) -> None:
        """Ends the world at once, on every member."""
        self._tell_all(("stop",), members(self._worker))

    def _members(self) -> list[int]:
        """Those whose work the world lasts for; guests are not asked."""
        return [n for n in members(self._worker) if not self._worker.peers[n].record.guest]

    def _check(self) -> None:
        if self._round == 0 and self._done >= set(self._members()):
            self._ask()

    def _ask(self) -> None:
        self._round += 1
        self._answers.clear()
        self._tell_all(("quiet?", self._round))

    def _judge(self) -> None:
        """Ends the world when all are quiet, all that was sent has come, and neither has changed for two rounds."""
        members = set(self._members())
        counts = {n: count for n, (_, count) in self._answers.items() if n in members}
        self._busy = [n for n in counts if not self._answers[n][0]]
        sent = {(a, b): told for a, count in counts.items() for b, (told, _) in count.items() if b in counts}
        come = {(a, b): heard for b, count in counts.items() for a, (_, heard) in count.items() if a in counts}
        settled = not self._busy and all(come.get(pair, 0) == told for pair, told in sent.items())
        if settled and sent == self._last:
            self.stop_all()
            return
        self._last = sent if settled else None
        if settled:
            self._ask()
        else:
            self._worker.keeper.after(0.02, self._ask)

    def _tell_all(self, body: object, to: list[int] | None = None) -> None:
        for member in self._members() if to is None else to:
            tell(self._worker, member, MEMBER, body)

    def _gone(self, peer: Peer) -> None:
        if self._round:
            self._last = None
            self._ask()
        elif self._done:
            self._check()
