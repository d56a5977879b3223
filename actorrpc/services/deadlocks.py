"""Deadlocks: found by following who waits for whom, and broken.

RULE DL1 (what a deadlock is). A handler that waits for a call, without a bound of its own, goes on only when that call
is answered; one below others in its place of the mailbox, only when these have ended, too. A message that is queued
behind a full mailbox begins when any one of the messages in progress there has ended. Whatever else somebody does or
waits for (it computes, waits for a lock, for room, for a future that is no call's, for gradients, in an asyncio wait
whose end is not known, for an object that is being made) may come to an end by itself. Take away all that can, by these
rules, and again what can then: those who are left wait for ever. Of these, the ones in circles are the deadlock.
RULE DL2 (no false alarm). Who waits for whom is collected twice, the second time after the first has come to its end,
and only what both say counts. Messages and calls have numbers that never come again. So all of it held at one moment
between the two; and what waits by DL1 then, waits for ever, unless a time runs out or somebody cancels.
RULE DL3 (what it costs). From time to time a worker looks which of its calls have been waited for since the look before
the last one, and for these asks along, with pauses that double. Who does not answer may be at work.
RULE DL4 (breaking). All calls in the circles are given up with a DeadlockError; those who had made them may catch it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from actorrpc.errors import ActorRPCError, DeadlockError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.completion import Call, describe
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.mailbox import State
from actorrpc.runtime.message import QUEUED
from actorrpc.services.ids import WAITS
from actorrpc.services.looking import Looking
from actorrpc.services.waits import Ages, Node, call_of, node_of, state_of, waits_of, who
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.waits import Wait

log = logging.getLogger("actorrpc")
_ANSWER_SECONDS = 5.0
_MOST = 5000
"""What is more entangled is not looked at."""
_RARELY = 32


class Hold(NamedTuple):
    """What keeps a message from coming to its end.

    Attributes:
        node: the message.
        any: whether the end of any one of `on` will do; else it takes all.
        on: the messages that it waits for.
        call: the one among them that is a call of its own, waited for.
        who, text: what handles it, and what it waits for, in words.
    """

    node: Node
    any: bool
    on: tuple[Node, ...]
    call: Node | None
    who: str
    text: str


class Deadlocks(Looking):
    """A worker's part in finding who waits for whom.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.ages = Ages(worker)
        self._marks = (0, 0)
        self._looks: dict[int, int] = {}
        """How often each call that is waited for for long was seen."""
        self._probing = False
        worker.services[Deadlocks] = self
        worker.cells[WAITS] = ServiceCell(worker, Lane.CONTROL, self._handle)

    def start(self, seconds: float) -> None:
        """Begins to look.

        Arguments:
            seconds: for how long a call must have been waited for; 0: does not look.
        """
        self._begin(seconds / 2)

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "state":
            message.reply(state_of(self._worker, self.ages))
        elif verb == "holds":
            message.reply(self.holds(rest[0]))
        elif verb == "break":
            self._give_up(*rest)

    # -- looking

    def _look(self) -> None:
        worker = self._worker
        old = [call for call in list(worker.calls.pending.values()) if call.id < self._marks[0] and call.waiters]
        self._marks = self._marks[1], self.ages.mark()
        self._looks = {call.id: self._looks.get(call.id, 0) + 1 for call in old}
        due = [call_of(worker, call) for call in old if _is_due(self._looks[call.id])]
        if due and not self._probing:
            self._probing = True
            worker.crew.submit((Lane.FREE, self._probe, due))

    def _probe(self, calls: Sequence[Node]) -> None:
        try:
            first = self._collect(calls)
            if circles(stuck(first)):
                again = self._collect(calls)
                self._break(stuck({node: hold for node, hold in first.items() if again.get(node) == hold}))
        except ActorRPCError as e:
            log.debug("%s: looking for deadlocks: %s", self._worker.record.name, e)
        finally:
            self._probing = False

    def _collect(self, roots: Iterable[Node]) -> dict[Node, Hold]:
        """Returns what keeps some messages, and all that they wait for, from coming to their end."""
        worker = self._worker
        found: dict[Node, Hold] = {}
        asked: set[Node] = set()
        todo = set(roots)
        while todo and len(found) < _MOST:
            asked |= todo
            by_worker: dict[int, list[Node]] = {}
            for node in sorted(todo):
                by_worker.setdefault(node[0], []).append(node)
            for hold in self._asked(by_worker):
                found[hold.node] = hold
            todo = {node for hold in found.values() for node in hold.on} - asked - found.keys()
        return found if worker.open else {}

    def _asked(self, by_worker: dict[int, list[Node]]) -> list[Hold]:
        worker = self._worker
        found: list[Hold] = []
        calls: list[Call] = []
        for number, nodes in by_worker.items():
            if number == worker.id:
                found += self.holds(nodes)
                continue
            try:
                body = ("holds", nodes)
                calls.append(worker.request(number, WAITS, body, _ANSWER_SECONDS, flags=Flag.CONTROL))
            except ActorRPCError as e:
                log.debug("%s: %s", worker.record.name, e)
        for call in calls:
            try:
                found += worker.wait_result(call)
            except ActorRPCError as e:  # it is gone, or at work
                log.debug("%s: %s", worker.record.name, e)
        return found

    # -- what keeps the messages here

    def holds(self, nodes: Collection[Node]) -> list[Hold]:
        """Returns what keeps messages from coming to their end, and those here that they wait for; nothing of those
        that may come to it by themselves.
        """
        worker = self._worker
        waits: dict[Message, Wait] = {}
        for wait in waits_of(worker):
            if wait.of_handler and wait.handling is not None and wait.handling.message is not None:
                waits[wait.handling.message] = wait
        todo = [worker.serving.requests.get(node[1:]) for node in nodes]
        found: dict[Node, Hold] = {}
        seen: set[Message] = set()
        while todo:
            message = todo.pop()
            node = None if message is None else node_of(message)
            if message is None or node is None or message in seen:
                continue
            seen.add(message)
            hold, more = self._hold(node, message, waits.get(message))
            todo += more
            if hold is not None:
                found[node] = hold
        return list(found.values())

    def _hold(self, node: Node, message: Message, wait: Wait | None) -> tuple[Hold | None, list[Message]]:
        if wait is None:
            if message.stage == QUEUED and message.mailbox is not None:
                return self._queued(node, message)
            return None, []
        worker, name = self._worker, who(message, wait.turn, self._worker)
        above: list[Message] = []
        turn = wait.turn
        if turn is not None and message.mailbox is not None:
            stack = next((stack for stack in message.mailbox.view().stacks if turn in stack), None)
            if stack is None:
                return None, []
            at = stack.index(turn)
            above = [over.message for over in stack[:at][-1:] if over.message is not None]
            if turn.state is State.RETURNING and above:
                return _made(node, False, above, None, name, "its turn"), above
            if turn.state is not State.WAITING:
                return None, []
        call = wait.what
        if not isinstance(call, Call) or wait.bounded or call.done or call.id not in worker.calls.pending:
            return None, []
        peer = worker.peers.get(call.peer)
        where = peer.record.name if peer is not None else f"worker {call.peer}"
        return _made(node, False, above, call_of(worker, call), name, f"{describe(call.what)} on {where}"), above

    def _queued(self, node: Node, message: Message) -> tuple[Hold | None, list[Message]]:
        """Says what keeps a message in a mailbox's queue."""
        assert message.mailbox is not None
        view = message.mailbox.view()
        tops = [stack[0] for stack in view.stacks]
        if message not in view.queue or not 0 < view.concurrency <= len(tops):
            return None, []
        if any(top.message is None or top.chain == message.chain for top in tops):
            return None, []  # a `main`, which admits any, or its own chain's
        name = who(message, None, self._worker)
        messages: list[Message] = [top.message for top in tops if top.message is not None]
        return _made(node, True, messages, None, name, "its turn"), messages

    # -- breaking

    def _break(self, held: dict[Node, Hold]) -> None:
        """Has the calls in the circles given up."""
        for circle in circles(held):
            calls = [hold.call for hold in circle if hold.call is not None]
            members = tuple(dict.fromkeys(hold.who for hold in circle if hold.call is not None))
            waits = "; ".join(f"{hold.who} waits for {hold.text}" for hold in circle if hold.call is not None)
            text = (
                f"these wait for each other, and would for ever: {waits}. The calls among them were given up. Let one "
                f"of them not wait within its handler (rpc_async and a callback, or tell), or give it more concurrency"
            )
            for number in {call[1] for call in calls}:
                mine = [call[2] for call in calls if call[1] == number]
                if number == self._worker.id:
                    self._give_up(mine, text, members)
                    continue
                try:
                    self._worker.tell(number, WAITS, ("break", mine, text, members), control=True)
                except ActorRPCError as e:
                    log.debug("%s: %s", self._worker.record.name, e)

    def _give_up(self, numbers: Sequence[int], text: str, members: Sequence[str]) -> None:
        calls, ended = self._worker.calls, False
        for number in numbers:
            call = calls.pending.get(number)
            if call is not None and calls.end(call, DeadlockError(f"{describe(call.what)}: {text}", members=members)):
                ended = True
        if ended:
            log.warning("%s: a deadlock: %s", self._worker, text)


