"""Starting a world: roles become processes."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from actorrpc.actor import Actor
from actorrpc.launch import processes
from actorrpc.launch.member import Part, take_part
from actorrpc.options import RpcBackendOptions
from actorrpc.session import check_name
from actorrpc.wire.folders import HeldFolder
from actorrpc.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Role", "launch"]

_GRACE = 2.0
"""Seconds that a process gets to end after its worker has been ended (see `member`)."""


class Role:
    """What the workers of a role are.

    Arguments:
        what: an Actor class, of which each worker makes one; a function, which each worker runs; or None for workers
            that only serve.
        count: how many workers.
        args, kwargs: for the class or function.
    """

    def __init__(self, what: Callable[..., Any] | None, count: int = 1, /, *args: Any, **kwargs: Any) -> None:
        given: object = what
        if isinstance(given, type):
            fits = issubclass(given, Actor)
        else:
            fits = given is None or callable(given)
        if not fits:
            raise TypeError(f"a role is an Actor class, a function or None, not {what!r}")
        if not isinstance(count, int):
            raise TypeError(f"count must be an int, not {count!r}; arguments for the class or function come after it")
        if count < 1:
            raise ValueError(f"a role has at least one worker, not {count}")
        self.what, self.count, self.args, self.kwargs = what, count, args, kwargs

    def __repr__(self) -> str:
        return f"Role({getattr(self.what, '__qualname__', self.what)}, {self.count})"


def launch(*, options: RpcBackendOptions | None = None, **roles: Role | Callable[..., Any] | None) -> Any:
    """Starts a world of roles on this host, and returns what its driver returns.

    Each keyword is a role: a `Role`, or what would be its first argument. The first role's first worker is rank 0, the
    driver: it must have a `main` (or be a function), and the world ends when that returns. Workers are called
    "role:index". Processes are spawned; OMP_NUM_THREADS is 1 in them unless it is set.

    Under torchrun nothing is spawned: this process takes the part of its own RANK, and `launch` returns None on ranks
    other than 0.

    Arguments:
        options: for all workers; the rendezvous is chosen here.
        roles: the roles, in order.

    Returns what the driver's `main` returned.

    Raises:
        MemberDiedError: a worker died or raised; it says which, and of what. All others were ended.
        ValueError, TypeError: the roles make no world.
    """
    parts = _parts(roles)
    options = copy.copy(options) if options is not None else RpcBackendOptions()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _take_own_part(parts, options)
    folder = HeldFolder()
    try:
        options.init_method = f"file://{folder.path}/store"
        members = [
            processes.Member(part.name, take_part, (part, rank, len(parts), options)) for rank, part in enumerate(parts)
        ]
        return processes.run(members, grace=_GRACE)
    finally:
        folder.close()


def _parts(roles: dict[str, Role | Callable[..., Any] | None]) -> list[Part]:
    if not roles:
        raise ValueError("launch needs at least one role, e.g. launch(agent=Agent, observer=Role(Observer, 4))")
    parts = []
    for name, role in roles.items():
        spec = role if isinstance(role, Role) else Role(role)
        check_name(f"{name}:{spec.count - 1}")
        if hasattr(World, name):
            raise ValueError(f"no role can be called {name!r}: world.{name} is something else")
        parts += [Part(name, i, spec.what, spec.args, spec.kwargs) for i in range(spec.count)]
    first = parts[0].what
    if first is None or (isinstance(first, type) and not callable(getattr(first, "main", None))):
        raise TypeError(
            f"the first role, {parts[0].role!r}, drives the world: "
            f"it must be a function, or an Actor class with a `main`"
        )
    return parts


def _take_own_part(parts: list[Part], options: RpcBackendOptions) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != len(parts):
        raise ValueError(f"the roles make {len(parts)} workers, but torchrun started {world_size} processes")
    options.init_method = "env://"
    return take_part(parts[rank], rank, world_size, options, exit_after=True)
