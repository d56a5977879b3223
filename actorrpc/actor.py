"""Actors: objects with a mailbox, which users subclass for the roles of their programs."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from actorrpc import reducers
from actorrpc.errors import CheckpointError, InvalidNameError, NotAMemberError, SerializationError
from actorrpc.rref import LIMITS, RRef, make
from actorrpc.runtime.cells import MailboxCell
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.message import Message
from actorrpc.services import names
from actorrpc.services.handles import OwnerHandle
from actorrpc.services.streams import Source
from actorrpc.session import Session, current
from actorrpc.watching import is_news
from actorrpc.wire.envelope import Kind
from actorrpc.workers import WorkerInfo, info_of, resolve
from actorrpc.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from actorrpc.runtime.peers import Peer
    from actorrpc.services.handles import Entry
    from actorrpc.workers import To

log = logging.getLogger("actorrpc")
_NO_NEW: Any = object.__new__
_TAKEN = ("name", "role", "index", "worker", "world", "rref")
"""The properties of an actor."""


@dataclass
class Home:
    """Where an actor lives.

    Attributes:
        session: its worker's.
        entry: its place there.
        name: its name; its worker's own for the actor of a role.
        places: how many places there have the actor, this one included.
        stopped: whether its `on_stop` was called, or never will be.
    """

    session: Session
    entry: Entry
    name: str
    places: int = 1
    stopped: bool = False
    door: threading.Lock = field(default_factory=threading.Lock)


class _Births(threading.local):
    home: Home | None = None


_births = _Births()


class Actor:
    """An object whose methods are called by messages, one at a time, in the order in which they arrive.

    Subclass it; give it a constructor and methods; start it by role with `launch`, or by `spawn`. `main`, if there is
    one, runs in its worker's main thread when it is launched in a role: it holds the actor while it computes, and
    lets messages be served while it waits for a call or in `serve`.

    A handler that waits admits messages of its own call chain only: actors may call each other back without deadlock.

    Methods, and `main`, may be `async def`: they run on their worker's one asyncio loop, where they `await` futures. A
    message is in progress until its coroutine has ended. So how many of an actor's coroutines interleave is declared,
    and an `async def` changes nothing for other methods.

    Class arguments:
        - `concurrency`: how many messages may be in progress at once; default 1.
        - `max_pending`: how many calls and tells each worker may have under way to such an actor; further ones wait
          until it has come to some, or raise BackpressureError (see `no_wait`). Default: a quarter of what the options
          of the calling worker say. Who makes an actor knows of it at once; a worker that was given the reference, or
          calls a role, is told once its first message has arrived.
        - `max_pending_bytes`: the same in bytes of what has not begun.
    """

    concurrency: ClassVar[int] = 1
    _actorrpc_limits: ClassVar[tuple[int | None, int | None]] = (None, None)
    _home: Home | None

    def __init_subclass__(
        cls,
        concurrency: int | None = None,
        max_pending: int | None = None,
        max_pending_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        for name, limit in (("max_pending", max_pending), ("max_pending_bytes", max_pending_bytes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{cls.__name__}: {name} must be at least 1, not {limit}")
        calls, size = cls._actorrpc_limits
        cls._actorrpc_limits = max_pending or calls, max_pending_bytes or size
        if concurrency is not None:
            if concurrency < 1:
                raise ValueError(f"{cls.__name__}: concurrency must be at least 1, not {concurrency}")
            cls.concurrency = concurrency
        for name in ("on_start", "on_stop", "on_restart"):
            if inspect.iscoroutinefunction(getattr(cls, name)):
                raise TypeError(f"{cls.__name__}.{name} is called where nothing can await it: it must not be async")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__} has no __init__, and takes no arguments")
        self = super().__new__(cls)
        # Known before __init__ runs, which may want its index. Taken by the first actor made, not by those it makes.
        self._home, _births.home = _births.home, None
        return self

    if not TYPE_CHECKING:  # a type checker would take it for leave to set any attribute

        def __setattr__(self, name: str, value: object) -> None:
            try:
                super().__setattr__(name, value)
            except AttributeError:
                if name not in _TAKEN:
                    raise
                raise AttributeError(
                    f"{type(self).__name__} cannot have an attribute {name!r} of its own; "
                    f"in an actor these names are taken: {', '.join(_TAKEN)}"
                ) from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._home.name!r}>" if self._home is not None else super().__repr__()

    # -- who it is

    @property
    def _at(self) -> Home:
        if self._home is None:
            raise NotAMemberError(
                f"this {type(self).__name__} lives on no worker; "
                f"actors are made by launch, {type(self).__name__}.spawn or remote"
            )
        return self._home

    @property
    def role(self) -> str:
        """The role of its worker; "" in a world that was not launched by roles."""
        return self._at.session.worker.record.role

    @property
    def index(self) -> int:
        """The number of its worker within the role, from 0."""
        return self._at.session.worker.record.index

    @property
    def name(self) -> str:
        """Its name, unique in the world."""
        return self._at.name

    @property
    def worker(self) -> WorkerInfo:
        """The worker on which it lives."""
        return info_of(self._at.session.worker.record)

    @property
    def rref(self) -> RRef[Self]:
        """A reference to itself, to be sent to others."""
        home = self._at
        return RRef._wrap(OwnerHandle(home.session.objects, home.entry, counted=False))

    @property
    def world(self) -> World:
        """The world: `world.observer` is the group of the role "observer"."""
        return World(self._at.session)

    @classmethod
    def spawn(cls, to: To, /, *args: Any, name: str | None = None, **kwargs: Any) -> RRef[Self]:
        """Makes an actor of this class on a worker.

        Arguments:
            to: the worker's name, rank or WorkerInfo.
            args, kwargs: for the constructor. (A `name` of its own it gets by position.)
            name: a name by which all workers find the actor (`get_actor`). It then lives as long as its worker, or
                until `forget_actor`; rank 0 keeps the names.

        Returns a reference to it, at once. What the constructor raises is raised when the reference is next used; then
        the name is free again.

        Raises:
            InvalidNameError: the name is taken.
        """
        return cls._spawn(to, args, kwargs, name, False)

    @classmethod
    def get_or_spawn(cls, to: To, /, *args: Any, name: str, **kwargs: Any) -> RRef[Self]:
        """Returns the actor of a name, wherever it is, or makes it, as `spawn` does. Of several workers that want the
        same at the same time one makes it, and the others wait until it is there.
        """
        return cls._spawn(to, args, kwargs, name, True)

    @classmethod
    def _spawn(
        cls, to: To, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, or_get: bool
    ) -> RRef[Self]:
        session = current()
        owner = resolve(session.worker, to)
        if name is None:
            return make(session, owner, cls, args, kwargs, -1.0)
        given: object = name
        if not isinstance(given, str) or not given:
            raise InvalidNameError(f"an actor's name is a str with something in it, not {name!r}")
        create = functools.partial(make, session, owner, _construct, (name, cls, *args), kwargs, -1.0)
        made: RRef[Self] = names.make(session.names, name, owner, or_get, create)
        return made

    def serve(self, seconds: float | None = None) -> None:
        """Lets messages be served; for use in `main`.

        Arguments:
            seconds: how long; None (the default) until the world ends.
        """
        session = self._at.session
        worker = session.worker
        if seconds is None:
            worker.wait(session.member.over, None, lead=False)
        else:
            worker.wait(Completion(), worker.clock.now() + seconds, lead=False)

    def checkpoint(self, state: object) -> None:
        """Keeps what `on_restart` is to get, in the place of what was kept before; returns when it is kept. By rank 0
        or, where the role has one, in its directory of checkpoints.

        Arguments:
            state: what pickle takes; no references. It is copied.

        Raises:
            CheckpointError: it cannot be written (the last one stands); or this is not the actor of a role.
            WorkerLostError: rank 0 is gone.
        """
        session = self._at.session
        if self._at.entry is not session.objects.root:
            raise CheckpointError(f"{self!r} was spawned and is not started again; only a role's own actor can be")
        try:
            data = reducers.dumps_by_name_or_value(state)
        except Exception as e:
            raise CheckpointError(f"{self!r} could not write its checkpoint: {e}; the last one stands") from e
        session.checkpoints.keep(data)

    # -- what users may override

    def on_restart(self, state: Any) -> None:
        """Called once, after `on_start`, where the launcher has started this actor's worker again (`Role`).

        Arguments:
            state: what the last `checkpoint` of its earlier lives has kept; None if there was none.
        """

    def on_start(self) -> None:
        """Called once, when the actor has been made, before its first message."""

    def on_stop(self) -> None:
        """Called once when its world ends in good order, or when the last reference to it is gone."""

    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        """Called for every worker that is gone from now on, as `World.watch` tells of them, in its turn among messages.

        Arguments:
            worker: who it was.
            reason: how it was noticed, in words.
        """

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"an actor cannot be sent, it stays where it is; "
            f"send a reference to it: the rref of this {type(self).__name__}"
        )


def _construct(name: str, cls: type[Actor], *args: Any, **kwargs: Any) -> Actor:
    """Makes a named actor."""
    if _births.home is not None:
        _births.home.name = name
    return cls(*args, **kwargs)


def get_actor(name: str) -> RRef[Any]:
    """Returns a reference to the actor of a name, wherever it is; waits while it is being made.

    Raises:
        NotAMemberError: there is none, or its worker is gone; or this process is in no world.
        WorkerLostError: rank 0 is gone, which kept the names.
    """
    found: RRef[Any] = current().names.find(name)
    return found


def forget_actor(name: str) -> None:
    """Takes a name away from its actor, which then lives as long as anybody holds a reference to it."""
    current().names.drop(name)


def install(session: Session) -> None:
    """Teaches a worker's objects service what an actor is."""

    def mailbox_for(value: Any, entry: Entry) -> MailboxCell | None:
        if not isinstance(value, Actor):
            return value.cell(entry, session.worker) if isinstance(value, Source) else None
        if value._home is None:
            value._home = Home(session, entry, name_of(session, entry))
        home = value._home
        cell = home.entry.mailbox
        if cell is None:
            what = f"{type(value).__name__} {home.name!r}"
            cell = home.entry.mailbox = MailboxCell(session.worker, home.entry.run, what, 0, getattr(value, LIMITS))
        if home.entry is not entry:
            # One more reference to the same actor, by `RRef(self)` or by a method that returned it: the same mailbox.
            home.places += 1
        elif not entry.held:
            cell.open(type(value).concurrency)
        return cell

    def construct(entry: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if type(function) is type and function.__new__ is _NO_NEW:
            return function(*args, **kwargs)  # what it makes is no actor: their class has a __new__ of its own
        home = _births.home = Home(session, entry, name_of(session, entry))
        try:
            value = function(*args, **kwargs)
            _births.home = None
            if isinstance(value, Actor) and value._home is home:
                value.on_start()
        except BaseException:
            cell, entry.mailbox, home.stopped = entry.mailbox, None, True
            if cell is not None:  # it had sent references to itself already
                cell.close()
            raise
        finally:
            _births.home = None
        return value

    session.objects.mailbox_for = mailbox_for
    session.objects.construct = construct
    session.objects.released = _released
    session.worker.members.watchers.append(functools.partial(_tell_of_loss, session))


def _released(value: Any) -> None:
    """Stops an actor when its last place is given up, or its world has ended; closes what nobody streams any more."""
    if isinstance(value, Source):
        value.end()
        return
    home: Home | None = value._home
    if home is None:
        return
    ended = home.session.member.ended.done
    with home.door:
        home.places -= 1
        if home.stopped or (home.places > 0 and not ended):
            return
        home.stopped = True
    cell = home.entry.mailbox
    if ended or cell is None:
        try:
            value.on_stop()
        except Exception:
            log.exception("on_stop of %s failed", type(value).__name__)
        return
    job = cell.accept(_Unsent(home, "on_stop"))  # behind the messages that were there before
    if job is not None:
        home.session.worker.crew.submit(job)


def _tell_of_loss(session: Session, peer: Peer) -> None:
    """Has the actors of a worker hear that another one is gone."""
    if not is_news(session, peer):
        return
    for actor in {id(actor): actor for actor in session.objects.actors()}.values():
        home: Home | None = getattr(actor, "_home", None)  # it may not have been made yet
        if home is None or home.entry.mailbox is None or type(actor).on_worker_lost is Actor.on_worker_lost:
            continue
        told = info_of(peer.record), peer.reason
        job = home.entry.mailbox.accept(_Unsent(home, "on_worker_lost", told, session.worker.place()))
        if job is not None:
            session.worker.crew.submit(job)


class _Unsent(Message):
    """A message that was not sent: the call of a method that users may override."""

    __slots__ = ("_call",)

    def __init__(self, home: Home, method: str, args: tuple[Any, ...] = (), place: int = sys.maxsize) -> None:
        worker, (creator, local) = home.session.worker, home.entry.id
        super().__init__(
            worker, Kind.TELL, 0, worker.id, 0, creator, local, worker.chain(), -1, None, place, ()
        )  # fmt: skip
        self._call: tuple[str, tuple[Any, ...], dict[str, Any]] = (method, args, {})

    def load(self) -> Any:
        return self._call


def name_of(session: Session, entry: Entry) -> str:
    """Returns the name of the actor in a place."""
    record = session.worker.record
    creator, local = entry.id
    if entry.held:
        return record.name
    return f"{record.name}/{creator}.{local & 0x7FFFFFFFFFFFFFFF}"
