"""Everything at once at full speed, for long: ``python -m benchmarks.soak --minutes 10``.

Three workers call one another: small calls, one by one and in bursts, tensors of 16 MiB, references that are passed on,
and training steps in contexts. Every small call has a number, and its callee keeps book: what is lost and what comes
twice is counted. Between the slices all are quiet for a moment, and say what memory, descriptors and threads they hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from benchmarks.memory import census
from benchmarks.pairs import OURS, Figures, Lane, Measures, Team, prepare, rpc_world

SIZE = 3
BURST = 200
LARGE = 16 << 20
MOST_GROWTH = {"memory": 24.0, "descriptors": 3.0}
"""MB, and descriptors, by which the last third of the slices may be above the middle one. Threads come and go."""
_SETTLING = 1.0


class Ledger:
    """Which numbers of one sender have come. They begin with 0, and may come in any order."""

    def __init__(self) -> None:
        self.came = self.repeated = self._next = 0
        self._ahead: set[int] = set()

    def enter(self, number: int) -> None:
        """Notes that a number has come."""
        if number < self._next or number in self._ahead:
            self.repeated += 1
            return
        self.came += 1
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1


@dataclass
class Book:
    """What one process has sent, and what came to it."""

    door: threading.Lock = field(default_factory=threading.Lock)
    sent: dict[str, int] = field(default_factory=dict)
    came: dict[str, Ledger] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def number(self, way: str) -> int:
        """Returns the next number on a way."""
        with self.door:
            number = self.sent.get(way, 0)
            self.sent[way] = number + 1
            return number

    def count(self, kind: str, number: int = 1) -> None:
        """Counts what was done."""
        with self.door:
            self.done[kind] = self.done.get(kind, 0) + number


_book = Book()


# What is called.


def enter(way: str, number: int) -> int:
    """A small call."""
    with _book.door:
        _book.came.setdefault(way, Ledger()).enter(number)
    return number


def echo(value: torch.Tensor) -> torch.Tensor:
    """A large call."""
    return value


class Number:
    """What references refer to."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


def ask(reference: Any) -> int:
    """Is sent a reference of a third worker's object."""
    value: int = reference.rpc_sync().get()
    return value


def parameters_of(module: Any) -> list[Any]:
    """Returns references to the parameters of a module of this worker."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def book() -> tuple[dict[str, int], dict[str, tuple[int, int]], dict[str, int]]:
    """Returns what was sent, what came and came again, and what was done."""
    with _book.door:
        came = {way: (ledger.came, ledger.repeated) for way, ledger in _book.came.items()}
        return dict(_book.sent), came, dict(_book.done)


# What each worker does.


def calls(to: str, way: str, end: float) -> None:
    """Small calls, one by one, in bursts, and told."""
    while time.monotonic() < end:
        number = _book.number(way)
        _must(rpc.rpc_sync(to, enter, args=(way, number)) == number, "an answer was another call's")
        numbers = [_book.number(way) for _ in range(BURST)]
        futures = [rpc.rpc_async(to, enter, args=(way, number)) for number in numbers]
        _must([future.wait() for future in futures] == numbers, "an answer was another call's")
        _book.count("calls", 1 + BURST)


def tensors(to: str, way: str, end: float) -> None:
    """Large tensors, there and back."""
    value = torch.empty(LARGE // 4)
    number = 0
    while time.monotonic() < end:
        number += 1
        value.fill_(number % 1000)
        back = rpc.rpc_sync(to, echo, args=(value,))
        _must(
            back.shape == value.shape and bool((back[:: 1 << 16] == number % 1000).all()), "a tensor came back changed"
        )
        _book.count("tensors")


def references(to: str, way: str, end: float) -> None:
    """References, used here and passed on."""
    third = next(f"w{i}" for i in range(SIZE) if f"w{i}" not in (to, rpc.get_worker_info().name))
    number = 0
    while time.monotonic() < end:
        made = []
        for _ in range(20):
            number += 1
            made.append((number, rpc.remote(to, Number, args=(number,))))
        for wanted, reference in made:
            _must(reference.rpc_sync().get() == wanted, "a reference refers to another object")
        _must(rpc.rpc_sync(third, ask, args=(made[-1][1],)) == number, "a reference that was passed on is another's")
        _must(made[0][1].to_here().value == made[0][0], "to_here gave another object")
        _book.count("references", len(made))


def contexts(to: str, way: str, end: float) -> None:
    """Training steps."""
    module = rpc.remote(to, nn.Linear, args=(64, 64))
    optimizer = DistributedOptimizer(torch.optim.SGD, rpc.rpc_sync(to, parameters_of, args=(module,)), lr=0.01)
    x = torch.randn(16, 64)
    while time.monotonic() < end:
        with autograd.context() as context_id:
            loss = module.rpc_sync().forward(x).pow(2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        _must(bool(torch.isfinite(loss)), "a loss is no number")
        _book.count("contexts")


KINDS: Sequence[Callable[[str, str, float], None]] = (calls, tensors, references, contexts)


def _must(holds: bool, else_: str) -> None:
    if not holds:
        raise AssertionError(else_)


def work(seconds: float) -> None:
    """Has this worker do everything at once, to all others in turn.

    Raises:
        BaseException: the first thing that failed.
    """
    me = rpc.get_worker_info().id
    others = [i for i in range(SIZE) if i != me]
    end = time.monotonic() + seconds
    failed: list[BaseException] = []

    def do(kind: Callable[[str, str, float], None], to: int) -> None:
        try:
            kind(f"w{to}", f"{me}>{to}", end)
        except BaseException as e:
            failed.append(e)

    threads = [
        threading.Thread(target=do, args=(kind, others[i % len(others)])) for i, kind in enumerate((*KINDS, calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def soaking(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Gives what has all workers work for some seconds, and what asks them for their books."""
    with rpc_world(lane, rank, port):
        workers = [f"w{i}" for i in range(SIZE)]

        def at_work(seconds: float) -> list[Figures]:
            for future in [rpc.rpc_async(name, work, args=(seconds,), timeout=0) for name in workers]:
                future.wait()
            time.sleep(_SETTLING)  # what is put off until nothing is to do is done
            return [rpc.rpc_sync(name, census) for name in workers]

        yield {"work": at_work, "books": lambda _: [rpc.rpc_sync(name, book) for name in workers]} if rank == 0 else {}


