"""Waiting in a coroutine: what `await future` does, on whichever asyncio loop; and what refuses other waits there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from actorrpc.errors import BlockingWaitError
from actorrpc.runtime.completion import Waiter
from actorrpc.runtime.handling import Handling, here
from actorrpc.runtime.mailbox import Mailbox, Turn

if TYPE_CHECKING:
    from collections.abc import Generator

    from actorrpc.runtime.completion import Completion


class Wake(asyncio.Future[None]):
    """What a task sleeps on while it awaits something of this library's.

    Attributes:
        core: what it waits for; None for leave to go on.
        waiter: its place among those who wait for that.
        timed: whether it sleeps for some time at most.
    """

    core: Completion | None = None
    waiter: Waiter | None = None
    timed = False


class LoopGate:
    """A gate for a coroutine: its opening wakes the task that sleeps on `wake`. It may be opened by any thread.

    Arguments:
        loop: the task's.
    """

    __slots__ = ("_loop", "wake")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.wake = loop, Wake(loop=loop)

    def open(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._open)
        except RuntimeError:
            pass  # the loop is closed, and nobody waits any more

    def _open(self) -> None:
        if not self.wake.done():
            self.wake.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        raise NotImplementedError("a coroutine sleeps on `wake`")


def until(what: Completion, seconds: float) -> Generator[Any, None, bool]:
    """Waits in a coroutine until something is done.

    Arguments:
        seconds: how long at most; 0 or below for ever.

    Returns whether it is done.

    Raises:
        RuntimeError: no asyncio loop runs in this thread.
        asyncio.CancelledError: the task is cancelled; what it waited for goes on.
    """
    loop = asyncio.get_running_loop()
    if what.done:
        yield from _give_way(what, loop)
        return True
    gate = LoopGate(loop)
    wake = gate.wake
    wake.core, wake.waiter = what, Waiter(gate)
    what.waiters.append(wake.waiter)
    timer = None
    if seconds > 0:
        timer, wake.timed = loop.call_later(seconds, gate._open), True
    try:
        if what.done:  # it came before it could see this waiter
            yield from _give_way(what, loop)
        else:
            yield from wake
    finally:
        what.waiters.remove(wake.waiter)
        if timer is not None:
            timer.cancel()
    return what.done


def _give_way(what: Completion, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
    """Lets an actor's earlier messages go before what is there already (RULE MB3); in other coroutines does nothing."""
    handling = here.handling
    if handling is not None and handling.turn is NO_TURN:
        wake = Wake(loop=loop)
        wake.core = what
        wake.set_result(None)
        wake._asyncio_future_blocking = True
        yield wake


class _NoWaits(Mailbox[Any]):
    """Stands where a thread that waits looks for its mailbox, and refuses: so other threads' waits need not ask where
    they are. It seems never to be empty, so that a wait whose answer is quick is no less of an error.
    """

    def __len__(self) -> int:
        return 1

    def suspend(self, turn: Turn[Any], limit: int | None = None) -> list[Turn[Any]]:
        raise BlockingWaitError(
            "this wait would block the worker's loop, and with it all its coroutines: within `async def`, `await` the "
            "future (rpc_async gives one), or `await asyncio.to_thread(...)` what has none. What was to be called was "
            "sent, and may run"
        )


_NO_WAITS = _NoWaits(0)
NO_TURN: Turn[Any] = Turn(None, None, None)
"""The turn of code that runs on a worker's loop, which cannot be lent by waiting."""


def on_loop(handling: Handling) -> Handling:
    """Returns the same circumstances for code on a worker's loop."""
    return Handling(handling.worker, handling.message, handling.chain, _NO_WAITS, NO_TURN)
