"""Batched methods: the calls of many callers become one run of a method, which gets lists.

RULE BT1 (turns). The handler of a batched call takes it down and returns, so that the actor is free for the next. The
batch runs in a turn: that of the call that fills it, or one of its own that queues behind what was there when its time
was up. A call within a wait of the actor's (of the same chain) is batched with others of that chain only: the turn of a
mixed batch would not be let in before the wait is over, which may be for this very call.
RULE BT2 (contexts). The calls of a batch belong to one autograd context: what is run for them belongs to one graph, of
which a pass of each context would need a part of its own. Calls in no context are another batch.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from actorrpc.errors import ActorGoneError, CancelledError, RPCTimeoutError, WrongResultError
from actorrpc.runtime.cells import MailboxCell
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.message import Message
from actorrpc.services.executor import Way, invoke
from actorrpc.wire.envelope import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.worker import Worker

_NO_MARK = object()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Call(NamedTuple):
    """One call of a batch: its message, its arguments by name, and what takes its result."""

    message: Message
    arguments: dict[str, Any]
    give: Callable[[Any], None]

    def fail(self, error: BaseException) -> None:
        if self.message.kept is not None:
            self.message.kept.fill(None, error)
        self.message.fail(error)

    def answer(self, result: Any) -> None:
        if isinstance(result, BaseException):
            self.fail(result)
            return
        try:
            self.give(result)
        except BaseException as e:
            self.fail(e)

    def wanted(self, now: float) -> bool:
        """Returns whether anybody waits for it; else answers it."""
        message = self.message
        message.on_cancel = None
        late = message.deadline is not None and message.deadline <= now
        if not (message.answered or message.cancelled or late):
            return True
        message.worker.serving.drop(message)
        if message.kept is not None:
            kind, reason = (RPCTimeoutError, "its time ran out") if late else (CancelledError, "it was cancelled")
            message.kept.fill(None, kind(f"the object was not made: {reason}"))
        return False


class Batching(Way):
    """What a batched method is marked with.

    Arguments:
        function: the method, as its class has it.
        max_size, max_wait: see `functions.batched`.

    Raises:
        TypeError: it cannot be batched.
    """

    def __init__(self, function: Callable[..., Any], max_size: int, max_wait: float) -> None:
        name = getattr(function, "__qualname__", repr(function))
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in _POSITIONAL:
            raise TypeError(f"{name} is no method: batched decorates methods, whose first parameter is self")
        if any(p.kind in _VARIABLE for p in parameters):
            raise TypeError(f"{name} cannot be batched: which lists would it get for *args or **kwargs?")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{name} cannot be batched: it is a generator, and a batch has one result for each call")
        self.max_size, self.max_wait = max_size, max_wait
        self.signature = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters[1:]])

    def take(
        self, message: Message, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        give: Callable[[Any], None],
    ) -> None:  # fmt: skip
        owner = getattr(function, "__self__", None)
        if owner is None:
            raise TypeError(f"{getattr(function, '__qualname__', function)} is batched: call it through a reference")
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(message, dict(bound.arguments), give)
        turn = message.turn
        inner = turn is not None and turn.below is not None and turn.below.chain is not None
        key = id(self), id(owner), message.context, message.chain if inner else None
        batches = message.worker.services.get(Batches) or message.worker.services.setdefault(Batches, Batches())
        with batches.door:
            batch = batches.open.get(key)
            begins = batch is None
            if batch is None:
                batch = batches.open[key] = _Batch(self, batches, key, function, message)
            batch.calls.append(call)
            message.on_cancel = functools.partial(batch.leave_out, call)
            full = len(batch.calls) >= self.max_size
            if full:
                del batches.open[key]
        if full:
            batch.run_in_turn_of(message)
        elif begins and self.max_wait:
            message.worker.keeper.after(self.max_wait, batch.due)
        elif begins:
            batch.due()


class Batches:
    """The batches of a worker that calls may still join.

    Attributes:
        open: by method, object, context and, where that counts, chain.
    """

    def __init__(self) -> None:
        self.open: dict[tuple[int, int, int, int | None], _Batch] = {}
        self.door = threading.RLock()


class _Batch:
    """Calls that are to be one.

    Arguments:
        way: how they are collected.
        batches, key: where it stands as long as it is open.
        method: of which object; it keeps that alive.
        first: the message of the first call.
    """

    def __init__(
        self, way: Batching, batches: Batches, key: tuple[int, int, int, int | None], method: Callable[..., Any],
        first: Message,
    ) -> None:  # fmt: skip
        self.way, self.method, self.calls = way, method, list[_Call]()
        self._batches, self._key, self._worker = batches, key, first.worker
        self._chain, self._context, self._target = first.chain, first.context, (first.creator, first.local)
        self._cell = _BatchCell(self._worker, getattr(method, "__qualname__", "a batched method"))
        self._is_over = False
        self._has_mailbox = first.mailbox is not None
        if first.mailbox is not None:
            self._cell.mailbox = first.mailbox
        self._worker.afoot.add(self)

    def due(self) -> None:
        """Has it run behind what is in the mailbox now; until then others may join."""
        if self._is_over:
            return
        flush = _Flush(self, self._worker, self._target, self._chain, self._context)
        if self._has_mailbox:
            job = self._cell.accept(flush)
        else:
            flush.cell, job = self._cell, (Lane.HANDLER, self._worker.perform, flush)
        if job is not None:
            self._worker.crew.submit(job)

    def run_in_turn_of(self, message: Message) -> None:
        """Runs it in the turn of a call that was to be one of its own, on the present thread."""
        flush = _Flush(self, self._worker, self._target, message.chain, self._context)
        flush.cell, turn = self._cell, message.turn
        if turn is None:
            self._worker.perform(flush)
            return
        flush.mailbox = message.mailbox
        message.turn, turn.message = None, flush  # whoever began the turn sees that it was taken over
        self._cell.perform(turn)

    def leave_out(self, call: _Call) -> None:
        """Lets go of a call that was cancelled before the batch ran."""
        with self._batches.door:
            was_there = any(other is call for other in self.calls)
            self.calls = [other for other in self.calls if other is not call]
        if was_there:
            call.wanted(self._worker.clock.now())

    def take_out(self) -> list[_Call]:
        """Closes it, and takes the calls that somebody waits for."""
        with self._batches.door:
            if self._batches.open.get(self._key) is self:
                del self._batches.open[self._key]
            calls, self.calls = self.calls, []
            self._is_over = True
        self._worker.afoot.discard(self)
        now = self._worker.clock.now()
        return [call for call in calls if call.wanted(now)]


class _BatchCell(MailboxCell):
    """Takes the message that runs a batch; it shares the actor's mailbox."""

    def __init__(self, worker: Worker, what: str) -> None:
        super().__init__(worker, self._handle, what, 1)

    def _handle(self, message: Message) -> None:
        assert isinstance(message, _Flush)
        message.run()

    def _refuse(self, message: Message) -> None:
        assert isinstance(message, _Flush)
        message.calls = message.batch.take_out()
        message.fail(ActorGoneError(f"{self.what} on {self._worker} was not run: its actor has ended"))


