"""Roles: what the workers of a world are, and how each plays its part."""

from __future__ import annotations

import inspect
import math
import os
import pickle
import uuid
from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actorrpc.actor import Actor
from actorrpc.errors import ActorGoneError, CheckpointError
from actorrpc.runtime.handling import here
from actorrpc.services.loop import loop_of
from actorrpc.workers import check_name
from actorrpc.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.session import Session


class Role:
    """What the workers of a role are.

    Arguments:
        what: an Actor class, of which each worker makes one; a function, which each worker runs; or None for workers
            that only serve.
        count: how many workers.
        args, kwargs: for the class or function. (What is called like one of the following it gets by position.)
        restarts: how often the launcher starts each worker of the role again when it dies or raises: as a new worker of
            the same name, whose actor's `on_restart` is called. Not one that has returned, nor rank 0, nor under
            torchrun, srun or mpirun. Once they are used up, a death ends the world as it does without.
        backoff: seconds before a worker is started again; twice as long, up to a minute, each time that it has lived
            for less than ten times its last pause.
        checkpoints: a directory for what `Actor.checkpoint` keeps; None: rank 0 keeps it.
        cpus: how many cores each worker gets for itself, of those of its host that no role names; or which ones the
            workers of the role are to share, e.g. {0, 1}. They are pinned to them where the system can do that, and
            torch gets as many threads. None: as it comes.
        devices: how many GPUs each worker gets for itself, of those of its host that no role names; or which ones the
            workers of the role are to share, e.g. [0]. It sees no others (CUDA_VISIBLE_DEVICES), as cuda:0, cuda:1 and
            so on. 0: none. None: as it comes.
    """

    def __init__(
        self, what: Callable[..., Any] | None, count: int = 1, /, *args: Any, restarts: int = 0, backoff: float = 0.5,
        checkpoints: str | os.PathLike[str] | None = None, cpus: int | Collection[int] | None = None,
        devices: int | Sequence[int] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
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
        often: object = restarts
        if not isinstance(often, int) or often < 0:
            raise ValueError(f"restarts must be a whole number, 0 or more, not {restarts!r}")
        if not 0 <= backoff < math.inf:
            raise ValueError(f"backoff must be seconds, 0 or more, not {backoff!r}")
        self.restarts, self.backoff = restarts, float(backoff)
        self.checkpoints = None if checkpoints is None else os.path.abspath(checkpoints)
        self.cpus = cores = _wish("cpus", cpus)
        if cores in (0, ()):
            raise ValueError("a worker cannot do without cpus")
        self.devices = _wish("devices", devices)
        self.what, self.count, self.args, self.kwargs = what, count, args, kwargs
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raises TypeError where the arguments do not fit: here, and not later in as many processes."""
        what, name = self.what, getattr(self.what, "__qualname__", self.what)
        called: Any = what if what is not None else _serves
        if isinstance(what, type):
            called = vars(what).get("__init__") or getattr(what, "__init__")  # noqa: B009  mypy distrusts the attribute
        try:
            signature = inspect.signature(called)
        except ValueError:  # some builtins do not tell
            return
        if isinstance(what, type):
            own = [] if called is object.__init__ else list(signature.parameters.values())[1:]  # without self
            signature = inspect.Signature(own)
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as e:
            count = self.kwargs.get("count")
            hint = f"; the number of workers goes without its name: Role({name}, {count})" if count is not None else ""
            raise TypeError(f"the arguments of Role do not fit {name}: {e}{hint}") from None

    def __repr__(self) -> str:
        return f"Role({getattr(self.what, '__qualname__', self.what)}, {self.count})"


def _wish(what: str, wish: object) -> int | tuple[int, ...] | None:
    """Checks how many, or which ones, of something a role asks for; which ones, in their order."""
    if wish is None or (isinstance(wish, int) and not isinstance(wish, bool) and wish >= 0):
        return wish
    if isinstance(wish, Collection) and not isinstance(wish, str | bytes):
        numbers = tuple(sorted(wish) if isinstance(wish, Set) else wish)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and len(set(numbers)) == len(numbers):
            return numbers
    raise ValueError(f"{what} must say how many, or which ones (e.g. [0, 1]), not {wish!r}")


def _serves() -> None:
    """What a role of None takes."""


@dataclass(frozen=True)
class Part:
    """What one worker is: the role and its number in it, what makes it up (see `Role`), and of which run."""

    role: str
    index: int
    what: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restarts: int = 0
    backoff: float = 0.5
    checkpoints: str | None = None
    run: str = ""
    cpus: int | tuple[int, ...] | None = None
    devices: int | tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The worker's name."""
        return f"{self.role}:{self.index}"


def parts_of(roles: dict[str, Role | Callable[..., Any] | None]) -> list[Part]:
    """Returns the parts of a world, by rank.

    Raises:
        ValueError, TypeError: the roles make no world.
    """
    if not roles:
        raise ValueError("launch needs at least one role, e.g. launch(agent=Agent, observer=Role(Observer, 4))")
    parts, run = [], uuid.uuid4().hex
    for name, role in roles.items():
        spec = role if isinstance(role, Role) else Role(role)
        check_name(f"{name}:{spec.count - 1}")
        if hasattr(World, name):
            raise ValueError(f"no role can be called {name!r}: world.{name} is something else")
        more = spec.restarts, spec.backoff, spec.checkpoints, run, spec.cpus, spec.devices
        parts += [Part(name, i, spec.what, spec.args, spec.kwargs, *more) for i in range(spec.count)]
    first = parts[0].what
    if first is None or (isinstance(first, type) and not callable(getattr(first, "main", None))):
        raise TypeError(
            f"the first role, {parts[0].role!r}, drives the world: "
            f"it must be a function, or an Actor class with a `main`. The role that drives comes first"
        )
    return parts


def play(session: Session, part: Part, life: int = 0) -> Any:
    """Makes what a worker is, in the present thread, and runs its `main` if it has one.

    Arguments:
        session: its worker's.
        part: what it is.
        life: how often it was started before.

    Returns what `main` returned; None where there is none.

    Raises:
        BaseException: what the constructor or `main` raised.
    """
    root = session.objects.root
    what = part.what
    if not (isinstance(what, type) and issubclass(what, Actor)):
        kind = "only serves" if what is None else f"runs {getattr(what, '__qualname__', what)}"
        root.fill(None, ActorGoneError(f"{session.worker} is no actor: it {kind}"))
        return what(*part.args, **part.kwargs) if what is not None else None
    try:
        session.checkpoints.use(part.checkpoints, part.run)
        actor = session.objects.construct(root, what, *part.args, **part.kwargs)
        if life:
            actor.on_restart(_last_checkpoint(session))
    except BaseException as e:
        root.fill(None, e)
        raise
    root.fill(actor)
    cell = root.mailbox
    assert cell is not None
    main = getattr(actor, "main", None)
    if main is None:
        cell.open(actor.concurrency)
        return None
    here.handling = handling = cell.enter()
    cell.open(actor.concurrency)
    try:
        if inspect.iscoroutinefunction(main):
            return loop_of(session.worker).run(main(), handling)
        return main()
    finally:
        here.handling = None
        cell.leave(handling)


def _last_checkpoint(session: Session) -> Any:
    data = session.checkpoints.last()
    if data is None:
        return None
    try:
        return pickle.loads(data)
    except Exception as e:
        raise CheckpointError(f"the last checkpoint of {session.worker} cannot be read: {e!r}") from e
