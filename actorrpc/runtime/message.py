"""A request or tell on its way through the callee."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from actorrpc.runtime.handling import NO_CONTEXT
from actorrpc.wire.envelope import HEADER_SIZE, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized

    import torch

    from actorrpc.runtime.cells import Cell
    from actorrpc.runtime.mailbox import Mailbox, Turn
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame


Outgoing: TypeAlias = tuple[int, int, int, int, int, int, int, float]
"""What the header of a message says, but for who sends it: kind, flags, call, creator, local, chain, context and
remaining, as in `envelope.Header`.
"""


class Trace(Protocol):
    """Takes down the tensors of one message, in an autograd context.

    As a context manager: the message leaves in the block, and is recorded at its end, unless that is an exception.

    Attributes:
        context: the context's id.
        tensors: those that were taken.
    """

    context: int

    @property
    def tensors(self) -> Sized: ...

    def add(self, tensor: torch.Tensor) -> object:
        """Takes a tensor that is being written; returns a mark that is written with it."""

    def take(self, tensor: torch.Tensor, mark: Any) -> None:
        """Takes a tensor that was just read, with its mark. It requires no grad yet."""

    def seal(self) -> None:
        """Records them: the message was read as a whole."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None: ...

    def undo(self) -> None:
        """Forgets them: the message is written anew."""


class Tracer(Protocol):
    """Makes traces; see `Trace`. None is needed for a context that is over."""

    def sending(self, context: int, peer: int) -> Trace | None:
        """For a message that is about to be written."""

    def receiving(self, context: int, peer: int) -> Trace | None:
        """For one that is about to be read."""


class Route(Enum):
    """What a message is with regard to the devices of the tensors in it."""

    REQUEST = "a request or a tell"
    ANSWER = "an answer"
    GRADIENTS = "gradients"


_PLACES: Final = {"[0]": "func", "[1]": "args", "[2]": "kwargs"}
"""How users call the parts of a request."""


class Parcel:
    """What a reducer may know of the message that is being written or read (`wire.codec.writing`, `reading`).

    Attributes:
        worker: whose message it is.
        peer: the worker id of the other end.
        route: which kind of message it is, where that is being written.
        refs: what the references in it noted down, for the case that it is never read; None without any.
        undo: called with `refs` when the writing starts anew.
        failure: what to raise instead of saying that something could not be written; a reducer that fails sets it.
        trace: takes down the tensors in it that require grad; None outside of autograd contexts.
    """

    __slots__ = ("failure", "peer", "refs", "route", "trace", "undo", "worker")

    def __init__(self, worker: Worker, peer: int, route: Route = Route.REQUEST) -> None:
        self.worker = worker
        self.peer = peer
        self.route = route
        self.refs: list[Any] | None = None
        self.undo: Any = None
        self.failure: BaseException | None = None
        self.trace: Trace | None = None

    @property
    def context(self) -> int:
        """The autograd context that the message belongs to: none where that is over, or its receiver would begin it
        again, for ever.
        """
        return NO_CONTEXT if self.trace is None else self.trace.context

    def open(self, context: int) -> None:
        """Prepares for reading a message, of some context."""
        if context != NO_CONTEXT and self.worker.tracer is not None:
            self.trace = self.worker.tracer.receiving(context, self.peer)

    def opened(self, value: Any) -> Any:
        """Returns what was read, after its tensors were recorded."""
        if self.trace is not None:
            self.trace.seal()
        return value

    def called(self, path: str) -> str:
        """Returns how users call a part of what is written: `args[0].lock`, `result.lock`."""
        if self.route is not Route.REQUEST:
            return f"result{path}"
        for place, name in _PLACES.items():
            if path.startswith(place):
                return name + path[len(place) :]
        return f"message{path}"

    def restart(self) -> None:
        """Forgets what was noted: the message is written a second time, by other means."""
        refs, self.refs = self.refs, None
        if self.trace is not None:
            self.trace.undo()
        if refs and self.undo is not None:
            self.undo(refs)


QUEUED: Final = 0
RUNNING: Final = 1
RETURNED: Final = 2


