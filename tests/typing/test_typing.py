"""What type checkers make of a user's program."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARK = "# wrong:"


def mypy(program: str, tmp_path: Path) -> str:
    """Returns what mypy says of a program, with settings of its own."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = true\nmypy_path = {ROOT}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(HERE / program)], stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    return done.stdout


def pyright(program: str, tmp_path: Path) -> str:
    """Returns what pyright says of a program."""
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"include": ["{HERE / program}"], "extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}'
    )
    checker = shutil.which("pyright") or shutil.which("basedpyright")
    if checker is None:
        pytest.skip("neither pyright nor basedpyright is installed")
    done = subprocess.run(
        [checker, "--pythonpath", sys.executable, "-p", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_program_is_found_right(checker: object, tmp_path: Path) -> None:
    assert callable(checker)
    found = checker("good.py", tmp_path)
    assert not re.search(r"\berror\b:", found), found
    assert re.search(r"no issues found|\b0 errors", found), found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_mistakes_are_found(checker: object, tmp_path: Path) -> None:
    assert callable(checker)
    found = checker("wrong.py", tmp_path)
    lines = (HERE / "wrong.py").read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if MARK in line}
    said = {int(number) for number in re.findall(r"wrong\.py:(\d+)(?::\d+)*(?: -)?:? error", found)}
    assert said == expected, found
