"""Messages that are dropped, repeated, reordered, delayed or altered."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

from actorrpc.testing.faults import Faults, FaultyTransport
from actorrpc.wire.zeromq import reachable
from tests.attacks import Middle
from tests.chaos.load import Ended, call_many, join_wrapped, leave, runs
from tests.chaos.table import Tally, cases, needs_heartbeats
from tests.worlds import World

_CALLS = 400
_TOKEN = "of a world in a storm"
FAULTS: list[Faults] = []
"""Those of this process."""


def _wrap(harm: str, seed: str, chance: float, more: dict[str, Any], inner: Any) -> Any:
    faults = Faults(hash_of(seed), active=False)
    getattr(faults, harm)(chance, **more)
    FAULTS.append(faults)
    return FaultyTransport(inner, faults)


def hash_of(text: str) -> int:
    """Returns a number of a text, the same one in every process."""
    return int.from_bytes(text.encode(), "little")


def _begin() -> None:
    FAULTS[-1].active = True


def _end() -> int:
    """Ends the faults; returns how many there were."""
    FAULTS[-1].active = False
    return sum(FAULTS[-1].done.values())


def _both_ways(tally: Tally, chance: random.Random, harm: str, share: float, **more: Any) -> tuple[list[Ended], int]:
    """Two call each other while their messages come to harm, then again while they do not."""
    ended: list[Ended] = []
    with World(2, join=False, strict=False, check=False, timeout=240) as world:
        path = f"{world.folder}/runs"
        for rank in range(2):
            wrap = functools.partial(_wrap, harm, f"{chance.random()}", share, more)
            world.start(rank, join_wrapped, rank, world.plan, wrap)
        world.results()
        world.everywhere(_begin)
        _call(world, path, "during", _CALLS)
        ended += itertools.chain(*world.results())
        harmed = sum(world.everywhere(_end))
        _call(world, path, "after", 10)
        ended += itertools.chain(*world.results())
        tally.check(ended, runs(path))
        world.everywhere(leave)
    if not harmed:
        tally.note(f"a case in which no message was to {harm}")
    return ended, harmed


def _call(world: World, path: str, when: str, count: int) -> None:
    for rank in range(2):
        keys = [f"{rank} {when} {n}" for n in range(count)]
        world.start(rank, call_many, f"worker{1 - rank}", path, keys, 0.0, 30.0, 8)


def _none_may_fail(tally: Tally, ended: Sequence[Ended]) -> None:
    for one in ended:
        if one.kind == "lost":
            tally.is_lost(f"nothing was lost, but {one.key} failed: {one.text}")


@cases("drop", "a message in 200 is dropped", 1, 20, needs=needs_heartbeats)
def drop(tally: Tally, chance: random.Random) -> None:
    _both_ways(tally, chance, "drop", 0.005, times=1)


@cases("reorder", "a message in 200 is overtaken by the next one", 1, 20, needs=needs_heartbeats)
def reorder(tally: Tally, chance: random.Random) -> None:
    _both_ways(tally, chance, "reorder", 0.005, times=1)


@cases("repeat", "a message in 5 comes twice", 1, 20)
def repeat(tally: Tally, chance: random.Random) -> None:
    ended, _ = _both_ways(tally, chance, "repeat", 0.2)
    _none_may_fail(tally, ended)


@cases("delay", "a message in 20 comes up to 0.2 s later", 1, 20)
def delay(tally: Tally, chance: random.Random) -> None:
    ended, _ = _both_ways(tally, chance, "delay", 0.05, seconds=0.2)
    _none_may_fail(tally, ended)


# -- on the wire


class Detour:
    """A transport whose connections lead past somebody who alters a byte, once.

    Arguments:
        inner: the transport.
        place: which byte towards the peer, counted on the first connection.
    """

    def __init__(self, inner: Any, place: int) -> None:
        self._inner, self._place = inner, place
        self._middles: list[Middle] = []
        self._done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        if peer < 0:  # not a member yet: the way by which it joins
            self._inner.dial(peer, endpoints)
            return
        middle = Middle(reachable(endpoints), self._change)
        self._middles.append(middle)
        self._inner.dial(peer, [middle.endpoint])

    def _change(self, passed: int, data: bytes) -> bytes:
        at = self._place - passed
        if self._done or not 0 <= at < len(data):
            return data
        self._done = True
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    def close(self, linger: float = 0.0) -> None:
        self._inner.close(linger)
        for middle in self._middles:
            middle.close()


@cases("alter", "a byte is altered on its way (token)", 1, 20, needs=needs_heartbeats)
def alter(tally: Tally, chance: random.Random) -> None:
    options = {"security_token": _TOKEN}
    with World(2, join=False, strict=False, check=False, timeout=240, options=options) as world:
        path = f"{world.folder}/runs"
        places = [chance.randrange(1_000, 60_000), 1 << 60]
        for rank in range(2):
            world.start(rank, join_wrapped, rank, world.plan, functools.partial(_detour, places[rank]))
        world.results()
        ended: list[Ended] = []
        for when in ("first", "then", "later"):
            _call(world, path, when, 200)
            ended += itertools.chain(*world.results())
        tally.check(ended, runs(path))
        world.everywhere(leave)


def _detour(place: int, inner: Any) -> Any:
    return Detour(inner, place)
