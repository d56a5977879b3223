"""The executor: runs functions for others. `rpc_sync` and `rpc_async` send to it."""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import SerializationError, WrongResultError
from actorrpc.runtime.cells import ServiceCell
from actorrpc.runtime.lanes import Lane
from actorrpc.services.ids import EXECUTOR
from actorrpc.services.loop import loop_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which `functions.async_execution` marks a function; torch's name, so that its marks count too."""

_UNDER_WAY: Any = (CoroutineType, GeneratorType, AsyncGeneratorType, torch._C.Future)
"""Results that have only begun."""


class Way:
    """A mark that says how its function is called. To be subclassed."""

    def take(
        self, message: Message, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        give: Callable[[Any], None],
    ) -> None:  # fmt: skip
        """Sees to it that the function is called and its result given; arguments and errors as for `invoke`."""
        raise NotImplementedError


def install(worker: Worker) -> None:
    """Gives a worker its executor."""
    worker.cells[EXECUTOR] = ServiceCell(worker, Lane.HANDLER, _execute)


def _execute(message: Message) -> None:
    function, args, kwargs = message.load()
    invoke(message, function, args, kwargs, message.reply)


def invoke(
    message: Message,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    give: Callable[[Any], None],
    mark: object = None,
) -> None:
    """Calls a function and gives its result, or, where it is marked as asynchronous, later its future's.

    Arguments:
        message: what asks for it; an error of the future answers it.
        function, args, kwargs: what to call.
        give: takes the result.
        mark: what bears the mark, where that is not the function.

    Raises:
        WrongResultError: a function marked as asynchronous returned something else than a Future.
        SerializationError: it returned what only such a function may, a Future; or a generator.
        BaseException: what the function raised.
    """
    mark = function if mark is None else mark
    found = mark_of(mark)
    if isinstance(found, Way):
        found.take(message, function, args, kwargs, give)
        return
    around = message.worker.around
    result = function(*args, **kwargs) if around is None else around(function, args, kwargs)
    if found is not None:
        _deliver(message, mark, result, give)
    elif isinstance(result, _UNDER_WAY):
        _take_up(message, function, result, give)
    else:
        give(result)


def _take_up(message: Message, function: object, result: Any, give: Callable[[Any], None]) -> None:
    """Gives what a function's result comes to, where that is a coroutine.

    Raises:
        SerializationError: it is something else that has only begun, and is to stay where it is.
    """
    if isinstance(result, CoroutineType):
        try:
            loop = loop_of(message.worker)
        except BaseException:
            result.close()
            raise
        loop.answer(message, result, give)
        return
    if message.kept is None and not isinstance(result, torch._C.Future):
        name = getattr(function, "__qualname__", repr(function))
        raise SerializationError(
            f"{name} returned a generator, which stays where it is: call it through stream(), and its items come one "
            f"after the other (for item in ref.stream().{getattr(function, '__name__', name)}(...))"
        )
    if message.kept is None and message.wants_answer:
        name = getattr(function, "__qualname__", repr(function))
        raise SerializationError(
            f"{name} returned a Future, which stays where it is (Can not pickle torch.futures.Future); mark {name} "
            f"with functions.async_execution, and the call is answered when the future is done (the mark goes "
            f"above torch.jit.script, below staticmethod)"
        )
    give(result)


def mark_of(function: object) -> Any:
    """Returns what a function, or what a bound or class method is made of, is marked with: a Way, or anything that says
    that it is asynchronous; None where it is not marked.
    """
    found = getattr(function, ASYNC_MARK, None)
    return found if found is not None else getattr(getattr(function, "__func__", None), ASYNC_MARK, None)


def is_async(function: object) -> bool:
    """Returns whether a function is marked as asynchronous."""
    return mark_of(function) is not None


def _deliver(message: Message, function: object, future: object, give: Callable[[Any], None]) -> None:
    if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future; scripted functions return this one
        name = getattr(function, "__qualname__", repr(function))
        raise WrongResultError(
            f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but {name} "
            f"returned {type(future).__name__} (functions.async_execution is how they are decorated)"
        )

    def ready(done: Any) -> None:
        try:
            value = done.wait()
        except BaseException as e:
            kept = message.kept
            if kept is not None:
                kept.fill(None, e)
            message.fail(e)
        else:
            give(value)

    future.add_done_callback(ready)
