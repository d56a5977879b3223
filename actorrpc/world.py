"""The world as an actor sees it: its roles, each a group of references."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actorrpc.errors import NotAMemberError
from actorrpc.group import Group
from actorrpc.rref import RRef
from actorrpc.services.handles import OwnerHandle
from actorrpc.services.ids import ROOT
from actorrpc.session import current
from actorrpc.watching import Watch
from actorrpc.workers import info_of, present

if TYPE_CHECKING:
    from actorrpc.session import Session
    from actorrpc.watching import Joined, Told
    from actorrpc.workers import WorkerInfo


@dataclass(frozen=True)
class ActorInfo:
    """What the world knows of a named actor.

    Attributes:
        name: its name.
        worker: where it lives.
        incarnation: which actor of this name it is, counted from 1.
    """

    name: str
    worker: WorkerInfo
    incarnation: int


class World:
    """All workers and roles. `world.observer` is the Group of the role "observer"; `world.role(name)` likewise.

    An actor has it as `self.world`; elsewhere `World()` is that of the process.

    Raises:
        NotAMemberError: the process is in none.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = current() if session is None else session

    def __repr__(self) -> str:
        return f"World({self.roles or [worker.name for worker in self.workers]})"

    @property
    def workers(self) -> list[WorkerInfo]:
        """All workers, by rank. In an elastic world: those who are there now."""
        return [info_of(record) for record in present(self._session.worker)]

    @property
    def roles(self) -> dict[str, int]:
        """How many workers each role has."""
        counts: dict[str, int] = {}
        for record in present(self._session.worker):
            if record.role:
                counts[record.role] = counts.get(record.role, 0) + 1
        return counts

    @property
    def actors(self) -> dict[str, ActorInfo]:
        """The named actors."""
        worker = self._session.worker
        found = self._session.names.all()
        return {
            name: ActorInfo(name, info_of(worker.peers[known.owner].record), known.incarnation)
            for name, known in found.items()
            if known.owner in worker.peers
        }

    def role(self, name: str) -> Group:
        """Returns the members of a role, in order of their index: those who are there now. Where all of them are gone,
        and may be about to be started again, the group is empty.

        Raises:
            NotAMemberError: there is no such role.
        """
        session = self._session
        records = [record for record in present(session.worker) if record.role == name]
        if not records and all(peer.record.role != name for peer in list(session.worker.peers.values())):
            known = ", ".join(self.roles) or "none"
            raise NotAMemberError(f"there is no role {name!r} in this world; there are: {known}")
        # The turns are the role's, so that `world.observer.pick()` gives the next one, though each look is a new group.
        turns = session.worker.services.setdefault(World, {}).setdefault(name, itertools.count())
        return Group([root_of(session, record.id) for record in sorted(records, key=lambda r: r.index)], turns)

    def watch(self, callback: Told | None = None, *, joined: Joined | None = None) -> Watch:
        """Has a callback told of every worker that is gone: that died, fell silent, was cut off, or left while others
        did not expect it. Also of those that this worker never called, and at once of those that are gone already.
        And another one of those who come.

        Arguments:
            callback: called with the worker's WorkerInfo and the reason, in words; in a thread of the pool, never twice
                at the same time. What it raises goes to the log.
            joined: called likewise, with the WorkerInfo of every worker that comes from now on, in an elastic world or
                by a restart; guests are no workers. `workers` tells who was there before.

        Returns an object whose `stop()`, or whose `with` block's end, ends the watching. It ends with the world, too.

        Raises:
            TypeError: there is no callback.
        """
        if callback is None and joined is None:
            raise TypeError(
                "watch() takes a callback for those who are gone, one for those who come (joined=), or both"
            )
        return Watch(self._session, callback, joined)

    def __getattr__(self, name: str) -> Group:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self.role(name)
        except NotAMemberError as e:
            raise AttributeError(str(e)) from None


def role(name: str) -> Group:
    """Returns the members of a role, in order of their index, as `world.role(name)` does in an actor; in any worker.

    Raises:
        NotAMemberError: there is no such role, or this process is in no world.
    """
    return World(current()).role(name)


def root_of(session: Session, owner: int) -> RRef[Any]:
    """Returns a reference to the actor that a worker was launched as."""
    objects = session.objects
    if owner == session.worker.id:
        return RRef._wrap(OwnerHandle(objects, objects.root))
    return RRef._wrap(objects.adopt(ROOT, owner))
