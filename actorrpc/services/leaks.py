"""Which references are left at the end of a world, and where they were made."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from typing import TYPE_CHECKING, NamedTuple

from actorrpc.runtime.completion import describe
from actorrpc.services.handles import OwnerHandle, UserHandle
from actorrpc.services.ids import ROOT

if TYPE_CHECKING:
    from types import FrameType

    from actorrpc.services.handles import Entry
    from actorrpc.services.objects import Objects

log = logging.getLogger("actorrpc")
_OWN = __name__.partition(".")[0]
_STILL_COMING_SECONDS = 1.0
_LINES = 50


class Origin(NamedTuple):
    """How this worker came by a reference."""

    what: str
    how: str


class Leaks:
    """Notes where references are made, and reports those that are left.

    Arguments:
        service: whose references.
    """

    def __init__(self, service: Objects) -> None:
        self._service = service
        self._noted: weakref.WeakKeyDictionary[OwnerHandle | UserHandle, Origin] = weakref.WeakKeyDictionary()

    def note(self, handle: OwnerHandle | UserHandle, what: object = None, sender: int | None = None) -> None:
        """Notes a reference.

        Arguments:
            what: what it refers to, or what made that, where it is known.
            sender: from whom it came; None for one that was made here.
        """
        if handle.ref == ROOT:  # an actor of a role lives as long as its worker
            return
        frame = _users_frame()
        how = "made"
        if sender is not None:
            peer = self._service.worker.peers.get(sender)
            how = f"came in a message from {peer.record.name if peer is not None else sender}, read"
        where = f"at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "by a thread of the library"
        self._noted[handle] = Origin(describe(what) if what is not None else "", f"{how} {where}")

    def report(self) -> None:
        """Writes one warning to the log: the references held here, and what others hold of this worker's objects.

        What is only waiting for the collector does not count, nor does an object whose owner alone holds it.
        """
        gc.collect()
        self._service.bury()  # now: nothing more will leave once this worker closes, and the owners wait for it
        held = [
            (handle, origin)
            for handle, origin in list(self._noted.items())
            if isinstance(handle, UserHandle) and not handle.fork.ended
        ]
        owned = self._held_by_others()
        lines = [f"  held: {self._line(handle, origin)}" for handle, origin in held]
        lines += [f"  owned: {self._owner_line(entry)}" for entry in owned]
        if not lines:
            return
        if len(lines) > _LINES:
            lines = [*lines[:_LINES], f"  ... and {len(lines) - _LINES} more"]
        log.warning(
            "%s: at shutdown %d references to others' objects are still held here, and others hold %d of its own:\n%s",
            self._service.worker, len(held), len(owned), "\n".join(lines),
        )  # fmt: skip

    def _held_by_others(self) -> list[Entry]:
        clock = self._service.worker.clock
        gate, end = clock.gate(), clock.now() + _STILL_COMING_SECONDS
        while (owned := self._service.owned()) and clock.now() < end:
            gate.wait(0.01)  # what others have dropped just now is still on its way
        return owned

    def _line(self, handle: UserHandle, origin: Origin) -> str:
        peers, kind = self._service.worker.peers, origin.what
        if handle.type is not None and handle.type.done():
            try:
                kind = handle.type.wait().__qualname__
            except Exception:
                pass
        what = f"{kind} on" if kind else "an object of"
        return f"{what} {peers[handle.owner].record.name}, {origin.how}"

    def _owner_line(self, entry: Entry) -> str:
        worker = self._service.worker
        names = sorted({worker.peers[n].record.name for n in entry.forks.holders.values() if n in worker.peers})
        try:
            kind = type(entry.value).__qualname__
        except BaseException as e:
            kind = f"an object whose creation failed ({type(e).__qualname__})"
        creator = worker.peers.get(entry.id[0])
        own = (o for h, o in list(self._noted.items()) if isinstance(h, OwnerHandle) and h.entry is entry)
        origin = next(own, None)
        if origin is not None:
            made = f", {origin.how}"
        else:
            made = f", made by a call of {creator.record.name}" if creator is not None else ""
        return f"{kind}, held by {', '.join(names)}{made}"


def _users_frame() -> FrameType | None:
    """Returns the innermost frame of the present thread that is neither this library's nor the threading module's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in (_OWN, "threading", "pickle", "cloudpickle", "torch"):
            return frame
        frame = frame.f_back
    return None
