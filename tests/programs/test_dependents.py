"""Packages that use `torch.distributed.rpc`, unmodified, under torch and with actorrpc standing in.

The programs of the folder `dependents` use them; `dependents/requirements.txt` says how to get the packages. What is
not installed is skipped. Lines are as in `test_plain_programs`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.joining import free_port
from tests.programs.test_plain_programs import Printed, differences, end, read

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 240.0  # for a run: three processes that import much

CASES = {
    "fairscale_pipeline.py": "fairscale",
    "geometric_loader.py --workers 0": "torch_geometric",
    "geometric_loader.py --workers 2": "torch_geometric",
    "machin_world.py": "machin",
    "pippy_pipeline.py": "pippy",
    "torchrl_collector.py": "torchrl",
}
"""Programs with their arguments, and the package that each is about."""


def run(command: str, stand_in: bool) -> Printed:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # Behind ours: two of the packages bring a `benchmarks` of their own.
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("PYTHONUNBUFFERED", None)  # lines of several processes stay whole
    program, *arguments = command.split()
    how = ["-m", "actorrpc", "run"] if stand_in else []
    process = subprocess.Popen(
        [sys.executable, *how, str(HERE / "dependents" / program), *arguments, "--port", str(free_port())],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    printed = Printed()
    try:
        out, printed.errors = process.communicate(timeout=SECONDS)
    finally:
        end(process)
    assert process.returncode == 0, f"{command} ended with {process.returncode}\n{out}\n{printed.errors}"
    read(out, printed)
    return printed


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 70)
@pytest.mark.parametrize("command, package", CASES.items(), ids=CASES)
def test_a_package_gives_the_same_with_either_library(command: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; see tests/programs/dependents/requirements.txt")
    theirs, ours = run(command, stand_in=False), run(command, stand_in=True)
    assert [library.split(".")[0] for library in theirs.libraries] == ["torch"]
    assert [library.split(".")[0] for library in ours.libraries] == ["actorrpc"]
    assert theirs.results
    differ = differences(theirs.results, ours.results)
    assert not differ, "\n".join([*differ, ours.errors])
