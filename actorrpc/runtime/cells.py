"""How an actor stands in the worker: a cell takes the messages addressed to it and says what job they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from actorrpc.errors import ActorGoneError, ActorRPCError
from actorrpc.runtime.handling import NO_CONTEXT, Handling
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.runtime.mailbox import LATER, Mailbox
from actorrpc.wire.envelope import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actorrpc.runtime.mailbox import Turn
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker


_USUAL = (None, None)
_NEVER = float("inf")


class Cell(Protocol):
    """Receives the messages of one actor."""

    def accept(self, message: Message) -> Job | None:
        """Takes a message in, in its order. Called under leadership: it neither blocks nor runs user code (TR1)."""

    def run(self, message: Message) -> None:
        """Handles a message and answers it, or keeps it to be answered later. An exception answers it, too."""


class ServiceCell:
    """The cell of a system actor: messages run side by side in a lane of the pool.

    Arguments:
        worker: where it lives.
        lane: CONTROL for messages that must neither queue behind handlers nor block, else HANDLER.
        handle: what to do with a message.
    """

    def __init__(self, worker: Worker, lane: int, handle: Callable[[Message], None]) -> None:
        self._perform, self.lane, self.run = worker.perform, lane, handle

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        return (self.lane, self._perform, message)


class MailboxCell:
    """The cell of an actor with a mailbox.

    Arguments:
        worker: where it lives.
        handle: what to do with a message.
        what: the actor, in words, for errors.
        concurrency: how many messages may be in progress at once; 0 holds them back until `open`.
        limits: how many calls and bytes each worker may have under way to it; None for the usual.
    """

    def __init__(
        self, worker: Worker, handle: Callable[[Message], None], what: str, concurrency: int = 0,
        limits: tuple[int | None, int | None] = (None, None),
    ) -> None:  # fmt: skip
        self._worker, self.run, self.what, self._limits = worker, handle, what, limits
        self._told: set[tuple[int, int, int]] = set()
        self.mailbox: Mailbox[Message] = Mailbox(concurrency)

    def accept(self, message: Message) -> Job | None:
        message.cell, message.mailbox = self, self.mailbox
        if self._limits != _USUAL and message.flags & Flag.COUNTED:
            who = message.caller, message.creator, message.local
            if who not in self._told:
                self._told.add(who)
                self._worker.crew.submit((Lane.CONTROL, self._tell_limits, who))
        turns = self.mailbox.put(message.number, message.chain, message)
        if not turns:
            if turns is None:
                return (Lane.FREE, self._refuse, message)
            return (Lane.CONTROL, self._accept_later, message) if turns is LATER else None
        if len(turns) > 1:
            self.start(turns[1:])
        return (Lane.HANDLER, self.perform, turns[0])

    def _accept_later(self, message: Message) -> None:
        job = MailboxCell.accept(self, message)
        if job is not None:
            self._worker.crew.submit(job)

    def open(self, concurrency: int) -> None:
        """Lets messages in from now on."""
        self.start(self.mailbox.open(concurrency))

    def close(self) -> None:
        """Answers what is queued, and all that comes later, with an error."""
        for message in self.mailbox.close():
            self._refuse(message)

    @staticmethod
    def start(turns: Iterable[Turn[Message]]) -> None:
        """Sends turns on their way: new ones to the pool, returning ones back to their threads."""
        for turn in turns:
            if turn.gate is not None:
                gate, turn.gate = turn.gate, None
                gate.open()
            else:
                message = turn.message
                assert message is not None
                cell = message.cell  # its own: several may share a mailbox
                assert isinstance(cell, MailboxCell)
                message.worker.crew.submit((Lane.HANDLER, cell.perform, turn))

    def finish(self, turn: Turn[Message]) -> None:
        """Ends a message's turn: on the thread that ran it or, where that was taken over (`message.turn` is None when
        the handler returns), when whoever took it says so.
        """
        message = turn.message
        assert message is not None
        turn.message = message.turn = None
        self.start(self.mailbox.finish(turn))

    def enter(self) -> Handling:
        """Begins the turn of the actor's `main` on the present thread; see `leave`."""
        return Handling(self._worker, None, None, self.mailbox, self.mailbox.enter())

    def leave(self, handling: Handling) -> None:
        """Ends the turn of `main`."""
        assert handling.turn is not None
        self.start(self.mailbox.finish(handling.turn))

    def perform(self, turn: Turn[Message]) -> None:
        """Runs the message whose turn it is, on the present thread."""
        message = turn.message
        assert message is not None
        message.turn = turn
        try:
            self._worker.perform(message)
        finally:
            taken = message.turn is None
            del message
            if not taken:
                self.finish(turn)

    def _tell_limits(self, who: tuple[int, int, int]) -> None:
        """Tells a caller how much it may have under way; what it has sent by now may be more."""
        calls, size = self._limits
        try:
            out = (Kind.LIMITS, Flag.CONTROL, calls or 0, *who[1:], size or 0, NO_CONTEXT, _NEVER)
            self._worker.emit(who[0], out, (b"",))
        except ActorRPCError:
            pass  # it is gone

    def _refuse(self, message: Message) -> None:
        if message.flags & Flag.COUNTED:
            self._worker.credit.begin(message)
        message.fail(ActorGoneError(f"{self.what} on {self._worker} takes no more messages: it has ended"))
