"""Being told of workers that are gone, or come: `World.watch`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing
from actorrpc.session import chosen
from actorrpc.workers import info_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from actorrpc.runtime.peers import Peer
    from actorrpc.session import Session
    from actorrpc.workers import WorkerInfo

log = logging.getLogger("actorrpc")
Told: TypeAlias = "Callable[[WorkerInfo, str], object]"
"""Takes a worker that is gone, and why, in words."""
Joined: TypeAlias = "Callable[[WorkerInfo], object]"
"""Takes a worker that has come."""


def is_news(session: Session, peer: Peer) -> bool:
    """Whether it is a loss that somebody is gone: not at the world's end, nor where it left an elastic one in order, or
    was a guest.
    """
    orderly = peer.record.guest or (peer.standing is Standing.LEFT and peer.leaving)
    return peer.standing is not Standing.MEMBER and not (orderly or session.worker.ending)


class Watch:
    """Callbacks that are told of the workers which are gone, or come, one at a time, by threads of the pool.

    Ends with `stop`, at the end of a `with` block, or with the world.

    Arguments:
        session: whose worker's world.
        told: the callback that is told of losses; None: none is.
        joined: the one that is told of newcomers; None: none is.
    """

    def __init__(self, session: Session, told: Told | None, joined: Joined | None) -> None:
        self._session, self._told, self._joined = session, told, joined
        self._seen: set[int] = set()
        self._queue: deque[tuple[Peer, bool]] = deque()
        self._running = self._stopped = False
        self._door = threading.Lock()
        members = session.worker.members
        members.watchers.append(self._gone)
        members.greeters.append(self._come)
        for peer in list(members.peers.values()):
            self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        with self._door:
            if self._stopped or peer.record.id in self._seen or not is_news(self._session, peer):
                return
            self._seen.add(peer.record.id)
        self._put(peer, False)

    def _come(self, peer: Peer) -> None:
        if not peer.record.guest:
            self._put(peer, True)

    def _put(self, peer: Peer, came: bool) -> None:
        with self._door:
            if self._stopped or (self._joined if came else self._told) is None:
                return
            self._queue.append((peer, came))
            if self._running:
                return
            self._running = True
        self._session.worker.crew.submit((Lane.FREE, self._run, None))

    def _run(self, _: object) -> None:
        while True:
            with self._door:
                if self._stopped or not self._queue:
                    self._running = False
                    return
                peer, came = self._queue.popleft()
            try:
                with chosen(self._session):
                    if not came and self._told is not None:
                        self._told(info_of(peer.record), peer.reason)
                    elif came and self._joined is not None:
                        self._joined(info_of(peer.record))
            except BaseException:  # an exit too: it is to be told of the next one all the same
                what = "coming" if came else "end"
                log.exception(
                    "%s: a callback could not be told of the %s of %s", self._session.worker, what, peer.record
                )

    def stop(self) -> None:
        """Tells the callbacks nothing any more; one that runs goes on."""
        with self._door:
            self._stopped = True
            self._queue.clear()
        members = self._session.worker.members
        for callbacks, own in ((members.watchers, self._gone), (members.greeters, self._come)):
            with contextlib.suppress(ValueError):  # it was stopped already, or its world has ended
                callbacks.remove(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
