"""What can be saved of a message that cannot be read: the references in it, so that they can be given back."""

from __future__ import annotations

import importlib
import io
import pickle
from typing import TYPE_CHECKING, Any

from actorrpc.wire.memo import asks_too_much
from actorrpc.wire.message import Reading, now, owned, plain

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class _Nothing:
    """Stands for whatever else is in the message; takes all that a pickle does to an object."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    append = extend = add = update = __call__


class _Sieve(pickle.Unpickler):
    keep: Collection[tuple[str, str]] = ()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.keep:
            return getattr(importlib.import_module(module), name)
        return _Nothing


def salvage(frames: Sequence[Any], notes: Any, keep: Collection[tuple[str, str]]) -> None:
    """Runs some loading functions of a message that cannot be read as a whole, and nothing else of it.

    Arguments:
        frames: the message.
        notes: what those functions find with `codec.reading()`.
        keep: the functions, by module and name.

    Never raises; what cannot be saved is not.
    """
    data = bytes(plain(frames[0]))
    if asks_too_much(data):
        return
    outer = now.reading
    now.reading = Reading(notes, frames)
    try:
        sieve = _Sieve(io.BytesIO(data), buffers=map(owned, frames[1:]))
        sieve.keep = keep
        sieve.load()
    except Exception:
        return
    finally:
        now.reading = outer
