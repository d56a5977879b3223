"""What leaves a worker: numbered for each peer, so that a gap shows that messages were lost."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError, NotAMemberError
from actorrpc.runtime.peers import Standing
from actorrpc.wire.envelope import HEADER_SIZE, MARK, Flag, Kind, pack_fields, size_of
from actorrpc.wire.transport import AT_ONCE, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import TypeAlias

    from actorrpc.runtime.message import Outgoing, Trace
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

    _Unsent: TypeAlias = list[tuple[Outgoing, ActorRPCError]]

log = logging.getLogger("actorrpc")
_MEMBER = Standing.MEMBER


class Outbox:
    """The sending end of a worker.

    Arguments:
        worker: whose.

    Attributes:
        to_itself: how many requests and tells that are not house-keeping the worker has sent to itself.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.to_itself = 0

    def emit(
        self,
        to: int,
        out: Outgoing,
        frames: Sequence[Frame],
        hold: int = AT_ONCE,
        trace: Trace | None = None,
        lasting: bool = True,
    ) -> None:
        """Sends a message whose payload is written. `hold`: whether it may wait for more (TR6, TR9); `trace`: its own;
        `lasting`: see `Transport.send`.

        Raises:
            NotAMemberError, WorkerLostError: it was not sent.
        """
        if trace is not None and trace.tensors:
            with trace:
                self.emit(to, out, frames, hold, None, lasting)
            return
        worker = self._worker
        if not worker.open:
            raise NotAMemberError(f"no calls any more through {worker}: {worker.closed_because}")
        if to == worker.id:
            kind, flags, call, *rest = out
            if kind <= Kind.TELL and not flags & Flag.CONTROL:
                self.to_itself += 1
            head = pack_fields(MARK, kind, flags, to, worker.record.incarnation, call, 0, *rest)
            # Copies, so that a call to oneself does not share its arguments any more than another one.
            own: list[Frame] = [head + frames[0], *(bytearray(memoryview(f)) for f in frames[1:])]
            worker.take(own)
            return
        peer = worker.peers.get(to)
        if peer is None or not peer.dialled or peer.standing is not _MEMBER:
            peer = worker.members.reach(to)
        if not peer.lock.acquire(False):
            if _is_sending():  # whoever has the lock may wait, in a finalizer as well, for one that this thread has
                peer.deferred.append((out, snapshot(frames, lasting)))
                self._pass_on(peer)
                return
            peer.lock.acquire()
        unsent: _Unsent | None = None
        try:
            if peer.busy:  # this thread is in the midst of a send: a finalizer of the user's sends
                peer.deferred.append((out, snapshot(frames, lasting)))
                return
            peer.busy = True
            try:
                while peer.deferred:  # which was left to somebody who has not come to it yet
                    unsent = self._follow(peer, unsent or [])
                self._number(peer, out, frames, hold, lasting)
            finally:
                try:
                    while peer.deferred:
                        unsent = self._follow(peer, unsent or [])
                finally:
                    peer.busy = False
        finally:
            peer.lock.release()
            if unsent:
                self._give_up(unsent)
            if peer.deferred:
                self._pass_on(peer)

    def _pass_on(self, peer: Peer) -> None:
        """Sends what finalizers sent meanwhile, unless somebody has the lock, who will."""
        while peer.deferred and peer.lock.acquire(False):
            unsent: _Unsent = []
            try:
                if peer.busy:
                    return
                peer.busy = True
                try:
                    while peer.deferred:
                        self._follow(peer, unsent)
                finally:
                    peer.busy = False
            finally:
                peer.lock.release()
                if unsent:
                    self._give_up(unsent)

    def _follow(self, peer: Peer, unsent: _Unsent) -> _Unsent:
        """Sends the next of what finalizers sent meanwhile; one that cannot be is none of the present thread's."""
        out, frames = peer.deferred.pop(0)
        try:
            self._number(peer, out, frames, AT_ONCE)
        except ActorRPCError as e:
            unsent.append((out, e))
        return unsent

    def _give_up(self, unsent: _Unsent) -> None:
        """Ends the calls, and gives the tells' room back, of finalizers that have long returned. Not under a lock."""
        worker = self._worker
        for out, error in unsent:
            log.debug("%s: what a finalizer sent could not leave: %s", worker.record.name, error)
            if out[0] <= Kind.TELL:
                worker.limits.answered(out[2])
                call = worker.calls.pending.get(out[2])
                if call is not None:
                    worker.calls.fail(call, error)

    def _number(self, peer: Peer, out: Outgoing, frames: Sequence[Frame], hold: int, lasting: bool = True) -> None:
        """Sends a message to a peer, numbered; under its lock."""
        worker, to = self._worker, peer.record.id
        kind, flags, call, *rest = out
        if peer.leaving and kind <= Kind.TELL and not flags & Flag.CONTROL and out[5] >> 40 != to:
            raise worker.members.lost_error(peer, "the message was not sent")
        peer.sent += 1
        if kind <= Kind.TELL and not flags & Flag.CONTROL:
            peer.told += 1
        head = pack_fields(MARK, kind, flags, worker.id, worker.record.incarnation, call, peer.sent, *rest)
        try:
            if len(frames) == 1:
                whole = head + frames[0]
                peer.bytes_out += len(whole)
                worker.transport.send(to, (whole,), hold)
                if hold:  # afterwards: a keeper who is about to sleep looks whether something is held
                    worker.crew.held_back(hold)
            else:
                peer.bytes_out += HEADER_SIZE + size_of(frames)
                worker.transport.send(to, [head + frames[0], *frames[1:]], AT_ONCE, lasting)
        except KeyError:
            raise worker.members.lost_error(peer, "the message was not sent") from None


_EMIT = Outbox.emit.__code__


def _is_sending() -> bool:
    """Whether whoever calls `emit` is a finalizer, which has interrupted the present thread in another `emit`. Looked
    for in the stack, and only where a lock is taken: to note it down would cost every message something.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is _EMIT:  # of this very message, which has a trace, and has no lock yet
        frame = frame.f_back
    while frame is not None:
        if frame.f_code is _EMIT:
            return True
        frame = frame.f_back
    return False
