"""Programs for `torch.distributed.rpc`, unchanged, under torch and with actorrpc standing in: their results are equal.

The programs are in the folder `plain`, and know nothing of actorrpc. A line `result NAME=VALUE` says what must be
equal; each of their workers says in a line `library MODULE` where its `init_rpc` is from.
"""

from __future__ import annotations

import ast
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.joining import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 100.0  # for a run
CLOSE = {"rel_tol": 1e-5, "abs_tol": 1e-6}
"""For numbers with a fraction: what several threads have added up was added in any order."""


@dataclass(frozen=True)
class Case:
    """A program, and how it is started.

    Attributes:
        command: the program and its arguments.
        workers: how many say which library they have.
        by: "itself"; "torchrun", in as many processes as there are workers; or "hand", each rank by a command with
            `--rank`.
        raises: whether functions fail in it that are meant to: each such call is in the callee's log.
    """

    command: str
    workers: int
    by: str = "itself"
    raises: bool = False

    def commands(self, stand_in: bool, folder: Path) -> list[list[str]]:
        """What to start, all at the same time. Torchrun's processes write to files in the folder."""
        program, *arguments = self.command.split()
        run = ["-m", "actorrpc", "run"] if stand_in else []
        line = [*run, str(HERE / "plain" / program), *arguments]
        if self.by == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.workers)]
            # They do not buffer, so that lines which go the same way would get mixed.
            return [[sys.executable, *launcher, "--redirects", "1", "--log-dir", str(folder), *line]]
        if self.by == "hand":
            return [[sys.executable, *line, "--rank", str(rank)] for rank in range(self.workers)]
        return [[sys.executable, *line]]

    def __str__(self) -> str:
        return f"{self.command}, by {self.by}" if self.by != "itself" else self.command


CASES = [
    Case("cartpole.py --episodes 6", 2),
    Case("cartpole.py --world_size 4 --episodes 2", 4),
    Case("rnn.py --epochs 2", 2),
    Case("parameter_server.py --start_method spawn", 2),
    Case("parameter_server.py --start_method forkserver", 2),
    Case("parameter_server.py", 2, by="hand"),
    Case("batch_parameter_server.py", 3),
    Case("batch_cartpole.py", 3),
    Case("batch_cartpole.py --no_batch", 3),
    Case("ddp_rpc.py", 4),
    Case("profiled_calls.py", 2),
    Case("pipeline.py", 3),
    Case("references.py", 3, raises=True),
    Case("two_trainers.py", 2),
    Case("two_calls.py", 2, by="torchrun"),
    Case("one_address.py", 2, by="torchrun"),
    Case("wider_world.py", 4, by="torchrun"),
]


@dataclass
class Printed:
    """What a run printed: results by name, the libraries of its workers, stderr."""

    results: dict[str, Any] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)
    errors: str = ""


def run(case: Case, stand_in: bool, folder: Path) -> Printed:
    """Runs a program to its end. The folder is to be an empty one."""
    environment = os.environ | {
        "GROUP_PORT": str(free_port()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("PYTHONUNBUFFERED", None)  # lines of several processes stay whole
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in case.commands(stand_in, folder)
    ]
    printed = Printed()
    try:
        for process in started:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"{case} ended with {process.returncode}\n{out}\n{err}"
            read(out, printed)
            printed.errors += err
        for log in folder.glob("*/attempt_0/*/stdout.log"):
            read(log.read_text(), printed)
    finally:
        for process in started:
            end(process)
    return printed


def end(process: subprocess.Popen[str]) -> None:
    """Ends a program with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its workers at the first
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            continue


def read(out: str, printed: Printed) -> None:
    for line in out.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "library":
            printed.libraries.append(rest)
        elif kind == "result":
            name, _, value = rest.rpartition("=")
            assert name, line
            assert name not in printed.results, f"{name} is there twice"
            printed.results[name] = parsed(value)


def parsed(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value  # a word


def same(a: Any, b: Any) -> bool:
    """Compares two values: numbers with a fraction as CLOSE says, all else exactly."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, **CLOSE)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Says what differs, one line for each result."""
    nothing = "nothing"
    pairs = {name: (theirs.get(name, nothing), ours.get(name, nothing)) for name in [*theirs, *ours]}
    return [f"{name}: torch has {a}, actorrpc has {b}" for name, (a, b) in pairs.items() if not same(a, b)]


def compare(case: Case, folder: Path) -> None:
    theirs = run(case, stand_in=False, folder=folder / "theirs")
    ours = run(case, stand_in=True, folder=folder / "ours")
    assert len(theirs.libraries) == case.workers
    assert all(library.startswith("torch.") for library in theirs.libraries)
    assert len(ours.libraries) == case.workers
    assert all(library.startswith("actorrpc.") for library in ours.libraries)
    said = ours.errors.count("actorrpc stands in for torch.distributed.rpc")
    assert said == (case.workers if case.by == "hand" else 1), ours.errors  # once for a command
    assert ("Traceback" in ours.errors) is case.raises, ours.errors
    assert theirs.results
    differ = differences(theirs.results, ours.results)
    assert not differ, "\n".join([*differ, ours.errors])


def test_a_parameter_server_gives_the_same_with_either_library(tmp_path: Path) -> None:
    compare(Case("parameter_server.py", 2), tmp_path)  # by fork: of these programs the quickest


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 70)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plain_program_gives_the_same_with_either_library(case: Case, tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.parametrize(
    "ours, differ",
    [
        ("result a=[1.0, 'x']\nresult b=word", False),
        ("result a=[1.000001, 'x']\nresult b=word", False),
        ("result a=[1.001, 'x']\nresult b=word", True),
        ("result a=[1.0, 'y']\nresult b=word", True),
        ("result a=[1, 'x']\nresult b=word", True),
        ("result a=[1.0]\nresult b=word", True),
        ("result a=[1.0, 'x']", True),
        ("result a=[1.0, 'x']\nresult b=word\nresult c=None", True),
    ],
)
def test_a_difference_is_seen(ours: str, differ: bool) -> None:
    first, second = Printed(), Printed()
    read("result a=[1.0, 'x']\nresult b=word", first)
    read(ours, second)
    assert bool(differences(first.results, second.results)) is differ
