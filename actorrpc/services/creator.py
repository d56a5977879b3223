"""The creator: makes objects that stay here, for `remote`; and what it means that a result stays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.lanes import Job, Lane
from actorrpc.runtime.message import GivenUp
from actorrpc.services.executor import invoke
from actorrpc.services.ids import CREATOR
from actorrpc.wire.envelope import Flag
from actorrpc.wire.names import lacks_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.message import Message
    from actorrpc.services.handles import Entry
    from actorrpc.services.objects import Objects


def install(service: Objects) -> None:
    """Gives a worker its creator."""
    service.worker.cells[CREATOR] = _Creator(service)


class _Creator:
    """The cell that takes requests to make an object out of nothing but a function's result."""

    def __init__(self, service: Objects) -> None:
        self._service = service

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        self._service.reserve(message)
        return (Lane.HANDLER, self._service.worker.perform, message)

    def run(self, message: Message) -> None:
        keep(message, self._make)

    def _make(self, message: Message, give: Callable[[Any], None]) -> None:
        function, args, kwargs = message.load()
        make = functools.partial(self._service.construct, message.kept, function)
        invoke(message, make, args, kwargs, give, mark=function)


def keep(message: Message, run: Callable[[Message, Callable[[Any], None]], None]) -> None:
    """Runs a message whose result stays here.

    Arguments:
        message: which.
        run: runs it, given what to call with the result, which puts it in its place. Its error goes there, too.
    """
    kept = message.kept
    assert kept is not None

    def give(value: Any) -> None:
        message.reply(None)  # first, so that the reference is confirmed before any use of it is answered
        kept.fill(value)

    try:
        run(message, give)
    except GivenUp:
        raise  # it is dropped like one that has not begun
    except BaseException as e:
        if message.read or not (message.flags & Flag.NEEDS_VALUE and lacks_main(e)):
            kept.fill(None, e)  # else the caller sends it again, by value
        raise


def construct(_: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes an object; the face has a way of its own, which knows what an actor wants."""
    return function(*args, **kwargs)
