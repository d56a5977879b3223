"""What a thread is doing on behalf of a message, kept per thread."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from actorrpc.runtime.mailbox import Mailbox, Turn
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker


class Handling:
    """The circumstances under which code runs.

    Attributes:
        worker: the worker that runs it.
        message: what is being handled; None in an actor's `main`.
        chain: the call chain that calls made here belong to; None: each call begins one.
        mailbox, turn: the place in an actor's mailbox that waits give up for a while; None outside actors.
    """

    __slots__ = ("chain", "mailbox", "message", "turn", "worker")

    def __init__(
        self,
        worker: Worker,
        message: Message | None,
        chain: int | None,
        mailbox: Mailbox[Message] | None = None,
        turn: Turn[Message] | None = None,
    ) -> None:
        self.worker = worker
        self.message = message
        self.chain = chain
        self.mailbox = mailbox
        self.turn = turn


NO_CONTEXT = -1
no_wait: ContextVar[bool] = ContextVar("actorrpc_no_wait", default=False)
"""Whether what is sent may not wait for room. Not in `here`: of two coroutines of a thread only one may be meant."""


class _Here(threading.local):
    handling: Handling | None = None
    context: int = NO_CONTEXT


here = _Here()
"""`here.handling`: what the present thread is doing; None in threads of the user's own. `here.context`: the autograd
context that its messages belong to, or NO_CONTEXT.
"""


class in_context:
    """Has what the present thread sends in the block belong to another autograd context, or to none.

    A class, since Ctrl-C may surface in the lines of contextlib: the old context would then come back with some later
    collection, in whatever the thread does by then.

    Arguments:
        context: the context's id, or NO_CONTEXT.
    """

    __slots__ = ("_context", "_outside")

    def __init__(self, context: int = NO_CONTEXT) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._outside, here.context = here.context, self._context

    def __exit__(self, *_: object) -> None:
        here.context = self._outside


def current() -> Any:
    """Returns the present thread's `Handling`, or None."""
    return here.handling


_USERS: Final = frozenset(("executor", "handles", "creator", "futures", "loop", "batches", "streams"))
"""The modules below the face from which code of the users' is called that may wait."""


def may_wait() -> bool:
    """Whether the present thread may wait: not where the library's own code, which may hold locks or leadership, was
    interrupted by a finalizer, or called a reducer.
    """
    frame: Any = sys._getframe(1)
    outside = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("actorrpc."):
            if outside:
                room = name.split(".")
                return room[1] not in ("wire", "runtime", "services") or room[-1] in _USERS
        elif not outside:
            outside = True
        frame = frame.f_back
    return True
