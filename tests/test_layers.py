"""The rooms of the package: imports go downwards only (docs/design.md, "Rooms")."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "actorrpc"
LEVELS = {"errors": 0, "wire": 1, "runtime": 2, "services": 3}
FACE = 4
NOBODY_IMPORTS = {"__main__", "commands", "compat", "launching", "testing"}
"""Rooms on top of the face; only the package itself re-exports from `launching`; the command line uses the others."""


def room_of(module: str) -> str:
    """Returns the first name below the package, e.g. "wire" for "actorrpc.wire.codec"; "" for the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def level_of(room: str) -> int:
    return FACE + 1 if room in NOBODY_IMPORTS or room == "" else LEVELS.get(room, FACE)


def imports_of(tree: ast.AST, package: str) -> set[str]:
    """Returns the modules of the package that a source imports, anywhere in it, also for type checking."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: relative imports hide where they point"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "actorrpc" else {module}
    return {name for name in found if name.split(".")[0] == "actorrpc"}


def faults_in(source: str, module: str) -> list[str]:
    """Returns the imports of a source that point up or into a room that nobody may import."""
    room, faults = room_of(module), []
    for target in sorted(imports_of(ast.parse(source), module)):
        to = room_of(target)
        if to == room or (module == "actorrpc" and to != "compat") or (room in {"__main__", "commands"} and to):
            continue
        if to in NOBODY_IMPORTS or level_of(to) > level_of(room) or to == "":
            faults.append(f"{module} imports {target}")
    return faults


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found.append((name, path))
    return found


@pytest.mark.parametrize("module,path", modules(), ids=lambda x: x if isinstance(x, str) else "")
def test_no_import_points_up(module: str, path: Path) -> None:
    assert not faults_in(path.read_text(), module)


@pytest.mark.parametrize(
    "module,source",
    [
        ("actorrpc.wire.codec", "from actorrpc.runtime.worker import Worker"),
        ("actorrpc.runtime.crew", "def f():\n    import actorrpc.services.objects"),
        ("actorrpc.services.objects", "from actorrpc.rref import RRef"),
        ("actorrpc.services.objects", "from actorrpc import RRef"),
        ("actorrpc.rpc", "from actorrpc.launching import launch"),
        ("actorrpc.rpc", "from actorrpc import testing"),
        ("actorrpc.launching.child", "from actorrpc.commands import main"),
        ("actorrpc.errors", "if TYPE_CHECKING:\n    from actorrpc.wire.codec import Codec"),
    ],
)
def test_the_guard_sees_an_import_that_points_up(module: str, source: str) -> None:
    assert faults_in(source, module)


def test_files_stay_small_enough_to_read() -> None:
    long = {
        str(path.relative_to(PACKAGE)): n for _, path in modules() if (n := len(path.read_text().splitlines())) > 420
    }
    assert not long


def test_the_picture_of_the_rooms_has_all_modules() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(" |") and len(line) > 75 and line[75] == "|"]
    drawn: dict[str, set[str]] = {}
    room = ""
    for line in lines:
        room = line[2:13].strip() or room
        drawn.setdefault(room, set()).update(re.findall(r"\w+", line[13:75]))
    for room in ("face", "services", "runtime", "wire"):
        folder = PACKAGE if room == "face" else PACKAGE / room
        there = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__", "errors"}
        there |= {"autograd", "nn", "optim"} if room == "face" else set()
        assert drawn[room] == there, room


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
