"""The names of actors: a table on rank 0. A name is claimed before its actor is made, and bound when that is there.

All that happens to the table happens in the control lane, one thing after the other: of several who want to make the
same actor one gets the claim, and the others wait until that has come to something.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from actorrpc.errors import ActorRPCError, InvalidNameError, NotAMemberError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
Token = tuple[int, int]
"""Names a claim: the worker that claims, and a number of its own."""


class Known(NamedTuple):
    """What is known of a named actor.

    Attributes:
        owner: the id of its worker.
        incarnation: the how manieth actor it is that has this name, from 1.
    """

    owner: int
    incarnation: int


class _Entry:
    """A name in use: claimed, and bound when `ref` is there."""

    def __init__(self, token: Token, owner: int, incarnation: int) -> None:
        self.token, self.known = token, Known(owner, incarnation)
        self.ref: Any = None


class Names:
    """The service of one worker; rank 0's has the table.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._tokens = itertools.count()
        self._table: dict[str, _Entry] = {}
        self._lives: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Message, tuple[Any, ...]]]] = {}
        """By name: what is to be asked again once its claim has come to something."""
        worker.services[Names] = self
        worker.cells[NAMES] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)

    # -- asking

    def claim(self, name: str, owner: int, or_get: bool) -> tuple[Token, Any]:
        """Claims a name for an actor that is to be made.

        Arguments:
            name: the name.
            owner: the id of the worker that will have the actor.
            or_get: whether one that has the name already will do.

        Returns the claim, and None; or, where there is an actor, the claim that it had, and the reference.

        Raises:
            InvalidNameError: it is taken.
            WorkerLostError: rank 0 is gone.
        """
        token = self._worker.id, next(self._tokens)
        try:
            answer, found = self._ask("claim", name, token, owner, or_get)
        except BaseException:  # it may be granted all the same
            self.drop(name, token)
            raise
        if answer is not None:
            raise InvalidNameError(answer)
        return token, found

    def bind(self, name: str, token: Token, ref: object) -> None:
        """Gives a claimed name to an actor, which lives as long as it has the name."""
        self._tell("bind", name, token, ref)

    def drop(self, name: str, token: Token | None = None) -> None:
        """Gives a claim back; or, without one, takes the name away from whatever has it."""
        self._tell("drop", name, token)

    def find(self, name: str) -> Any:
        """Returns the reference to a named actor; waits where it is being made.

        Raises:
            NotAMemberError: there is none.
        """
        answer, found = self._ask("find", name)
        if answer is not None:
            raise NotAMemberError(answer)
        return found

    def all(self) -> dict[str, Known]:
        """Returns the named actors."""
        found: dict[str, Known] = self._ask("all", "")
        return found

    def close(self) -> None:
        """Lets go of all actors, at the end of the world."""
        table, self._table = self._table, {}
        table.clear()

    def _ask(self, *body: object) -> Any:
        worker = self._worker
        return worker.wait_result(worker.request(0, NAMES, body, what=f"{body[0]}ing the name {body[1]!r}"))

    def _tell(self, *body: object) -> None:
        try:
            self._worker.tell(0, NAMES, body)
        except ActorRPCError as e:  # rank 0 is gone, and the table with it
            log.debug("%s: %s of the name %r could not leave: %s", self._worker.record.name, body[0], body[1], e)

    # -- the table (on rank 0, in the control lane)

    def _handle(self, message: Message) -> None:
        self._do(message, message.load())

    def _do(self, message: Message, body: tuple[Any, ...]) -> None:
        verb, name, *rest = body
        entry = self._table.get(name)
        if verb == "bind":
            token, ref = rest
            if entry is not None and entry.token == token and self._is_member(entry.known.owner):
                entry.ref = ref
                self._ask_again(name)
        elif verb == "drop":
            self._forget(name, rest[0])
        elif verb == "all":
            message.reply({name: entry.known for name, entry in self._table.items() if entry.ref is not None})
        elif entry is not None and entry.ref is None:
            self._waiting.setdefault(name, []).append((message, body))
        elif verb == "find":
            message.reply((None, entry.ref) if entry is not None else (self._unknown(name), None))
        elif entry is None:
            self._grant(message, name, *rest)
        else:
            message.reply((None, entry.ref) if rest[-1] else (self._taken(name, entry), None))

    def _grant(self, message: Message, name: str, token: Token, owner: int, _: bool) -> None:
        if not (self._is_member(token[0]) and self._is_member(owner)):
            message.reply((None, None))  # whoever asked will find that the worker is gone, if it is there itself
            return
        self._lives[name] = self._lives.get(name, 0) + 1
        self._table[name] = _Entry(token, owner, self._lives[name])
        message.reply((None, None))

    def _forget(self, name: str, token: Token | None) -> None:
        waiting = self._waiting.get(name, [])
        waiting[:] = [(m, body) for m, body in waiting if token is None or body[0] != "claim" or body[2] != token]
        entry = self._table.get(name)
        if entry is not None and (entry.token == token if token is not None else entry.ref is not None):
            del self._table[name]
            self._ask_again(name)

    def _ask_again(self, name: str) -> None:
        for message, body in self._waiting.pop(name, []):
            self._do(message, body)

    def _gone(self, peer: Peer) -> None:
        number = peer.record.id
        for name, entry in list(self._table.items()):
            if entry.known.owner == number or (entry.ref is None and entry.token[0] == number):
                self._forget(name, entry.token)

    def _is_member(self, number: int) -> bool:
        peer = self._worker.peers.get(number)
        return peer is not None and peer.standing is Standing.MEMBER

    def _unknown(self, name: str) -> str:
        names = ", ".join(sorted(repr(n) for n, entry in self._table.items() if entry.ref is not None)) or "none"
        return f"there is no actor named {name!r} in this world; there are: {names}"

    def _taken(self, name: str, entry: _Entry) -> str:
        owner = self._worker.peers[entry.known.owner].record
        return (
            f"the name {name!r} is taken by an actor on {owner}, the {_ordinal(entry.known.incarnation)} of this name: "
            f"take another, or have it by get_actor or get_or_spawn"
        )


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def make(names: Names, name: str, owner: int, or_get: bool, create: Callable[[], Any]) -> Any:
    """Has a named actor made, unless there is one.

    Arguments:
        names: this worker's.
        name, owner, or_get: see `Names.claim`.
        create: makes the reference to it.

    Returns the reference. Raises as `claim` and `create` do.
    """
    token, found = names.claim(name, owner, or_get)
    if found is not None:
        return found
    try:
        ref = create()
        future = ref._get_future()
    except BaseException:
        names.drop(name, token)
        raise

    def made(done: Any) -> None:
        try:
            done.value()
        except BaseException:  # whoever uses the reference hears of it
            names.drop(name, token)
        else:
            names.bind(name, token, ref)

    future.add_done_callback(made)
    return ref
