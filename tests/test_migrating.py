"""The worked program of `docs/migrating.md`: each step of it runs, and gives the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.joining import free_port

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/migrating.md").read_text()
STEPS = dict(re.findall(r"^<!-- step: (\w+) -->\n```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def run(step: str, folder: Path, *how: str) -> str:
    program = folder / f"step_{step}.py"
    program.write_text(STEPS[step].replace("29500", str(free_port())))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *how, str(program)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_of_the_worked_program_gives_what_it_gives_under_torch(tmp_path: Path) -> None:
    assert list(STEPS) == ["torch", "actors", "roles"]
    expected = run("torch", tmp_path)
    assert re.fullmatch(r"best 0\.\d+ after 120 looks\n", expected)
    assert run("torch", tmp_path, "-m", "actorrpc", "run") == expected
    assert run("actors", tmp_path) == expected
    assert run("roles", tmp_path) == expected


def test_the_steps_differ_in_what_the_text_says_they_do() -> None:
    before, after = STEPS["torch"].splitlines(), STEPS["actors"].splitlines()
    changed = [line for line in after if line and line not in before]
    assert changed == ["import actorrpc as rpc", "class Judge(rpc.Actor):"]
