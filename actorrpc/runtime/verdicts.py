"""Telling a peer that it was taken for lost, and hearing so: lost is final, and the lost one shall know.

A verdict is a message with the sequence number 0, which no other has, so it is seen where a gap is. It goes by a way of
its own, since the peer's way is closed by then; where the peer is stopped or cut off, it waits there for a while. It
may be lost like any other message, and no gap would show that: so it is said twice. And whoever is lost hears it again
when a message of its comes.

Who obeys. A verdict of the member with the lowest id holds for the world: whom it has lost is out. Any other one holds
for the two alone. What somebody says who was lost here is not obeyed, since lost is final: two parts of a world that
were cut off from each other go on by themselves; only one that is left alone takes it to be true. Whether it is it
hears by asking the others.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from actorrpc.runtime.handling import NO_CONTEXT
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.wire.envelope import HEADER_SIZE, MARK, Flag, Kind, pack_fields, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_FIRST_WAY = -3 - (1 << 64)
"""Below the ways by which those who join are answered; see `services.porch`."""
_WAITS_SECONDS = 60.0
_AGAIN_SECONDS, _AGAIN = 1.0, 0.25
"""When a verdict is said again; or after this share of the time of silence, if that is less."""
_OUT = "the others have taken this worker for lost"
_NOBODY = 0xFFFFFFFF
_NEVER = float("inf")


class Verdicts:
    """What one worker tells those whom it has lost, and hears from those who have lost it.

    Arguments:
        worker: whose.

    Attributes:
        against: why the world has taken this worker for lost, and who says so; "" where it has not.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ways: dict[int, float] = {}
        """Until when they stay open."""
        self._again: set[int] = set()
        """Ways by which it will be said again in a moment."""
        self._tellers: set[int] = set()
        """Those who have said that this worker is lost; they need not hear the same in return, unless it holds for the
        world.
        """
        self._said = ""
        self.against = ""

    @property
    def speaks(self) -> bool:
        """Whether what this worker says of a loss holds for the whole world."""
        return not self.against and min(self._members(), default=-1) == self._worker.id

    def _members(self) -> list[int]:
        return [n for n, peer in list(self._worker.peers.items()) if peer.standing is Standing.MEMBER]

    # -- telling

    def tell(self, peer: Peer) -> None:
        """Tells a peer that it was taken for lost here."""
        way = _FIRST_WAY - peer.record.incarnation
        if way not in self._again and self._say(peer, way):
            self._again.add(way)
            self._worker.keeper.after(self.again, lambda: self._say_again(peer, way))

    def has_to_hear(self, peer: Peer) -> bool:
        """Whether a peer that is lost here is to be told so by one who is out itself: if it was lost by a finding of
        its own, which may be what has left it alone.
        """
        return peer.standing is Standing.LOST and peer.reason != _OUT

    @property
    def again(self) -> float:
        """After how many seconds what is told of a loss is told again, as a message may have been lost."""
        silence = self._worker.transport.silence
        return min(_AGAIN_SECONDS, silence * _AGAIN) if silence else _AGAIN_SECONDS

    def _say(self, peer: Peer, way: int) -> bool:
        worker = self._worker
        if peer.standing is not Standing.LOST or not worker.open:
            return False
        if peer.record.id in self._tellers and not self.speaks:
            return False
        self._ways[way] = worker.clock.now() + _WAITS_SECONDS
        words = json.dumps({"reason": peer.reason, "speaks": self.speaks}).encode()
        head = pack_fields(
            MARK, Kind.TELL, Flag.CONTROL, worker.id, worker.record.incarnation, 0, 0, _NOBODY, 0, 0, NO_CONTEXT, _NEVER
        )
        worker.transport.dial(way, peer.record.endpoints)
        worker.transport.send(way, (head + words,))
        worker.keeper.after(_WAITS_SECONDS, lambda: self._close(way))
        return True

    def _say_again(self, peer: Peer, way: int) -> None:
        self._again.discard(way)
        self._say(peer, way)

    def _close(self, way: int) -> None:
        if self._ways.get(way, _NEVER) <= self._worker.clock.now():
            del self._ways[way]
            self._worker.transport.hang_up(way)

    def close(self) -> None:
        """Drops what could not be delivered."""
        for way in list(self._ways):
            self._worker.transport.hang_up(way)
        self._ways.clear()

    def is_by(self, number: int) -> bool:
        """Whether a peer has said that this worker is lost, or the world has."""
        return bool(self.against) or number in self._tellers

    # -- hearing (under leadership: RULE TR1)

    def hear(self, frames: Sequence[Frame]) -> None:
        """Takes a message whose sender is no member, or that is out of step: if it is a verdict, it is obeyed; if it is
        something else from somebody who was lost, that one is told so.
        """
        head = unpack(memoryview(frames[0]))
        peer = self._worker.peers.get(head.caller)
        if peer is None or peer.record.incarnation != head.incarnation:
            return
        if head.sequence == 0 and head.creator == _NOBODY:
            words = bytes(memoryview(frames[0])[HEADER_SIZE:])
            self._worker.crew.submit((Lane.CONTROL, self._obey, (peer, words)))
        elif peer.standing is Standing.LOST:
            self._worker.crew.submit((Lane.CONTROL, self._remind, peer))

    def _remind(self, peer: Peer) -> None:
        try:
            self.tell(peer)
        except Exception as e:
            log.debug("%s: %s cannot be told that it was lost: %s", self._worker.record.name, peer.record, e)

    def _obey(self, what: tuple[Peer, bytes]) -> None:
        peer, words = what
        worker = self._worker
        try:
            told = json.loads(words)
            reason, speaks = str(told["reason"]), bool(told["speaks"])
        except (ValueError, KeyError, TypeError):
            log.warning("%s: dropped a message of %s that makes no sense", worker.record.name, peer.record)
            return
        if worker.ending or not worker.open:
            return
        new = peer.record.id not in self._tellers
        self._tellers.add(peer.record.id)
        if speaks:
            self._said = f"{peer.record} says: {reason}"
        if speaks and peer.standing is Standing.MEMBER and peer.record.id < worker.id:
            self._condemned()
            for number in list(worker.peers):
                worker.members.lose(number, _OUT)
            return
        lost_it = peer.standing is Standing.LOST
        worker.members.lose(peer.record.id, f"it has taken this worker for lost: {reason}")
        self.reconsider()
        if new and speaks and lost_it:
            worker.keeper.after(worker.transport.silence / 2, self._ask_all)  # before, they may not have heard of it

    def _ask_all(self) -> None:
        doubts = self._worker.doubts
        for number in self._members():
            if number != self._worker.id and doubts.ask is not None:
                doubts.ask(number, _AGAIN_SECONDS, doubts.new_question())

    def reconsider(self) -> None:
        """Sees whether this worker is left alone, and has been told why."""
        if self._said and self._members() == [self._worker.id]:
            self._condemned()

    def _condemned(self) -> None:
        if not self.against:
            self.against = self._said
            log.error(
                "%s was taken for lost by the others (%s); it is no member of its world any more",
                self._worker,
                self.against,
            )
