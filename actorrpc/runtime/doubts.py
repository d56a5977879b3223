"""Peers that may be gone: what the transport has found out, heard out and asked after before anybody is taken for lost.

What an ended process sent is heard out first: an answer, a goodbye, the end of the world. A connection that has ended
says less: the network may have lost it, this process may have stood still, or the peer has left and its goodbye, which
comes by another connection, is on its way. So the peer is asked, by a message that goes by a new connection: an answer
shows that it is there, and that no message to it was lost before that. Each end of a connection asks anew, since what
was sent after the last question may be lost with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actorrpc.runtime.peers import Standing
from actorrpc.wire.lookout import ANSWER, state_of
from actorrpc.wire.transport import News

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

_LAST_WORDS_SECONDS = 0.1
"""What the transport gets to take in what was sent; then the leader must have seen the inbox empty."""
_REFUSED_SECONDS = 1.0
"""And a peer of another host at whose address nobody listens any more: its goodbye may be on its way."""
_GOODBYE_SECONDS = 5.0
"""And to one that has closed a connection within this host, or any at the end of the world: it has a reason to."""
_ANSWER_AT_LEAST = 0.5
"""And any other one, where its share of the time of silence (`ANSWER`) is less."""


class Doubts:
    """What one worker has found out of its peers.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.open: dict[int, _Doubt] = {}
        """By the peers' numbers."""
        self.ask: Callable[[int, float, int], None] | None = None
        """Asks a peer for an answer within some seconds, upon which `reassure` is called with the question's number.
        From any thread.
        """
        self._questions = itertools.count(1)
        worker.transport.told = self.hear

    def attend(self, peer: Peer) -> None:
        """Has the end of a peer's process noticed, where it is one of this host."""
        if self._is_neighbour(peer):
            self._worker.transport.attend(peer.record.id, peer.record.pid)

    def _is_neighbour(self, peer: Peer) -> bool:
        mine, record = self._worker.record, peer.record
        return record.boot == mine.boot and record.pid != mine.pid

    def hear(self, number: int, news: str) -> None:
        """Takes news of a peer, from a thread of the transport's."""
        worker, peer = self._worker, self._worker.peers.get(number)
        if news == News.AWAKE:
            worker.waking.begin()
        if peer is None or peer.standing is not Standing.MEMBER:
            return
        doubt, known = self._judge(peer, news), self.open.get(number)
        if known is not None and known.until <= doubt.until and (known.final or not doubt.final):
            doubt = known
        if known is not None:
            doubt.question = known.question
        asks = self.ask is not None and not doubt.final and (known is None or news == News.CUT)
        if asks:
            doubt.question = next(self._questions)
        if doubt is not known:
            self.open[number] = doubt
            worker.keeper.rouse()
        if asks and self.ask is not None:
            self.ask(number, max(0.1, doubt.until - worker.clock.now()), doubt.question)

    def _judge(self, peer: Peer, news: str) -> _Doubt:
        worker, pid = self._worker, peer.record.pid
        now, silence = worker.clock.now(), worker.transport.silence
        local, state = worker.transport.is_local(peer.record.id), "?"
        if self._is_neighbour(peer):
            state = state_of(pid)
        if news == News.ENDED or state in ("", "Z", "X"):
            return _Doubt(now, now, f"its process {pid} has ended", True)
        seconds = max(_ANSWER_AT_LEAST, ANSWER * silence)
        if state in ("T", "t") and news != News.REFUSED:  # it may go on before that is over
            reason = f"no sign of life came from it for {silence:g} s: its process {pid} is stopped"
            return _Doubt(now, now + seconds, reason, False)
        if news == News.UNREACHED:
            return _Doubt(now, now, f"no connection to it came about within {silence:g} s", True)
        if news == News.REFUSED:
            seconds, reason = _REFUSED_SECONDS, "its connection ended, and nobody listens at its address any more"
        else:
            what = f", or nothing was heard from it for {silence:g} s" if silence and not local else ""
            reason = f"its connection ended{what}, and it did not answer by another one"
        if local or worker.ending:
            seconds = _GOODBYE_SECONDS
        return _Doubt(now, now + seconds, reason, False)

    def new_question(self) -> int:
        """Returns the number of a question that somebody else will ask."""
        return next(self._questions)

    def reassure(self, number: int, question: int) -> None:
        """Says that a peer has answered a question. Under leadership too."""
        self._worker.waking.answered(number, question)
        doubt = self.open.get(number)
        if doubt is not None and not doubt.final and doubt.question == question:
            self.open.pop(number, None)

    def look(self, time: float) -> None:
        """Takes those for lost of whom nothing more can be hoped for. The keeper calls it as long as any are open."""
        transport = self._worker.transport
        for number, doubt in list(self.open.items()):
            peer = self._worker.peers.get(number)
            if peer is None or peer.standing is not Standing.MEMBER:
                self.open.pop(number, None)
            elif doubt.emptied is None:
                if time >= max(doubt.until, doubt.since + _LAST_WORDS_SECONDS):
                    doubt.emptied = transport.emptied
                    transport.wake()  # a leader who sleeps goes round once
            elif transport.emptied != doubt.emptied or time >= doubt.until + _GOODBYE_SECONDS:
                self._worker.members.lose(number, doubt.reason)


@dataclass
class _Doubt:
    """Why a peer may be gone.

    Attributes:
        since: when that was noticed.
        until: until when it may show that it is not.
        reason: in words.
        final: whether no answer can show that.
        emptied: how often the inbox had been empty a little after `until`.
        question: the last one that it was asked.
    """

    since: float
    until: float
    reason: str
    final: bool
    emptied: int | None = None
    question: int = 0
