"""docs/deploying.md: its program runs, and every command that it shows can be read."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.commands import launch as command

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "deploying.md").read_text()
PROGRAM, CORES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"actorrpc launch (program:Agent[^`\n\\]*)")
COMMANDS = sorted({found.strip() for text in (PAGE, command.EXAMPLES) for found in COMMAND.findall(text)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("program", None)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_can_be_read(line: str, folder: Path) -> None:
    parser = argparse.ArgumentParser()
    command.declare(parser.add_subparsers())
    roles = command._roles(parser.parse_args(["launch", *shlex.split(line)]))
    assert list(roles) == ["agent", "observer"]
    assert roles["observer"].count in (4, 5)  # type: ignore[union-attr]


def test_the_numbers_of_processes_fit_the_roles() -> None:
    lines = PAGE.replace("\\\n", " ").splitlines()
    for line in lines:
        if number := re.search(r"(?:--nproc-per-node|mpirun -n) (\d+).*Observer\*(\d+)", line):
            hosts = re.search(r"--nnodes (\d+)", line)
            assert int(number[1]) * int(hosts[1] if hosts else 1) == int(number[2]) + 1, line
    assert "#SBATCH --ntasks=5" in PAGE


def test_cores_and_gpus_are_asked_for_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM + CORES, space)
    monkeypatch.setattr(rpc, "launch", lambda **roles: roles)
    found = space["start"]()
    assert [(role.cpus, role.devices) for role in found.values()] == [(4, 1), (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["program", "command"])
def test_the_program_of_the_page_runs_either_way(way: str, folder: Path) -> None:
    (first,) = re.findall(r"^    actorrpc (launch .*--set.*)", PAGE, re.MULTILINE)
    line = ["program.py"] if way == "program" else ["-m", "actorrpc", *shlex.split(first)]
    done = subprocess.run(
        [sys.executable, *line], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" is on ")[0] for line in done.stdout.splitlines()] == [f"observer:{i}" for i in range(4)]
    assert done.stdout.rstrip().endswith("with seed 4")
