"""The rows of the table, and what is made of their figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pairs import Plan, Samples, prepare, ratio, say

SLACK = 0.75
"""What part of "never below" --check lets pass: machines are noisy, and a fault is larger than that."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Arguments:
        key: names it.
        title: what it is.
        unit: of its figures.
        aim, least: how many times ahead of torch it should be, and must be; None where there is nothing of torch's.
        rate: whether more is better.
        most: for a figure without a counterpart: what it may be at most.
        group: rows of one group are one row to those who count.
    """

    key: str
    title: str
    unit: str = "us"
    aim: float | None = None
    least: float | None = None
    rate: bool = False
    most: float | None = None
    group: str = ""


@dataclass
class Result:
    """What was found of a row.

    Attributes:
        row: which.
        theirs, ours: the medians; None where there is none.
        ahead: how many times ahead of torch: the median of the ratios of blocks that lay side by side.
        notes: what else there is to say, in words.
        samples: the figures of all blocks, by lane.
        section: in which it was measured.
    """

    row: Row
    theirs: float | None = None
    ours: float | None = None
    ahead: float | None = None
    notes: list[str] = field(default_factory=list)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    section: str = ""

    @property
    def falls_short(self) -> bool:
        """Whether it is below what it must be."""
        return self.by(1.0)

    @property
    def fails(self) -> bool:
        """Whether it is so far below that it cannot be noise."""
        return self.by(SLACK)

    @property
    def at_the_aim(self) -> bool:
        row = self.row
        if row.aim is not None and self.ahead is not None:
            return self.ahead >= row.aim
        return row.most is not None and self.ours is not None and self.ours <= row.most

    def by(self, part: float) -> bool:
        """Returns whether it is below that part of what it must be."""
        row = self.row
        if row.least is not None and self.ahead is not None:
            return self.ahead < row.least * part
        return row.most is not None and self.ours is not None and self.ours > row.most / part


def result_of(row: Row, samples: Mapping[str, Sequence[float]], notes: Iterable[str] = ()) -> Result:
    """Returns what the samples of the lanes "torch" and "ours" come to."""
    theirs, ours = samples.get("torch"), samples.get("ours")
    found = Result(row, notes=list(notes), samples=samples)
    found.theirs = statistics.median(theirs) if theirs else None
    found.ours = statistics.median(ours) if ours else None
    if theirs and ours:
        found.ahead = ratio(ours, theirs) if row.rate else ratio(theirs, ours)
    return found


def results_of(rows: Sequence[Row], samples: Samples, limits: Mapping[str, str] | None = None) -> list[Result]:
    """Returns the results of rows.

    Arguments:
        rows: the rows.
        samples: what was measured of them.
        limits: by lane that is a limit of the machine, how to say what a row comes to beside it: "x bare ipc".
    """
    found = []
    for row in rows:
        lanes = samples[row.key]
        notes = []
        for lane, words in (limits or {}).items():
            if lanes.get(lane) and lanes["ours"]:
                notes.append(f"{ratio(lanes['ours'], lanes[lane]):.2f} {words}")
        found.append(result_of(row, lanes, notes))
    return found


Section = Callable[[Plan], list[Result]]


def table(results: Sequence[Result]) -> str:
    """Returns the table, with the counts at its end."""
    lines = [
        f"{'row':44}{'unit':>9}{'torch':>12}{'ours':>12}{'ahead':>8}{'aim':>7}{'least':>7}  ",
        "-" * 110,
    ]
    for x in results:
        row = x.row
        verdict = "BELOW" if x.falls_short else "aim" if x.at_the_aim else ""
        aim = _number(row.aim) if row.aim is not None else "" if row.most is None else f"<={_number(row.most)}"
        notes = ", ".join([*([verdict] if verdict else []), *x.notes])
        lines.append(
            f"{row.title:44}{row.unit:>9}{_number(x.theirs):>12}{_number(x.ours):>12}"
            f"{'' if x.ahead is None else f'{x.ahead:.2f}':>8}{aim:>7}{_number(row.least):>7}  {notes}".rstrip()
        )
    counted = [x for x in results if x.row.aim is not None or x.row.most is not None]
    if counted:
        groups = _groups(counted)
        reached = [name for name, members in groups.items() if all(x.at_the_aim for x in members)]
        below = [x.row.title for x in counted if x.falls_short]
        lines += [
            "",
            f"at the aim: {sum(x.at_the_aim for x in counted)} of {len(counted)} rows; "
            f"{len(reached)} of {len(groups)} where rows that belong together count as one, by their worst",
            f'below "least": {"; ".join(below) if below else "none"}',
        ]
    return "\n".join(lines)


def _groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for x in results:
        groups.setdefault(x.row.group or x.row.key, []).append(x)
    return groups


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def complaints(results: Sequence[Result]) -> list[str]:
    """Returns what is so far below "least" that it cannot be noise."""
    found = []
    for x in results:
        if x.fails and x.ahead is not None:
            found.append(f"{x.row.title}: {x.ahead:.2f} times ahead; least is {x.row.least:g}")
        elif x.fails:
            found.append(f"{x.row.title}: {_number(x.ours)} {x.row.unit}; {x.row.most:g} at most are wanted")
    return found


def machine() -> dict[str, Any]:
    """Returns what figures hang on: cores, memory, versions. Nothing that names the machine."""
    import torch
    import zmq

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": zmq.__version__,
        "zeromq": zmq.zmq_version(),
    }


def write_json(path: Path, results: Sequence[Result], plan: Plan) -> None:
    """Writes everything that was found."""
    rows = []
    for x in results:
        found = asdict(x)
        verdict = {"at_the_aim": x.at_the_aim, "falls_short": x.falls_short, "fails": x.fails}
        rows.append({**found.pop("row"), **found, **verdict})
    path.write_text(json.dumps({"machine": machine(), "plan": asdict(plan), "rows": rows}, indent=1) + "\n")


def parser_for(prog: str, description: str) -> argparse.ArgumentParser:
    """Returns the options that all benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--rounds", type=int, default=3, help="how many fresh sets of worlds (default: 3)")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each row in a round (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of a block (default: 0.3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every block's figures there")
    parser.add_argument("--check", action="store_true", help=f'fail if a row is below {SLACK} times its "least"')
    return parser


def plan_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    """Returns what the options ask for; ends the program where they make no sense."""
    for name in ("rounds", "blocks", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    return Plan(options.rounds, options.blocks, options.seconds, options.check)


def report(results: Sequence[Result], plan: Plan, json_to: Path | None) -> int:
    """Prints the table, and writes JSON; returns the program's exit code."""
    print(table(results))
    if json_to is not None:
        write_json(json_to, results, plan)
    found = complaints(results) if plan.check else []
    for complaint in found:
        say(complaint)
    return 1 if found else 0


def run_command(
    prog: str,
    description: str,
    section: Section,
    arguments: list[str] | None,
    further: Callable[[Sequence[Result]], list[str]] | None = None,
) -> int:
    """Runs one section as a program of its own.

    Arguments:
        prog, description: what it is called, and does.
        section: what measures.
        arguments: those of the command line.
        further: returns what else --check has to complain of, given the results.
    """
    parser = parser_for(prog, description)
    options = parser.parse_args(arguments)
    plan = plan_of(parser, options)
    prepare()
    results = section(plan)
    code = report(results, plan, options.json)
    more = further(results) if further is not None and plan.check else []
    for complaint in more:
        say(complaint)
    return 1 if more else code