def _is_due(looks: int) -> bool:
    return looks % _RARELY == 0 or looks & (looks - 1) == 0


def _made(
    node: Node, any_of: bool, messages: Sequence[Message], call: Node | None, name: str, text: str
) -> Hold | None:
    """Makes a hold; None where one of those that it is on cannot be told to others."""
    on = [node_of(message) for message in messages]
    known = [one for one in on if one is not None]
    if len(known) < len(on):
        return None
    return Hold(node, any_of, (*known, *([] if call is None else [call])), call, name, text)


def stuck(holds: dict[Node, Hold]) -> dict[Node, Hold]:
    """Returns those that cannot come to their end (RULE DL1); who is not among `holds` can."""
    left, before = dict(holds), -1
    while len(left) != before:
        before = len(left)
        for node, hold in list(left.items()):
            kept = [one in left for one in hold.on]
            if not (all(kept) if hold.any else any(kept)):
                del left[node]
    return left


def circles(held: dict[Node, Hold]) -> list[list[Hold]]:
    """Returns the circles: groups of messages each of which waits for each other one of the group, or for itself."""
    reach: dict[Node, set[Node]] = {}
    for start in held:
        seen: set[Node] = set()
        todo = [one for one in held[start].on if one in held]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += [one for one in held[node].on if one in held]
        reach[start] = seen
    found: list[list[Hold]] = []
    done: set[Node] = set()
    for node, reached in reach.items():
        if node in reached and node not in done:
            circle = [held[one] for one in held if one in reached and node in reach[one]]
            done |= {hold.node for hold in circle}
            found.append(circle)
    return found
