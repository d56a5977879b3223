"""Starting a world: roles become processes."""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

from actorrpc.launch import processes
from actorrpc.launch.member import take_part
from actorrpc.launch.output import Output
from actorrpc.options import RpcBackendOptions, own_options
from actorrpc.roles import Role, parts_of
from actorrpc.wire.folders import HeldFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.roles import Part

log = logging.getLogger("actorrpc")
_GRACE = 2.0
"""Seconds that a process gets to end after its worker has been ended (see `member`)."""


def launch(
    *, options: RpcBackendOptions | None = None, logs: bool = False, **roles: Role | Callable[..., Any] | None
) -> Any:
    """Starts a world of roles on this host, and returns what its driver returns.

    Each keyword is a role: a `Role`, or what would be its first argument. The first role's first worker is rank 0, the
    driver: it must have a `main` (or be a function), and the world ends when that returns. Workers are called
    "role:index". Processes are spawned; OMP_NUM_THREADS is 1 in them unless it is set.

    Under torchrun nothing is spawned: this process takes the part of its own RANK, and `launch` returns None on ranks
    other than 0.

    Arguments:
        options: for all workers; the rendezvous is chosen here. Torch's will do as well.
        logs: whether this process shows what the workers print and log, on its stdout, each line with
            `[role:index host pid]` in front; of each at most 200 lines a second, and how many were left out. They come
            through pipes, so what a worker wrote before it was killed is there; a worker's stdout is then no terminal.
            By default they write to this process's stdout and stderr themselves. Under torchrun, which has options for
            that, nothing.
        roles: the roles, in order.

    Returns what the driver's `main` returned.

    Raises:
        MemberDiedError: a worker died or raised, and is not to be started again (see `Role`); it says which, and of
            what. All others were ended.
        OSError: a directory for checkpoints cannot be made.
        ValueError, TypeError: the roles make no world.
        RuntimeError: `logs` on a system that is not POSIX.
    """
    if not isinstance(logs, bool):
        raise TypeError(f"logs is True or False, not {logs!r}; no role can have this name")
    parts = parts_of(roles)
    supervised = any(part.restarts for part in parts)
    options = copy.copy(own_options(options)) if options is not None else RpcBackendOptions()
    for directory in {part.checkpoints for part in parts if part.checkpoints is not None}:
        os.makedirs(directory, exist_ok=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if supervised:
            log.warning("restarts of roles are nothing under torchrun, which starts all again together: --max-restarts")
        return _take_own_part(parts, options)
    output = Output() if logs else None
    folder = HeldFolder()
    try:
        options.init_method = f"file://{folder.path}/store"
        members = [
            processes.Member(
                part.name, take_part, (part, rank, len(parts), options, False, supervised), part.restarts, part.backoff
            )
            for rank, part in enumerate(parts)
        ]
        return processes.run(members, grace=_GRACE, output=output)
    finally:
        if output is not None:
            output.close()
        folder.close()


def _take_own_part(parts: list[Part], options: RpcBackendOptions) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != len(parts):
        raise ValueError(f"the roles make {len(parts)} workers, but torchrun started {world_size} processes")
    options.init_method = "env://"
    return take_part(parts[rank], rank, world_size, options, exit_after=True)
