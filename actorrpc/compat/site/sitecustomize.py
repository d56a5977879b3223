"""Python imports this when it starts in a process that inherits the stand-in. It puts it in force when torch has been
imported, and not before: many a process never imports torch. Where actorrpc is imported first, which imports torch, it
is when that has been.

It hides no other `sitecustomize`: the next one on the path is run as well.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Finds torch, or actorrpc, as others do, with a loader that installs the stand-in afterwards."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in ("torch", "actorrpc"):
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


class _Installing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        from actorrpc.compat import install

        install()


def _run_next() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("ACTORRPC_STANDS_IN") == "1":
    sys.meta_path.insert(0, _AfterTorch())
_run_next()
