"""Other Pythons than the one that runs the tests: their parsers take all of the package.

What needs torch runs only where torch is installed; these interpreters have none.
"""

from __future__ import annotations

import ast
import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "actorrpc"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CHECK = """
import sys, warnings
warnings.simplefilter("error")
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        compile(file.read(), path, "exec", dont_inherit=True)
print("all", sys.version_info[:2])
"""


def interpreter(version: str) -> str | None:
    """Returns the Python of that version, or None; also one that is installed beside the one in use."""
    if version == "{}.{}".format(*sys.version_info[:2]):
        return sys.executable
    beside = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
    for candidate in (shutil.which(f"python{version}"), *beside):
        if candidate and not subprocess.run([candidate, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode:
            return candidate
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_source_is_read_without_a_warning(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    sources = [str(path) for path in sorted(PACKAGE.rglob("*.py"))]
    done = subprocess.run(
        [python, "-I", "-c", CHECK, *sources], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("all")


LATE = {
    "typing": {"Self", "Never", "LiteralString", "assert_never", "assert_type", "Unpack", "override", "reveal_type"},
    "asyncio": {"TaskGroup", "timeout", "Runner", "Barrier"},
    "enum": {"StrEnum", "verify"},
}
"""Names that Python 3.10 lacks, by module."""
LATE_BUILTINS = {"ExceptionGroup", "BaseExceptionGroup"}


class Late(ast.NodeVisitor):
    """Collects uses of late names that no `if` with `TYPE_CHECKING` or `sys.version_info` stands above."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if not {"TYPE_CHECKING", "version_info"} & set(re.findall(r"\w+", ast.unparse(node.test))):
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found |= {alias.name for alias in node.names} & LATE.get(node.module or "", set())

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.attr in LATE.get(node.value.id, set()):
            self.found.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.found |= {node.id} & LATE_BUILTINS


def late_names(source: str) -> set[str]:
    """Returns the late names that a source uses unguarded."""
    late = Late()
    late.visit(ast.parse(source))
    return late.found


def test_what_the_oldest_python_lacks_is_asked_for_by_version() -> None:
    assert not {path.name: late for path in sorted(PACKAGE.rglob("*.py")) if (late := late_names(path.read_text()))}


def test_that_guard_sees_what_the_oldest_python_lacks() -> None:
    assert late_names("from typing import Self") == {"Self"}
    assert late_names("raise ExceptionGroup('', [])") == {"ExceptionGroup"}
    assert late_names("limit = asyncio.timeout(1)") == {"timeout"}
    assert not late_names("if TYPE_CHECKING:\n    from typing import Self")
    assert not late_names("if sys.version_info >= (3, 11):\n    E = ExceptionGroup")
