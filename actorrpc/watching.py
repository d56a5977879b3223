"""Being told of workers that are gone: `World.watch`."""

from __future__ import annotations

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


def is_news(session: Session, peer: Peer) -> bool:
    """Whether it is a loss that somebody is gone: not at the world's end, nor where it left an elastic one in order, or
    was a guest.
    """
    orderly = peer.record.guest or (peer.standing is Standing.LEFT and peer.leaving)
    return peer.standing is not Standing.MEMBER and not (orderly or session.worker.ending)


class Watch:
    """A callback that is told of the workers which are gone, one at a time, by threads of the pool.

    Ends with `stop`, at the end of a `with` block, or with the world.

    Arguments:
        session: whose worker's world.
        told: the callback.
    """

    def __init__(self, session: Session, told: Told) -> None:
        self._session, self._told = session, told
        self._seen: set[int] = set()
        self._queue: deque[Peer] = deque()
        self._running = self._stopped = False
        self._door = threading.Lock()
        members = session.worker.members
        members.watchers.append(self._gone)
        for peer in list(members.peers.values()):
            self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        with self._door:
            if self._stopped or peer.record.id in self._seen or not is_news(self._session, peer):
                return
            self._seen.add(peer.record.id)
            self._queue.append(peer)
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
                peer = self._queue.popleft()
            try:
                with chosen(self._session):
                    self._told(info_of(peer.record), peer.reason)
            except BaseException:  # an exit too: it is to be told of the next one all the same
                log.exception("%s: a callback could not be told of the end of %s", self._session.worker, peer.record)

    def stop(self) -> None:
        """Tells the callback nothing any more; one that runs goes on."""
        with self._door:
            self._stopped = True
            self._queue.clear()
        try:
            self._session.worker.members.watchers.remove(self._gone)
        except ValueError:
            pass  # it was stopped already, or its world has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
