"""What a worker hears of others that come into a world that runs, or are about to leave it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.services.carrying import Carrying
from actorrpc.services.ids import DIRECTORY, ELASTIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.devices import Devices

log = logging.getLogger("actorrpc")


class Neighbours:
    """The actor. In worlds of fixed size those who come are guests.

    Arguments:
        worker: whose; nobody is admitted yet.
        devices: those of the workers that are known, by name.
    """

    def __init__(self, worker: Worker, devices: Mapping[str, Devices]) -> None:
        self._worker = worker
        self._devices: dict[str, Devices] = {}
        worker.services[Neighbours] = self
        worker.cells[ELASTIC] = ServiceCell(worker, Lane.CONTROL, self._handle)
        self.learn(devices)

    def learn(self, devices: Mapping[str, Devices]) -> None:
        """Learns of the devices of workers, by name, and what they mean for this one."""
        self._devices.update(devices)
        Carrying.learn(self._worker, self._devices)

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        worker = self._worker
        if verb == "news":
            number, records, devices = rest
            worker.members.admit(records)
            self.learn(devices)
            tell(worker, message.caller, DIRECTORY, ("noted", number))
        elif verb == "leaving":
            note_leaving(worker.peers[message.caller])
            message.reply(None)  # after all that was sent to it before


def note_leaving(peer: Peer) -> None:
    """Begins no calls to a peer any more."""
    with peer.lock:
        peer.leaving, peer.reason = True, "it has called shutdown"


def tell(worker: Worker, to: int, target: tuple[int, int], body: object) -> bool:
    """Tells somebody something, if they are still there, and this worker is; returns whether it left."""
    try:
        worker.tell(to, target, body, control=True)
    except ActorRPCError as e:
        log.debug("%s: %s", worker.record.name, e)
        return False
    return True
