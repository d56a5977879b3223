"""What is the process's own, kept in one place: what it has joined, and how its workers are made."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from actorrpc.options import RpcBackendOptions
    from actorrpc.session import Session
    from actorrpc.wire.transport import Transport


@dataclass(frozen=True)
class Foreign:
    """What stands in a session's place where `init_rpc` was told to use a backend of the program's own.

    Attributes:
        backend: which, in words.
        agent: what its handler returned.
        kept: what must live as long.
    """

    backend: str
    agent: Any
    kept: Any

    def __str__(self) -> str:
        return f"{self.backend}, whose agent is {self.agent!r}"


class Process:
    """A process, or in a simulated world what poses as one.

    Attributes:
        session: its own, the default of its threads.
        foreign: what stands in a session's place.
        joining: taken by the thread that is about to join or leave.
        wrap: what a worker's transport is put into before the worker gets it, in tests; None: nothing.
        make: what makes its workers where it is simulated (as `session._made`); None: the real thing.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.foreign: Foreign | None = None
        self.joining = threading.RLock()
        self.wrap: Callable[[Transport], Transport] | None = None
        self.make: Callable[[str, int, RpcBackendOptions, str, int], Session] | None = None


this_process = Process()
_process: ContextVar[Process] = ContextVar("actorrpc_process", default=this_process)


def process() -> Process:
    """Returns the present thread's process: the real one, unless it is a thread of a simulated one."""
    return _process.get()


@contextlib.contextmanager
def living_in(one: Process) -> Iterator[None]:
    """Makes a simulated process the present thread's for the block."""
    token = _process.set(one)
    try:
        yield
    finally:
        _process.reset(token)


def foreign() -> Foreign | None:
    """Returns what a backend of the program's own has put in the place of a session, if one has."""
    return process().foreign


def set_foreign(what: Foreign | None) -> None:
    """Keeps what a backend of the program's own has started, or forgets it."""
    process().foreign = what
