"""The receiving end of the limits: callers are told which of their messages have begun here (RULE LM2, `limits`)."""

from __future__ import annotations

import array
import logging
import threading
from typing import TYPE_CHECKING, Final

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.crew import TICK
from actorrpc.runtime.handling import NO_CONTEXT
from actorrpc.wire.envelope import HEADER_SIZE, Flag, Kind, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_NEVER = float("inf")
_SMALL: Final = 4096
"""Bytes of a request that are given back with its answer only."""
BATCH: Final = 256
BATCH_BYTES: Final = 4 * 2**20
_IDLE_SECONDS: Final = 1.0


class _Begun:
    """What one caller is to be told of: its counted messages that have begun here.

    Attributes:
        numbers: theirs.
        bytes: how large they are together, about.
        enough, enough_bytes: how much is to come together before it is told.
        wanted: whether the caller waits for it.
        handlers: whether some of those who wait there are handlers.
        due: when it is told in any case; never where it is nothing.
    """

    __slots__ = ("bytes", "due", "enough", "enough_bytes", "handlers", "numbers", "wanted")

    def __init__(self) -> None:
        self.due = _NEVER
        self.clear()

    def clear(self) -> None:
        self.numbers = array.array("Q")
        self.bytes = 0
        self.enough, self.enough_bytes = BATCH, BATCH_BYTES
        self.wanted = self.handlers = False


class Credit:
    """What one worker has to tell its callers.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Reentrant: the collector may run a finalizer of the user's, which tells, in the midst of what it guards.
        self._door = threading.RLock()
        self._begun: dict[int, _Begun] = {}
        worker.members.watchers.append(self._lost)

    @property
    def keeps_handlers_waiting(self) -> bool:
        """Whether handlers, elsewhere or here, wait for this worker to begin what they have sent."""
        return any(begun.handlers for begun in list(self._begun.values()))

    def _lost(self, peer: Peer) -> None:
        with self._door:
            self._begun.pop(peer.record.id, None)

    def begin(self, message: Message) -> None:
        """Notes that a counted message begins, or is refused."""
        size = HEADER_SIZE if not message.frames else size_of(message.frames)
        if message.wants_answer and size < _SMALL:
            return
        now, caller = self._worker.clock.now(), message.caller
        with self._door:
            begun = self._begun.get(caller)
            if begun is None:
                begun = self._begun[caller] = _Begun()
            begun.numbers.append(message.call)
            begun.bytes += size
            if len(begun.numbers) >= begun.enough or begun.bytes >= begun.enough_bytes:
                due = None
            else:
                due = TICK if begun.wanted else _IDLE_SECONDS
                if now + due < begun.due:
                    begun.due = now + due
                else:
                    return
        if due is None:
            self._report(caller)
        else:
            self._worker.keeper.after(due, lambda: self._report(caller))

    def want(self, what: tuple[int, int, int, int]) -> None:
        """Hears that a caller waits for room: tells it of what has begun, or of what does next, in smaller batches. (If
        that is not enough it asks again.)
        """
        caller, enough, in_handler, enough_bytes = what
        with self._door:
            begun = self._begun.get(caller)
            if begun is None:
                begun = self._begun[caller] = _Begun()
            begun.wanted, begun.handlers = True, begun.handlers or bool(in_handler)
            begun.enough, begun.enough_bytes = min(begun.enough, enough), min(begun.enough_bytes, enough_bytes)
        self._report(caller)

    def _report(self, caller: int) -> None:
        with self._door:
            begun = self._begun.get(caller)
            if begun is None or not begun.numbers:
                return
            numbers = begun.numbers
            begun.clear()
            begun.due = _NEVER
        if caller == self._worker.id:
            self._worker.limits.note(caller, numbers)
            return
        try:
            self._worker.emit(
                caller, (Kind.CREDIT, Flag.CONTROL, 0, 0, 0, 0, NO_CONTEXT, _NEVER), (numbers.tobytes(),)
            )
        except ActorRPCError as e:
            log.debug("%s: rank %d could not be given room: %s", self._worker.record.name, caller, e)


def numbers_in(frames: Sequence[Frame]) -> array.array[int]:
    """Returns the numbers that a worker was told of by another one's `Credit`."""
    numbers = array.array("Q")
    payload = bytes(memoryview(frames[0])[HEADER_SIZE:])
    numbers.frombytes(payload[: len(payload) // numbers.itemsize * numbers.itemsize])
    return numbers
