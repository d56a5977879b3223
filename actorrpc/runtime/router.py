"""Where a message goes that has come: to an actor, to the call that waits for it, or to what keeps the limits."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError, ProtocolError
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.wire import envelope
from actorrpc.wire.envelope import MARK, Flag, Kind, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.lanes import Job
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_NEVER = float("inf")
_MEMBER = Standing.MEMBER
_unpack = envelope._LAYOUT.unpack_from


class Router:
    """Routes the messages of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = itertools.count(1)

    def place(self) -> int:
        """See `Worker.place`."""
        return next(self._numbers)

    def route(self, frames: Sequence[Frame]) -> Job | None:
        """Takes a message in; returns what there is to run for it, if there is. Under leadership (RULE TR1)."""
        try:
            return self._dispatch(frames)
        except Exception:  # the leader, and with it all later messages, must not suffer for one
            log.exception("%s: a message of %d bytes could not be routed", self._worker, size_of(frames))
            return None

    def _dispatch(self, frames: Sequence[Frame]) -> Job | None:
        worker, first = self._worker, frames[0]
        try:
            mark, kind, flags, caller, incarnation, call_id, sequence, creator, local, chain, context, remaining = (
                _unpack(first)
            )
            if mark != MARK:
                raise ProtocolError("not a message of this protocol")
        except Exception:
            data = envelope.read_greeting(frames)
            if data is not None:
                return (Lane.CONTROL, self._greeting, data)
            log.debug("%s: dropped %d bytes that are no message", worker.record.name, size_of(frames))
            return None
        if caller != worker.id or incarnation != worker.record.incarnation:
            peer = worker.peers.get(caller)
            if peer is None or peer.record.incarnation != incarnation or peer.standing is not _MEMBER:
                worker.members.keep_early(frames)
                return None
            peer.seen += 1
            if peer.seen != sequence:
                worker.members.out_of_step(peer, sequence, frames)
                return None
            peer.bytes_in += len(first) if len(frames) == 1 else size_of(frames)
            if kind <= Kind.TELL and not flags & Flag.CONTROL:
                peer.heard += 1
        number = next(self._numbers)
        if kind <= Kind.TELL:
            deadline = None if remaining == _NEVER else worker.clock.now() + remaining
            message = worker.message_class(
                worker, kind, flags, caller, call_id, creator, local, chain, context, deadline, number, frames
            )  # fmt: skip
            if kind == Kind.REQUEST and not flags & Flag.CONTROL:
                if worker.meter is not None:
                    message.came = worker.clock.now()
                worker.serving.requests[caller, call_id] = message
            cell = worker.cells.get((creator, local), worker.fallback)
            if cell is None:
                message.cell = _NO_CELL
                return (Lane.FREE, worker.perform, message)
            return cell.accept(message)
        if kind == Kind.REPLY or kind == Kind.ERROR:
            return worker.calls.answered(call_id, caller, kind == Kind.ERROR, flags, frames, number)
        if kind == Kind.CANCEL:
            return (Lane.FREE, worker.serving.cancel, (caller, call_id, remaining))
        if kind == Kind.CREDIT:
            worker.limits.credit(caller, frames)
        elif kind == Kind.WANT:
            return (Lane.CONTROL, worker.credit.want, (caller, call_id, creator, local))
        elif kind == Kind.LIMITS:
            worker.limits.learn((caller, creator, local), call_id or None, chain or None)
        return None

    def _greeting(self, data: bytes) -> None:
        if self._worker.greeted is not None:
            self._worker.greeted(data)


class _NoCell:
    """Answers what is addressed to nobody."""

    def accept(self, message: Message) -> Job | None:
        raise AssertionError("it is never registered")

    def run(self, message: Message) -> None:
        raise ActorRPCError(f"there is no actor ({message.creator}, {message.local}) on {message.worker}")


_NO_CELL = _NoCell()