# What comes of it.


@dataclass
class Outcome:
    """What was found.

    Attributes:
        done: how much was done, by kind.
        lost, repeated: small calls that did not come, or came more than once.
        growth: by how much the last third of the slices is above the middle one, the worst worker's.
        slices: every worker's census after each slice.
        slope: by how much each grew a minute in the last two thirds of the slices, the worst worker's.
    """

    done: dict[str, int]
    lost: int
    repeated: int
    growth: Figures
    slices: list[list[Figures]]
    slope: Figures = field(default_factory=dict)

    def complaints(self) -> list[str]:
        """Returns what is not as it should be."""
        found = []
        if self.lost or self.repeated:
            found.append(f"{self.lost} calls were lost, {self.repeated} came twice")
        grown = {key: self.growth[key] for key, most in MOST_GROWTH.items() if self.growth.get(key, 0.0) > most}
        return [*found, *(f"{key} grew by {value:.1f}" for key, value in grown.items())]


def growth_of(slices: Sequence[Sequence[Figures]]) -> Figures:
    """Returns by how much the last third is above the middle one, of medians, the worst worker's."""
    third = max(1, len(slices) // 3)
    middle, last = slices[-2 * third : -third], slices[-third:]
    if not middle:
        return {}

    def level(part: Sequence[Sequence[Figures]], worker: int, key: str) -> float:
        return statistics.median(each[worker][key] for each in part)

    workers = range(len(slices[0]))
    return {key: max(level(last, w, key) - level(middle, w, key) for w in workers) for key in slices[0][0]}


def slope_of(slices: Sequence[Sequence[Figures]], times: Sequence[float]) -> Figures:
    """Returns by how much each figure grew a minute in the last two thirds, by least squares, the worst worker's.

    Arguments:
        slices: the censuses.
        times: when they were taken, in seconds.
    """
    first = len(slices) // 3
    late, minutes = slices[first:], [time / 60 for time in times[first:]]
    if len(late) < 2:
        return {}
    workers = range(len(slices[0]))
    return {
        key: max(statistics.linear_regression(minutes, [each[w][key] for each in late]).slope for w in workers)
        for key in slices[0][0]
    }


def soak(seconds: float, slice_seconds: float = 10.0) -> Outcome:
    """Runs everything for so many seconds, in slices.

    Raises:
        SystemExit: a worker has failed or died.
    """
    slices: list[list[Figures]] = []
    times: list[float] = []
    with Team(Lane("ours", soaking, OURS, SIZE)) as team, team.going_on():
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(slices) < 3:
            slices.append(team.have("work", slice_seconds))
            times.append(time.monotonic())
            shown = "; ".join(
                f"{x['memory']:.0f} MB, {x['descriptors']:.0f} descriptors, {x['threads']:.0f} threads"
                for x in slices[-1]
            )
            print(f"{len(slices):4}: {shown}", file=sys.stderr, flush=True)
        books = team.have("books", 0)
    sent: dict[str, int] = {}
    came: dict[str, tuple[int, int]] = {}
    done: dict[str, int] = {}
    for of_sender, of_receiver, made in books:
        sent |= of_sender
        came |= of_receiver
        for kind, number in made.items():
            done[kind] = done.get(kind, 0) + number
    lost = sum(number - came.get(way, (0, 0))[0] for way, number in sent.items())
    twice = sum(again for _, again in came.values())
    return Outcome(done, lost, twice, growth_of(slices), slices, slope_of(slices, times))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Everything at once, for long.")
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--slice", type=float, default=10, metavar="S", help="seconds between two looks (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.slice <= 0:
        parser.error("--minutes and --slice must be above 0")
    # glibc raises this with the first large block that is freed, and then keeps such blocks for each of its arenas, of
    # which there are up to eight a core: for minutes it looks like a leak.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    prepare()
    outcome = soak(options.minutes * 60, options.slice)
    print("; ".join(f"{number:,} {kind}" for kind, number in outcome.done.items()))
    print(f"lost: {outcome.lost}; came twice: {outcome.repeated}")
    grown = ", ".join(f"{key} {value:+.1f}" for key, value in outcome.growth.items())
    print(f"the last third of the slices against the middle one: {grown}")
    steep = ", ".join(f"{key} {value:+.2f}" for key, value in outcome.slope.items())
    print(f"growth a minute, in the last two thirds: {steep}")
    if options.json:
        options.json.write_text(json.dumps(vars(outcome), indent=1) + "\n")
    found = outcome.complaints()
    for complaint in found:
        print(complaint, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.soak import main as main_by_name

    sys.exit(main_by_name())
