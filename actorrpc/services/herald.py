"""Who tells whom that a worker is gone: all tell the herald, and the herald tells all.

The herald is the member with the lowest id: rank 0 as long as it is there, then the next one. It has a way to
everybody, and everybody has one to it, so that each end is noticed by it or of it. What it says of a loss holds for the
whole world, also where the lost one can still be reached by some; so the world stays one.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import HERALD
from actorrpc.wire.envelope import Flag
from actorrpc.wire.transport import News

if TYPE_CHECKING:
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_GOODBYE_SECONDS = 5.0


class Herald:
    """A worker's part in it.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._heard: set[int] = set()
        """Of whose end others have told."""
        worker.services[Herald] = self
        worker.cells[HERALD] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)
        worker.doubts.ask = self._ask

    def _members(self) -> list[int]:
        return [n for n, peer in list(self._worker.peers.items()) if peer.standing is Standing.MEMBER]

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "there?":
            message.reply(None)
        elif verb == "gone":
            self._learn(message.caller, *rest)

    def _learn(self, teller: int, number: int, standing: str, reason: str) -> None:
        """Hears of an end from a worker: from the herald, or as the herald."""
        worker = self._worker
        peer, rank = worker.peers.get(number), worker.peers[teller].record.rank
        if peer is None or number == worker.id:
            return
        if number == min(self._members()) and teller > number:  # the herald: everybody sees for himself, and asks it
            worker.doubts.hear(number, News.CUT)
            return
        if teller < worker.id:
            self._heard.add(number)
        said = reason if reason.endswith(" says)") else f"{reason} (rank {rank} says)"
        news = functools.partial(worker.members.lose, number, said, Standing(standing))
        if peer.leaving and standing == Standing.LEFT.value:
            worker.keeper.after(_GOODBYE_SECONDS, news)  # its own goodbye comes, after its last answers
        else:
            news()

    def _gone(self, peer: Peer) -> None:
        worker, number, verdicts = self._worker, peer.record.id, self._worker.members.verdicts
        if verdicts.against:
            if verdicts.has_to_hear(peer):
                verdicts.tell(peer)
            return
        members = self._members()
        first = min(members, default=worker.id)
        if number < first:  # it was the herald
            self._reach(members if first == worker.id else [first])
        self._spread(peer)
        if peer.standing is Standing.LOST:  # that may have been lost, and with nothing after it no gap would show it
            worker.keeper.after(verdicts.again, lambda: self._spread(peer))
        # Not by others: the lost one would report its teller, and the herald might hear of that first.
        if (first == worker.id or number < first) and peer.standing is Standing.LOST and not worker.ending:
            verdicts.tell(peer)

    def _spread(self, peer: Peer) -> None:
        """Tells of an end: the herald all, and all others the herald, unless it is who has told of it."""
        worker, number, members = self._worker, peer.record.id, self._members()
        first = min(members, default=worker.id)
        if worker.members.verdicts.against or not worker.open:
            return
        if first == worker.id:
            for other in members:
                self._tell(other, peer)
        elif number not in self._heard and peer.standing is Standing.LOST:
            self._tell(first, peer)

    def _reach(self, numbers: list[int]) -> None:
        """Has the ends of workers noticed."""
        for number in numbers:
            try:
                if number != self._worker.id:
                    self._worker.members.reach(number)
            except ActorRPCError as e:
                log.debug("%s: %s", self._worker.record.name, e)

    def _tell(self, to: int, gone: Peer) -> None:
        body = ("gone", gone.record.id, gone.standing.value, gone.reason)
        try:
            if to != self._worker.id:
                self._worker.tell(to, HERALD, body, control=True)
        except ActorRPCError as e:
            log.debug("%s: %s", self._worker.record.name, e)

    # -- asking

    def _ask(self, number: int, seconds: float, question: int) -> None:
        self._worker.crew.submit((Lane.CONTROL, self._request, (number, seconds, question)))

    def _request(self, what: tuple[int, float, int]) -> None:
        number, seconds, question = what
        note = functools.partial(self._answered, question)
        try:
            self._worker.request(
                number, HERALD, ("there?",), seconds, "a question whether it is there", note=note, flags=Flag.CONTROL
            )
        except ActorRPCError as e:
            log.debug("%s: %s", self._worker.record.name, e)

    def _answered(self, question: int, call: Call) -> None:
        if call.failure is None:
            self._worker.doubts.reassure(call.peer, question)
