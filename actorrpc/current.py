"""What a handler can ask about the call that it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.runtime.handling import here
from actorrpc.runtime.handling import no_wait as _no_wait
from actorrpc.runtime.peers import Standing
from actorrpc.workers import WorkerInfo, info_of

if TYPE_CHECKING:
    from actorrpc.runtime.message import Message


class no_wait:
    """A block in which calls do not wait for room: where too much is under way to a callee (`max_pending` of the
    options or of an Actor's class), `tell`, `rpc_async`, `remote` and a group's calls raise BackpressureError, and send
    nothing.

    For the present thread or, in a coroutine, for that alone, also over its awaits; and for what `asyncio.to_thread`
    runs for it. Blocks may be nested.

    Examples:
        >>> with rpc.no_wait():
        ...     server.tell().report(state)
    """

    __slots__ = ("_outside",)

    def __enter__(self) -> None:
        self._outside = _no_wait.get()
        _no_wait.set(True)

    def __exit__(self, *_: object) -> None:
        _no_wait.set(self._outside)


class CurrentCall:
    """The call that a handler serves; see `current_call`."""

    __slots__ = ("_message",)

    def __init__(self, message: Message | None) -> None:
        self._message = message

    def __repr__(self) -> str:
        caller = self.caller
        return f"CurrentCall({'none' if caller is None else f'from {caller.name!r}'})"

    @property
    def caller(self) -> WorkerInfo | None:
        """The worker that made the call; None where there is no call."""
        message = self._message
        return None if message is None else info_of(message.worker.peers[message.caller].record)

    def remaining(self) -> float | None:
        """Returns the seconds until the caller gives up, 0 when it has; None: it waits for ever, or it was a `tell`."""
        message = self._message
        if message is None or message.deadline is None:
            return None
        return max(0.0, message.deadline - message.worker.clock.now())

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more: the call was cancelled, its time has run out, or its caller was
        lost. False for a `tell`, for which nobody ever waits.
        """
        message = self._message
        if message is None or not message.wants_answer:
            return False
        if message.cancelled or self.remaining() == 0.0:
            return True
        peer = message.worker.peers.get(message.caller)
        return peer is not None and peer.standing is Standing.LOST


def current_call() -> CurrentCall:
    """Returns what the present thread serves: the call of a function or method by another worker, or by this one.

    Its time bounds the calls that are made in it: they have no longer than it, whatever their own `timeout`; a `tell`
    has no time, and is not bounded. A handler that runs long looks at `current_call().cancelled` and gives up when that
    is true; nothing interrupts it.

    Elsewhere (in a main thread, an actor's `main`, the callback of a future, a thread of the user's own) there is none:
    `caller` and `remaining()` are None, and `cancelled` is False, so that a function works wherever it is called.

    Examples:
        >>> def work(items):
        ...     for item in items:
        ...         if rpc.current_call().cancelled:
        ...             return
        ...         handle(item)
    """
    handling = here.handling
    return CurrentCall(None if handling is None else handling.message)
