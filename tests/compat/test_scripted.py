"""Scripted code that makes calls, and what goes with it, under the stand-in: a program that knows nothing of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "scripted_program.py"
CHECKS = re.findall(r"^def (check_\w+)", PROGRAM.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What has become of the program's checks, by name: "" or a traceback."""
    root = str(FOLDER.parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "run", "--quiet", str(PROGRAM)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": root}, cwd=root, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", CHECKS)
def test_the_program_finds(name: str, found: dict[str, str]) -> None:
    assert found[name] == ""


def test_all_checks_have_run(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)
