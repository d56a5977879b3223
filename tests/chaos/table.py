"""The table: its rows, what is counted in them, and how it is printed."""

from __future__ import annotations

import inspect
import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import actorrpc as rpc
from tests.chaos.load import Ended


@dataclass
class Tally:
    """What came of the cases of one row.

    Attributes:
        tried: how many cases.
        noticed: seconds from the fault until each call that depended on it had failed with the right error.
        lost: calls of which nobody was told: that ended only with their own limit, with a wrong value, or as if done
            though they had not run; and other things that were to be told and were not.
        repeated: calls that ran more than once.
        hung: calls, ends and starts that did not come about in their time.
        notes: what else there is to say; printed below the table.
    """

    tried: int = 0
    noticed: list[float] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    hung: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the last three columns are 0."""
        return not (self.lost or self.repeated or self.hung)

    def note(self, text: str) -> None:
        """Keeps something to be said, up to a dozen."""
        if len(self.notes) < 12:
            self.notes.append(text)

    def is_lost(self, text: str) -> None:
        """Counts something that was not told."""
        self.lost += 1
        self.note(f"lost silently: {text}")

    def is_hung(self, text: str) -> None:
        """Counts something that does not end."""
        self.hung += 1
        self.note(f"hung: {text}")

    def check_runs(self, runs: Mapping[str, int]) -> None:
        """Takes how many times each call has run."""
        for key, count in runs.items():
            if count > 1:
                self.repeated += count - 1
                self.note(f"repeated: {key} ran {count} times")

    def check(self, ended: Sequence[Ended], runs: Mapping[str, int], began: float | None = None) -> None:
        """Takes what came of calls.

        Arguments:
            ended: the calls.
            runs: how many times each has run, as counted outside of all workers.
            began: when the fault was; None: each call's own beginning counts.
        """
        self.check_runs(runs)
        for one in ended:
            if one.kind == "value":
                if not runs.get(one.key):
                    self.is_lost(f"{one.key} was answered and had not run")
            elif one.kind == "lost":
                self.noticed.append(max(0.0, one.at - (one.sent if began is None else max(began, one.sent))))
            elif one.kind == "hung":
                self.is_hung(f"{one.key}: {one.text}")
            else:
                self.is_lost(f"{one.key} ended with {one.kind}: {one.text}")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: for `--only` and tests.
        fault: what happens.
        run: tries some cases, into a tally.
        quick, full: how many cases, with `--quick` and without.
        unit: what a case is.
        seeded: whether `--seeds` sets the number of cases.
        needs: says why it cannot be had here; "" where it can.
    """

    name: str
    fault: str
    run: Callable[[Tally, int], None]
    quick: int
    full: int
    unit: str = "cases"
    seeded: bool = True
    needs: Callable[[], str] = lambda: ""


ROWS: dict[str, Row] = {}


def row(
    name: str, fault: str, quick: int, full: int, unit: str = "cases", seeded: bool = True,
    needs: Callable[[], str] = lambda: "",
) -> Callable[[Callable[[Tally, int], None]], Callable[[Tally, int], None]]:  # fmt: skip
    """Makes a row of a function; see `Row`."""

    def made(run: Callable[[Tally, int], None]) -> Callable[[Tally, int], None]:
        assert name not in ROWS, name
        ROWS[name] = Row(name, fault, run, quick, full, unit, seeded, needs)
        return run

    return made


def cases(
    name: str, fault: str, quick: int, full: int, unit: str = "seeds", needs: Callable[[], str] = lambda: ""
) -> Callable[[Callable[[Tally, random.Random], None]], Callable[[Tally, random.Random], None]]:
    """As `row`, for a function that tries one case, given what is to be drawn from; a case that raises has hung."""

    def made(one: Callable[[Tally, random.Random], None]) -> Callable[[Tally, random.Random], None]:
        def run(tally: Tally, count: int) -> None:
            for seed in range(count):
                tally.tried += 1
                try:
                    one(tally, random.Random(f"{name} {seed}"))
                except Exception:
                    tally.is_hung(f"case {seed} did not come to its end:\n{traceback.format_exc()[-4000:]}")

        row(name, fault, quick, full, unit, True, needs)(run)
        return one

    return made


def has_option(name: str) -> bool:
    """Returns whether workers have an option, so that the rows about it can be tried."""
    return name in inspect.signature(rpc.RpcBackendOptions).parameters


def needs_heartbeats() -> str:
    """For rows about peers that fall silent."""
    return "" if has_option("heartbeat_timeout") else "not built yet (heartbeats)"


def heartbeat(seconds: float) -> dict[str, Any]:
    """Returns options with which a silent peer is noticed sooner; none where that is not built."""
    return {"heartbeat_timeout": seconds} if has_option("heartbeat_timeout") else {}


def play(row: Row, count: int) -> Tally:
    """Tries a row."""
    tally = Tally()
    row.run(tally, count)
    return tally


# -- printing

_HEAD = ("fault", "tried", "noticed: median", "worst", "lost silently", "repeated", "hung", "took")


def line_of(row: Row, tally: Tally | str, took: float = 0.0) -> tuple[str, ...]:
    """Returns the cells of a row's line; for a row that was not tried: why not."""
    if isinstance(tally, str):
        return (row.fault, tally, "", "", "", "", "", "")
    seen = sorted(tally.noticed)
    times = (f"{statistics.median(seen):.2f} s", f"{seen[-1]:.2f} s") if seen else ("-", "-")
    counts = str(tally.lost), str(tally.repeated), str(tally.hung)
    return (row.fault, f"{tally.tried:,} {row.unit}", *times, *counts, f"{took:.0f} s")


def print_table(rows: Sequence[Row], count: Callable[[Row], int]) -> bool:
    """Tries rows and prints the table, as Markdown; returns whether all is as it should be."""
    widths = [max(len(r.fault) for r in rows), 15, 15, 8, 13, 8, 4, 6]

    def show(cells: Sequence[str]) -> None:
        print("| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |", flush=True)

    show(_HEAD)
    show(["-" * w for w in widths])
    good, notes = True, []
    for row in rows:
        reason = row.needs()
        if reason:
            show(line_of(row, f"not tried: {reason}"))
            continue
        began = time.monotonic()
        tally = play(row, count(row))
        show(line_of(row, tally, time.monotonic() - began))
        good = good and tally.good
        notes += [f"{row.name}: {note}" for note in tally.notes]
    for note in notes:
        print(f"\n{note}")
    return good


