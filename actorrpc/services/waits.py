"""Who waits for whom on one worker, read from what is there: nothing is noted down on the way of a call.

Threads that wait through the library are found on their stacks, in `Patience.wait`; coroutines on the worker's loop;
messages in mailboxes and in the table of requests. `debug` shows all that; `deadlocks` follows it from one worker to
the next.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actorrpc.runtime.completion import Call, describe
from actorrpc.runtime.message import RUNNING
from actorrpc.runtime.patience import Patience
from actorrpc.runtime.worker import Worker
from actorrpc.services.autograd import Autograd
from actorrpc.services.loop import Carried, Handler
from actorrpc.services.objects import Objects

if TYPE_CHECKING:
    from actorrpc.runtime.cells import MailboxCell
    from actorrpc.runtime.completion import Completion
    from actorrpc.runtime.handling import Handling
    from actorrpc.runtime.mailbox import Turn
    from actorrpc.runtime.message import Message

_WAIT = Patience.wait.__code__
_PERFORM, _STEP = Worker.perform.__code__, Carried.step.__code__
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_MOST = 100
"""So many of a kind are listed."""

Node = tuple[int, int, int]
"""A message on its way through the callee: that worker's id, its sender's id, and the sender's number of it."""


@dataclass(frozen=True)
class Waiting:
    """A thread, or a coroutine, that waits.

    Attributes:
        thread: its name.
        who: what it runs, in words.
        what: what it waits for, in words.
        on: the worker that is to answer; "" where it waits for no call.
        seconds: for how long the call has been under way; None where nobody knows.
        message, call: the message that it handles, and the call that it waits for, as others know them.
    """

    thread: str
    who: str
    what: str
    on: str = ""
    seconds: float | None = None
    message: Node | None = None
    call: Node | None = None


@dataclass(frozen=True)
class ActorState:
    """An actor's mailbox.

    Attributes:
        name: the actor.
        depth: how many messages wait in it.
        running, waiting: how many messages are in progress, and how many of these wait for something.
        concurrency: how many may be in progress at once.
        seconds: for how long the first one has waited at least; None where none does, or nobody knows.
        queued: the messages that wait, as others know them; not more than a hundred.
    """

    name: str
    depth: int
    running: int
    waiting: int
    concurrency: int
    seconds: float | None = None
    queued: tuple[Node, ...] = ()


@dataclass(frozen=True)
class CallState:
    """A call that is not answered.

    Attributes:
        what, on: what was called, and where.
        seconds: for how long it has been under way at least; None where nobody knows.
        waited_for: whether a thread or a coroutine waits for it.
    """

    what: str
    on: str
    seconds: float | None
    waited_for: bool


@dataclass(frozen=True)
class WorkerState:
    """One worker at one moment.

    Attributes:
        name: the worker, in words.
        id: its number.
        waits: who waits there.
        actors: the mailboxes.
        calls: calls of its own that are not answered, the oldest first; not more than a hundred.
        pending: how many there are.
        passes: backward passes that wait, in words.
        windows: windows that are full and waited for, in words.
        statistics: counts of its threads, handlers and messages.
        at_work: the handlers that run and do not wait through the library, each in words, with the line where it is.
    """

    name: str
    id: int
    waits: list[Waiting] = field(default_factory=list)
    actors: list[ActorState] = field(default_factory=list)
    calls: list[CallState] = field(default_factory=list)
    pending: int = 0
    passes: list[str] = field(default_factory=list)
    windows: list[str] = field(default_factory=list)
    statistics: dict[str, int] = field(default_factory=dict)
    at_work: list[str] = field(default_factory=list)


class Wait(NamedTuple):
    """A wait through the library as it is found.

    Attributes:
        thread: the name of who waits.
        handling: on whose behalf; None in threads of the program's own.
        turn: its place in a mailbox, if it has one.
        what: what it waits for.
        bounded: whether it gives up by itself before the call that it waits for does.
        coroutine: whether it is a coroutine.
    """

    thread: str
    handling: Handling | None
    turn: Turn[Any] | None
    what: Completion
    bounded: bool
    coroutine: bool = False

    @property
    def of_handler(self) -> bool:
        """Whether it is the handler of its message that waits: not a thread that a coroutine has begun."""
        message = None if self.handling is None else self.handling.message
        if message is None:
            return False
        return self.coroutine or (message.stage == RUNNING and (message.mailbox is None) == (self.turn is None))


