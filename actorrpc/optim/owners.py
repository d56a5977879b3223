"""How the owners of parameters are asked: all at the same time, outside of autograd contexts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import RemoteTraceback
from actorrpc.proxies import failed_future
from actorrpc.rref import RRef
from actorrpc.runtime.handling import NO_CONTEXT, in_context

if TYPE_CHECKING:
    from collections.abc import Sequence


Start = Callable[[], Callable[[], Any]]
"""Sends a call, and returns what waits for its result."""


def ask(what: str, calls: Sequence[tuple[str, Start]]) -> list[Any]:
    """Calls several owners at the same time, and returns their answers.

    Arguments:
        what: what they are asked to do, for errors.
        calls: for each owner its name, and what sends the call.

    Raises:
        BaseException: what the first of those that failed raised; its cause names all of them, with their tracebacks.
    """
    answers: list[Any] = []
    failed: list[tuple[str, Exception]] = []
    with in_context(NO_CONTEXT):
        waits = [(name, _sent(start)) for name, start in calls]
        for name, wait in waits:
            try:
                answers.append(wait())
            except Exception as e:
                failed.append((name, e))
    if failed:
        names = ", ".join(repr(name) for name, _ in failed)
        texts = [f"{what} failed on {len(failed)} of {len(calls)} owners: {names}", *map(_told, failed)]
        raise failed[0][1] from RemoteTraceback("\n".join(texts))
    return answers


def _sent(start: Start) -> Callable[[], Any]:
    try:
        return start()
    except Exception as e:  # the others are asked all the same
        return failed_future(e).wait


def _told(failed: tuple[str, Exception]) -> str:
    name, error = failed
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.text
    return f"{name}: {''.join(traceback.format_exception_only(error))}"


def checked(refs: object, what: str) -> list[RRef[Any]]:
    """Returns a list of references to parameters.

    Raises:
        TypeError: it is none.
        ValueError: it is empty.
    """
    if isinstance(refs, RRef):
        refs = [refs]
    if isinstance(refs, (str, bytes)) or not hasattr(refs, "__iter__"):
        raise TypeError(f"{what} must be a list of RRefs to parameters, not {type(refs).__name__}")
    found = list(refs)
    if not found:
        raise ValueError(f"{what} is empty: there is nothing to optimize")
    for ref in found:
        if not isinstance(ref, RRef):
            raise TypeError(
                f"{what} must hold RRefs to parameters, not {type(ref).__name__}; "
                f"on the worker that has a parameter, RRef(parameter) makes one"
            )
    return found


def tensor_of(ref: RRef[Any]) -> Any:
    """Returns the parameter that a reference of this worker refers to.

    Raises:
        TypeError: it refers to something else.
        BaseException: what its creation raised.
    """
    value = ref.local_value()
    if not isinstance(value, torch.Tensor):
        hint = ""
        if isinstance(value, torch.nn.Module):
            hint = ": refer to its parameters, [RRef(p) for p in module.parameters()]"
        elif isinstance(value, (list, tuple)):
            hint = ": fetch the references in it with to_here() first"
        raise TypeError(f"a reference to a parameter is needed, but {ref} refers to a {type(value).__qualname__}{hint}")
    return value
