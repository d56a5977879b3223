"""`python -m actorrpc run --compare`: a program under torch.distributed.rpc and under actorrpc, one after the other."""

from __future__ import annotations

import difflib
import os
import resource
import subprocess
import sys
import time
from typing import NamedTuple

from actorrpc.compat.children import VARIABLE

TORCH, OURS = "torch.distributed.rpc", "actorrpc"


class Run(NamedTuple):
    """One run of a program.

    Attributes:
        code: its exit code.
        text: what it and its processes wrote, stdout and stderr together.
        seconds: how long it took.
        processor: seconds of processor time that it and its processes took.
    """

    code: int
    text: str
    seconds: float
    processor: float


def compare(program: str, arguments: list[str], *, module: bool = False) -> str:
    """Runs a program twice, and says how the runs differ.

    Arguments:
        program: a Python file, or with `module` the name of a module.
        arguments: what it is given.

    Returns the differences of the output, line by line, and a table of times.

    Raises:
        RuntimeError: this process is one of several ranks, or the stand-in is in force in it.
    """
    if "RANK" in os.environ or VARIABLE in os.environ:
        raise RuntimeError("--compare starts the whole program by itself, twice: not under torchrun, nor under `run`")
    what = ["-m", program] if module else [program]
    theirs = _run([sys.executable, *what, *arguments])
    ours = _run([sys.executable, "-m", "actorrpc", "run", "--quiet", *what, *arguments])
    return f"{differences(theirs.text, ours.text)}\n\n{table(theirs, ours)}"


def differences(theirs: str, ours: str) -> str:
    """Returns the lines that are in one text only, marked - (torch) and +; or a line that says that there are none."""
    lines = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), TORCH, OURS, lineterm="", n=0)
    return "\n".join(lines) or "The output is the same."


def table(theirs: Run, ours: Run) -> str:
    """Returns the times of both runs, and how many times as fast the second is."""
    rows = [f"{'':<20}{TORCH:>24}{OURS:>12}{'times ahead':>14}"]
    for name, a, b in (
        ("wall time, s", theirs.seconds, ours.seconds),
        ("processor time, s", theirs.processor, ours.processor),
    ):
        rows.append(f"{name:<20}{a:>24.2f}{b:>12.2f}{a / max(b, 1e-9):>14.2f}")
    rows.append(f"{'exit code':<20}{theirs.code:>24}{ours.code:>12}")
    return "\n".join(rows)


def _run(command: list[str]) -> Run:
    before, begun = _processor_time(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Run(done.returncode, done.stdout, time.monotonic() - begun, _processor_time() - before)


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
