"""The programs of `docs/api-review.md`: counted as its table says, compiled, and run where their library is there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import actorrpc as rpc
from tests.joining import free_port
from tests.worlds import inside

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/api-review.md").read_text()
BLOCKS = {
    (program, library): block
    for program, library, block in re.findall(
        r"^<!-- (\w+): (\w+) -->\n```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL
    )
}
LIBRARIES = {
    "actorrpc": "actorrpc",
    "torch": "torch.distributed.rpc",
    "ray": "Ray",
    "xoscar": "Xoscar",
    "monarch": "Monarch",
}
PROGRAMS = {
    "echo": ("Echo", r"hello"),
    "parameter_server": ("Parameter server", r"error 0\.00"),
    "agent_observer": ("Agent and observers", r"\[\(0, 33\), \(1, 32\)\]"),
    "pipeline": ("Pipeline", r"\[0\.0, 6\.0, 12\.0, 18\.0, 24\.0, 30\.0, 36\.0, 42\.0\]"),
    "fan_out": ("Fan-out and gather", r"332833500"),
}
INSTALLED = [library for library in LIBRARIES if find_spec(library) is not None]


def count(program: str) -> int:
    """Returns how many lines are neither blank nor a comment."""
    lines = [line.strip() for line in program.splitlines()]
    return sum(1 for line in lines if line and not line.startswith("#"))


def table() -> dict[str, list[str]]:
    """Returns the cells of the page's table, by program, its head included."""
    rows = re.findall(r"^\| (.+?) \|$", TEXT, re.MULTILINE)
    cells = [row.split(" | ") for row in rows if not row.startswith("---")]
    return {row[0]: row[1:] for row in cells}


def test_the_page_has_each_program_for_each_library() -> None:
    assert sorted(BLOCKS) == sorted((program, library) for program in PROGRAMS for library in LIBRARIES)


def test_the_table_counts_right() -> None:
    expected = {"program": list(LIBRARIES.values())}
    for program, (title, _) in PROGRAMS.items():
        expected[title] = [str(count(BLOCKS[program, library])) for library in LIBRARIES]
    sums = [sum(count(BLOCKS[program, library]) for program in PROGRAMS) for library in LIBRARIES]
    assert table() == {**expected, "all five": [str(number) for number in sums]}


def test_blank_lines_and_comments_do_not_count() -> None:
    assert count("import os\n\n# a word\nos.sync()  # another\n    \n    # a third\n") == 2


@pytest.mark.parametrize("program, library", BLOCKS)
def test_a_program_compiles_and_is_for_the_library_that_it_says(program: str, library: str) -> None:
    block = BLOCKS[program, library]
    compile(block, f"{program} for {library}", "exec")
    imported = set(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE))
    assert library in imported
    assert not imported & (set(LIBRARIES) - {library, "torch"}), "another library's"
    assert all(len(line) <= 120 for line in block.splitlines())


def run(program: str, library: str, folder: Path) -> str:
    file = folder / f"{program}_{library}.py"
    block = BLOCKS[program, library]
    for port in ("29500", "9999"):
        block = block.replace(port, str(free_port()))
    file.write_text(block)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_what_the_page_says(program: str, library: str, tmp_path: Path) -> None:
    assert re.search(rf"^{PROGRAMS[program][1]}$", run(program, library, tmp_path), re.MULTILINE)


class Doubler(rpc.Actor):
    def double(self, x: int | rpc.RRef[int]) -> int:
        return 2 * (x.to_here() if isinstance(x, rpc.RRef) else x)


@inside
def test_a_future_as_an_argument_is_refused_with_what_to_write() -> None:
    doubler = Doubler.spawn(1)
    assert doubler.rpc_sync().double(doubler.remote().double(2)) == 8
    refused = functools.partial(doubler.rpc_sync().double, doubler.rpc_async().double(2))
    with pytest.raises(rpc.SerializationError, match=r"send its result, or make its call with remote\(\)") as error:
        refused()
    assert "send the reference" in str(error.value)
