"""The counting of references. Plain logic: it takes what happened and says what is to be sent.

Every holder of a reference, other than the owner, holds a *fork* that the owner knows. Names: a reference's id and a
fork's id are each (worker id, counter). The four ways in which a reference travels:

- *user to owner, as return value*: `remote` makes the id; the owner records its fork when the creation message comes,
  and the answer confirms it (RULE RR1: a user's fork is *confirmed* once the owner is known to have it).
- *owner to user*: the owner records the new fork before it sends (RULE RR2), so it is confirmed when it arrives.
- *user to user*: the sender makes the new fork's id and keeps its own fork, as the *parent*, until the receiver says
  that the owner has recorded the child (RULE RR3).
- *user to owner, as argument*: the owner needs no fork; it tells the parent at once that the child is accepted.

RULE RR4: a user deletes its fork once nobody uses it, it is confirmed, and no child of it is open. RULE RR5: record,
accept and delete may come twice. When a worker is gone, the owner drops the forks that it held.
"""

from __future__ import annotations

from typing import NamedTuple

Id = tuple[int, int]


class UserFork:
    """A fork that this worker holds.

    Attributes:
        ref: the reference's id.
        id: the fork's id.
        owner: the owner's worker id.
        confirmed: whether the owner is known to have recorded it.
        dropped: whether nobody uses it here any more.
        children: how many of its children are open.
        ended: whether it was deleted.
    """

    __slots__ = ("children", "confirmed", "dropped", "ended", "id", "owner", "ref")

    def __init__(self, ref: Id, fork: Id, owner: int, confirmed: bool) -> None:
        self.ref, self.id, self.owner, self.confirmed = ref, fork, owner, confirmed
        self.dropped = self.ended = False
        self.children = 0


class Delete(NamedTuple):
    """What the owner is to be told: a fork has ended."""

    owner: int
    ref: Id
    fork: Id


class UserForks:
    """The forks that a worker holds of others' objects."""

    def __init__(self) -> None:
        self.forks: dict[Id, UserFork] = {}
        self.parents: dict[Id, tuple[UserFork, int]] = {}
        """By the id of an open child: its parent, and the worker it was sent to."""

    def add(self, ref: Id, fork: Id, owner: int, confirmed: bool) -> UserFork:
        """Begins to hold a fork."""
        made = self.forks[fork] = UserFork(ref, fork, owner, confirmed)
        return made

    def open_child(self, parent: UserFork, child: Id, receiver: int) -> None:
        """Notes that a child of a fork was sent."""
        parent.children += 1
        self.parents[child] = parent, receiver

    def close_child(self, child: Id) -> Delete | None:
        """Notes that a child was accepted, or that it never arrived. May be said twice."""
        parent, _ = self.parents.pop(child, (None, 0))
        if parent is None:
            return None
        parent.children -= 1
        return self._end(parent)

    def confirm(self, fork: Id) -> Delete | None:
        """Notes that the owner has recorded a fork."""
        held = self.forks.get(fork)
        if held is None:
            return None
        held.confirmed = True
        return self._end(held)

    def drop(self, fork: UserFork) -> Delete | None:
        """Notes that nobody uses a fork any more."""
        fork.dropped = True
        return self._end(fork)

    def forget(self, fork: Id) -> None:
        """Ends a fork that the owner never recorded, or whose owner is gone."""
        held = self.forks.pop(fork, None)
        if held is not None:
            held.ended = True

    def lose(self, worker: int) -> list[Delete]:
        """Notes that a worker is gone: children sent to it will not be accepted, forks of its objects are void."""
        for fork in [fork for fork in self.forks.values() if fork.owner == worker]:
            self.forget(fork.id)
        gone = [child for child, (_, receiver) in self.parents.items() if receiver == worker]
        return [delete for child in gone if (delete := self.close_child(child)) is not None]

    def _end(self, fork: UserFork) -> Delete | None:
        if fork.ended or not (fork.dropped and fork.confirmed) or fork.children:
            return None
        fork.ended = True
        self.forks.pop(fork.id, None)
        return Delete(fork.owner, fork.ref, fork.id)


class OwnerForks:
    """The forks that others hold of one object.

    Attributes:
        holders: by fork, the worker id of who holds it.
    """

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: dict[Id, int] = {}

    def record(self, fork: Id, holder: int) -> None:
        """Notes a fork."""
        self.holders[fork] = holder

    def delete(self, fork: Id) -> bool:
        """Drops a fork; returns whether none is left."""
        self.holders.pop(fork, None)
        return not self.holders

    def drop_holder(self, holder: int) -> bool:
        """Drops all forks of a worker that is gone; returns whether any was dropped and none is left."""
        gone = [fork for fork, who in self.holders.items() if who == holder]
        for fork in gone:
            del self.holders[fork]
        return bool(gone) and not self.holders