class Ages:
    """Tells how old calls and messages are at least, by marks that were made from time to time: as they are numbered,
    none need be noted down.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=600)

    def mark(self) -> int:
        """Makes a mark; returns the number that calls from now on are above."""
        number = self._worker.calls.next_id()
        self._marks.append((self._worker.clock.now(), number, self._worker.place()))
        return number

    def of_call(self, call: Call) -> float | None:
        """Returns the seconds since a call was sent."""
        now = self._worker.clock.now()
        if call.deadline is not None and call.bound is None and call.timeout > 0:
            return max(0.0, now - (call.deadline - call.timeout))
        return next((now - time for time, number, _ in list(self._marks) if call.id < number), None)

    def of_message(self, message: Message) -> float | None:
        """Returns the seconds since a message came."""
        now = self._worker.clock.now()
        return next((now - time for time, _, place in list(self._marks) if message.number < place), None)


def waits_of(worker: Worker) -> list[Wait]:
    """Returns who waits on a worker, through it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[Wait] = []
    frame: Any = None
    frames = sys._current_frames()
    for ident, top in list(frames.items()):
        frame = top
        while frame is not None and frame.f_code is not _WAIT:
            frame = frame.f_back
        if frame is None:
            continue
        known = frame.f_locals
        if known.get("worker") is worker:  # else it has only just begun, or is another worker's
            what, handling, deadline = known["what"], known.get("handling"), known["deadline"]
            own = what.deadline if isinstance(what, Call) else None
            bounded = deadline is not None and (own is None or deadline < own)
            turn = None if handling is None else handling.turn
            found.append(Wait(names.get(ident, str(ident)), handling, turn, what, bounded))
        del known
    del frames, frame  # this function's own frame is among them
    for handler in list(worker.afoot):
        if isinstance(handler, Handler):
            handling, turn, wake = handler.awaits()
            if wake is not None and wake.core is not None:
                found.append(Wait("a coroutine", handling, turn, wake.core, wake.timed, True))
    return found


def at_work(worker: Worker) -> list[str]:
    """Returns what runs in a worker's handlers now, in words, each with the line of the program's own that it is at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[str] = []
    frame: Any = None
    frames = sys._current_frames()
    for ident, top in list(frames.items()):
        frame, outermost = top, None
        while frame is not None and frame.f_code not in (_WAIT, _PERFORM, _STEP):
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                outermost = (frame.f_code, frame.f_lineno)
            frame = frame.f_back
        if frame is None or frame.f_code is _WAIT or outermost is None:
            continue
        known = frame.f_locals
        on_loop = frame.f_code is _STEP
        handling = known["self"]._handling if on_loop else None
        message = known.get("message") if handling is None else handling.message
        if (known["self"] if handling is None else handling.worker) is worker:
            code, line = outermost
            does = "keeps the worker's loop busy" if on_loop else "is at work"
            found.append(
                f"{names.get(ident, ident)}: {who(message, None, worker)} {does}, in {code.co_name} "
                f"({code.co_filename}:{line})"
            )
        del known
    del frames, frame  # this function's own frame is among them
    return found


def node_of(message: Message) -> Node | None:
    """Returns how others know a message; None for one that was not sent."""
    return (message.worker.id, message.caller, message.call) if message.call else None


def call_of(worker: Worker, call: Call) -> Node:
    """Returns the message that a call of a worker's is."""
    return call.peer, worker.id, call.id


def who(message: Message | None, turn: Turn[Any] | None, worker: Worker) -> str:
    """Says in words what handles a message."""
    if message is None:
        return f"the main of {worker.record.name}" if turn is not None else f"the program of {worker.record.name}"
    what = getattr(message.cell, "what", None)
    if what is None:
        value = getattr(message.cell, "_value", None)
        what = "a function" if value is None else f"a method of a {type(value).__name__}"
    return f"{what} on {worker.record.name}"


def state_of(worker: Worker, ages: Ages) -> WorkerState:
    """Returns how a worker stands."""
    calls = list(worker.calls.pending.values())
    autograd: Autograd = worker.services[Autograd]
    objects: Objects = worker.services[Objects]
    return WorkerState(
        str(worker),
        worker.id,
        [_waiting(worker, ages, wait) for wait in waits_of(worker)],
        [_actor(cell, ages) for cell in objects.mailboxes()],
        [
            CallState(describe(call.what), _name(worker, call.peer), ages.of_call(call), bool(call.waiters))
            for call in calls[:_MOST]
        ],
        len(calls),
        autograd.waits(),
        worker.limits.full(),
        worker.statistics(),
        at_work(worker),
    )


def _waiting(worker: Worker, ages: Ages, wait: Wait) -> Waiting:
    handling, what = wait.handling, wait.what
    message = None if handling is None else handling.message
    name, of = who(message, wait.turn, worker), None if message is None else node_of(message)
    if wait.turn is not None and wait.turn.gate is not None:
        return Waiting(wait.thread, name, "its turn: messages of its own chain go first", message=of)
    if not isinstance(what, Call):
        return Waiting(wait.thread, name, _other(what), message=of)
    return Waiting(
        wait.thread, name, describe(what.what), _name(worker, what.peer), ages.of_call(what), of, call_of(worker, what)
    )  # fmt: skip


def _other(what: Completion) -> str:
    kind = type(what)
    if kind.__name__ == "Room":
        return "room to send"
    if kind.__module__ == "actorrpc.services.passes":
        return "gradients"
    return "a future, time to pass, or the world's end"


def _actor(cell: MailboxCell, ages: Ages) -> ActorState:
    view = cell.mailbox.view()
    turns = [turn for stack in view.stacks for turn in stack]
    queued = (node_of(message) for message in view.queue[:_MOST])
    return ActorState(
        cell.what,
        len(view.queue),
        len(turns),
        sum(turn.state.value != "running" for turn in turns),
        view.concurrency,
        ages.of_message(view.queue[0]) if view.queue else None,
        tuple(node for node in queued if node is not None),
    )


def _name(worker: Worker, number: int) -> str:
    peer = worker.peers.get(number)
    return peer.record.name if peer is not None else f"worker {number}"
