"""What a thread can wait for: something that is not there yet, and then is, once and for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.clock import Gate
    from actorrpc.runtime.mailbox import Mailbox, Turn
    from actorrpc.wire.envelope import Frame


class Waiter:
    """One thread's wait.

    Attributes:
        gate: what it sleeps on when it does not lead.
        leading: the ident of its thread while it leads, else 0: then it sleeps in the transport instead.
        listed: whether it stands in the list of callers that could lead.
        resigned: it gave leadership away to the pool and does not ask for it again in this wait.
        over: it no longer waits.
        wake: ends its receive while it leads; for those who complete something without knowing the worker.
        mailbox, turn: its place in an actor's mailbox; None outside actors.
    """

    __slots__ = ("gate", "leading", "listed", "mailbox", "over", "resigned", "turn", "wake")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.leading = 0
        self.listed = self.resigned = self.over = False
        self.mailbox: Mailbox[Any] | None = None
        self.turn: Turn[Any] | None = None
        self.wake: Callable[[], None] | None = None


class Completion:
    """Something that comes to be done. Set by whoever completes it, once (the caller sees to that).

    Attributes:
        done: whether it is. Set last, so that a thread that sees it sees all the rest.
        number: its place among the messages that reached the worker (RULE MB3).
    """

    __slots__ = ("done", "number", "waiters")

    def __init__(self) -> None:
        self.done = False
        self.number = 0
        self.waiters: list[Waiter] = []


class Call(Completion):
    """A request that was sent and awaits its answer.

    Attributes:
        id: its number, this worker's own.
        peer: the worker id of the callee.
        deadline: when it expires, on the worker's clock; None for never.
        timeout: the seconds that it was given, for the error's text.
        bound: the worker id of the caller of the handler whose deadline it has, earlier than its own; else None.
        what: what was called: a string, a function, or anything else that `describe` can name.
        frames: the answer's payload, the first frame with its header.
        failure: an error that was found on this side, instead of an answer.
        flags, sent_flags: flags of the answer and of the request, bits of `envelope.Flag`.
        failed: whether the answer is an error.
        note: called under leadership as soon as it is done: neither blocks nor runs user code (TR1).
        then: called once, with the call, by a pool thread, when it is done and nobody waits for it.
        urgent: callbacks hang on it, so that `then` must not be put off.
        again: writes the payload again, by value; for a callee to whom names of `__main__` are unknown.
        refs: what the sender must take back if the message is not read.
    """

    __slots__ = (
        "again", "bound", "deadline", "failed", "failure", "flags", "frames", "id", "note", "peer", "refs",
        "sent_flags", "then", "timeout", "urgent", "what",
    )  # fmt: skip

    def __init__(self, number: int, peer: int, timeout: float, deadline: float | None, what: object) -> None:
        self.done = False
        self.number = 0
        self.waiters = []
        self.id = number
        self.peer = peer
        self.timeout = timeout
        self.deadline = deadline
        self.bound: int | None = None
        self.what = what
        self.frames: Sequence[Frame] = ()
        self.failure: BaseException | None = None
        self.flags = self.sent_flags = 0
        self.failed = self.urgent = False
        self.note: Callable[[Call], None] | None = None
        self.then: Callable[[Call], None] | None = None
        self.again: Callable[[], tuple[Sequence[Frame], Any]] | None = None
        self.refs: Any = None


def check_seconds(timeout: object) -> None:
    """Refuses what is no limit of time.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be seconds (0: for ever), not {timeout!r} of type {type(timeout).__name__}")
    if timeout != timeout:
        raise ValueError("timeout must be seconds (0: for ever), not NaN")


def describe(what: object) -> str:
    """Names what was called, for an error's text."""
    if isinstance(what, str):
        return what
    return str(getattr(what, "__qualname__", None) or getattr(what, "__name__", None) or what)
