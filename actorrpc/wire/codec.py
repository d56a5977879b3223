"""Objects to frames and back: the first frame is a pickle, the others are raw buffers that it refers to.

Plain pickle (the C one, protocol 5) writes first; what it refuses goes to cloudpickle, with the same reducers and the
same buffers. Frames that `dumps` returns share memory with the large tensors and arrays in the object: whoever changes
those before the frames are sent sends the change.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import torch
from cloudpickle import cloudpickle as cloud

from actorrpc.errors import DeserializationError, DeviceMapError, SerializationError, UnknownNameError
from actorrpc.wire import names, spans, tensors
from actorrpc.wire.memo import asks_too_much
from actorrpc.wire.message import Landing, Leaving, Reading, Writing, now, owned, plain, write_late

NONE: Final = b"\x80\x05N."
"""What `dumps` writes of None."""
Frame: TypeAlias = bytes | memoryview
"""What `dumps` returns a list of; `loads` also takes bytearrays and `zmq.Frame`s."""

_KEEP = 64 * 1024  # a pickler whose message was longer is thrown away: its memo table would stay as large
_WARY = 1000
"""So many messages are looked through before they are read, after one that could not be: those after it may be broken
in a worse way. (To do so with each costs some microseconds.)
"""
_Reducer = Callable[[Any], Any]
_REFUSALS: Final = (SerializationError, DeviceMapError)
"""Errors which say all that there is to say; others may be mended by cloudpickle, or say too little."""


def writing() -> Any:
    """The `notes` of the `dumps` that runs on this thread, or None."""
    return now.writing.notes if now.writing is not None else None


def reading() -> Any:
    """The `notes` of the `loads` that runs on this thread, or None."""
    return now.reading.notes if now.reading is not None else None


def mentions_main(frames: Sequence[Any]) -> bool:
    """Whether a message may refer to things of `__main__`, so that writing it again by value may help a reader.

    It is a search for the module's name, so it may say yes wrongly, and does for a message written by value.
    """
    data = frames[0]
    return names.mentions_main(data if type(data) is bytes else plain(data))


class _Sink:
    """A file that keeps what is written as it comes: the pickler writes a short pickle in one go."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[Any], object]) -> None:
        self.write = write


