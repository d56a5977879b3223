"""The creator: makes objects that stay here, for `remote`; and what it means that a result stays."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.lanes import Job, Lane
from actorrpc.runtime.message import GivenUp
from actorrpc.services.executor import invoke
from actorrpc.services.ids import CREATOR
from actorrpc.wire.envelope import Flag
from actorrpc.wire.names import lacks_main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        with keeping(message) as give:
            function, args, kwargs = message.load()
            make = functools.partial(self._service.construct, message.kept, function)
            invoke(message, make, args, kwargs, give, mark=function)


@contextlib.contextmanager
def keeping(message: Message) -> Iterator[Callable[[Any], None]]:
    """Gives what is to be called with the result of a message whose result stays here: it puts it in its place.

    An error inside goes to that place, too.
    """
    kept = message.kept
    assert kept is not None

    def give(value: Any) -> None:
        message.reply(None)  # first, so that the reference is confirmed before any use of it is answered
        kept.fill(value)

    try:
        yield give
    except GivenUp:
        raise  # it is dropped like one that has not begun
    except BaseException as e:
        if message.read or not (message.flags & Flag.NEEDS_VALUE and lacks_main(e)):
            kept.fill(None, e)  # else the caller sends it again, by value
        raise


def construct(_: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes an object; the face has a way of its own, which knows what an actor wants."""
    return function(*args, **kwargs)
