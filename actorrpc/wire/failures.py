"""Exceptions to frames and back. Writing one never fails, and reading one always gives an exception.

A failure carries the exception itself where a try on the sender shows that it survives the journey; beside it the parts
from which it can be made again without its constructor, which often does not fit its `args`; and, as plain strings, its
type's name, its text and its traceback, which always arrive.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from dataclasses import fields as fields_of
from typing import Any, Final, TypeAlias

import torch

from actorrpc.errors import GROUPS, DeserializationError, RemoteError, RemoteTraceback
from actorrpc.wire.codec import Codec, Frame

Where: TypeAlias = str | Mapping[str, object]
"""Where it happened: words, or the keys worker, rank, host and pid (any of them)."""

ORIGINAL: Final = "_actorrpc_original"
"""The attribute of an exception that stands for another one, which travels in its place."""

TEXT_LIMIT: Final = 1024 * 1024
"""Longer texts lose their middle."""
_DEPTH: Final = 8  # of exception groups within groups; deeper ones become RemoteErrors

FULL_VARIABLE: Final = "ACTORRPC_FULL_TRACEBACKS"
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

_Blob: TypeAlias = list[bytes] | None


class ScriptError(torch.jit.Error, RuntimeError):
    """What a scripted function raised elsewhere. Such an error is no RuntimeError where it is raised; torch's RPC makes
    one of it, and programs catch either.
    """


@dataclass(frozen=True)
class Failure:
    """What a reply carries when a handler raised.

    Args:
        type_name: module and qualified name of the exception's type.
        text: its `str`.
        traceback: its traceback and those of its causes, rendered.
        where: where it happened, in words.
        whole: the exception, pickled, if that can be read again.
        cls: its type, pickled.
        args: its arguments, pickled; `repr`s stand for those that cannot be.
        state: what can be pickled of its `__dict__`.
        members: the failures in an exception group.
    """

    type_name: str
    text: str
    traceback: str
    where: str
    whole: _Blob = None
    cls: _Blob = None
    args: _Blob = None
    state: _Blob = None
    members: list[list[bytes]] | None = None


_FIELDS: Final = fields_of(Failure)


def write_failure(exc: BaseException, where: Where, codec: Codec, by_value: bool = False) -> list[Frame]:
    """Writes an exception; whatever it holds, this does not raise.

    Args:
        exc: the exception, with its traceback and causes.
        where: where it happened; see `Where`.
        codec: writes what can be written of the exception itself.
        by_value: see `Codec.dumps`.
    """
    writer = _Writer(codec, by_value)
    exc = getattr(exc, ORIGINAL, exc)
    try:
        failure = _failure(exc, where, writer, _DEPTH)
    except Exception:  # an exception that fights back harder than was thought of
        failure = Failure(_name(type(exc)), _text(exc), _rendered(exc), _place(where))
    return codec.dumps(astuple(failure))


def read_failure(frames: Sequence[Any], codec: Codec | _Writer) -> BaseException:
    """Reads an exception.

    Its `__cause__` is a `RemoteTraceback`. It may be a KeyboardInterrupt or SystemExit: raising it is up to the caller.

    Args:
        frames: what `write_failure` returned.
        codec: reads what was written of the exception itself.

    Returns:
        The exception, of its own type where that can be imported; else a RemoteError.

    Raises:
        DeserializationError: if these frames are not of a failure.
    """
    fields = codec.loads(frames)
    if not (isinstance(fields, tuple) and len(fields) == len(_FIELDS) and all(type(f) is str for f in fields[:4])):
        raise DeserializationError("a message that should hold a failure holds something else")
    failure = Failure(*fields)
    exc = _whole(failure, codec) or _remade(failure, codec)
    if exc is None:
        exc = RemoteError(
            _cut(f"{failure.type_name}: {failure.text}"),
            type_name=failure.type_name,
            text=failure.text,
            where=failure.where,
        )
    cause = RemoteTraceback(f"On {failure.where}:\n{failure.traceback}")
    # Not by assignment: the exception may be a frozen dataclass, or have a __setattr__ of its own.
    BaseException.__setattr__(exc, "__cause__", cause)
    return exc


class _Writer:
    """A codec that knows how things of the main module are to be written."""

    def __init__(self, codec: Codec, by_value: bool) -> None:
        self.loads = codec.loads
        self._codec, self._by_value = codec, by_value

    def dumps(self, obj: object) -> list[Frame]:
        return self._codec.dumps(obj, by_value=self._by_value)


def as_elsewhere(exc: BaseException) -> BaseException:
    """Returns what an exception of this process is to those who made the call: itself, or a `ScriptError`."""
    if type(exc) is not torch.jit.Error:
        return exc
    made = ScriptError(*exc.args).with_traceback(exc.__traceback__)
    made.__cause__, made.__context__ = exc.__cause__, exc.__context__
    return made


def cause_here(exc: BaseException, where: str) -> RemoteTraceback:
    """Makes the cause that an exception of this process would have elsewhere, for one kept without its frames."""
    return RemoteTraceback(f"On {where}:\n{_rendered(exc)}")


def _failure(exc: BaseException, where: Where, codec: _Writer, depth: int) -> Failure:
    exc = as_elsewhere(exc)
    kind = type(exc)
    failure = Failure(_name(kind), _text(exc), _rendered(exc), _place(where))
    whole = _written(exc, codec)
    if whole is not None and _survives(exc, whole, codec):
        return Failure(*_plain(failure), whole=whole)
    members = None
    if isinstance(exc, GROUPS) and depth:
        members = [
            [bytes(frame) for frame in codec.dumps(astuple(_failure(member, where, codec, depth - 1)))]
            for member in exc.exceptions
        ]
    remake = Failure(
        *_plain(failure),
        cls=_written(kind, codec),
        args=_written(exc.args[:1] if members is not None else tuple(_kept(arg, codec) for arg in exc.args), codec),
        state=_written(_state(exc, codec), codec),
        members=members,
    )
    return remake if _remade(remake, codec) is not None else failure


def _plain(failure: Failure) -> tuple[str, str, str, str]:
    return failure.type_name, failure.text, failure.traceback, failure.where


def _survives(exc: BaseException, whole: list[bytes], codec: _Writer) -> bool:
    # Same type is not enough: a constructor that decorates its message and passes it on decorates it once more.
    try:
        back = codec.loads(whole)
        return type(back) is type(exc) and len(back.args) == len(exc.args) and str(back) == str(exc)
    except Exception:
        return False


def _whole(failure: Failure, codec: Codec | _Writer) -> BaseException | None:
    exc = _read(failure.whole, codec)
    return exc if isinstance(exc, BaseException) else None


def _remade(failure: Failure, codec: Codec | _Writer) -> BaseException | None:
    """The exception made without its constructor, which may want other arguments than `args`."""
    cls = _read(failure.cls, codec)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    args = _read(failure.args, codec)
    if not isinstance(args, tuple):
        args = (failure.text,)
    if failure.members is not None:
        args = (*args[:1], [read_failure(member, codec) for member in failure.members])
    try:
        exc: object = cls.__new__(cls, *args)
        if not isinstance(exc, BaseException):
            return None
        if failure.members is None:
            BaseException.__setattr__(exc, "args", args)
        state = _read(failure.state, codec)
        if isinstance(state, dict):
            exc.__dict__.update(state)
        str(exc)  # one that cannot even be printed helps nobody
    except Exception:
        return None
    return exc


def _read(blob: _Blob, codec: Codec | _Writer) -> Any:
    if blob is None:
        return None
    try:
        return codec.loads(blob)
    except Exception:
        return None


def _written(obj: object, codec: _Writer) -> _Blob:
    try:
        return [bytes(frame) for frame in codec.dumps(obj)]
    except Exception:
        return None


def _kept(arg: object, codec: _Writer) -> object:
    blob = _written(arg, codec)
    if blob is not None:
        try:
            codec.loads(blob)
            return arg
        except Exception:
            pass
    return _safely(lambda: repr(arg), f"<{type(arg).__qualname__}>")


def _state(exc: BaseException, codec: _Writer) -> dict[str, object]:
    state = getattr(exc, "__dict__", None)
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in list(state.items()) if _kept(value, codec) is value}


def _name(kind: type) -> str:
    return _safely(lambda: f"{kind.__module__}.{kind.__qualname__}", "an exception")


def _text(exc: BaseException) -> str:
    return _cut(_safely(lambda: str(exc), f"<{type(exc).__qualname__} whose str() fails>"))


def _rendered(exc: BaseException) -> str:
    return _cut(_safely(lambda: rendered(exc), f"<no traceback: {_text(exc)}>"))


def rendered(exc: BaseException) -> str:
    """Returns the traceback of an exception and those of its causes, without the frames of this package, which tell the
    user nothing; where there are no others, or ACTORRPC_FULL_TRACEBACKS is set (and not to 0), with them.
    """
    told = traceback.TracebackException.from_exception(exc)
    if os.environ.get(FULL_VARIABLE, "0") in ("", "0"):
        _leave_out_ours(told)
    return "".join(told.format())


def _leave_out_ours(told: traceback.TracebackException) -> None:
    left = [told]
    while left:  # a chain may be longer than Python's stack
        one = left.pop()
        theirs = [frame for frame in one.stack if not frame.filename.startswith(_PACKAGE)]
        if theirs:
            one.stack = traceback.StackSummary.from_list(theirs)
        left += [more for more in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())) if more]


def _safely(render: Any, otherwise: str) -> str:
    try:
        text = render()
        # A subclass of str could be as unwilling as the exception.
        return str.__str__(text) if type(text) is str else str(text).encode("utf-8", "replace").decode()
    except Exception:
        return otherwise


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _place(where: Where) -> str:
    if isinstance(where, str):
        return where
    worker = where.get("worker")
    details = [f"{key} {value}" for key, value in where.items() if key != "worker" and value is not None]
    place = f'worker "{worker}"' if worker is not None else "a worker"
    return f"{place} ({', '.join(details)})" if details else place
