"""Every piece of Python that a page shows runs, and prints what the page says that it prints.

A block is a program of its own, unless a comment in the line before it says otherwise:

- `<!-- continues -->`: it goes on with the program of the block before it;
- `<!-- not run: reason -->`: nobody can run it here;
- `<!-- word: word -->`: a name, for the page's own test (BY_OTHERS).

A block of text after it that has `<!-- prints -->` before it is what the program prints to stdout; with
`<!-- prints in any order -->` its lines may come in another order. Pages whose code needs more than that have a test of
their own, in BY_OTHERS.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.joining import free_port

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "examples").rglob("*.md"))
BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BY_OTHERS = {
    "docs/actors.md": (10, "tests/test_docs.py::test_the_page_of_actors_is_a_program_that_runs"),
    "docs/api-review.md": (25, "tests/test_api_review.py::test_a_program_prints_what_the_page_says"),
    "docs/deploying.md": (2, "tests/test_deploying_page.py::test_the_program_of_the_page_runs_either_way"),
    "docs/finding-out.md": (4, "tests/test_finding_out_page.py::test_the_code_of_the_page_does_what_it_says"),
    "docs/migrating.md": (
        3,
        "tests/test_migrating.py::test_every_step_of_the_worked_program_gives_what_it_gives_under_torch",
    ),
    "docs/logging.md": (2, "tests/test_tracing_page.py::test_the_code_of_the_pages_does_what_they_say"),
    "docs/tracing.md": (2, "tests/test_tracing_page.py::test_the_code_of_the_pages_does_what_they_say"),
    "docs/testing.md": (4, "tests/test_docs.py::test_the_program_of_the_page_on_testing_passes_its_test"),
}
"""Pages whose blocks are run elsewhere: how many there are, so that none is added unseen, and a test that runs them."""

QUICK = {("docs/start.md", 0)}


@dataclass
class Program:
    """A program of a page.

    Attributes:
        source: its text.
        prints: what it prints, as the page says; None where that says nothing.
        ordered: whether it prints that in this order.
        reason: why it cannot be run; "" where it can.
    """

    source: str
    prints: str | None = None
    ordered: bool = True
    reason: str = ""


def programs_of(text: str) -> list[Program]:
    """Returns the programs that a page shows.

    Raises:
        ValueError: a mark means nothing, or stands where it means nothing.
    """
    programs: list[Program] = []
    for mark, tag, body in BLOCK.findall(text):
        if tag == "python":
            if mark == "continues":
                programs[-1].source += "\n" + body
            elif not mark or re.fullmatch(r"\w+: \w+", mark):
                programs.append(Program(body))
            elif mark.startswith("not run: "):
                programs.append(Program(body, reason=mark.removeprefix("not run: ")))
            else:
                raise ValueError(f"<!-- {mark} --> says nothing of a piece of Python")
        elif mark.startswith("prints"):
            if programs[-1].prints is not None:
                raise ValueError("a program has two outputs")
            programs[-1].prints, programs[-1].ordered = body, mark == "prints"
    return programs


@pytest.mark.parametrize("page", PAGES)
def test_python_that_a_page_shows_can_be_read(page: str) -> None:
    for program in programs_of((ROOT / page).read_text()):
        ast.parse(program.source)


OWN = [page for page in PAGES if page not in BY_OTHERS]
SHOWN = {
    (page, i): program
    for page in OWN
    for i, program in enumerate(programs_of((ROOT / page).read_text()))
    if not program.reason
}


def run(source: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own."""
    (folder / "program.py").write_text(source.replace("29500", str(free_port())))
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def faults_of(program: Program, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns what a program did otherwise than its page says."""
    faults = [f"it ended with {done.returncode}: {done.stderr}"] if done.returncode else []
    if "Traceback" in done.stderr:
        faults.append(f"it showed an error: {done.stderr}")
    if program.prints is not None:
        printed, expected = done.stdout.splitlines(), program.prints.splitlines()
        if printed != expected if program.ordered else sorted(printed) != sorted(expected):
            faults.append(f"it printed {printed}, and not {expected}")
    return faults


@pytest.mark.parametrize(
    "page, number",
    [pytest.param(*key, marks=() if key in QUICK else pytest.mark.slow, id=f"{key[0]}-{key[1]}") for key in SHOWN],
)
@pytest.mark.timeout(300)
def test_a_program_of_a_page_does_what_the_page_says(page: str, number: int, tmp_path: Path) -> None:
    program = SHOWN[page, number]
    assert faults_of(program, run(program.source, tmp_path)) == []


@pytest.mark.parametrize("page", BY_OTHERS)
def test_the_code_of_a_page_that_is_left_out_here_is_run_by_its_own_test(page: str) -> None:
    count, test = BY_OTHERS[page]
    assert sum(tag == "python" for _, tag, _ in BLOCK.findall((ROOT / page).read_text())) == count
    file, name = test.split("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_no_page_shows_python_under_another_name() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        tags = {tag for _, tag, _ in BLOCK.findall(text)}
        assert tags <= {"python", "text", "sh", "yaml", "toml", "dockerfile", "json", "ini"}, page
        for indented in re.findall(r"(?:^    .*\n)+", re.sub(BLOCK, "", text), re.MULTILINE):
            assert not re.search(r"^    (?:import|from|def|class|with|for) ", indented, re.MULTILINE), (page, indented)


def test_what_a_program_does_otherwise_than_its_page_says_is_seen(tmp_path: Path) -> None:
    text = (
        "```python\nprint(1)\n```\n\n<!-- continues -->\n```python\nprint(2)\n```\n\n"
        "<!-- prints -->\n```text\n1\n2\n```\n<!-- not run: it needs a GPU -->\n```python\nprint(3)\n```\n"
        "```python\nraise SystemExit(4)\n```\n<!-- prints in any order -->\n```text\n5\n6\n```\n"
    )
    first, left_out, last = programs_of(text)
    assert (first.source, first.prints, first.ordered) == ("print(1)\n\nprint(2)\n", "1\n2\n", True)
    assert left_out.reason == "it needs a GPU"
    assert (last.prints, last.ordered) == ("5\n6\n", False)
    assert faults_of(first, run(first.source, tmp_path)) == []
    assert len(faults_of(first, run(last.source, tmp_path))) == 2
    assert faults_of(last, run("print(6); print(5)", tmp_path)) == []
    with pytest.raises(ValueError, match="says nothing"):
        programs_of("<!-- continued -->\n```python\n```\n")
    with pytest.raises(ValueError, match="two outputs"):
        programs_of("```python\n```\n" + 2 * "<!-- prints -->\n```text\n```\n")


PARTNER = """
import actorrpc as rpc
rpc.init_rpc("worker0", rank=0, world_size=2)
lost = 0
for number in range(20):
    try:
        rpc.rpc_sync("worker1", abs, args=(-number,))
    except rpc.WorkerLostError:
        lost += 1
print("answers before it was lost:", number + 1 - lost)
rpc.shutdown(graceful=False)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_worker_of_the_page_on_testing_dies_with_its_eleventh_answer(tmp_path: Path) -> None:
    *_, (_, _, block) = [found for found in BLOCK.findall((ROOT / "docs/testing.md").read_text()) if "python" in found]
    (tmp_path / "block.py").write_text(block)
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **meet}
    with subprocess.Popen([sys.executable, "block.py"], cwd=tmp_path, env=environment) as shown:
        try:
            done = run(PARTNER, tmp_path, **meet)
            assert done.stdout == "answers before it was lost: 11\n", done.stderr
            assert shown.wait(60) < 0
        finally:
            shown.kill()
