"""Chaos: a world of four that calls all the while, members of which are killed and replaced at random."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import actorrpc as rpc
from actorrpc import autograd as dist_autograd
from actorrpc import session
from tests.chaos.load import append, counted, kind_of, lines, runs, tables
from tests.chaos.table import Tally, cases
from tests.joining import options
from tests.worlds import World, until

SIZE = 4
CALLS = 2_000
_SPARE = 6
_LIMIT = 60.0
_LINE = 16


class Tallying:
    """An object to refer to; its method is counted."""

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, key: str) -> str:
        return counted(self.path, key)

    def via(self, key: str, to: str) -> str:
        """Has another worker run it."""
        value: str = rpc.rpc_sync(to, counted, args=(self.path, key), timeout=_LIMIT)
        return value


def via(path: str, key: str, to: str) -> str:
    """Has another worker run it, as part of a call."""
    value: str = rpc.rpc_sync(to, counted, args=(path, key), timeout=_LIMIT)
    return value


async def via_awaited(path: str, key: str, to: str) -> str:
    """As `via`, without a thread that waits."""
    value: str = await rpc.rpc_async(to, counted, args=(path, key), timeout=_LIMIT)
    return value


def items(path: str, key: str) -> Iterator[str]:
    """Streams a few items; its beginning is counted."""
    counted(path, key)
    for _ in range(5):
        yield key


def scaled(path: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A handler with a gradient."""
    counted(path, key)
    return tensor * 3


def others() -> list[str]:
    """Returns who else is there."""
    from actorrpc.workers import present

    worker = session.current().worker
    return [record.name for record in present(worker) if record.id != worker.id]


class Caller:
    """Makes calls until enough were begun in the world, by any of the verbs; notes each in a file before it is sent and
    when it has ended, so that what becomes of this process takes nothing away.

    Arguments:
        folder: where the files are.
        seed: of what it draws.
        name: a word for its calls.
        total: how many calls the world makes.
    """

    def __init__(self, folder: str, seed: str, name: str, total: int) -> None:
        self.begun, self.ended, self.runs = f"{folder}/begun", f"{folder}/ended", f"{folder}/runs"
        self.chance, self.name, self.total, self.number = random.Random(seed), name, total, 0
        self.refs: list[Any] = []
        self.futures: list[tuple[str, Any]] = []

    def play(self) -> None:
        """Makes the calls, and comes to an end."""
        verbs = (
            self.call, self.later, self.by_reference, self.nested, self.awaited, self.streamed, self.given_up,
            self.with_gradient,
        )  # fmt: skip
        while self.left() > 0:
            there = others()
            if not there:
                time.sleep(0.01)
                continue
            self.number += 1
            key = f"{self.name} {self.number}"
            append(self.begun, key.ljust(_LINE - 1))
            try:
                self.chance.choice(verbs)(key, self.chance.choice(there), there)
            except Exception as e:
                self.end(key, e)
            if len(self.futures) > 8:
                self.settle(*self.futures.pop(0))
        for one in self.futures:
            self.settle(*one)
        self.refs.clear()

    def left(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.total - os.stat(self.begun).st_size // _LINE
        return self.total

    def end(self, key: str, error: BaseException | None = None) -> None:
        kind, text = ("value", "") if error is None else (kind_of(error), str(error))
        append(self.ended, f"{key}|{kind}|{time.monotonic()}|{text}")

    def settle(self, key: str, future: Any) -> None:
        try:
            value = future.wait()
        except Exception as e:
            self.end(key, e)
            return
        self.end(key, None if value == key else AssertionError(repr(value)))

    def call(self, key: str, to: str, there: list[str]) -> None:
        self.end(key, None if rpc.rpc_sync(to, counted, args=(self.runs, key), timeout=_LIMIT) == key else ValueError())

    def later(self, key: str, to: str, there: list[str]) -> None:
        self.futures.append((key, rpc.rpc_async(to, counted, args=(self.runs, key), timeout=_LIMIT)))

    def nested(self, key: str, to: str, there: list[str]) -> None:
        args = self.runs, key, self.chance.choice([*there, rpc.get_worker_info().name])
        self.futures.append((key, rpc.rpc_async(to, via, args=args, timeout=_LIMIT)))

    def awaited(self, key: str, to: str, there: list[str]) -> None:
        args = self.runs, key, self.chance.choice([*there, rpc.get_worker_info().name])
        self.futures.append((key, rpc.rpc_async(to, via_awaited, args=args, timeout=_LIMIT)))

    def streamed(self, key: str, to: str, there: list[str]) -> None:
        taken = self.chance.randrange(1, 6)
        with rpc.stream(to, items, args=(self.runs, key), window=2, timeout=_LIMIT) as stream:
            for value in itertools.islice(stream, taken):  # else it is closed before its end
                assert value == key
        self.end(key)

    def given_up(self, key: str, to: str, there: list[str]) -> None:
        future = rpc.rpc_async(to, counted, args=(self.runs, key, 0.001), timeout=_LIMIT)
        if self.chance.random() < 0.5:
            time.sleep(0.0005)
        if future.cancel():
            self.end(key, rpc.CancelledError())
        else:
            self.settle(key, future)

    def by_reference(self, key: str, to: str, there: list[str]) -> None:
        if len(self.refs) < 5:
            self.refs.append(rpc.remote(to, Tallying, args=(self.runs,), timeout=_LIMIT))
        ref = self.refs.pop(self.chance.randrange(len(self.refs)))
        if self.chance.random() < 0.5:
            value = ref.rpc_sync(timeout=_LIMIT).add(key)
        else:
            value = rpc.rpc_sync(to, _use, args=(ref, key), timeout=_LIMIT)
        self.refs.append(ref)  # where it has failed, its owner may be gone
        self.end(key, None if value == key else ValueError(repr(value)))

    def with_gradient(self, key: str, to: str, there: list[str]) -> None:
        leaf = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context:
            out = rpc.rpc_sync(to, scaled, args=(self.runs, key, leaf), timeout=_LIMIT)
            dist_autograd.backward(context, [out.sum()])
            assert dist_autograd.get_gradients(context)[leaf].tolist() == [3.0] * 3
        self.end(key)


def _use(ref: Any, key: str) -> str:
    value: str = ref.rpc_sync(timeout=_LIMIT).add(key)
    return value


def _play(rank: int, method: str, folder: str, seed: str, name: str, total: int, secret: str | None) -> str:
    """A worker's whole program, but for its leaving. Returns what its tables still hold."""
    from actorrpc.services import elastic

    elastic.DOOR_SECONDS = 0.0
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options(method, rpc_timeout=_LIMIT, security_token=secret))
    Caller(folder, seed, name, total).play()
    return name


