"""How users name a worker, and what they learn of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from actorrpc.errors import NotAMemberError
from actorrpc.services.elastic import Elastic

if TYPE_CHECKING:
    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and number.

    Attributes:
        name: its name, unique in the world.
        id: its rank.
    """

    name: str
    id: int


To = Union[str, int, WorkerInfo]  # noqa: UP007  evaluated at run time, also by Python 3.10
"""What names a worker: its name, its rank, or its WorkerInfo."""


def info_of(record: Record) -> WorkerInfo:
    """Makes what users see of a record."""
    return WorkerInfo(record.name, record.rank)


def present(worker: Worker) -> list[Record]:
    """Returns the workers of a world, by rank: all of them or, in an elastic world, those who have not left."""
    elastic: Elastic | None = worker.services.get(Elastic)
    if elastic is not None:
        return elastic.present()
    return [peer.record for _, peer in sorted(worker.peers.items())]


def resolve(worker: Worker, to: To) -> int:
    """Returns the id of the worker that a user named.

    Raises:
        NotAMemberError: there is none of that name or rank.
        TypeError: it is nothing that names a worker.
    """
    if isinstance(to, str):
        number = worker.names.get(to)
        if number is None:
            known = ", ".join(sorted(record.name for record in present(worker)))
            hint = f', did you mean "{to}:0"?' if f"{to}:0" in worker.names else ""
            raise NotAMemberError(f'there is no worker "{to}" in the world of {worker}; there are: {known}{hint}')
        return number
    if not isinstance(to, int):
        to = getattr(to, "id", to)  # torch's WorkerInfo has one as well
    if isinstance(to, bool) or not isinstance(to, int):
        raise TypeError(f"a worker is named by its name, rank or WorkerInfo, not by {to!r} of type {type(to).__name__}")
    number = worker.ranks.get(to)
    if number is None:
        size = len(present(worker))
        raise NotAMemberError(f"there is no worker of rank {to} in the world of {worker}, which has {size}")
    return number
