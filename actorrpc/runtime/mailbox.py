"""An actor's mailbox: which message may run now. Plain logic: it takes messages and returns decisions.

RULE MB1 (order). Messages start in the order in which they were put, at most `concurrency` at once.
RULE MB2 (own chain). A handler that waits admits messages of its own call chain, one at a time, ahead of the queue; the
turn of `main` (chain None) admits any. An admitted handler that waits may admit in its turn: turns form a stack, of
which only the top runs.
RULE MB3 (a reply keeps its place). Messages and replies are numbered in the order in which they reached the worker.
A waiting turn goes on only after the admissible messages with smaller numbers than what it waited for, and none with
larger numbers is started on top of it meanwhile. So a reply never overtakes an earlier `tell` of the same sender.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.clock import Gate

M = TypeVar("M")
LATER: list[Any] = []
"""What `Mailbox.put` returns where the message is to be put a little later."""
_CLEAR_AT_LEAST = 64


class State(Enum):
    """What a turn does."""

    RUNNING = "running"
    WAITING = "waiting"
    """Blocked in a wait that is not over."""
    RETURNING = "returning"
    """Its wait is over; others go first."""


class Turn(Generic[M]):
    """One message's stay at the actor, or that of its `main`.

    Attributes:
        message: what is to be run; None for `main`.
        chain: the call chain; None admits any.
        gate: opened when a returning turn may go on.
    """

    __slots__ = ("below", "chain", "gate", "limit", "message", "state")

    def __init__(self, message: M | None, chain: int | None, below: Turn[M] | None) -> None:
        self.message = message
        self.chain = chain
        self.below = below
        self.state = State.RUNNING
        self.limit: int | None = None
        self.gate: Gate | None = None


class View(NamedTuple):
    """A mailbox as it is at one moment.

    Attributes:
        concurrency: how many messages may be in progress at once.
        stacks: the turns, in each place the top one first.
        queue: the messages that wait, the first one first.
    """

    concurrency: int
    stacks: list[list[Turn[Any]]]
    queue: list[Any]


class Mailbox(Generic[M]):
    """Queues messages for one actor and says whose turn it is.

    Every method that may let a turn run returns those turns: a new one is to be run, a returning one's gate opened
    (see `begin`).

    Arguments:
        concurrency: how many messages may be in progress at once; 0 holds all back until `open`.
    """

    def __init__(self, concurrency: int = 1) -> None:
        self._concurrency = concurrency
        self._queue: deque[tuple[int, int, M]] = deque()
        self._chains: dict[int, int] = {}
        self._tops: list[Turn[M]] = []
        self._useless = 0
        """How many messages `forget` was told of since it last cleared up."""
        self._closed = False
        # Reentrant: the collector may run a finalizer of the user's in the midst of what it guards; see `put`.
        self._door: Any = threading.RLock()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether a message is in progress or queued."""
        return bool(self._tops or self._queue)

    @property
    def in_progress(self) -> int:
        """How many places are taken."""
        return len(self._tops)

    def view(self) -> View:
        """Returns how it stands now."""
        with self._door:
            stacks: list[list[Turn[Any]]] = []
            for top in self._tops:
                stacks.append([])
                turn: Turn[M] | None = top
                while turn is not None:
                    stacks[-1].append(turn)
                    turn = turn.below
            return View(self._concurrency, stacks, [message for _, _, message in self._queue])

    def open(self, concurrency: int) -> list[Turn[M]]:
        """Lets messages start from now on."""
        with self._door:
            self._concurrency = concurrency
            return self._next()

    def put(self, number: int, chain: int, message: M) -> list[Turn[M]] | None:
        """Takes a message in. Returns None, and does not take it, when the mailbox is closed; LATER, and does not take
        it either, in a finalizer that has interrupted the present thread in the midst of a method of this mailbox.
        """
        if self._door._is_owned():
            return LATER
        with self._door:
            if self._closed:
                return None
            if not self._tops and not self._queue and self._concurrency:
                turn = Turn(message, chain, None)
                self._tops.append(turn)
                return [turn]
            self._queue.append((number, chain, message))
            self._chains[chain] = self._chains.get(chain, 0) + 1
            return self._next()

    def enter(self) -> Turn[M]:
        """Begins the turn of `main`: it holds one place until `finish`, and admits any message while it waits."""
        with self._door:
            turn: Turn[M] = Turn(None, None, None)
            self._tops.append(turn)
            return turn

    def finish(self, turn: Turn[M]) -> list[Turn[M]]:
        """Ends a turn that runs."""
        with self._door:
            for i, top in enumerate(self._tops):
                below: Turn[M] | None = top
                if top is turn:
                    if turn.below is None:
                        del self._tops[i]
                    else:
                        self._tops[i] = turn.below
                    break
                while below is not None and below.below is not turn:
                    below = below.below
                if below is not None:  # a turn that was forced to go on ends before those above it
                    below.below = turn.below
                    break
            return self._next()

    def suspend(self, turn: Turn[M], limit: int | None = None) -> list[Turn[M]]:
        """Says that a running turn begins to wait; `limit` is the place of what it waits for where that is there."""
        with self._door:
            turn.state, turn.limit, turn.gate = State.WAITING, limit, None
            return self._next()

    def arrived(self, turn: Turn[M], number: int) -> None:
        """Says that what a waiting turn waits for has come, as `number`: what comes later no longer goes first."""
        with self._door:
            if turn.state is State.WAITING and turn.limit is None:
                turn.limit = number

    def resume(self, turn: Turn[M], number: int, gate: Gate) -> list[Turn[M]]:
        """Says that a turn's wait is over; it may go on when it is returned, from here or from a later call.

        Arguments:
            number: the place of what it waited for; 0 when it stopped waiting for another reason.
            gate: what to open then.
        """
        with self._door:
            turn.state, turn.gate = State.RETURNING, gate
            turn.limit = number if turn.limit is None else min(turn.limit, number)
            return self._next()

    def force(self, turn: Turn[M]) -> None:
        """Lets a turn go on at once, whoever runs above it: its thread is being interrupted."""
        with self._door:
            turn.state, turn.gate = State.RUNNING, None

    def forget(self, useless: Callable[[M], bool]) -> None:
        """Says that one more queued message need not be served. Once they may be half of the queue they are taken out.

        Arguments:
            useless: tells which.
        """
        with self._door:
            self._useless += 1
            if self._useless < max(_CLEAR_AT_LEAST, len(self._queue) // 2):
                return
            self._useless, queue, self._queue = 0, self._queue, deque()
            for entry in queue:
                if useless(entry[2]):
                    self._count(entry)
                else:
                    self._queue.append(entry)

    def close(self) -> list[M]:
        """Refuses all further messages; returns those that were waiting, to be answered with an error."""
        with self._door:
            self._closed = True
            left = [message for _, _, message in self._queue]
            self._queue.clear()
            self._chains.clear()
            return left

    def _next(self) -> list[Turn[M]]:
        ready: list[Turn[M]] = []
        for i, top in enumerate(self._tops):
            if top.state is State.RUNNING:
                continue
            if self._queue and self._concurrency:
                entry = self._take(top)
                if entry is not None:
                    self._tops[i] = turn = Turn(entry[2], entry[1], top)
                    ready.append(turn)
                    continue
            if top.state is State.RETURNING:
                top.state = State.RUNNING
                ready.append(top)
        while self._queue and len(self._tops) < self._concurrency:
            _, chain, message = entry = self._queue.popleft()
            self._count(entry)
            turn = Turn(message, chain, None)
            self._tops.append(turn)
            ready.append(turn)
        return ready

    def _take(self, top: Turn[M]) -> tuple[int, int, M] | None:
        """Takes the first message that a turn admits off the queue."""
        if top.chain is None:
            # The head suffices: a smaller number further back came by another thread, of which nobody knows the order.
            if top.limit is not None and self._queue[0][0] >= top.limit:
                return None
            entry = self._queue.popleft()
            self._count(entry)
            return entry
        if top.chain not in self._chains:
            return None
        for i, entry in enumerate(self._queue):
            if entry[1] == top.chain and (top.limit is None or entry[0] < top.limit):
                del self._queue[i]
                self._count(entry)
                return entry
        return None

    def _count(self, entry: tuple[int, int, M]) -> None:
        left = self._chains[entry[1]] - 1
        if left:
            self._chains[entry[1]] = left
        else:
            del self._chains[entry[1]]
