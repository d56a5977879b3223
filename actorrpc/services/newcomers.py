"""Hearing who comes into a world, and who is about to leave it: workers of an elastic one, guests of any."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import DIRECTORY, ELASTIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.devices import Devices

log = logging.getLogger("actorrpc")


class Newcomers:
    """A worker's ear for them. In a world of fixed size these are guests only; see `Elastic` for the others.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        worker.services[Newcomers] = self
        worker.cells[ELASTIC] = ServiceCell(worker, Lane.CONTROL, self._handle)

    def learn(self, devices: Mapping[str, Devices]) -> None:
        """Learns of the devices of newcomers, by name. Those of guests matter to nobody."""

    def _handle(self, message: Message) -> None:
        verb, *rest = message.load()
        worker = self._worker
        if verb == "news":
            number, records, devices = rest
            worker.members.admit(records)
            self.learn(devices)
            tell(worker, message.caller, DIRECTORY, ("noted", number))
        elif verb == "leaving":
            self.note_leaving(worker.peers[message.caller])
            message.reply(None)  # after all that was sent to it before

    @staticmethod
    def note_leaving(peer: Peer) -> None:
        """Begins no calls to a peer any more."""
        with peer.lock:
            peer.leaving, peer.reason = True, "it has called shutdown"


def members(worker: Worker) -> list[int]:
    """Returns the numbers of those who are there, guests and the worker itself included."""
    return [n for n, peer in list(worker.peers.items()) if peer.standing is Standing.MEMBER]


def tell(worker: Worker, to: int, target: tuple[int, int], body: object) -> bool:
    """Tells somebody something, if they are still there, and this worker is; returns whether it left."""
    try:
        worker.tell(to, target, body, control=True)
    except ActorRPCError as e:
        log.debug("%s: %s", worker.record.name, e)
        return False
    return True
