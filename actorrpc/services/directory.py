"""The directory, on rank 0: who joins a world of fixed size, and who is missing; and what other workers have of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.devices import NO_DEVICES
from actorrpc.services.ending import Ending
from actorrpc.services.ids import ENDING, MEMBER
from actorrpc.services.neighbours import Neighbours
from actorrpc.services.porch import Porch
from actorrpc.services.roster import Roster
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.roster import Hello

log = logging.getLogger("actorrpc")
_WORD_SECONDS = 2.0


class Directory:
    """The directory's actor.

    Arguments:
        worker: rank 0.
        hello: its own, with the world's size.
        session: drawn anew for every world; hellos of others are not for this one.
    """

    def __init__(self, worker: Worker, hello: Hello, session: str) -> None:
        self.roster = Roster(hello.world_size)
        self.joined = Completion()
        """Done when all have joined, or never can."""
        self.all_told = Completion()
        """Done when as many as were expected have been told that the world cannot come about."""
        self.visited: Callable[[Hello, int], None] | None = None
        """Takes the greetings of guests, once all have joined."""
        self._guests: set[int] = set()
        """The ways to those who came before then."""
        self._said = b""
        """The verdict, as it was sent."""
        self._worker = worker
        self.porch = Porch(worker, session, self._come)
        worker.services[Directory] = self
        Ending(worker)
        self._take(hello)

    def expire(self) -> None:
        """Gives up: tells all who have joined who is missing."""
        if not self.joined.done and self.roster.refusal is None:
            self.roster.refusal = f"time ran out: {self.roster.status()}"
            self._announce()

    # -- joining (control lane, but for the first worker, which is this one)

    def _come(self, hello: Hello, way: int) -> None:
        if hello.record.guest:
            if self.visited is not None:
                self.visited(hello, way)
            elif not hello.withdrawn:
                self._guests.add(way)
                self.porch.answer(way, {"status": f"the world is not complete yet: {self.roster.status()}"})
            return
        reason = self._take(hello)
        if reason is not None and self.roster.refusal is None and self._worker.ending:
            return  # a member that was quicker to leave comes for the next world here, whose hint it will find
        if reason is None and not self.roster.complete:
            self.porch.answer(way, {"status": self.roster.status()})
        elif self.joined.done and reason != self.roster.refusal:  # it came too late
            self.porch.answer(way, {"refused": reason})
        elif self.joined.done and not self.porch.is_under_way(way):  # it asks again, so the first answer was lost
            self.porch.send((way,), self._said)
        self._see_who_was_told()

    def _take(self, hello: Hello) -> str | None:
        reason = self.roster.hello(hello)
        if not self.joined.done and (self.roster.complete or self.roster.refusal is not None):
            self._announce()
        return reason

    def _announce(self) -> None:
        ways = self.porch.ways if self.roster.refusal is not None else self.porch.ways - self._guests
        self._said = self.porch.written(self._verdict())
        self.porch.send(list(ways), self._said)
        if self.roster.refusal is None:
            Neighbours(self._worker, self.roster.devices())
            self._worker.members.admit(self.roster.records)
            differences = self.roster.differences()
            if differences is not None:
                log.warning(
                    "%s: the workers run different versions, and may not be able to read each other's pickles and "
                    "functions sent by value: %s",
                    self._worker.record.name,
                    differences,
                )
        self._worker.complete(self.joined)

    def _see_who_was_told(self) -> None:
        told = len(self.porch.ways - self._guests)
        if self.joined.done and not self.all_told.done and told >= self.roster.world_size - 1:
            self._worker.complete(self.all_told)

    def _verdict(self) -> dict[str, Any]:
        if self.roster.refusal is not None:
            return {"refused": self.roster.refusal, "about_devices": self.roster.about_devices}
        devices = {name: d.to_json() for name, d in self.roster.devices().items() if d != NO_DEVICES}
        return {"members": [record.to_json() for record in self.roster.records], "devices": devices}


class Member:
    """What every worker has of the directory: it hears announcements, and learns when the world ends.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.ended = Completion()
        """Done when the world ends, or rank 0 is gone."""
        self.over = Completion()
        """Done when the world's work is done, and members should come to an end; also when `ended` is."""
        self.orphaned: Peer | None = None
        self.outlives_rank_0 = False
        """Whether the world goes on without rank 0."""
        worker.services[Member] = self
        worker.cells[MEMBER] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)

    def arrive(self) -> None:
        """Tells the directory that this worker's own program has come to its end.

        Raises:
            WorkerLostError: rank 0 is gone.
        """
        self._worker.tell(0, ENDING, ("done",), control=True)

    def late(self) -> str:
        """Asks the directory what the end of the world waits for; returns it in words, soon."""
        worker = self._worker
        try:
            call = worker.request(0, ENDING, ("late?",), _WORD_SECONDS, flags=Flag.CONTROL)
            return str(worker.wait_result(call))
        except ActorRPCError as e:
            return f"rank 0 does not say for whom ({e})"

    def say_goodbye(self, reason: str) -> None:
        """Tells the others that this worker leaves; those that it never spoke to hear it from rank 0."""
        me = self._worker.id
        for number, peer in list(self._worker.peers.items()):
            if number != me and (peer.dialled or peer.seen or 0 in (number, me) or self.orphaned is not None):
                try:
                    self._worker.tell(number, MEMBER, ("bye", reason), control=True)
                except ActorRPCError:
                    continue

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        worker = self._worker
        if verb == "quiet?":
            worker.ending = True
            # Of those it has spoken with: rank 0 holds all workers' counts at once, which else grew by the square.
            counts = {n: (p.told, p.heard) for n, p in worker.peers.items() if n != worker.id and (p.told or p.heard)}
            worker.tell(
                message.caller,
                ENDING,
                ("quiet", rest[0], (worker.quiet, counts)),
                control=True,
            )
        elif verb == "over":
            worker.ending = True
            if not self.over.done:
                worker.complete(self.over)
        elif verb == "stop":
            self._end()
        elif verb == "bye":
            worker.members.lose(message.caller, rest[0], Standing.LEFT)

    def _gone(self, peer: Peer) -> None:
        if peer.record.id == 0 and not self.ended.done:
            self.orphaned = peer
            if not self.outlives_rank_0:
                self._end()

    def _end(self) -> None:
        for what in (self.over, self.ended):
            if not what.done:
                self._worker.complete(what)
