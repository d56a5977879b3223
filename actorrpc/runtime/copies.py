"""Copies of errors: such as torch raises, and such as may be kept without what their tracebacks refer to."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from typing import Any

from actorrpc.errors import GROUPS, RemoteError
from actorrpc.wire.failures import ORIGINAL

_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def as_torch_raises(error: BaseException) -> BaseException:
    """Returns an error that is of its own type and a RuntimeError; it travels as what it was."""
    if not isinstance(error, Exception) or isinstance(error, RuntimeError):
        return error
    kind: Any = type(error)
    try:
        both = _also_runtime_error(kind)
        made: BaseException = both.__new__(both, *error.args)
    except Exception:  # their layouts, its constructor or its metaclass do not allow it
        return error
    _copy_state(error, made)
    return made.with_traceback(error.__traceback__)


@functools.lru_cache(maxsize=128)
def _also_runtime_error(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": _as_it_was}
    return type(kind.__name__, (kind, RuntimeError), names)


def _copy_state(error: BaseException, made: BaseException) -> None:
    # Not by assignment: the exception may be a frozen dataclass, or have a __setattr__ of its own.
    put = functools.partial(BaseException.__setattr__, made)
    put("args", error.args)
    for kind in type(error).__mro__:
        if kind is BaseException:
            break
        for name, field in vars(kind).items():  # what is not in __dict__: the file name of an OSError, __slots__
            value = getattr(error, name, None) if isinstance(field, _FIELDS) else None
            if value is not None and name not in ("__dict__", "__weakref__"):
                with contextlib.suppress(Exception):
                    put(name, value)
    made.__dict__.update({**vars(error), ORIGINAL: error})
    put("__cause__", error.__cause__)
    put("__suppress_context__", error.__suppress_context__)


def _as_it_was(error: Any) -> Any:
    return _same, (getattr(error, ORIGINAL),)


def _same(error: BaseException) -> BaseException:
    return error


def bare_copy(error: BaseException, depth: int = 8) -> BaseException:
    """Copies an error, its causes and a group's errors, all without tracebacks."""
    original = getattr(error, ORIGINAL, None)
    if original is not None:
        return as_torch_raises(bare_copy(original, depth))
    try:
        made = _copied_group(error, depth) if isinstance(error, GROUPS) else copy.copy(error)
    except Exception:  # an exception class of the user's that cannot be copied
        made = RemoteError(f"{type(error).__qualname__}: {error}", type_name=type(error).__qualname__)
    cause = error.__cause__
    made.__cause__ = bare_copy(cause, depth - 1) if cause is not None and depth else None
    return made.with_traceback(None)


def _copied_group(group: Any, depth: int) -> BaseException:
    kept = [bare_copy(e, depth - 1) for e in group.exceptions] if depth else [RemoteError("left out")]
    kind: Any = type(group)
    made: BaseException = kind.__new__(kind, group.message, kept)
    made.__dict__.update(vars(group))
    return made
