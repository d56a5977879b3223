"""The directory, on rank 0: who joins, who is missing, and when all may end."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Record, Standing
from actorrpc.services.ids import DIRECTORY, MEMBER
from actorrpc.wire.envelope import PROTOCOL, Flag

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_WORD_SECONDS = 2.0


class Roster:
    """Who has joined a world of fixed size. Plain logic: takes hellos, returns answers.

    Arguments:
        world_size: how many workers it waits for.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: dict[int, Record] = {}
        self.refusal: str | None = None
        """Why the world cannot come about; final."""

    @property
    def complete(self) -> bool:
        """Whether all have joined."""
        return len(self.records) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self.records]

    def status(self) -> str:
        """Says in words who is missing and who is there."""
        there = ", ".join(str(self.records[rank]) for rank in sorted(self.records))
        missing = self.missing
        return (
            f"missing rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}; joined: {there or 'nobody'}"
        )

    def hello(self, record: Record, world_size: int, protocol: int) -> None:
        """Takes a worker in, or sets `refusal`. The same worker may come again."""
        known = self.records.get(record.id)
        if self.refusal is not None or (known is not None and known.incarnation == record.incarnation):
            return
        if protocol != PROTOCOL:
            self.refusal = f"{record} speaks version {protocol} of the protocol, rank 0 version {PROTOCOL}"
        elif world_size != self.world_size:
            self.refusal = f"{record} was given world_size={world_size}, rank 0 world_size={self.world_size}"
        elif not 0 <= record.id < self.world_size:
            self.refusal = f"{record} has a rank outside of 0 to {self.world_size - 1}"
        elif known is not None:
            self.refusal = f"two workers have rank {record.id}: {known} and {record}"
        else:
            for other in self.records.values():
                if other.name == record.name:
                    low, high = sorted((other.id, record.id))
                    self.refusal = (
                        f'RPC worker name "{record.name}" is not unique. Workers {low} and {high} share the same name'
                    )
                    return
            self.records[record.id] = record


