"""The package as it is imported: its names, and that importing it costs nothing before it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import actorrpc as rpc

SOURCE = Path(rpc.__file__ or "").read_text()


def told_to_type_checkers() -> dict[str, str]:
    """Returns each name of the block for type checkers with its module; rooms with an empty string."""
    found: dict[str, str] = {}
    for block in ast.parse(SOURCE).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name):
            for node in ast.walk(block):
                if isinstance(node, ast.ImportFrom) and node.module:
                    home = node.module.removeprefix("actorrpc").removeprefix(".")
                    found |= {alias.name: home for alias in node.names}
    return found


def test_type_checkers_are_told_what_python_finds() -> None:
    told = told_to_type_checkers()
    assert told == rpc._HOMES | dict.fromkeys(rpc._ROOMS, "")
    assert set(told) == set(rpc.__all__)


@pytest.mark.parametrize("name", rpc.__all__)
def test_every_public_name_is_there(name: str) -> None:
    home = rpc._HOMES.get(name)
    assert getattr(rpc, name) is (
        getattr(importlib.import_module(f"actorrpc.{home}"), name) if home else sys.modules[f"actorrpc.{name}"]
    )
    assert name in dir(rpc)


def test_no_public_name_is_hidden_by_a_module_of_that_name() -> None:
    """Python sets a package's attribute when it imports a module of it, and would put it in the place of the name."""
    modules = {path.stem for path in Path(rpc.__file__ or "").parent.glob("*") if path.suffix in ("", ".py")}
    assert not modules & set(rpc._HOMES)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'actorrpc' has no attribute 'rpc_snyc'"):
        rpc.__getattr__("rpc_snyc")


def test_importing_the_package_imports_nothing_else_of_it() -> None:
    program = "import sys, actorrpc; print(sorted(name for name in sys.modules if name.startswith('actorrpc')))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) == ["actorrpc", "actorrpc.version"]


def test_the_packages_own_backend_is_there_before_anything_else_was_asked_for() -> None:
    program = "import actorrpc as rpc; print(rpc.BackendType.TENSORPIPE.name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "TENSORPIPE\n", done.stderr


def test_star_import_brings_all_names() -> None:
    program = "from actorrpc import *; import actorrpc; print([n for n in actorrpc.__all__ if n not in globals()])"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
