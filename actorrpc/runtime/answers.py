"""The answers to calls: those that a worker gives, and what it reads of those that it gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import ActorRPCError, DeserializationError, NotAMemberError, RemoteError
from actorrpc.runtime.message import Parcel, Route
from actorrpc.wire.codec import NONE
from actorrpc.wire.envelope import HEADER_SIZE, Flag, Kind, context_of
from actorrpc.wire.failures import read_failure, write_failure
from actorrpc.wire.salvage import salvage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
failures = logging.getLogger("actorrpc.failures")
"""What handlers raise, which its callers are told in any case; at level INFO, so that it is not shown by default."""

_NEVER = float("inf")
_NOTHING: Sequence[Frame] = (NONE,)
_NOTHING_SIZE = HEADER_SIZE + len(NONE)


class Answers:
    """The answers of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def give(self, message: Message, value: object) -> None:
        """Sends the reply to a message."""
        if value is None:
            self._send(message, Kind.REPLY, 0, _NOTHING)
            return
        try:
            frames, parcel = self._worker.write(value, message.caller, message.context, route=Route.ANSWER)
        except BaseException as e:
            self.give_error(message, e, 0)
            return
        self._send(message, Kind.REPLY, Flag.REFS if parcel.refs else 0, frames, parcel)

    def give_nothing(self, message: Message) -> None:
        """Tells the caller of a message, who has given up, that nothing was run."""
        self._send(message, Kind.ERROR, Flag.DROPPED, _NOTHING)

    def give_error(self, message: Message, error: BaseException, flags: int) -> None:
        """Sends an error as the answer; the error of a tell is logged, since nobody waits for it."""
        worker = self._worker
        if not message.wants_answer:
            peer = worker.peers.get(message.caller)
            who = peer.record if peer is not None else f"rank {message.caller}"
            if worker.ending and isinstance(error, NotAMemberError):  # what was to go on until the end is no failure
                failures.info("%s: a message from %s was cut short by the end", worker, who, exc_info=error)
                return
            log.error("%s: a message from %s failed", worker, who, exc_info=error)
            return
        failures.info("%s: a call failed, of which the caller is told", worker, exc_info=error)
        by_value = worker.has_another_main(message.caller)
        self._send(message, Kind.ERROR, flags, write_failure(error, str(worker), worker.codec, by_value))

    def _send(
        self, message: Message, kind: int, flags: int, frames: Sequence[Frame], parcel: Parcel | None = None
    ) -> None:
        worker = self._worker
        out = (kind, flags, message.call, message.creator, message.local, message.chain, message.context, _NEVER)
        try:
            trace = parcel.trace if parcel is not None else None
            worker.emit(message.caller, out, frames, worker.crew.may_hold(), trace, False)
        except ActorRPCError as e:
            log.debug("%s: an answer to rank %d could not leave: %s", worker.record.name, message.caller, e)
            if parcel is not None:
                parcel.restart()

    def read(self, call: Call) -> Any:
        """Reads the answer of a call that is done.

        Raises:
            RPCTimeoutError, WorkerLostError: there is none.
            DeserializationError: it cannot be read.
            BaseException: what the callee raised.
        """
        if call.failure is not None:
            raise call.failure
        frames, call.frames = call.frames, ()
        if not call.failed:
            return self._load(frames, call.peer, bool(call.flags & Flag.REFS))
        error = read_failure([memoryview(frames[0])[HEADER_SIZE:], *frames[1:]], self._worker.codec)
        try:
            if isinstance(error, Exception):
                raise self._worker.raised_as(error)
            # A callee's sys.exit or Ctrl-C must not end the caller.
            raise RemoteError(f"the call ended with {error!r}", type_name=type(error).__qualname__) from error
        finally:
            del error  # else it and this frame would keep each other, and the caller's frames, until a collection

    def _load(self, frames: Sequence[Frame], peer: int, refs: bool) -> Any:
        if len(frames[0]) == _NOTHING_SIZE and frames[0][HEADER_SIZE:] == NONE:
            return None
        worker = self._worker
        payload = [memoryview(frames[0])[HEADER_SIZE:], *frames[1:]]
        parcel = Parcel(worker, peer)
        parcel.open(context_of(frames[0]))
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    return parcel.opened(worker.codec.loads(payload, parcel))
            return parcel.opened(worker.codec.loads(payload, parcel))
        except DeserializationError:
            if refs:  # taken over and dropped at once, or the sender would count them for ever
                salvage(payload, Parcel(worker, peer), worker.reference_readers)
            raise

    def discard(self, what: tuple[Sequence[Frame], int]) -> None:
        """Takes over, and drops at once, what lies in an answer that nobody waits for: its frames, and who sent it."""
        frames, caller = what
        try:
            self._load(frames, caller, True)
        except Exception as e:
            log.debug("%s: a late answer could not be read: %r", self._worker.record.name, e)
