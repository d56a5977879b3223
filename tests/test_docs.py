"""The pages under `docs` name tests that exist, and miss no row. (Their code: test_docs_code.py.)"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))

SECTIONS = {
    "A": "01 02 03 04 07 08 09 10 12 14 15",
    "B": "16 18 19 20 22 24 26 27 29 30 31 32 33 34",
    "C": "36 38 39 40 41 45",
    "D": "46 47 48 49 50 51 54 55 56 57 60",
    "E": "64 65 66 67 68 69 71 72 73 74 76 77 78",
    "F": "79",
}
"""The public reports that `docs/faults.md` answers, by section; the numbers between were left out from the first."""

TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+)(?:\[([^]\n]*)])?)?")


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Returns the functions of a file, those in classes too; none if there is no such file."""
    file = ROOT / path
    tree = ast.parse(file.read_text() if file.exists() else "")
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def faults_in(text: str) -> list[str]:
    """Returns the tests that a text names, and that are not there."""
    faults = []
    for path, name, case in TEST.findall(text):
        known = names_in(path)
        if not known or (name and not (name.startswith("test_") and name in known)):
            faults.append(f"{path}::{name}" if name else path)
        elif case.isidentifier() and not re.search(rf"\b{case}\b", (ROOT / path).read_text()):
            faults.append(f"{path}::{name}[{case}]")
    return faults


def bare_names_in(text: str) -> list[str]:
    """Returns the tests that a text names without their file, so that nobody would see them go."""
    return re.findall(r"(?<!::)\btest_\w+(?!\w*\.py)\b(?!/)", text)


def section_of(page: str, title: str) -> str:
    """Returns what stands under a heading of the second level."""
    (found,) = re.findall(rf"^## {re.escape(title)}.*\n((?:(?!## ).*\n)*)", (ROOT / page).read_text(), re.MULTILINE)
    return str(found)


def rows_of(text: str) -> list[list[str]]:
    """Returns the cells of a text's table, without its head."""
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    assert faults_in(page.read_text()) == []


@pytest.mark.parametrize("page", ["faults.md", "reference-coverage.md"])
def test_a_page_names_every_test_with_its_file(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(TEST.findall(text)) > 100
    assert bare_names_in(text) == []


def test_a_name_that_is_not_there_would_be_seen() -> None:
    here = "tests/test_docs.py::"
    good = f"`{here}test_every_test_that_a_page_names_is_there[design.md]`, all of `tests/worlds.py`"
    assert faults_in(good) == []
    assert bare_names_in(good) == []
    case = "test_in_one_world[an_actor_may_call_it]"
    bad = ["tests/nowhere.py", f"{here}test_of_nothing", f"{here}rows_of", f"tests/test_actors.py::{case}"]
    assert faults_in(", ".join(f"`{name}`" for name in bad)) == bad
    assert bare_names_in("`test_of_nothing`, and `test_docs.py`: `test_other`") == ["test_of_nothing", "test_other"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_fault_has_one_row_in_its_section(section: str) -> None:
    rows = rows_of(section_of("docs/faults.md", f"{section}. "))
    assert Counter(row[0] for row in rows) == Counter(SECTIONS[section].split())
    for row in rows:
        assert len(row) == 4
        assert all(row)
        assert TEST.search(row[3]) or row[3].startswith("not built yet"), row


def test_the_page_of_faults_has_no_other_sections() -> None:
    headings = re.findall(r"^## (\w)\. ", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    assert headings == list(SECTIONS)


def test_what_is_easily_missed_is_covered_number_by_number() -> None:
    rows = rows_of(section_of("docs/reference-coverage.md", "Easily missed"))
    assert [row[0] for row in rows] == [str(n) for n in range(1, 17)]
    assert all(TEST.search(row[2]) for row in rows)


@pytest.mark.parametrize("title", ["What is promised with a token", "What is promised in any case"])
def test_every_promise_of_the_page_on_security_names_its_tests(title: str) -> None:
    rows = rows_of(section_of("docs/security.md", title))
    assert len(rows) > 3
    assert all(len(row) == 2 and TEST.search(row[1]) for row in rows)


def test_who_looks_for_the_security_policy_is_led_to_that_page() -> None:
    assert "](docs/security.md)" in (ROOT / "SECURITY.md").read_text()


def test_the_readme_shows_some() -> None:
    assert len(re.findall(r"^```python$", (ROOT / "README.md").read_text(), re.MULTILINE)) >= 2


@pytest.mark.parametrize("example", sorted(path.parent for path in (ROOT / "examples").glob("*/__main__.py")), ids=str)
def test_an_example_has_a_page_with_its_options_and_files_and_a_row_in_the_readme(example: Path) -> None:
    page, program = (example / "README.md").read_text(), (example / "__main__.py").read_text()
    for option in re.findall(r'add_argument\("(--[\w-]+)"', program):
        assert f"| `{option}` |" in page, option
    for file in example.glob("*.py"):
        assert file.name == "__init__.py" or f"| `{file.name}` |" in page, file
    assert f"| `python -m examples.{example.name}` |" in section_of("README.md", "Examples")


def test_the_program_of_the_page_on_testing_passes_its_test(tmp_path: Path) -> None:
    text = section_of("docs/testing.md", "A program and its test")
    program, test = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "counting.py").write_text(program)
    (tmp_path / "test_counting.py").write_text(test)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_counting.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "21 passed" in done.stdout


def test_the_rules_of_the_page_on_testing_are_all_there_are() -> None:
    from actorrpc.testing import Faults

    text = section_of("docs/testing.md", "Messages that come to harm")
    (block, _) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {})
    rules = {name for name in vars(Faults) if not name.startswith("_")} - {"judge", "altered", "seed", "active", "done"}
    assert {row[0].strip("`") for row in rows_of(text)} == rules


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_of_actors_is_a_program_that_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/actors.md").read_text()
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert done.stderr.count("restart 1 of 3") == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "('A', ['B', 'C'], ['A', 'D'])"
    steps = ast.literal_eval(lines[1])
    assert [step for _, step in steps] == list(range(6))
    assert steps[-1][0] >= 3  # of weights that were set between two items
    assert lines[2] == "10"
    assert re.search(r", 6, \(\('simulator:1',\), \[<class 'ValueError'>\]\)", lines[-4])
    assert lines[-3] == "(64, True)"
    assert lines[-2] == "(1, 2)"
    assert lines[-1] == "{'learner': 1, 'simulator': 3, 'keeper': 1}"


def run_program(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=program.parent, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
