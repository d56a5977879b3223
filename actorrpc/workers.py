"""How users name a worker, and what they learn of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from actorrpc.errors import InvalidNameError, NotAMemberError
from actorrpc.services.elastic import Elastic

if TYPE_CHECKING:
    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker


NAME_LIMIT = 128
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and number.

    Attributes:
        name: its name, unique in the world.
        id: its rank.

    Raises:
        InvalidNameError: nobody can have this name.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)


def check_name(name: object) -> None:
    """Raises InvalidNameError for a name that workers may not have."""
    if name == "":
        raise InvalidNameError("a worker name must be non-empty")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"Worker name must match {_NAME.pattern!r}, which is letters, digits, '_', ':' and '-'; {name!r} does not"
        )
    if len(name) >= NAME_LIMIT:
        raise InvalidNameError(f"a worker name must be shorter than {NAME_LIMIT} characters; {name!r} has {len(name)}")


To = Union[str, int, WorkerInfo]  # noqa: UP007  evaluated at run time, also by Python 3.10
"""What names a worker: its name, its rank, or its WorkerInfo."""


def info_of(record: Record) -> WorkerInfo:
    """Makes what users see of a record."""
    return WorkerInfo(record.name, record.rank)


def present(worker: Worker) -> list[Record]:
    """Returns the workers of a world, by rank: all of them or, in an elastic world, those who have not left. Guests are
    not counted.
    """
    elastic: Elastic | None = worker.services.get(Elastic)
    if elastic is not None:
        return elastic.present()
    return [peer.record for _, peer in sorted(worker.peers.items()) if not peer.record.guest]


def resolve(worker: Worker, to: To) -> int:
    """Returns the id of the worker that a user named.

    Raises:
        NotAMemberError: there is none of that name or rank.
        ValueError: it is nothing that names a worker.
    """
    if isinstance(to, str):
        number = worker.names.get(to)
        if number is None:
            known = ", ".join(sorted(record.name for record in present(worker)))
            hint = f', did you mean "{to}:0"?' if f"{to}:0" in worker.names else ""
            raise NotAMemberError(
                f'could not find destination "{to}" in the world of {worker}; there are: {known}{hint}'
            )
        return number
    if not isinstance(to, int):
        to = getattr(to, "id", to)  # torch's WorkerInfo has one as well
    if isinstance(to, bool) or not isinstance(to, int):
        raise ValueError(
            f"a worker is named by its name, rank or WorkerInfo, not by {to!r} of type {type(to).__name__}"
        )
    number = worker.ranks.get(to)
    if number is None:
        size = len(present(worker))
        raise NotAMemberError(f"there is no worker of rank {to} in the world of {worker}, which has {size}")
    return number
