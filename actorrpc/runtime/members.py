"""The members of the world as one worker knows them: who is there, and what follows when one is gone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actorrpc.errors import NotAMemberError, WorkerLostError
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Peer, Standing
from actorrpc.runtime.verdicts import Verdicts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_EARLY_LIMIT = 10_000
_MAY_HAVE_RUN = "the call may or may not have run"


class Members:
    """The members, by id and by name.

    Attributes:
        peers: all that were ever members, this worker too, by id.
        names, ranks: the ids of the members, by name and by rank; of several that had it, the last one's.
        watchers: called, in the control lane, with every peer that was lost or has left.
        greeters: called with every peer that is admitted from now on; they must not block.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.peers: dict[int, Peer] = {}
        self.names: dict[str, int] = {}
        self.ranks: dict[int, int] = {}
        self.watchers: list[Callable[[Peer], None]] = []
        self.greeters: list[Callable[[Peer], None]] = []
        self._early: list[Sequence[Frame]] = []
        self.verdicts = Verdicts(worker)

    def admit(self, records: Sequence[Record], own: int | None = None) -> None:
        """Learns of members; what they sent before this was known is taken up now.

        The first time under leadership, so that nothing that came later is routed before it.

        Arguments:
            records: theirs; those that are known already may be among them.
            own: the id that this worker was given, where that was not known before.
        """

        new: list[Peer] = []

        def learn() -> None:
            if own is not None:
                self._worker.become(own)
            for record in records:
                known = self.peers.get(record.id)
                if known is None or known.record.incarnation != record.incarnation:
                    peer = self.peers[record.id] = Peer(record)
                    peer.by_value = record.main != self._worker.record.main
                    new.append(peer)
                    self.names[record.name] = self.ranks[record.rank] = record.id
            early, self._early = self._early, []
            for frames in early:
                self._worker.take(frames)

        if self.peers:  # who comes later has sent nothing yet; and the leader may be a caller who waits for long
            learn()
        else:
            self._worker.crew.lead_once(learn)
        for peer in new:
            for greet in list(self.greeters):
                greet(peer)

    def keep_early(self, frames: Sequence[Frame]) -> None:
        """Keeps the message of a sender who is no member, while the list of members has not come; else drops it.

        Under leadership.
        """
        if self.peers:
            self.verdicts.hear(frames)
        elif len(self._early) < _EARLY_LIMIT:
            self._early.append(frames)

    def out_of_step(self, peer: Peer, sequence: int, frames: Sequence[Frame]) -> None:
        """Takes a member's message that does not follow the one before: some are missing, and so the peer is lost.

        Under leadership.
        """
        if sequence == 0:
            self.verdicts.hear(frames)
            return
        peer.seen -= 1
        if sequence > peer.seen:  # else it was here before
            self.lose(peer.record.id, f"messages {peer.seen + 1} to {sequence - 1} from it did not arrive")

    def reach(self, number: int) -> Peer:
        """Returns a peer that can be sent to, dialled.

        Raises:
            NotAMemberError: there is none of this id.
            WorkerLostError: it was lost or has left.
        """
        worker, peer = self._worker, self.peers.get(number)
        if peer is None:
            raise NotAMemberError(
                f"there is no worker of number {number} in the world of {worker}; if there was one, it has left or was "
                f"lost before this worker came"
            )
        if peer.standing is not Standing.MEMBER:
            raise self.lost_error(peer, "the message was not sent")
        if not peer.dialled:
            with peer.lock:
                first = not peer.dialled
                if first:
                    worker.transport.dial(number, peer.record.endpoints)
                    peer.dialled = True
            if first:  # a second thread would open a second pidfd, which nobody closes
                worker.doubts.attend(peer)
        return peer

    def lose(self, number: int, reason: str, standing: Standing = Standing.LOST) -> None:
        """Takes a peer for gone: its calls fail, its queue is dropped, watchers hear of it. May be said twice."""
        worker, peer = self._worker, self.peers.get(number)
        if peer is None or number == worker.id:
            return
        with peer.lock:
            if peer.standing is not Standing.MEMBER:
                return
            peer.standing, peer.reason = standing, reason
        worker.transport.hang_up(number)
        worker.doubts.open.pop(number, None)
        if standing is Standing.LOST and worker.open and not (worker.ending or self.verdicts.against):
            log.warning("%s: lost %s: %s", worker.record.name, peer.record, reason)
        worker.calls.fail_all_to(number, lambda: self.lost_error(peer, _MAY_HAVE_RUN))
        self.verdicts.reconsider()
        worker.crew.submit((Lane.CONTROL, self._tell_watchers, peer))

    def _tell_watchers(self, peer: Peer) -> None:
        for watcher in list(self.watchers):
            try:
                watcher(peer)
            except Exception:  # the others are to hear of it all the same
                log.exception("%s: one of its parts could not be told of the end of %s", self._worker, peer.record)

    def lost_error(self, peer: Peer, consequence: str) -> WorkerLostError:
        """Makes the error for what depended on a peer that is gone, or in whose world this worker is gone."""
        against = self.verdicts.against
        if against and peer.standing is Standing.LOST:
            r, reason = self._worker.record, against
            text = f"{r} was taken for lost by the others, and is no member of their world any more ({against})"
        else:
            r, reason = peer.record, peer.reason
            word = {Standing.MEMBER: "is about to leave", Standing.LOST: "was lost"}.get(peer.standing, "has left")
            text = f"{r} {word}: {reason}"
        return WorkerLostError(
            f"{text}; {consequence}", worker=r.name, rank=r.rank, host=r.host, pid=r.pid, reason=reason,
            may_have_run=consequence == _MAY_HAVE_RUN,
        )  # fmt: skip
