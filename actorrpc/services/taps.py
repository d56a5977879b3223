"""Looking on at what a worker does: functions are put around its own, for as long as somebody looks. So the way of a
call has nothing in it for those who look on, and costs nothing while nobody does.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.worker import Worker

_making = threading.Lock()


def taps_of(worker: Worker) -> Taps:
    """Returns a worker's taps."""
    with _making:
        taps: Taps = worker.services.setdefault(Taps, Taps())
        return taps


class Taps:
    """What is put around functions of one worker, and of what belongs to it. Made by `taps_of`."""

    def __init__(self) -> None:
        self._door = threading.RLock()
        self._layers: dict[tuple[int, str], _Layers] = {}

    def put(self, owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
        """Has `around(plain, ...)` called where `owner.name(...)` is, `plain` being what was called until now.

        Arguments:
            owner: an object whose function is looked up whenever it is called.
            name: the function's.
            around: what is to be called instead. It may still be called for a short while after it was taken away.

        Returns what takes it away again, in whatever order; to be called once.
        """
        with self._door:
            layers = self._layers.get((id(owner), name))
            if layers is None:
                layers = self._layers[id(owner), name] = _Layers(owner, name)
            layers.around.append(around)
            layers.apply()

        def take_away() -> None:
            with self._door:
                layers.around.remove(around)
                layers.apply()
                if not layers.around:
                    self._layers.pop((id(owner), name), None)

        return take_away


class _Layers:
    """What is around one function."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._plain, self._own = getattr(owner, name), name in vars(owner)
        self.around: list[Callable[..., Any]] = []

    def apply(self) -> None:
        built = self._plain
        for around in self.around:
            built = functools.partial(around, built)
        if self.around or self._own:
            setattr(self._owner, self._name, built)
        else:
            delattr(self._owner, self._name)
