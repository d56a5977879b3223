"""Takes away, in the process that imports this and in those that it starts, what other systems lack.

What torch itself needs when it is imported is left until it has been.
"""

from __future__ import annotations

import builtins
import os
import select
import signal
import socket
import sys
from typing import Any

VARIABLE = "TESTS_ELSEWHERE"
"""The name of the system that this process plays; children look for it, too (`play`)."""

LACKS: dict[str, list[tuple[Any, str]]] = {
    "macos": [
        (os, "memfd_create"),
        (os, "pidfd_open"),
        (os, "eventfd"),
        (os, "sched_getaffinity"),
        (os, "sched_setaffinity"),
        (select, "epoll"),
        (socket, "SO_PEERCRED"),
    ],
    "windows": [
        (os, "memfd_create"),
        (os, "pidfd_open"),
        (os, "eventfd"),
        (os, "sched_getaffinity"),
        (os, "sched_setaffinity"),
        (os, "fork"),
        (os, "register_at_fork"),
        (os, "getuid"),
        (os, "geteuid"),
        (select, "epoll"),
        (select, "poll"),
        (socket, "SO_PEERCRED"),
        (socket, "SCM_RIGHTS"),
        (socket, "MSG_CMSG_CLOEXEC"),
        (signal, "SIGUSR1"),
    ],
}
MODULES = {"macos": (), "windows": ("fcntl", "resource", "pwd", "grp")}


def play(system: str) -> None:
    """Makes this process, from now on, one of a system that lacks those names, files below /proc, and for "windows"
    `ipc` of ZeroMQ. `sys.platform` stays: torch and the standard library would look for files of that system.
    """
    import torch.distributed
    import torch.multiprocessing  # noqa: F401
    import zmq

    os.environ[VARIABLE] = system
    for module, name in LACKS[system]:
        if hasattr(module, name):
            delattr(module, name)
    plain_open, plain_listdir, plain_import = builtins.open, os.listdir, builtins.__import__

    def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc on this system", file)
        return plain_open(file, *args, **kwargs)

    def listdir(path: Any = ".") -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc on this system", path)
        return plain_listdir(path)

    def import_(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:
        ours = str((globals or {}).get("__name__", "")).startswith("actorrpc")
        if ours and name in MODULES[system]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, globals, *args, **kwargs)

    builtins.open = open_
    os.listdir = listdir
    builtins.__import__ = import_
    if system == "windows":
        plain_has = zmq.has
        zmq.has = lambda capability: capability != "ipc" and plain_has(capability)


if os.environ.get(VARIABLE) and "actorrpc" not in sys.modules:
    play(os.environ[VARIABLE])
