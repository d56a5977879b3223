"""Elastic worlds: workers come and go while others work (docs/design.md, "Elastic worlds").

Every worker of such a world has an `Elastic`, which hears who comes and who is about to leave, and by which it leaves
itself. Rank 0 also has the `Door`, which lets newcomers in. That somebody is gone comes as in any world (`directory`).
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.devices import NO_DEVICES
from actorrpc.services.directory import Member
from actorrpc.services.ids import DIRECTORY, ELASTIC
from actorrpc.services.neighbours import Neighbours, tell
from actorrpc.services.objects import Objects
from actorrpc.services.porch import Porch
from actorrpc.services.residents import IDS, Objection, Residents
from actorrpc.services.roster import ELASTIC as ANY_SIZE
from actorrpc.services.roster import differences, some
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer, Record
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.roster import Hello
    from actorrpc.services.store import HintStore

log = logging.getLogger("actorrpc")
DOOR_SECONDS = 3.0
"""For how long rank 0 at least keeps the door open: those who were started together with it shall find it."""
_HOLDER_SECONDS = 2.0
"""What the holder of a name or rank that somebody else asks for gets to be found dead, or to have left."""
_NOTE_SECONDS = 10.0
"""What the others get to take note that somebody leaves, and rank 0 for the newcomers that it has begun to let in."""
_ACCEPTED_SECONDS = 5.0
"""What the receivers of passed on references get to have them recorded, once all else is quiet."""
_LOOK_SECONDS = 0.005
_PUBLISH_SECONDS = 5.0


def hint_of(worker: Worker, session: str, world_size: int) -> bytes:
    """Returns what the rendezvous store is to say: whom to greet, for which session, and of which kind its world is."""
    told = {"session": session, "endpoints": worker.transport.endpoints, "world_size": world_size}
    return json.dumps(told).encode()


class Elastic:
    """A worker's part in an elastic world.

    Arguments:
        worker: whose.
        session: of the world.
        store: the rendezvous store, for the case that rank 0 goes.

    Attributes:
        door: rank 0's; None elsewhere.
        orphaned: rank 0, when it is gone.
    """

    def __init__(self, worker: Worker, session: str, store: HintStore) -> None:
        self._worker, self._session, self._store = worker, session, store
        self.door: Door | None = None
        self.orphaned: Peer | None = None
        self._porch: Porch | None = None
        self._speaks = False
        self._leaving = False
        worker.services[Elastic] = self
        worker.services[Member].outlives_rank_0 = True
        worker.members.watchers.append(self._gone)

    def present(self) -> list[Record]:
        """Returns those who are there, and not about to leave, by rank; guests are not counted."""
        peers = [p for p in list(self._worker.peers.values()) if p.standing is Standing.MEMBER and not p.leaving]
        return sorted((p.record for p in peers if not p.record.guest), key=lambda record: record.rank)

    def _others(self) -> list[int]:
        return [n for n in _members(self._worker) if n != self._worker.id]

    # -- leaving

    def leave(self, deadline: float | None) -> bool:
        """Has the others take note that this worker leaves, and serves until nothing is under way: its own calls, those
        that others had begun before they knew, and references that it has passed on.

        Returns whether that came to an end before `deadline` (None: no bound but that of the calls).
        """
        self._leaving = True
        if self._worker.record.guest and self._worker.services[Member].ended.done:
            return True  # the others have gone, when nothing was under way, a guest's calls included
        if self.door is not None:
            self.door.shut(deadline)
        self._have_noted(deadline)
        worker = self._worker
        objects: Objects = worker.services[Objects]
        still, end = 0, None
        while still < 2:  # what a callback of the last call begins shall be seen, too
            now = worker.clock.now()
            if deadline is not None and now >= deadline:
                return False
            end = (end or now + _ACCEPTED_SECONDS) if worker.quiet else None
            settled = end is not None and (now >= end or not objects.statistics()["children"])
            still = still + 1 if settled else 0
            worker.wait(Completion(), now + _LOOK_SECONDS, lead=False)
        return True

    def _have_noted(self, deadline: float | None) -> None:
        """Tells all others. As messages keep their order, what they had sent is here when they have answered."""
        worker, calls = self._worker, []
        seconds = _NOTE_SECONDS if deadline is None else min(_NOTE_SECONDS, max(0.1, deadline - worker.clock.now()))
        for number in self._others():
            try:
                calls.append(worker.request(number, ELASTIC, ("leaving",), seconds, flags=Flag.CONTROL))
            except ActorRPCError as e:
                log.debug("%s: %s", worker.record.name, e)
        for call in calls:
            try:
                worker.wait_result(call)
            except ActorRPCError as e:  # it is gone, or does not answer anybody
                log.debug("%s: %s", worker.record.name, e)

    def at_work(self) -> str:
        """Says in words what a leaving that does not come to an end waits for."""
        worker = self._worker
        to = sorted({call.peer for call in list(worker.calls.pending.values())})
        who = ", ".join(str(worker.peers[n].record) for n in to if n in worker.peers)
        running = worker.statistics()["running"]
        parts = [f"calls to {who} are not answered"] if who else []
        if running:
            parts.append(f"{running} handler{'s' if running > 1 else ''} still run")
        return "; ".join(parts) or "messages or references are still on their way"

    # -- without rank 0

    def _gone(self, peer: Peer) -> None:
        worker = self._worker
        if worker.members.verdicts.against:  # the world may go on very well, with rank 0
            return
        if not worker.services[Member].outlives_rank_0:  # all end with it
            return
        if peer.record.id == 0:
            self.orphaned = peer
            sad = peer.standing is Standing.LOST and not (self._leaving or worker.record.guest)
            level = logging.WARNING if sad else logging.INFO
            log.log(level, "%s: %s", worker.record.name, self._orphan_text())
            self._porch = Porch(worker, self._session, self._turn_away)
        lowest = worker.id < min(self._others(), default=IDS) and not worker.record.guest
        speaks = self.orphaned is not None and lowest
        if speaks and not (self._speaks or self._leaving):
            self._speaks = True
            worker.clock.start(self._publish, f"{worker.record.name}-hint")

    def _orphan_text(self) -> str:
        assert self.orphaned is not None
        word = "was lost" if self.orphaned.standing is Standing.LOST else "has left"
        return (
            f"{self.orphaned.record}, which let workers into this world, {word}: {self.orphaned.reason}; those who are "
            f"there go on, and nobody can join any more"
        )

    def _publish(self) -> None:
        """Has newcomers ask this worker, who tells them that they come too late."""
        hint = hint_of(self._worker, self._session, ANY_SIZE)
        try:
            self._store.publish(hint, self._worker.clock.now() + _PUBLISH_SECONDS)
        except ActorRPCError as e:  # rank 0's process served it, say
            log.debug("%s: newcomers cannot be told that rank 0 is gone: %s", self._worker.record.name, e)

    def _turn_away(self, hello: Hello, way: int) -> None:
        assert self._porch is not None
        there = ", ".join(f'"{record.name}"' for record in self.present())
        text = f"{self._orphan_text()} (there are: {there}). A new world needs a rank 0 of its own, which begins it"
        self._porch.answer_last(way, {"refused": text, "orphaned": True})


class Door:
    """Lets workers into the world, a round after the other: all who are there take note of the newcomers, then these
    are told that they are in. On rank 0. In a world of fixed size, where the directory has a porch of its own, it is
    for guests only, whom the directory sends on.

    Arguments:
        worker: rank 0, with its `Neighbours`.
        hellos: its own, and those of all who are there.
        session: of the world.
        porch: the directory's.
    """

    def __init__(self, worker: Worker, hellos: Sequence[Hello], session: str, porch: Porch | None = None) -> None:
        self._worker, self._hello = worker, hellos[0]
        self._neighbours: Neighbours = worker.services[Neighbours]
        self._residents = Residents(*hellos)
        self._opened = worker.clock.now()
        self._shut = False
        self._waiting: list[Hello] = []
        self._batch: list[Hello] = []
        """Those whom the present round lets in."""
        self._round = 0
        self._awaited: set[int] = set()
        """Those who have not taken note yet."""
        self._in_the_way: dict[int, float] = {}
        """By the incarnation of who comes: since when somebody else has its name or rank."""
        worker.cells[DIRECTORY] = ServiceCell(worker, Lane.CONTROL, self._handle)
        worker.members.watchers.append(self._gone)
        self._porch = Porch(worker, session, self.come) if porch is None else porch

    def shut(self, deadline: float | None, at_once: bool = False) -> None:
        """Lets nobody in any more, once the door was open for long enough; waits for those who are being let in.

        Arguments:
            deadline: when to wait no longer.
            at_once: whether it was open for long enough by now.
        """
        worker, until = self._worker, 0.0 if at_once else self._opened + DOOR_SECONDS
        worker.wait(Completion(), until if deadline is None else min(until, deadline), lead=False)
        self._shut = True
        until = worker.clock.now() + _NOTE_SECONDS
        until = until if deadline is None else min(until, deadline)
        while (self._batch or self._waiting) and worker.clock.now() < until:
            worker.wait(Completion(), worker.clock.now() + _LOOK_SECONDS, lead=False)

    # -- control lane

    def come(self, hello: Hello, way: int) -> None:
        """Takes a greeting."""
        incarnation = hello.record.incarnation
        known = self._residents.known(incarnation)
        if hello.withdrawn:
            self._forget(known, hello)
        elif known is None:
            objection = self._objection(hello)
            if objection is None:
                self._in_the_way.pop(incarnation, None)
                self._let_in(hello, way)
            elif objection.passing and self._is_patient(incarnation):
                self._porch.answer(way, {"status": objection.text})
            else:
                self._in_the_way.pop(incarnation, None)
                refusal = {
                    "refused": objection.text, "about_devices": objection.about_devices, "over": self._shut
                }  # fmt: skip
                self._porch.answer_last(way, refusal)
        elif any(known.id == other.record.id for other in (*self._waiting, *self._batch)):
            self._porch.answer(way, {"status": self._status()})
        elif not self._porch.is_under_way(way):  # it asks again, so the answer was lost
            self._porch.answer_last(way, {"id": known.id}, self._world())

    def _objection(self, hello: Hello) -> Objection | None:
        if self._shut:
            return Objection(f"{self._worker} is about to leave this world, so that nobody can join it any more")
        return self._residents.objection(hello)

    def _is_patient(self, incarnation: int) -> bool:
        now = self._worker.clock.now()
        return now - self._in_the_way.setdefault(incarnation, now) < _HOLDER_SECONDS

    def _forget(self, known: Record | None, hello: Hello) -> None:
        """Lets somebody go who has given up."""
        if known is None:
            self._in_the_way.pop(hello.record.incarnation, None)
        elif any(known.id == other.record.id for other in self._waiting):
            self._waiting = [other for other in self._waiting if other.record.id != known.id]
            self._residents.leave(known.id)
        else:
            self._worker.members.lose(known.id, hello.withdrawn, Standing.LEFT)
        self._porch.close(self._porch.way_of(hello))

    def _let_in(self, hello: Hello, way: int) -> None:
        self._waiting.append(self._residents.admit(hello))
        unlike = differences((self._hello, hello))
        if unlike is not None:
            log.warning(
                "%s: a worker joins that runs another version; it may not be able to read the others' pickles and "
                "functions sent by value, nor they its own: %s",
                self._worker.record.name,
                unlike,
            )
        self._begin_round()
        if self._batch:  # else the round is over already
            self._porch.answer(way, {"status": self._status()})

    def _begin_round(self) -> None:
        if self._batch or not self._waiting:
            return
        worker, present = self._worker, _members(self._worker)
        self._batch, self._waiting = self._waiting, []
        records = [hello.record for hello in self._batch]
        devices = {hello.record.name: hello.devices for hello in self._batch}
        worker.members.admit(records)
        self._neighbours.learn(devices)
        self._round += 1
        self._awaited = set()
        for number in present:
            if number != worker.id and tell(worker, number, ELASTIC, ("news", self._round, records, devices)):
                self._awaited.add(number)
        for record in records:  # so that their deaths are noticed
            try:
                worker.members.reach(record.id)
            except ActorRPCError as e:
                log.debug("%s: %s", worker.record.name, e)
        self._end_round()

    def _end_round(self) -> None:
        if not self._batch or self._awaited:
            return
        batch, self._batch = self._batch, []
        world = self._world()
        for hello in batch:
            self._porch.answer_last(self._porch.way_of(hello), {"id": hello.record.id}, world)
        self._begin_round()

    def _world(self) -> bytes:
        """Writes what all newcomers are told alike."""
        peers = [self._worker.peers[n] for n in _members(self._worker)]
        devices = {n: d.to_json() for n, d in self._residents.devices().items() if d != NO_DEVICES}
        told: dict[str, Any] = {
            "members": [peer.record.to_json() for peer in peers],
            "leaving": [peer.record.id for peer in peers if peer.leaving],
            "devices": devices,
        }
        return json.dumps(told).encode()

    def _status(self) -> str:
        late = some((self._worker.peers[n].record for n in sorted(self._awaited)), len(self._awaited))
        return f"it is about to be let in; who has not taken note of it yet: {late or 'nobody'}"

    def _handle(self, message: Message) -> None:
        verb, number = message.load()
        if verb == "noted" and number == self._round:
            self._awaited.discard(message.caller)
            self._end_round()

    def _gone(self, peer: Peer) -> None:
        number = peer.record.id
        self._residents.leave(number)
        self._batch = [hello for hello in self._batch if hello.record.id != number]
        self._awaited.discard(number)
        if self._batch:
            self._end_round()
        else:
            self._awaited.clear()
            self._begin_round()


def _members(worker: Worker) -> list[int]:
    return [n for n, peer in list(worker.peers.items()) if peer.standing is Standing.MEMBER]