def _left_over() -> dict[str, int]:
    """Waits for this worker's tables to be empty; returns what is left."""

    def empty() -> bool:
        gc.collect()
        return not any(tables().values())

    with contextlib.suppress(AssertionError):
        until(empty, 30.0)
    return {name: n for name, n in tables().items() if n}


@cases("chaos", f"{SIZE} workers, {CALLS:,} calls, kills and restarts", 1, 20)
def chaos(tally: Tally, chance: random.Random) -> None:
    storm(tally, chance, CALLS)


def storm(tally: Tally, chance: random.Random, total: int) -> None:
    """One world, until it has made so many calls; some of its members are killed, and others take their places. Every
    other one has a token, so that ZeroMQ carries its messages.
    """
    secret = None if tally.tried % 2 else "of a world in a storm"
    with World(SIZE + _SPARE, join=False, strict=False, check=False, timeout=300) as world:
        method, folder = f"file://{world.folder}/place", world.folder
        players = {}  # by rank: the process that has it
        spare = list(range(SIZE + _SPARE))
        killed: dict[str, float] = {}

        def begin(rank: int) -> None:
            process = players[rank] = spare.pop(0)
            world.start(process, _play, rank, method, folder, f"{chance.random()}", f"p{process}", total, secret)

        for rank in range(SIZE):
            begin(rank)
        marks = sorted(chance.randrange(total // 10, total * 9 // 10) for _ in range(_SPARE))
        for mark in marks:
            until(lambda m=mark: len(lines(f"{folder}/begun")) >= m, 120)  # type: ignore[misc]
            rank = chance.randrange(1, SIZE)
            world.kill(players[rank])
            killed[f"p{players[rank]}"] = time.monotonic()
            world._busy.discard(players[rank])
            begin(rank)
        for process in players.values():
            world.result(process)
        living = list(players.values())
        for process in living:
            world.start(process, _left_over)
        for process in living:
            left = world.result(process)
            if left:
                tally.is_lost(f"p{process}'s tables are not empty: {left}")
        for process in living:
            world.start(process, rpc.shutdown)
        for process in living:
            world.result(process)
        _judge(tally, folder, killed)


def _judge(tally: Tally, folder: str, killed: dict[str, float]) -> None:
    """Compares what was begun, what has run and what was told; `killed`: who, and when."""
    begun = [line.strip() for line in lines(f"{folder}/begun")]
    ended = dict(line.split("|", 1) for line in lines(f"{folder}/ended") if "|" in line)
    ran = runs(f"{folder}/runs")
    tally.check_runs(ran)
    kinds: Counter[str] = Counter()
    for key in begun:
        if key not in ended:
            if key.split()[0] not in killed:
                tally.is_hung(f"{key} was begun and has not ended")
            kinds["died with its caller"] += 1
            continue
        kind, at, text = ended[key].split("|", 2)
        kinds[kind] += 1
        if kind == "lost":
            tally.noticed.append(min((float(at) - t for t in killed.values() if t <= float(at)), default=0.0))
        if kind == "value" and ran[key] != 1:
            tally.is_lost(f"{key} was answered and has run {ran[key]} times")
        elif kind not in ("value", "lost", "CancelledError", "NotAMemberError"):
            tally.is_lost(f"{key} ended with {kind}: {text}")
    tally.note(f"{len(begun)} calls begun, of which {dict(kinds)}; {len(killed)} members killed")
