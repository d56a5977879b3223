"""Where workers that are no members yet are heard and answered."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from actorrpc.services.roster import Hello

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_LAST_SECONDS = 5.0


class Porch:
    """Takes the greetings of those who come.

    Arguments:
        worker: who hears them.
        session: of the world; greetings for others are not for this one.
        come: called, in the control lane, with the hello of somebody who greets, and the way by which to answer. One
            who has had no answer greets again.

    Attributes:
        ways: those that are open.
    """

    def __init__(self, worker: Worker, session: str, come: Callable[[Hello, int], None]) -> None:
        self._worker, self._session, self._come = worker, session, come
        self.ways: set[int] = set()
        worker.greeted = self._greeted

    def _greeted(self, data: bytes) -> None:
        try:
            told = json.loads(data)
            if told.get("session") != self._session:
                return
            hello = Hello.from_json(told)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s: dropped a greeting that makes no sense", self._worker.record.name)
            return
        way = self.way_of(hello)
        if way not in self.ways:
            self._worker.transport.dial(way, hello.record.endpoints)
            self.ways.add(way)
        self._come(hello, way)

    @staticmethod
    def way_of(hello: Hello) -> int:
        """Returns the number of the way to somebody."""
        return -2 - hello.record.incarnation

    def answer(self, way: int, answer: Mapping[str, Any]) -> None:
        """Sends an answer, if the way is open."""
        self.answer_all((way,), answer)

    def answer_all(self, ways: Iterable[int], answer: Mapping[str, Any]) -> None:
        """Sends the same answer along several ways. It is written once: the list of a large world takes milliseconds."""
        data = json.dumps({"session": self._session, **answer}).encode()
        for way in ways:
            with contextlib.suppress(KeyError):  # hung up meanwhile: it has had its answer
                self._worker.greet(way, data)

    def answer_last(self, way: int, answer: Mapping[str, Any]) -> None:
        """Sends an answer after which there is no other; the way stays open for a while, in case it gets lost."""
        self.answer(way, answer)
        self._worker.keeper.after(_LAST_SECONDS, lambda: self.close(way))

    def close(self, *ways: int) -> None:
        """Hangs up some ways; without arguments, all."""
        for way in ways or list(self.ways):
            self._worker.transport.hang_up(way, 1.0)
            self.ways.discard(way)
