"""Who is in the world: the worker records that the directory hands out, and how each stands with this worker."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.message import Outgoing
    from actorrpc.wire.envelope import Frame


@dataclass(frozen=True)
class Record:
    """What the world knows of a worker.

    Attributes:
        id: its number in the world, which nobody else gets; equal to its rank in a world of fixed size.
        name: its name, unique in the world.
        incarnation: drawn anew at every start.
        endpoints: where it listens, best first.
        host, boot: the host's name, and an id of its present boot, by which workers of one host know each other.
        pid: its process id there.
        role, index: what it is in a world that was launched by roles; "" and 0 elsewhere.
        main: what its main module is made of; those who have the same can write names of it to each other.
        rank: what users call it by. Where workers come and go, one that comes again has its rank, and a new id.
        guest: whether it only looks in (`attach`): it is not counted among the workers.
    """

    id: int
    name: str
    incarnation: int
    endpoints: tuple[str, ...]
    host: str
    boot: str
    pid: int
    role: str = ""
    index: int = 0
    main: str = ""
    rank: int = -1
    guest: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0:
            object.__setattr__(self, "rank", self.id)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return dict(vars(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        """Reads what `to_json` wrote; that of another version may have more, or less after the first four.

        Raises:
            TypeError, ValueError, KeyError: it is something else.
        """
        return Record(
            int(data["id"]),
            str(data["name"]),
            int(data["incarnation"]),
            tuple(map(str, data["endpoints"])),
            str(data.get("host", "unknown")),
            str(data.get("boot", "")),
            int(data.get("pid", 0)),
            str(data.get("role", "")),
            int(data.get("index", 0)),
            str(data.get("main", "")),
            int(data.get("rank", -1)),
            bool(data.get("guest", False)),
        )

    def __str__(self) -> str:
        if self.guest:  # whose number says nothing to users
            return f'guest "{self.name}" (host {self.host}, pid {self.pid})'
        return f'worker "{self.name}" (rank {self.rank}, host {self.host}, pid {self.pid})'


class Standing(Enum):
    """How a peer stands with this worker."""

    MEMBER = "member"
    LEFT = "left"
    """It said goodbye."""
    LOST = "lost"
    """It was found dead or silent; final for this incarnation."""


class Peer:
    """A worker as seen from here.

    Attributes:
        record: what the world knows of it.
        standing: whether it still counts as a member.
        leaving: whether it has said that it is about to leave: no calls to it are begun any more.
        reason: why it does not.
        lock: taken to number and send one message (ZQ4, and so that numbers leave in order).
        sent: how many messages went to it.
        seen: how many came from it.
        told, heard: of these, the requests and tells that are not house-keeping.
        bytes_out, bytes_in: how large all messages to it and from it were together.
        dialled: whether the way to it was opened.
        busy, deferred: whether a message is just being sent, and what is to follow it.
        by_value: whether it does not know this worker's names of `__main__`.
    """

    __slots__ = (
        "busy", "by_value", "bytes_in", "bytes_out", "deferred", "dialled", "heard", "leaving", "lock",
        "reason", "record", "seen", "sent", "standing", "told",
    )  # fmt: skip

    def __init__(self, record: Record) -> None:
        self.record = record
        self.standing = Standing.MEMBER
        self.reason = ""
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of a send (`busy`).
        self.lock = threading.RLock()
        self.sent = self.seen = self.told = self.heard = self.bytes_out = self.bytes_in = 0
        self.busy = self.by_value = self.leaving = False
        self.deferred: list[tuple[Outgoing, Sequence[Frame]]] = []
        self.dialled = False
