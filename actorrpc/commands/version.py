"""`actorrpc version`: the versions that a report of a fault should name."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actorrpc.commands.declaring import Commands


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "version",
        help="print the versions of actorrpc and of what it stands on",
        description="Prints the versions of actorrpc, Python, torch, pyzmq, libzmq, cloudpickle and numpy: what a "
        "report of a fault should name.",
    )
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Prints the versions, a line each."""
    import zmq

    from actorrpc.version import VERSION

    print(f"actorrpc {VERSION}")
    print(f"Python {platform.python_version()} ({platform.platform()})")
    for name in ("torch", "pyzmq", "cloudpickle", "numpy"):
        print(f"{name} {importlib.metadata.version(name)}")
    print(f"libzmq {zmq.zmq_version()}")
    return 0
