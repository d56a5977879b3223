"""PyTorch's own RPC tests, with actorrpc standing in (docs/conformance.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.suite import NAMES, read_names

ROOT = Path(__file__).parent.parent.parent
EXPECTED = read_names(NAMES)
SAMPLE = EXPECTED[:: len(EXPECTED) // 40][:40]
_ROW = re.compile(r"^\| `(\w+\.\w+)` \| (.+) \|$", re.MULTILINE)


def run_suite(names: list[str], folder: Path, seconds: float) -> str:
    """Runs tests of PyTorch in a process of their own, and returns what it printed."""
    chosen = folder / "names.txt"
    chosen.write_text("\n".join(names))
    command = [sys.executable, "-m", "tests.conformance.suite", "run", "--names", str(chosen), "--logs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_a_sample_of_pytorchs_own_tests_passes(tmp_path: Path) -> None:
    said = run_suite(SAMPLE, tmp_path, 290.0)
    assert f"{len(SAMPLE)} of {len(SAMPLE)} pass" in said, said


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_of_pytorchs_own_tests_that_are_expected_to_pass_do(tmp_path: Path) -> None:
    said = run_suite(EXPECTED, tmp_path, 2990.0)
    assert f"{len(EXPECTED)} of {len(EXPECTED)} pass" in said, said


def test_every_test_of_pytorch_that_is_told_apart_has_its_reason_and_is_not_expected_to_pass() -> None:
    rows = _ROW.findall((ROOT / "docs" / "conformance.md").read_text())
    assert rows
    assert all(reason.strip() for _, reason in rows)
    assert not {name for name, _ in rows} & set(EXPECTED)
