"""Who is in an elastic world, and who may come in. Plain logic."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

from actorrpc.services import devices
from actorrpc.services.roster import ELASTIC, Hello, mixture, stranger
from actorrpc.wire import envelope

if TYPE_CHECKING:
    from actorrpc.runtime.peers import Record
    from actorrpc.services.devices import Devices

_AGAIN = 1024
"""The first id that is no rank."""
IDS = 1 << 15
"""So many workers may a world see: an id has 15 bits in an autograd context's."""


class Objection(NamedTuple):
    """Why a worker is not let in.

    Attributes:
        text: in words.
        passing: whether it may be over soon, since it is another worker that is in the way.
        about_devices: whether it is for a device map.
    """

    text: str
    passing: bool = False
    about_devices: bool = False


class Residents:
    """The workers of an elastic world, and those that were let in and are not known to all yet.

    Arguments:
        first, others: rank 0, and who else is in from the beginning.
    """

    def __init__(self, first: Hello, *others: Hello) -> None:
        self._first = first
        self.hellos: dict[int, Hello] = {hello.record.id: hello for hello in (first, *others)}
        """By id; the record in each has that id."""
        self._used = set(self.hellos)
        self._next = _AGAIN

    def known(self, incarnation: int) -> Record | None:
        """Returns the record of a worker that is in, with its id."""
        return next((h.record for h in self.hellos.values() if h.record.incarnation == incarnation), None)

    def objection(self, hello: Hello) -> Objection | None:
        """Looks for what keeps a worker out; None where it may come in."""
        record = hello.record
        if hello.protocol != envelope.PROTOCOL:
            return Objection(stranger(hello, self._first))
        if hello.world_size != ELASTIC:
            return Objection(mixture(f"{record} was given world_size={hello.world_size}, rank 0 none"))
        if len(self._used) >= IDS:
            return Objection(f"the world has seen {IDS} workers, which is as many as one can; begin a new one")
        for other in self.hellos.values():
            for what, taken in (("rank", other.record.rank == record.rank), ("name", other.record.name == record.name)):
                if taken:
                    value = record.rank if what == "rank" else f'"{record.name}"'
                    return Objection(
                        f"{what} {value}, which {record} asks for, is taken by {other.record}; give it another {what}, "
                        f"or have that one leave first",
                        passing=True,
                    )
        fault = devices.fault_of_one(record.name, hello.devices)
        if fault is None:
            fault = devices.fault_between({**self.devices(), record.name: hello.devices}, complete=False)
        return None if fault is None else Objection(fault, about_devices=True)

    def admit(self, hello: Hello) -> Hello:
        """Takes a worker in to whom there is no objection; returns its hello, with the id that it has from now on.

        That is its rank, unless there has been a worker of that id.
        """
        rank = hello.record.rank
        number = rank if rank < IDS and rank not in self._used else self._free()
        self._used.add(number)
        made = self.hellos[number] = dataclasses.replace(hello, record=dataclasses.replace(hello.record, id=number))
        return made

    def _free(self) -> int:
        above, below = range(self._next, IDS), range(1, min(_AGAIN, IDS))
        number = next(n for n in itertools.chain(above, below) if n not in self._used)
        self._next = max(self._next, number + 1)
        return number

    def leave(self, number: int) -> None:
        """Forgets a worker that is gone; its name and rank are free."""
        self.hellos.pop(number, None)

    def devices(self) -> dict[str, Devices]:
        """Returns the devices of all, by name."""
        return {hello.record.name: hello.devices for hello in self.hellos.values()}