class Directory:
    """The directory's actor.

    Arguments:
        worker: rank 0.
        world_size: how many workers the world has.
        session: drawn anew for every world; hellos of others are not for this one.
    """

    def __init__(self, worker: Worker, world_size: int, session: str) -> None:
        self.roster = Roster(world_size)
        self.joined = Completion()
        """Done when all have joined, or never can."""
        self.all_told = Completion()
        """Done when as many as were expected have been told that the world cannot come about."""
        self._worker, self._session = worker, session
        self._ways: dict[int, int] = {}
        self._done: set[int] = set()
        self._round = 0
        self._answers: dict[int, tuple[bool, dict[int, tuple[int, int]]]] = {}
        self._last: dict[tuple[int, int], int] | None = None
        self._busy: list[int] = []
        worker.services[Directory] = self
        worker.greeted = self._greeted
        worker.cells[DIRECTORY] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)
        self._take(worker.record, world_size, PROTOCOL)

    def expire(self) -> None:
        """Gives up: tells all who have joined who is missing."""
        if not self.joined.done and self.roster.refusal is None:
            self.roster.refusal = f"time ran out: {self.roster.status()}"
            self._announce()

    # -- joining (control lane, but for the first worker, which is this one)

    def _greeted(self, data: bytes) -> None:
        try:
            hello = json.loads(data)
            if hello.get("session") != self._session:
                return
            record = Record.from_json(hello["record"])
            world_size, protocol = int(hello["world_size"]), int(hello["protocol"])
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s: dropped a greeting that makes no sense", self._worker.record.name)
            return
        way = -2 - record.incarnation
        if way not in self._ways:
            self._worker.transport.dial(way, record.endpoints)
            self._ways[way] = record.id
        self._take(record, world_size, protocol)
        if self.roster.refusal is None and not self.roster.complete:
            self._answer(way, {"status": self.roster.status()})
        elif self.joined.done:
            self._answer(way, self._verdict())  # it asks again, so the first answer was lost; or it came too late
        self._see_who_was_told()

    def _take(self, record: Record, world_size: int, protocol: int) -> None:
        self.roster.hello(record, world_size, protocol)
        if not self.joined.done and (self.roster.complete or self.roster.refusal is not None):
            self._announce()

    def _announce(self) -> None:
        verdict = self._verdict()
        for way in list(self._ways):
            self._answer(way, verdict)
        if self.roster.refusal is None:
            self._worker.members.admit(list(self.roster.records.values()))
        self._worker.complete(self.joined)

    def _see_who_was_told(self) -> None:
        if self.joined.done and not self.all_told.done and len(self._ways) >= self.roster.world_size - 1:
            self._worker.complete(self.all_told)

    def _verdict(self) -> dict[str, Any]:
        if self.roster.refusal is not None:
            return {"refused": self.roster.refusal}
        return {"members": [record.to_json() for record in self.roster.records.values()]}

    def _answer(self, way: int, answer: dict[str, Any]) -> None:
        with contextlib.suppress(KeyError):  # hung up meanwhile: it has had its answer
            self._worker.greet(way, json.dumps({"session": self._session, **answer}).encode())

    def close_ways(self) -> None:
        """Hangs up the ways by which joining workers were answered."""
        for way in list(self._ways):
            self._worker.transport.hang_up(way, 1.0)
        self._ways.clear()

    # -- ending: all have called shutdown, then nobody works and no message is under way, twice over

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        if verb == "done":
            self._done.add(message.caller)
            self._check()
        elif verb == "quiet" and rest[0] == self._round:
            self._answers[message.caller] = rest[1]
            if self._answers.keys() >= set(self._members()):
                self._judge()
        elif verb == "late?":
            message.reply(self._late())

    def _late(self) -> str:
        """Says in words what the end of the world waits for."""
        members = self._members()
        late = [n for n in members if n not in self._done]
        who = ", ".join(str(self._worker.peers[n].record) for n in late or self._busy if n in members)
        if late:
            return f"not in shutdown yet: {who}"
        return f"all are in shutdown; calls or handlers are under way at {who or 'some of them'}"

    def end_world(self) -> None:
        """Tells all members that the world's work is done, whether or not theirs is."""
        self._tell_all(("over",))

    def stop_all(self) -> None:
        """Ends the world at once, on every member."""
        self._tell_all(("stop",))

    def _members(self) -> list[int]:
        return [n for n, peer in self._worker.peers.items() if peer.standing is Standing.MEMBER]

    def _check(self) -> None:
        if self._round == 0 and self._done >= set(self._members()):
            self._ask()

    def _ask(self) -> None:
        self._round += 1
        self._answers.clear()
        self._tell_all(("quiet?", self._round))

    def _judge(self) -> None:
        """Ends the world when all are quiet, all that was sent has come, and neither has changed for two rounds."""
        members = set(self._members())
        counts = {n: count for n, (_, count) in self._answers.items() if n in members}
        self._busy = [n for n in counts if not self._answers[n][0]]
        sent = {(a, b): told for a, count in counts.items() for b, (told, _) in count.items() if b in counts}
        come = {(a, b): heard for b, count in counts.items() for a, (_, heard) in count.items() if a in counts}
        settled = not self._busy and all(come.get(pair, 0) == told for pair, told in sent.items())
        if settled and sent == self._last:
            self._tell_all(("stop",))
            return
        self._last = sent if settled else None
        if settled:
            self._ask()
        else:
            self._worker.keeper.after(0.02, self._ask)

    def _tell_all(self, body: object) -> None:
        for member in self._members():
            try:
                self._worker.tell(member, MEMBER, body, control=True)
            except ActorRPCError as e:
                log.debug("%s: %s", self._worker.record.name, e)

    def _gone(self, peer: Peer) -> None:
        self._tell_all(("gone", peer.record.id, peer.standing.value, peer.reason))
        if self._round:
            self._last = None
            self._ask()
        elif self._done:
            self._check()


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
        worker.services[Member] = self
        worker.cells[MEMBER] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)

    def arrive(self) -> None:
        """Tells the directory that this worker's own program has come to its end.

        Raises:
            WorkerLostError: rank 0 is gone.
        """
        self._worker.tell(0, DIRECTORY, ("done",), control=True)

    def late(self) -> str:
        """Asks the directory what the end of the world waits for; returns it in words, soon."""
        worker = self._worker
        try:
            call = worker.request(0, DIRECTORY, ("late?",), _WORD_SECONDS, flags=Flag.CONTROL)
            return str(worker.wait_result(call))
        except ActorRPCError as e:
            return f"rank 0 does not say for whom ({e})"

    def say_goodbye(self, reason: str) -> None:
        """Tells the others that this worker leaves; those that it never spoke to hear it from rank 0."""
        me = self._worker.id
        for number, peer in list(self._worker.peers.items()):
            if number != me and (peer.dialled or 0 in (number, me)):
                try:
                    self._worker.tell(number, MEMBER, ("bye", reason), control=True)
                except ActorRPCError:
                    continue

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        worker = self._worker
        if verb == "quiet?":
            worker.ending = True
            counts = {n: (p.told, p.heard) for n, p in worker.peers.items() if n != worker.id}
            worker.tell(
                message.caller,
                DIRECTORY,
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
        elif verb == "gone":
            number, standing, reason = rest
            worker.members.lose(number, f"{reason} (rank 0 says)", Standing(standing))

    def _gone(self, peer: Peer) -> None:
        if peer.record.id == 0 and not self.ended.done:
            self.orphaned = peer
            self._end()

    def _end(self) -> None:
        for what in (self.over, self.ended):
            if not what.done:
                self._worker.complete(what)
