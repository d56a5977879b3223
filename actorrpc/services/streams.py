"""The owner's side of a stream: a generator whose items others ask for, one message an item.

RULE ST1 (one at a time, in order). Of those messages one at a time is in the mailbox; the others wait here, in the
order in which they came. After each item the next one queues behind what came for the actor meanwhile: between two
items an actor serves others, as at an `await`.
RULE ST2 (the end). When nobody holds the stream any more (it was closed, collected, or its holder is gone), what still
waits is answered, and the generator is closed in a turn of its own, so that its `finally` has the actor to itself.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import NotAMemberError
from actorrpc.runtime.cells import MailboxCell
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.runtime.lanes import Job
from actorrpc.runtime.mailbox import Mailbox
from actorrpc.runtime.message import Message
from actorrpc.services.executor import Way, mark_of
from actorrpc.services.handles import Dressed
from actorrpc.services.loop import loop_of
from actorrpc.wire.envelope import Kind

if TYPE_CHECKING:
    from actorrpc.runtime.mailbox import Turn
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.handles import Entry

log = logging.getLogger("actorrpc")


class Streamed(Dressed):
    """Has a method's items come one by one.

    Arguments:
        name: the method's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: opened(method, *args, **kwargs)


def opened(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Source:
    """Calls a function and makes the source of its items.

    Raises:
        TypeError: its result has no items.
        BaseException: what the function raised.
    """
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(mark_of(function), Way):
        raise TypeError(f"{name} is batched, and answers each call with one result: call it by rpc_sync() or rpc_async")
    made = function(*args, **kwargs)
    if hasattr(made, "__aiter__"):
        return Source(name, aiter(made))
    if hasattr(made, "__iter__") and not isinstance(made, str | bytes):
        return Source(name, iter(made))
    if hasattr(made, "close") and hasattr(made, "cr_code"):
        made.close()  # a coroutine, which need not say that nobody has awaited it
    raise TypeError(
        f"{name} gave a {type(made).__qualname__}, which has no items to stream: stream() is for generators, async "
        f"generators and what can be iterated over; other methods are called by rpc_sync() or rpc_async()"
    )


class Source:
    """A stream's items, on the worker that makes them. Made in the handler of the message that asks for the stream.

    Arguments:
        what: what makes the items, in words.
        items: an iterator, or an async one.
    """

    def __init__(self, what: str, items: Iterator[Any] | AsyncIterator[Any]) -> None:
        self.what, self.items = what, items
        handling = here.handling
        self.mailbox: Mailbox[Message] | None = handling.mailbox if handling is not None else None
        self._cell: SourceCell | None = None

    def cell(self, entry: Entry, worker: Worker) -> SourceCell:
        """Returns the cell that takes the messages for it."""
        if self._cell is None:
            self._cell = SourceCell(worker, self, entry)
        return self._cell

    def end(self) -> None:
        """Closes the generator: nobody holds the stream any more."""
        if self._cell is not None:
            self._cell.end()

    def __reduce__(self) -> Any:
        raise TypeError("a stream's items are asked for one by one, through the Stream that stream() gives")


class SourceCell(MailboxCell):
    """Takes the messages that ask for items. It shares the actor's mailbox; where a function makes the items, it has
    one of its own.

    Arguments:
        worker: where it lives.
        source: whose items.
        entry: its place.
    """

    def __init__(self, worker: Worker, source: Source, entry: Entry) -> None:
        super().__init__(worker, self._handle, f"the stream of {source.what}", 1)
        if source.mailbox is not None:
            self.mailbox = source.mailbox
        self._source, self._id = source, entry.id
        self._items: Any = source.items
        self._is_async = not hasattr(source.items, "__next__")
        self._queue: deque[Message] = deque()
        self._gate = threading.RLock()  # reentrant: a finalizer of the user's may drop another reference
        self._present: Message | None = None
        """The message that is in the mailbox, or is being handled."""
        self._over = self._ending = False
        self._grad = True
        """Whether torch records in the generator, where it stands."""

    def accept(self, message: Message) -> Job | None:
        message.cell = self
        with self._gate:
            if self._present is not None:
                self._queue.append(message)
                return None
            self._present = message
        return super().accept(message)

    def finish(self, turn: Turn[Message]) -> None:
        super().finish(turn)
        self._go_on()

    def _refuse(self, message: Message) -> None:
        if isinstance(message, _End):
            self._close(message)
        else:
            super()._refuse(message)
        self._go_on()

    def _go_on(self) -> None:
        with self._gate:
            message = self._present = self._queue.popleft() if self._queue else None
        if message is not None:
            job = super().accept(message)
            if job is not None:
                self._worker.crew.submit(job)

    def end(self) -> None:
        """See `Source.end`."""
        worker = self._worker
        with self._gate:
            if self._ending:
                return
            self._over = self._ending = True
            waiting, self._queue = self._queue, deque()
            present = self._present
        for message in waiting:
            message.reply(None)
        end = _End(worker, self._id)
        if present is None and (worker.ending or not worker.open):
            self._close(end)
            return
        if present is not None and self._is_async:
            loop_of(worker).cancel(present)  # it may await what never comes
        job = self.accept(end)
        if job is not None:
            worker.crew.submit(job)

    # -- in a turn

    def _handle(self, message: Message) -> None:
        message.load()
        if isinstance(message, _End):
            self._close(message)
        elif self._over:
            message.reply(None)
        elif self._is_async:
            loop_of(self._worker).answer(message, self._take_async(), message.reply)
        else:
            self._take(message)

    def _take(self, message: Message) -> None:
        torch.set_grad_enabled(self._grad)  # `with torch.no_grad()` around a `yield`: the mode stays the generator's
        try:
            item = next(self._items)
        except StopIteration:
            self._over = True
            message.reply(None)
            return
        except BaseException:
            self._over = True
            raise
        finally:
            self._grad = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
        message.reply((item,))

    async def _take_async(self) -> tuple[Any] | None:
        torch.set_grad_enabled(self._grad)
        try:
            return (await anext(self._items),)
        except StopAsyncIteration:
            self._over = True
            return None
        except BaseException:
            self._over = True
            raise
        finally:
            self._grad = torch.is_grad_enabled()

    def _close(self, end: Message) -> None:
        try:
            if not self._is_async:
                getattr(self._items, "close", _nothing)()
            elif self._worker.open and hasattr(self._items, "aclose"):
                loop_of(self._worker).answer(end, self._items.aclose(), lambda _: None)
        except NotAMemberError:
            pass  # the worker is at its end, and its loop, as it ends, closes what is left
        except Exception:
            log.exception("%s: the end of %s failed", self._worker, self.what)


def _nothing() -> None:
    """The end of an iterator that has none."""


class _End(Message):
    """A message that was not sent: the end of a stream."""

    __slots__ = ()

    def __init__(self, worker: Worker, source: tuple[int, int]) -> None:
        chain = worker.id << 40 | worker.calls.next_id()
        super().__init__(
            worker, Kind.TELL, 0, worker.id, 0, *source, chain, NO_CONTEXT, None, sys.maxsize, ()
        )  # fmt: skip

    def load(self) -> Any:
        return None