class Meter(Protocol):
    """Measures how long requests take here."""

    def answered(self, message: Message) -> None:
        """Takes a request that has just been answered, on whatever thread."""


class Kept(Protocol):
    """The place of a result that stays with the callee."""

    def fill(self, value: Any, error: BaseException | None = None) -> None:
        """Puts the result, or the error, in."""


class GivenUp(BaseException):  # it is no error, and no handler of those may take it
    """While the arguments of a message were read its caller gave up; what has not begun is not run."""


class Message:
    """One request or tell, with everything its handler needs to answer it.

    Attributes:
        worker: the worker that received it.
        flags: bits of `Flag`.
        caller: the sender's worker id.
        call: the sender's number of the call.
        number: its place among all that reached this worker.
        chain: its call chain.
        context: the autograd context that it was sent in, or -1.
        deadline: when the caller gives up, on this worker's clock; None for never.
        creator, local: the target's id.
        wants_answer: whether it is a request.
        answered: whether it was answered, or its error logged.
        cancelled: whether its caller has said that it no longer waits.
        stage: whether it is QUEUED, its handler is RUNNING, or that has RETURNED and it is answered later.
        on_cancel: called, in a thread of the pool, when it is cancelled; set by who can end what has begun.
        cell: what handles it.
        kept: the place of a result that stays here (`Flag.KEEP`).
        mailbox, turn: its place in an actor's mailbox while it runs.
        came: when it reached this worker; 0 where nobody measures (`Worker.meter`).
        read: whether its payload was read: a DeserializationError from then on is of something else.
    """

    __slots__ = (
        "answered", "call", "caller", "came", "cancelled", "cell", "chain", "context", "creator", "deadline", "flags",
        "frames", "kept", "local", "mailbox", "number", "on_cancel", "read", "stage", "turn", "wants_answer", "worker",
    )  # fmt: skip

    cell: Cell

    def __init__(
        self,
        worker: Worker,
        kind: int,
        flags: int,
        caller: int,
        call: int,
        creator: int,
        local: int,
        chain: int,
        context: int,
        deadline: float | None,
        number: int,
        frames: Sequence[Frame],
    ) -> None:
        self.worker = worker
        self.flags = flags
        self.caller = caller
        self.call = call
        self.creator = creator
        self.local = local
        self.chain = chain
        self.context = context
        self.deadline = deadline
        self.number = number
        self.frames: Sequence[Frame] = frames
        self.wants_answer = kind == Kind.REQUEST
        self.answered = self.cancelled = self.read = False
        self.stage = QUEUED
        self.came = 0.0
        self.on_cancel: Callable[[], None] | None = None
        self.kept: Kept | None = None
        self.mailbox: Mailbox[Message] | None = None
        self.turn: Turn[Message] | None = None

    def load(self) -> Any:
        """Reads the payload and lets go of its bytes.

        Raises:
            DeserializationError: it cannot be read here.
            GivenUp: the caller gave up meanwhile.
        """
        frames, self.frames = self.frames, ()
        payload = [memoryview(frames[0])[HEADER_SIZE:], *frames[1:]]
        parcel = Parcel(self.worker, self.caller)
        if self.context != NO_CONTEXT:
            parcel.open(self.context)
        value = self.worker.codec.loads(payload, parcel)
        self.read = True
        if self.given_up:
            raise GivenUp
        return parcel.opened(value)

    @property
    def given_up(self) -> bool:
        """Whether its caller has said that it no longer waits, or its time has run out."""
        return self.cancelled or (self.deadline is not None and self.deadline <= self.worker.clock.now())

    def reply(self, value: object) -> None:
        """Answers with a value; with an error where it cannot be written. Tells are not answered."""
        if self.wants_answer and not self.answered:
            self.answered = True
            self.worker.serving.answered(self)
            self.worker.answers.give(self, value)

    def fail(self, error: BaseException, flags: int = 0) -> None:
        """Answers with an error; the error of a tell goes to the log."""
        if not self.answered:
            self.answered = True
            self.worker.serving.answered(self)
            self.worker.answers.give_error(self, error, flags)

    @property
    def holds_refs(self) -> bool:
        """Whether references travel in the payload."""
        return bool(self.frames) and bool(self.flags & Flag.REFS)
