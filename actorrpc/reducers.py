"""Reducers of the user's own, by class: how its instances are written into messages."""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]

from actorrpc import session
from actorrpc.rref import RRef
from actorrpc.wire.codec import REDUCERS

if TYPE_CHECKING:
    from actorrpc.session import Session

Reducer: TypeAlias = "Callable[[Any], str | tuple[Any, ...]]"

_PICKLES_OWN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, type(...),
    type(NotImplemented), types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
"""What a pickler writes without asking anybody."""
_door = threading.Lock()
_registered: dict[type, Reducer] = {}


def register_reducer(cls: type, reducer: Reducer | None) -> None:
    """Has instances of a class written by a function of yours, in all that this process sends from now on: arguments,
    results, errors, what references hand out, tells, and what `launch` sends to its processes.

        class Table:  # holds a connection, which no pickler takes
            def __init__(self, url): self.connection = connect(url)

        def open_table(url): return Table(url)

        rpc.register_reducer(Table, lambda table: (open_table, (table.connection.url,)))

    The reader needs no registration, only the function that makes the object again (`open_table`), which goes by name.
    Who sends such objects back needs one of its own: so call this at the top level of the module that has the class.
    Pickle and copy outside of actorrpc are not changed; what is to hold there as well goes to `copyreg.pickle`, or into
    the class as `__reduce__`, both of which actorrpc honours, too.

    Arguments:
        cls: the class itself; it does not apply to subclasses.
        reducer: takes an object, and returns what its `__reduce__` would. None takes a registration back: the class
            is written as it was before.

    Raises:
        TypeError: it is no class, or one whose instances cannot be caught this way: those of Python's own that are
            written without asking, and those that actorrpc itself writes (tensors, references).
    """
    if not isinstance(cls, type):
        raise TypeError(f"a reducer is registered for a class, not for {cls!r}")
    if cls in _PICKLES_OWN or issubclass(cls, type):
        raise TypeError(f"instances of {cls.__qualname__} are written by the pickler itself, which asks no reducer")
    if cls is RRef or cls in REDUCERS:
        raise TypeError(f"actorrpc itself knows how a {cls.__qualname__} is written; register a subclass or a wrapper")
    if reducer is not None and not callable(reducer):
        raise TypeError(f"a reducer is a function of the object, or None, not {reducer!r}")
    with _door:
        if reducer is None:
            _registered.pop(cls, None)
        else:
            _registered[cls] = reducer
        for each in session.all_sessions():
            _apply(each, cls, reducer)


def install(session: Session) -> None:
    """Teaches a new worker what was registered."""
    with _door:
        for cls, reducer in _registered.items():
            _apply(session, cls, reducer)


def _apply(session: Session, cls: type, reducer: Reducer | None) -> None:
    codec = session.worker.codec
    if reducer is None:
        codec.forget(cls)
    else:
        codec.register(cls, reducer)


def dumps(obj: object, by_name: bool) -> bytes:
    """Writes what goes between processes before there are workers.

    Arguments:
        obj: what to write.
        by_name: refuses what only cloudpickle takes, and writes names of the main module.
    """
    file = io.BytesIO()
    with _door:
        own = dict(_registered)
    if by_name:
        pickler = pickle.Pickler(file, 5)
        pickler.dispatch_table = {**copyreg.dispatch_table, **own}
        pickler.dump(obj)
    else:
        _CloudPickler(file, own).dump(obj)
    return file.getvalue()


def dumps_by_name_or_value(obj: object) -> bytes:
    """Writes what another process of the same program will read: things of the main module by name, if that will do."""
    try:
        return dumps(obj, by_name=True)
    except Exception:
        return dumps(obj, by_name=False)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, own: dict[type, Reducer]) -> None:
        self.dispatch_table = {**cloudpickle.Pickler.dispatch_table, **own}  # before __init__, which looks it up
        super().__init__(file, protocol=5)
