"""Starting a world: roles become processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from actorrpc.launching.seats import seat_of
from actorrpc.launching.starting import prepared
from actorrpc.roles import Role, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.options import RpcBackendOptions


def launch(
    *, options: RpcBackendOptions | None = None, logs: bool = False, **roles: Role | Callable[..., Any] | None
) -> Any:
    """Starts a world of roles on this host, and returns what its driver returns.

    Each keyword is a role: a `Role`, or what would be its first argument. The first role's first worker is rank 0, the
    driver: it must have a `main` (or be a function), and the world ends when that returns. Workers are called
    "role:index". Processes are spawned; OMP_NUM_THREADS is 1 in them unless it is set, or their role has `cpus`.

    Where a launcher has started this program several times, as torchrun, srun and mpirun do, or RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set by hand, nothing is spawned: this process takes the part of its own rank, and
    `launch` returns None on ranks other than 0. docs/deploying.md has an example of each.

    Arguments:
        options: for all workers; where they meet is chosen here. Options of torch's class will do as well.
        logs: whether this process shows what the workers print and log, on its stdout, each line with
            `[role:index host pid]` in front; of each worker at most 200 lines a second, and how many were left out.
            They come through pipes, so what a worker wrote before it was killed is there; a worker's stdout is then no
            terminal. Default False: they write to this process's stdout and stderr themselves. No effect where a
            launcher has started the workers: it has options for that.
        roles: the roles, in order.

    Returns what the driver's `main` returned.

    Raises:
        MemberDiedError: a worker died or raised, and is not to be started again (see `Role`); it says which, and of
            what. All others were ended.
        OSError: a directory for checkpoints cannot be made.
        ValueError, TypeError: the roles make no world, or not one of as many workers as a launcher has started; they
            ask for cores or GPUs that are not there; launchers' variables contradict each other.
        RuntimeError: a role has `devices`, and this process is that worker and has begun to use CUDA; or `logs` on a
            system that is not POSIX.

    Examples:
        >>> rpc.launch(agent=Agent, observer=rpc.Role(Observer, 4, seed=1))  # five processes; Agent.main drives them
    """
    if not isinstance(logs, bool):
        raise TypeError(f"logs is True or False, not {logs!r}; no role can have this name")
    return prepared(parts_of(roles), options, seat_of(os.environ), logs)()