class _Flush(Message):
    """A message that was not sent: runs a batch. It is answered by answering all calls in it.

    Arguments:
        batch: what to run.
        worker, target, chain, context: as in `Message`.
    """

    __slots__ = ("batch", "calls")

    def __init__(
        self, batch: _Batch, worker: Worker, target: tuple[int, int], chain: int, context: int
    ) -> None:
        super().__init__(
            worker, Kind.TELL, 0, worker.id, 0, *target, chain, context, None, worker.place(), ()
        )  # fmt: skip
        self.batch = batch
        self.calls: Sequence[_Call] = ()

    def run(self) -> None:
        """Calls the method, unless nobody waits for it any more, or it was called before."""
        calls = self.calls = self.batch.take_out()
        if not calls:
            return
        ends = [call.message.deadline for call in calls]
        self.deadline = None if None in ends else max(end for end in ends if end is not None)
        args: list[list[Any]] = []
        kwargs: dict[str, list[Any]] = {}
        for name, parameter in self.batch.way.signature.parameters.items():
            column = [call.arguments[name] for call in calls]
            if parameter.kind in _POSITIONAL:
                args.append(column)
            else:
                kwargs[name] = column
        invoke(self, self.batch.method, tuple(args), kwargs, self._share, mark=_NO_MARK)

    def _share(self, results: Any) -> None:
        """Gives each call its own of the results.

        Raises:
            WrongResultError: there are not as many as calls.
        """
        calls, name = self.calls, getattr(self.batch.method, "__qualname__", "a batched method")
        if isinstance(results, torch.Tensor) and results.dim():
            results = results.unbind()
        if not isinstance(results, (list, tuple)) or len(results) != len(calls):
            has = f" of {len(results)}" if isinstance(results, (list, tuple)) else ""
            raise WrongResultError(
                f"{name} is batched: of {len(calls)} calls it must return a list, a tuple or a tensor of {len(calls)} "
                f"results, one for each call in their order, but it returned a {type(results).__qualname__}{has}"
            )
        self.answered = True
        for call, result in zip(calls, results, strict=True):
            call.answer(result)

    def fail(self, error: BaseException, flags: int = 0) -> None:
        if not self.answered:
            self.answered = True
            for call in self.calls:
                call.fail(error)
