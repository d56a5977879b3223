"""Has the stand-in reach the processes that a program starts, by whatever means: they inherit the environment."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ACTORRPC_STANDS_IN"
"""Set in the environment of a program for which actorrpc stands in, and of its children."""
SITE = str(Path(__file__).parent / "site")
"""A folder with a `sitecustomize`, which Python imports when it starts; see there."""


def install() -> None:
    """Sets the environment of the processes that this one starts."""
    os.environ[VARIABLE] = "1"
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != SITE]
    os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *before])
