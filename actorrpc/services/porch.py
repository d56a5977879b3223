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
_LONG, _AGAIN_SECONDS = 1 << 16, 2.0


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
        self._next: dict[int, float] = {}
        """When those who have been sent a long answer may be sent another."""
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
        self.send((way,), self.written(answer))

    def written(self, answer: Mapping[str, Any], more: bytes = b"") -> bytes:
        """Writes an answer. `more`: what else is in it, JSON of an object with parts; that of many answers alike, since
        the list of a large world takes milliseconds to write.
        """
        data = json.dumps({"session": self._session, **answer}).encode()
        return data[:-1] + b", " + more[1:] if more else data

    def send(self, ways: Iterable[int], data: bytes) -> None:
        """Sends what is written along those of some ways that are open."""
        for way in ways:
            with contextlib.suppress(KeyError):  # hung up meanwhile: it has had its answer
                self._worker.greet(way, data)
                if len(data) > _LONG:
                    self._next[way] = self._worker.clock.now() + _AGAIN_SECONDS

    def is_under_way(self, way: int) -> bool:
        """Whether a long answer was sent just now: who asks again may not have got it yet. With another one each time,
        the answers to a large world would never end.
        """
        return self._worker.clock.now() < self._next.get(way, 0.0)

    def answer_last(self, way: int, answer: Mapping[str, Any], more: bytes = b"") -> None:
        """Sends an answer after which there is no other; the way stays open for a while, in case it gets lost."""
        self.send((way,), self.written(answer, more))
        self._worker.keeper.after(_LAST_SECONDS, lambda: self.close(way))

    def close(self, *ways: int) -> None:
        """Hangs up some ways; without arguments, all."""
        for way in ways or list(self.ways):
            under_way = self.is_under_way(way)
            self._worker.transport.hang_up(way, _LAST_SECONDS if under_way else 1.0)
            self.ways.discard(way)
            if not under_way:  # else it is not to be sent again to who greets anew, either
                self._next.pop(way, None)
