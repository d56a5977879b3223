"""What comes before the object that it is about: its creation may still be on its way, from a third worker."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from actorrpc.errors import ActorGoneError
from actorrpc.runtime.lanes import Job, Lane

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message
    from actorrpc.services.forks import Id
    from actorrpc.services.handles import Entry
    from actorrpc.services.objects import Objects

_SECONDS = 5.0
"""How long it is kept."""


class Early:
    """Keeps messages, records of forks and references that came home, and gives them to the object when it comes.

    It is the cell that takes what is addressed to an object that has none: one that is not known yet, or that others do
    not hold. What is not marked otherwise is called under the service's door.
    """

    def __init__(self, service: Objects) -> None:
        self._service = service
        self._messages: dict[Id, list[Message]] = {}
        self._records: dict[Id, list[tuple[Id, Message]]] = {}

    def accept(self, message: Message) -> Job | None:
        """Takes a message in; not under the door."""
        service = self._service
        ref = message.creator, message.local
        with service.door:
            entry = service.known(ref)
            if entry is None:
                message.cell = self
                first = ref not in self._messages
                self._messages.setdefault(ref, []).append(message)
                if first:
                    service.worker.keeper.after(_SECONDS, lambda: self._give_up_messages(ref))
                return None
        return entry.accept(message)

    def run(self, message: Message) -> None:
        """Refuses what was addressed to an object that never came."""
        raise self._gone((message.creator, message.local))

    def record(self, ref: Id, fork: Id, message: Message) -> None:
        """Keeps the request to record a fork."""
        first = ref not in self._records
        self._records.setdefault(ref, []).append((fork, message))
        if first:
            self._service.worker.keeper.after(_SECONDS, lambda: self._give_up_records(ref))

    def expect(self, ref: Id) -> Entry:
        """Makes the place of an object to which a reference has come home."""
        entry = self._service.entry(ref)
        entry.expected = True
        self._service.worker.keeper.after(_SECONDS, lambda: self._give_up(ref))
        return entry

    def take_up(self, ref: Id, entry: Entry) -> None:
        """Gives the object what was kept for it."""
        entry.expected = False
        if ref in self._messages:
            entry.adopt(self._messages.pop(ref))
        for fork, message in self._records.pop(ref, ()) if self._records else ():
            self._service.record(entry, fork, message.caller)
            # Not by a job: under the door nobody waits for the crew's, whose holder may be in a finalizer.
            self._service.worker.keeper.after(0.0, functools.partial(message.reply, None))

    def clear(self) -> None:
        """Forgets all."""
        self._messages.clear()
        self._records.clear()

    def _give_up_messages(self, ref: Id) -> None:
        with self._service.door:
            messages = self._messages.pop(ref, [])
        for message in messages:
            self._service.worker.crew.submit((Lane.FREE, self._service.worker.perform, message))

    def _give_up_records(self, ref: Id) -> None:
        with self._service.door:
            records = self._records.pop(ref, [])
        for _, message in records:
            message.fail(self._gone(ref))

    def _give_up(self, ref: Id) -> None:
        with self._service.door:
            entry = self._service.known(ref)
            if entry is None or not entry.expected:
                return
            entry.expected = False
        entry.fill(None, self._gone(ref))

    def _gone(self, ref: Id) -> ActorGoneError:
        worker = self._service.worker
        return ActorGoneError(f"{worker} has no object of reference {ref}: it was released, or never made")
