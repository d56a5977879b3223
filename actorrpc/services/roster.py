"""Who has joined a world of fixed size, and whether they fit together. Plain logic."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.runtime.peers import Record
from actorrpc.services import devices
from actorrpc.services.devices import Devices
from actorrpc.wire import envelope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ELASTIC = 0
"""The size of a world in which workers come and go."""
_SHOWN = 4
_TOLD = 32
"""How many are named to those who wait, and ask twice a second."""


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself when it comes to join.

    As JSON it has, in every version of the protocol (RULE GR1): `protocol`, and of the `record` the `id`, `name`,
    `incarnation` and `endpoints`; a directory of whatever version answers to these endpoints with JSON that has
    `session` and `refused`, the reason in words. All else is of one version.

    Attributes:
        record: who it is.
        world_size: how many workers it was told of; ELASTIC: any number.
        protocol: the version of the protocol that it speaks.
        versions: what it runs, by name: "python", "torch", "actorrpc".
        devices: its devices and device maps.
        withdrawn: why it cannot join, where it only comes to say so.
    """

    record: Record
    world_size: int
    protocol: int
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Devices = field(default_factory=Devices)
    withdrawn: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {**vars(self), "record": self.record.to_json(), "devices": self.devices.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Hello:
        """Reads what `to_json` wrote, also that of another version.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        record, protocol = Record.from_json(data["record"]), int(data["protocol"])
        if protocol != envelope.PROTOCOL:
            versions = data.get("versions")
            return Hello(record, 0, protocol, versions if isinstance(versions, dict) else {})
        versions = {str(what): str(version) for what, version in data["versions"].items()}
        return Hello(
            record, int(data["world_size"]), protocol, versions, Devices.from_json(data["devices"]),
            str(data["withdrawn"]),
        )  # fmt: skip


def versions_here(package: str) -> dict[str, str]:
    """Returns what this process runs, for its hello; `package`: the version of actorrpc."""
    return {"actorrpc": package, "python": platform.python_version(), "torch": str(torch.__version__)}


class Roster:
    """Takes hellos until all have come who were expected, or somebody does not fit.

    Arguments:
        world_size: how many workers it waits for.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.hellos: dict[int, Hello] = {}
        self._names: dict[str, Record] = {}
        self._missing = dict.fromkeys(range(world_size))
        self.refusal: str | None = None
        """Why the world cannot come about; final."""
        self.about_devices = False
        """Whether that is for a device map."""

    @property
    def records(self) -> list[Record]:
        """Those who have joined."""
        return [hello.record for hello in self.hellos.values()]

    @property
    def complete(self) -> bool:
        """Whether all have joined."""
        return len(self.hellos) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return list(self._missing)

    def status(self) -> str:
        """Says in words who is missing and who is there."""
        came = (self.hellos[rank].record for rank in sorted(itertools.islice(self.hellos, _TOLD)))
        there, lack = some(came, len(self.hellos)), some(self._missing, len(self._missing))
        return f"missing rank{'s' if len(self._missing) > 1 else ''} {lack}; joined: {there or 'nobody'}"

    def hello(self, hello: Hello) -> str | None:
        """Takes a worker in, or returns why not. The same worker may come again.

        One that does not fit keeps the world from coming about (`refusal`), unless all have joined before.
        """
        known = self.hellos.get(hello.record.id)
        if known is not None and known.record.incarnation == hello.record.incarnation:
            return self.refusal
        if self.refusal is not None:
            return self.refusal
        reason = self._objection(hello)
        if reason is None:
            reason = devices.fault_of_one(hello.record.name, hello.devices)
            self.about_devices = reason is not None and not self.complete
        if reason is None:
            self.hellos[hello.record.id] = hello
            self._names[hello.record.name] = hello.record
            del self._missing[hello.record.id]
            if self.complete:
                self.refusal = devices.fault_between(self.devices())
                self.about_devices = self.refusal is not None
            return self.refusal
        if not self.complete:
            self.refusal = reason
        return reason

    def _objection(self, hello: Hello) -> str | None:
        record, known = hello.record, self.hellos.get(hello.record.id)
        if hello.protocol != envelope.PROTOCOL:
            return stranger(hello, self.hellos.get(0))
        if hello.withdrawn:
            return f"{record} could not take part: {hello.withdrawn}"
        if hello.world_size == ELASTIC:
            return mixture(f"{record} was given no world_size, rank 0 world_size={self.world_size}")
        if hello.world_size != self.world_size:
            return f"{record} was given world_size={hello.world_size}, rank 0 world_size={self.world_size}"
        if not 0 <= record.id < self.world_size:
            return f"{record} has a rank outside of 0 to {self.world_size - 1}"
        if known is not None:
            return (
                f"two workers have rank {record.id}: {known.record} and {record}; each worker needs a rank of its own, "
                f"and each of two programs an address of its own"
            )
        other = self._names.get(record.name)
        if other is not None:
            low, high = sorted((other, record), key=lambda r: r.id)
            return (
                f'RPC worker name "{record.name}" is not unique. Workers {low.id} and {high.id} share the same '
                f"name (hosts {low.host} and {high.host}, pids {low.pid} and {high.pid})"
            )
        return None

    def devices(self) -> dict[str, Devices]:
        """Returns the devices of all who have joined, by name, in order of rank."""
        return {self.hellos[rank].record.name: self.hellos[rank].devices for rank in sorted(self.hellos)}

    def differences(self) -> str | None:
        """Says which versions of Python, torch and actorrpc run where; None where all run the same."""
        return differences(self.hellos[rank] for rank in sorted(self.hellos))


def differences(hellos: Iterable[Hello]) -> str | None:
    """Says which versions of Python, torch and actorrpc run where; None where all run the same."""
    parts, hellos = [], list(hellos)
    for what in ("actorrpc", "python", "torch"):
        where: dict[str, list[Record]] = {}
        for hello in hellos:
            where.setdefault(_what_counts(what, hello.versions.get(what, "unknown")), []).append(hello.record)
        if len(where) > 1:
            parts.append(f"{what} " + ", ".join(f"{version} on {_listed(who)}" for version, who in where.items()))
    return "; ".join(parts) or None


def stranger(hello: Hello, first: Hello | None) -> str:
    """Says that a worker speaks another version of the protocol than this one; `first`: rank 0's own hello."""
    theirs, ours = hello.versions.get("actorrpc"), first.versions.get("actorrpc") if first is not None else None
    packages = f" (it has {theirs}, rank 0 {ours})" if theirs and ours else ""
    return (
        f"{hello.record} speaks version {hello.protocol} of the protocol, rank 0 version {envelope.PROTOCOL}; "
        f"install one version of actorrpc everywhere{packages}"
    )


def mixture(who: str) -> str:
    """Says that worlds of fixed size and elastic ones do not mix, in the words that torch's tests look for."""
    return f"RPC group mixes statically and dynamically initialized members which is not supported. {who}"


def _what_counts(what: str, version: str) -> str:
    """Leaves out of a version what does not matter to pickles: Python's last number, torch's kind of build."""
    return ".".join(version.split(".")[:2]) if what == "python" else version.split("+")[0]


def some(of: Iterable[object], number: int) -> str:
    """Lists things in words; of a large number, the first ones, and how many more there are."""
    shown = [str(each) for each in itertools.islice(of, _TOLD)]
    return ", ".join(shown) + (f" and {number - len(shown)} more" if number > len(shown) else "")


def _listed(records: list[Record]) -> str:
    names = [f'"{record.name}" (rank {record.id})' for record in records[:_SHOWN]]
    more = len(records) - len(names)
    return " and ".join((", ".join(names), f"{more} more")) if more else ", ".join(names)