class _Pen(Writing):
    """A pickler and the message that it is at. Making one costs more than pickling a small call, so pens are kept."""

    __slots__ = ("chunks", "pickler")

    def __init__(self, table: dict[type, _Reducer]) -> None:
        super().__init__()
        self.chunks: list[Any] = []
        self.pickler = pickle.Pickler(_Sink(self.chunks.append), 5, buffer_callback=self.take)
        self.pickler.dispatch_table = table


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with a codec's reducers, and with things of the main module by name unless told otherwise."""

    def __init__(self, write: Callable[[Any], object], table: dict[type, _Reducer], take: Any, by_value: bool) -> None:
        # A file's content is not the file: cloudpickle's reducer for files opened for reading would surprise.
        own = {kind: reducer for kind, reducer in self._dispatch_table.items() if kind is not io.TextIOWrapper}
        self.dispatch_table = tensors.Table({**own, **table})  # before __init__, which looks it up
        self._by_value = by_value
        super().__init__(_Sink(write), protocol=5, buffer_callback=take)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type) and getattr(obj, "__module__", None) in names.MAINS:
            if not self._by_value and _is_global(obj):
                return NotImplemented
            if isinstance(obj, types.FunctionType):
                return self._dynamic_function_reduce(obj)
            return cloud._dynamic_class_reduce(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and not (_is_global(obj) and self._may_go_by_name(obj)):
            return _cached, (obj.__wrapped__, obj.cache_parameters())  # of its own accord it goes by name, always
        return super().reducer_override(obj)

    def _may_go_by_name(self, obj: Any) -> bool:
        return not (self._by_value and obj.__module__ in names.MAINS)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _is_global(obj: Any) -> bool:
    try:
        return names.resolve(obj.__module__, obj.__qualname__) is obj
    except Exception:
        return False


class _Idle(threading.local):
    pen: _Pen | None = None


REDUCERS: Final[dict[type, _Reducer]] = {
    **tensors.REDUCERS,
    torch.jit.ScriptFunction: names.reduce_script_function,
    torch.jit._script.RecursiveScriptModule: names.reduce_script_module,
}
"""What every codec begins with."""


class Codec:
    """Writes and reads the messages of one worker. Any thread may use it, and reducers may use it themselves.

    Args:
        where: which worker it is, for errors: "on so-and-so".
    """

    def __init__(self, where: str = "here") -> None:
        self._where = where
        self._wary = 0
        self._idle = _Idle()
        self._own = dict(REDUCERS)
        self._table = tensors.Table()
        self._known = -1
        self.leaving: Callable[[Any], Leaving | None] | None = None
        """Given a message's notes, what knows where its tensors go that are on other devices than the CPU, or shall be;
        None where there are no such devices.
        """
        self.landing: Callable[[Any], Landing] | None = None
        """Given a message's notes, what puts its tensors there."""
        self._fill()

    def register(self, cls: type, reducer: _Reducer) -> None:
        """Has instances of exactly this class written by `reducer`, whatever the class itself says.

        Args:
            cls: the class; subclasses of it are not meant. Functions and classes themselves cannot be caught this way.
            reducer: takes the object, returns what `__reduce__` would. It may be called more than once in a message
                that plain pickle refuses (see `dumps`).
        """
        self._own[cls] = reducer
        self._fill()

    def forget(self, cls: type) -> None:
        """Takes a registration back; the class is written as it was before."""
        if self._own.pop(cls, None) is not None:
            self._table.pop(cls, None)
            self._fill()

    def _fill(self) -> None:
        # A pickler's own table replaces copyreg's, to which others may add at any time. Changed in place: pens have it.
        self._known = len(copyreg.dispatch_table)
        self._table.update({**copyreg.dispatch_table, **self._own})

    def dumps(self, obj: object, notes: Any = None, by_value: bool = False) -> list[Frame]:
        """Writes an object.

        Args:
            obj: what to write.
            notes: reducers that run meanwhile find it with `writing()`. If it has a method `restart`, that is called
                each time what was written so far is thrown away. If it has an attribute `trace` that is not None,
                tensors that require grad are not written as leaves: `trace.add(tensor)` gives a mark that goes with
                the tensor, and the reader's `notes.trace.take(tensor, mark)` gets both.
            by_value: writes functions and classes of the main module themselves instead of their names, for a reader
                that has another main module. What names none is written as ever.

        Returns:
            The pickle, then the buffers, read-only and in the object's own memory.

        Raises:
            SerializationError: if neither pickle nor cloudpickle takes it; it says what and where.
            DeviceMapError: a tensor in it is on a device from which it can go nowhere.
        """
        if len(copyreg.dispatch_table) != self._known:
            self._fill()
        if by_value:
            plainly = self.dumps(obj, notes)
            if not mentions_main(plainly):
                return plainly
            _restart(notes)
            return self._dumps_cloud(obj, notes, True)
        idle = self._idle
        pen = idle.pen
        if pen is None:
            pen = _Pen(self._table)
        else:
            idle.pen = None  # a reducer may write a message of its own meanwhile
        pen.notes = notes
        pen.trace = getattr(notes, "trace", None)
        if self.leaving is not None:
            pen.leaving = self.leaving(notes)
        outer = now.writing
        now.writing = pen
        try:
            pen.pickler.dump(obj)
            chunks = pen.chunks
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            if pen.late:
                write_late(pen, spans.finish(pen))
        except _REFUSALS:
            raise
        except Exception:
            return self._dumps_cloud(obj, notes, False)
        finally:
            now.writing = outer
        frames: list[Frame] = [data]
        if pen.frames:
            frames += pen.frames
        if len(data) < _KEEP:
            chunks.clear()
            pen.pickler.clear_memo()
            pen.notes = pen.trace = pen.leaving = None
            pen.inline = 0
            if pen.frames:
                pen.frames = []
            if pen.anchors:
                pen.anchors = {}
            if pen.late:
                pen.late = {}
            idle.pen = pen
        return frames

    def _dumps_cloud(self, obj: object, notes: Any, by_value: bool) -> list[Frame]:
        message = self._writing(notes)
        chunks: list[Any] = []
        try:
            if not by_value:
                _restart(notes)
            self._write_cloud(obj, message, chunks.append, by_value)
        except _REFUSALS:
            raise
        except Exception as error:
            path, culprit = self._locate(obj, notes, by_value)
            _restart(notes)
            raise SerializationError(_complaint(path, culprit, error, notes)) from error
        return [b"".join(chunks), *message.frames]

    def _writing(self, notes: Any) -> Writing:
        return Writing(notes, None if self.leaving is None else self.leaving(notes))

    def _write_cloud(self, obj: object, message: Writing, write: Callable[[Any], object], by_value: bool) -> None:
        outer = now.writing
        now.writing = message
        try:
            # The pickler lives on until the table is done: its memo keeps the keys of `message.anchors` unique.
            pickler = _CloudPickler(write, self._table, message.take, by_value)
            pickler.dump(obj)
            if message.late:
                write_late(message, spans.finish(message))
        finally:
            now.writing = outer

    def _locate(self, obj: object, notes: Any, by_value: bool, tries: int = 500) -> tuple[str, object]:
        """The innermost part of an object that cannot be written on its own, and the way to it."""
        path = ""
        try:
            for _ in range(20):
                if type(obj) in self._table:  # a reducer writes it, and not what it is made of
                    break
                for step, part in _parts(obj):
                    tries -= 1
                    try:
                        self._write_cloud(part, self._writing(notes), len, by_value)
                    except Exception:
                        path, obj = path + step, part
                        break
                    if tries <= 0:
                        return path, obj
                else:
                    break
        except Exception:  # a __repr__ or a property of the user's: then this is as far as we see
            pass
        return path, obj

    def loads(self, frames: Sequence[Any], notes: Any = None, tries: int = 5) -> Any:
        """Reads an object.

        Args:
            frames: as `dumps` returned them: bytes, bytearrays, memoryviews or `zmq.Frame`s. The memory of those that
                are writable and aligned becomes the memory of what is read, so they must not be used again; others
                are copied.
            notes: loading functions that run meanwhile find it with `reading()`.
            tries: how often it is read again where another thread's imports come in the way of its own.

        Raises:
            UnknownNameError: if it refers to something that cannot be imported here.
            DeserializationError: if it cannot be read for another reason, which is the cause.
        """
        data = frames[0]
        if type(data) is not bytes:
            data = plain(data)
        if self._wary and self._is_bad(data):
            raise DeserializationError("cannot read a message: its pickle asks for more memory than it can need")
        outer = now.reading
        reading = now.reading = Reading(notes, frames, self.landing)
        try:
            buffers = map(owned, islice(frames, 1, None)) if len(frames) > 1 else None
            if names.needs_alias(data):
                return names.load_aliased(data, buffers)
            return pickle.loads(data, buffers=buffers)
        except UnknownNameError as missing:
            raise names.unknown(missing.module, missing.name, missing.__cause__, self._where) from missing.__cause__
        except DeserializationError:
            self._wary = _WARY
            raise
        except Exception as error:
            if isinstance(error, ImportError | AttributeError) and (found := names.missing(data, error)) is not None:
                raise names.unknown(found.module, found.name, found.__cause__ or error, self._where) from error
            # One thread imports a package, which wants its module, another that module, which wants the package: Python
            # ends one of the two so. Not where tensors are recorded, or they would be twice.
            if tries and type(error).__name__ == "_DeadlockError" and getattr(notes, "trace", None) is None:
                return self.loads(frames, notes, tries - 1)
            self._wary = _WARY
            raise DeserializationError(f"cannot read a message: {_words(error)}") from error
        finally:
            now.reading = outer
            if reading.landing is not None:
                reading.landing.done()

    def _is_bad(self, data: bytes) -> bool:
        self._wary -= 1  # of several threads one may count for another
        if not asks_too_much(data):
            return False
        self._wary = _WARY
        return True


def _restart(notes: Any) -> None:
    restart = getattr(notes, "restart", None)
    if restart is not None:
        restart()


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that pickling it would visit, each with how one would write the way to it."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r:.80}]", value
            yield f".key({key!r:.80})", key
    elif isinstance(obj, list | tuple):
        for i, value in enumerate(obj):
            yield f"[{i}]", value
    elif isinstance(obj, set | frozenset):
        for value in obj:
            yield f".element({value!r:.80})", value
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f".<closure variable {name}>", cell.cell_contents
            except ValueError:  # not filled yet
                continue
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f".<global variable {name}>", obj.__globals__[name]
    elif not isinstance(obj, type):
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f".{name}", value


def _complaint(path: str, culprit: object, error: BaseException, notes: Any) -> str:
    kind = type(culprit)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    called = getattr(notes, "called", "message{}".format)(path)
    what = f"cannot write an object of type {name}" + (f" at {called}" if called != "message" else "")
    what += f" ({_words(error)})"
    if isinstance(culprit, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        what += "; it can only run where it was made, so send what it gives (list(it), say) instead"
    elif path:
        what += (
            "; leave it out (`__getstate__`), say how it is written (register_reducer), or make what holds it on the "
            "worker where it is used (rpc.remote)"
        )
    return what


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
