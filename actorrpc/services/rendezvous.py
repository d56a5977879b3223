"""How a world comes about: rank 0 opens a directory and publishes where; the others greet it until it answers.

The store (see `services.store`) carries one hint and is trusted for nothing: a left-over one names a directory that
does not answer, or answers for another session, and is read again until the right one does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import uuid
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError, DeviceMapError, RendezvousError
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.peers import Record
from actorrpc.services.devices import Devices
from actorrpc.services.directory import Directory, Member
from actorrpc.services.elastic import Door, Elastic, hint_of
from actorrpc.services.ending import Ending
from actorrpc.services.neighbours import Neighbours, note_leaving
from actorrpc.services.roster import ELASTIC, mixture
from actorrpc.wire.lookout import is_shut

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actorrpc.runtime.worker import Worker
    from actorrpc.services.roster import Hello
    from actorrpc.services.store import HintStore

log = logging.getLogger("actorrpc")
_WAY = -1
_GREET_SECONDS = 0.5
_LOOK_SECONDS = 5.0
"""Between two looks at the hint of a rank 0 that answers: the store of a large world would have no rest otherwise."""
_QUIET_SECONDS = 20.0
"""For how long a worker waits for others without a word: somebody may sit before it."""
_REFUSAL_SECONDS = 5.0
_PROBE_SECONDS = 1.0
"""What the rank 0 of a world whose hint is found gets to say that it lives."""
_LAST_WORD_SECONDS = 2.0
"""What a joining worker waits beyond its own limit for rank 0 to say who is missing."""
_SILENCE_SECONDS = 3.0
"""After which rank 0, which answers every greeting, is said not to answer any more."""


def found(worker: Worker, store: HintStore, hello: Hello, deadline: float) -> None:
    """Opens a world, on rank 0, and waits until all have joined, unless it is an elastic one.

    Arguments:
        worker: rank 0, started.
        store: where to publish the hint.
        hello: what this worker says of itself, with the size of the world. One that is withdrawn opens none, and only
            tells those who come why.
        deadline: when to give up, on the worker's clock.

    Raises:
        RendezvousError: time ran out (it says who is missing), or the workers do not fit together.
        DeviceMapError: a device map does not fit.
    """
    session = uuid.uuid4().hex
    if hello.world_size == ELASTIC:
        _begin(worker, store, hello, session, deadline)
        return
    directory = Directory(worker, hello, session)
    roster = directory.roster
    store.publish(hint_of(worker, session, hello.world_size), deadline)
    worker.wait(directory.joined, min(deadline, worker.clock.now() + _QUIET_SECONDS), lead=False)
    if not directory.joined.done and worker.clock.now() < deadline:
        _say_it_waits(worker, roster.status(), deadline)
    if not worker.wait(directory.joined, deadline, lead=False):
        directory.expire()
    elif roster.refusal is not None:  # those who come a little later shall hear why, too
        worker.wait(directory.all_told, min(deadline, worker.clock.now() + _REFUSAL_SECONDS), lead=False)
    directory.porch.close()
    if roster.refusal is not None:
        kind = DeviceMapError if roster.about_devices else RendezvousError
        raise kind(f"{worker} could not start a world of {hello.world_size}: {roster.refusal}")
    directory.visited = Door(worker, [roster.hellos[n] for n in sorted(roster.hellos)], session, directory.porch).come
    _watch(worker, list(worker.peers))


def _say_it_waits(worker: Worker, for_what: str, deadline: float) -> None:
    log.warning(
        "%s: its world has not begun yet: %s. It waits for %.0f s more (init_timeout)",
        worker.record.name, for_what, deadline - worker.clock.now(),
    )  # fmt: skip


def _begin(worker: Worker, store: HintStore, hello: Hello, session: str, deadline: float) -> None:
    """Opens an elastic world, which has this worker alone to begin with."""
    left = store.peek()
    if left is not None:
        _Joining(worker, store, hello).refuse_if_alive(left)
    elastic = Elastic(worker, session, store)
    Neighbours(worker, {hello.record.name: hello.devices})
    worker.members.admit([worker.record])
    elastic.door = Door(worker, [hello], session)
    Ending(worker)
    store.publish(hint_of(worker, session, ELASTIC), deadline)


def _watch(worker: Worker, numbers: Iterable[int]) -> None:
    """Has the deaths of workers on this host noticed from now on. Rank 0 looks after all, since it tells the others."""
    for number in numbers:
        if number != worker.id:
            with contextlib.suppress(ActorRPCError):  # it is gone already, which was told elsewhere
                worker.members.reach(number)


def join(worker: Worker, store: HintStore, hello: Hello, deadline: float) -> None:
    """Joins a world, on any rank but 0, and waits until all have joined or, where it is an elastic one, until all who
    are there know of this worker. Arguments and errors: see `found`.
    """
    _Joining(worker, store, hello).run(deadline)


class _Joining:
    def __init__(self, worker: Worker, store: HintStore, hello: Hello) -> None:
        self._worker, self._store = worker, store
        self._verdict = Completion()
        self._answer: dict[str, Any] = {}
        self._status = ""
        self._heard = -math.inf
        self._dialled = math.inf
        self._session = self._where = ""
        self._endpoints: list[str] = []
        self._size = ELASTIC
        """That of the world, as the hint says."""
        self._elastic = hello.world_size == ELASTIC
        self._guest = hello.record.guest
        self._hello = hello.to_json()
        worker.greeted = self._greeted

    def run(self, deadline: float) -> None:
        worker = self._worker
        try:
            self._ask(deadline)
            if not self._verdict.done:
                raise RendezvousError(f"{worker} could not join its world: time ran out; {self._why()}")
        except BaseException:
            if self._elastic and self._session and not self._verdict.done:  # it may be about to be let in
                self._greet(withdrawn="it gave up joining")
            raise
        finally:
            worker.greeted = None
            worker.transport.hang_up(_WAY, 0.1)
        if "refused" in self._answer:
            kind = DeviceMapError if self._answer.get("about_devices") else RendezvousError
            refusal = kind(f"{worker} could not join its world: {self._answer['refused']}")
            refusal.over = bool(self._answer.get("over"))
            raise refusal
        devices = {name: Devices.from_json(data) for name, data in self._answer["devices"].items()}
        records = [Record.from_json(data) for data in self._answer["members"]]
        if self._elastic:
            self._move_in(records, devices)
        else:
            Neighbours(worker, devices)
            worker.members.admit(records)
        _watch(worker, [0])

    def _ask(self, deadline: float) -> None:
        """Greets whoever the hint names until there is a verdict, or time has run out."""
        worker, now = self._worker, self._worker.clock.now
        hint: bytes | None = None
        quiet, look = now() + _QUIET_SECONDS, 0.0
        while not self._verdict.done and now() < deadline:
            if self._heard < now() - _SILENCE_SECONDS or now() >= look:
                latest, look = self._store.read(deadline), now() + _LOOK_SECONDS
                if latest is not None and latest != hint:
                    hint = latest
                    self._dial(hint)
            if hint is not None and self._session:
                self._greet()
            worker.wait(self._verdict, min(deadline, now() + _GREET_SECONDS), lead=False)
            if now() >= quiet and not self._verdict.done:
                quiet = math.inf
                if not self._status:  # else rank 0 is there, and says who is missing
                    _say_it_waits(worker, self._why(), deadline)
            if self._status and self._heard < now() - _SILENCE_SECONDS and all(map(is_shut, self._endpoints)):
                raise RendezvousError(f"{worker} could not join its world: {self._why()}")
            if self._mixes() and max(self._heard, self._dialled) < now() - _SILENCE_SECONDS:
                raise RendezvousError(
                    mixture(
                        f"{worker} was given no world_size; the world at this address was begun with {self._size} "
                        f"workers, and its rank 0 does not answer at {self._where}. If it is over, use another address"
                    )
                )
        if not self._verdict.done and self._status:
            worker.wait(self._verdict, now() + _LAST_WORD_SECONDS, lead=False)

    def _mixes(self) -> bool:
        """Whether this worker was given no size, and the world has one; to guests that does not matter."""
        return self._elastic and self._size != ELASTIC and not self._guest

    def refuse_if_alive(self, hint: bytes) -> None:
        """Asks whether the elastic world of a hint that was found has a rank 0.

        Raises:
            RendezvousError: it has.
        """
        self._dial(hint)
        worker, now, answer = self._worker, self._worker.clock.now, ""
        end = now() + _PROBE_SECONDS
        try:
            while self._session and self._size == ELASTIC and now() < end and not (answer or self._verdict.done):
                self._greet()
                worker.wait(self._verdict, min(end, now() + _PROBE_SECONDS / 5), lead=False)
                answer = self._status or answer
        finally:
            worker.greeted = None
            worker.transport.hang_up(_WAY, 0.1)
        if answer or (self._verdict.done and not self._answer.get("orphaned")):
            raise RendezvousError(
                f"{worker} cannot begin a world at this address, where one is alive: "
                f"{answer or self._answer.get('refused', '')}"
            )

    def _move_in(self, records: list[Record], devices: dict[str, Devices]) -> None:
        worker, leaving = self._worker, set(self._answer["leaving"])
        Elastic(worker, self._session, self._store)
        Neighbours(worker, devices)
        worker.services[Member].outlives_rank_0 = self._size == ELASTIC  # a guest of another kind of world ends with it
        worker.members.admit(records, int(self._answer["id"]))
        for number in leaving:
            note_leaving(worker.peers[number])

    def _greet(self, **more: str) -> None:
        self._worker.greet(_WAY, json.dumps({"session": self._session, **self._hello, **more}).encode())

    def _why(self) -> str:
        if not self._where:
            return f"rank 0 has published no address {self._store.seen()}"
        if self._status and all(map(is_shut, self._endpoints)):
            return f"rank 0 has ended: nobody listens at {self._where} any more. The last that it said: {self._status}"
        silent = self._worker.clock.now() - self._heard - _LAST_WORD_SECONDS
        if silent < _SILENCE_SECONDS:
            return self._status
        if not self._status:
            return f"rank 0 does not answer at {self._where}"
        return (
            f"rank 0 has not answered for {silent:.0f} s at {self._where}: look for its own error first. "
            f"The last that it said: {self._status}"
        )

    def _dial(self, hint: bytes) -> None:
        try:
            data = json.loads(hint)
            session, endpoints = str(data["session"]), [str(e) for e in data["endpoints"]]
            size = int(data.get("world_size", ELASTIC))
            self._worker.transport.dial(_WAY, endpoints)
            self._session, self._where, self._size = session, " or ".join(endpoints), size
            self._endpoints, self._status = endpoints, ""  # what an earlier one said, which has ended, counts no more
            self._dialled = self._worker.clock.now()
        except Exception:
            self._session = ""  # somebody else's words: read it again

    def _greeted(self, data: bytes) -> None:
        try:
            answer = json.loads(data)
            if answer.get("session") != self._session:
                return
            self._status, self._heard = answer.get("status", self._status), self._worker.clock.now()
        except (ValueError, AttributeError):
            return
        if "members" in answer or "refused" in answer:
            self._answer = answer
            if not self._verdict.done:
                self._worker.complete(self._verdict)
