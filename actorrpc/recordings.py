"""An actor's mailbox written to a file (`debug.Recorder`); `replaying` runs the actor again from it.

The file has what came to the actor, as it came and in the order in which it began: how it was made, its messages, and
the answers to the calls that it made itself.
"""

from __future__ import annotations

import inspect
import os
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

from actorrpc import actor, rref
from actorrpc.claims import claim, release
from actorrpc.errors import RemoteError
from actorrpc.runtime.completion import describe
from actorrpc.runtime.handling import here
from actorrpc.services import names
from actorrpc.services.taps import taps_of
from actorrpc.session import current
from actorrpc.wire.envelope import Flag
from actorrpc.workers import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.rref import RRef
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.handles import Entry
    from actorrpc.workers import To

FORMAT = "actorrpc recording 1"
"""What a recording begins with."""


class Recorder:
    """Makes actors whose mailboxes are written to files.

    Arguments:
        path: the file, on the worker where the actor lives. What is in it is written over, unless it is the recording
            of an actor that still lives.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def spawn(self, cls: type[actor.Actor], to: To, /, *args: Any, name: str | None = None, **kwargs: Any) -> RRef[Any]:
        """Makes an actor on a worker, as `cls.spawn` does, and records it from the first on.

        Whether the file can be written is seen there: the next use of the reference raises what its opening raised.

        Raises:
            TypeError: `cls` is no Actor's class.
            InvalidNameError: the name is taken.
        """
        kind: object = cls
        if not (isinstance(kind, type) and issubclass(kind, actor.Actor)):
            raise TypeError(f"a Recorder records actors; {cls!r} is no subclass of Actor")
        session = current()
        owner = resolve(session.worker, to)

        def create() -> RRef[Any]:
            ref = rref.make(session, owner, _construct, (self.path, name, cls, *args), kwargs, -1.0)
            limits = cls._actorrpc_limits
            if limits != (None, None):
                session.worker.limits.learn((owner, *ref._handle.ref), *limits)
            return ref

        if name is None:
            return create()
        made: RRef[Any] = names.make(session.names, name, owner, False, create)
        return made


def _construct(path: str, name: str | None, cls: type[actor.Actor], *args: Any, **kwargs: Any) -> actor.Actor:
    """Makes a recorded actor, on its worker."""
    home = actor._births.home
    message = here.handling.message if here.handling is not None else None
    assert home is not None
    assert message is not None
    if name is not None:
        home.name = name
    recording = _Recording(path, home.session.worker, home.entry)
    try:
        recording.begin(home.name, message, cls, args, kwargs)
        made = cls(*args, **kwargs)
    except BaseException:
        recording.end()
        raise
    recording.end_with(made)
    return made


class _Recording:
    """Writes one actor's file, until that has stopped or its world has ended."""

    def __init__(self, path: str, worker: Worker, entry: Entry) -> None:
        self._worker, self._run = worker, entry.run
        self._file = claim(path)
        self._taken: list[Callable[[], None]] = []
        """What takes away what was put around the worker's functions."""
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._door = threading.RLock()
        self._messages: dict[Message, int] = {}
        self._made: dict[int, int] = {}
        self._calls: dict[int, tuple[int, int]] = {}
        """Its calls that are not answered: message and number within it."""
        self._count = 0
        entry.run = self.run  # type: ignore[method-assign]

    def _write(self, *event: Any) -> None:
        with self._door:
            if not self._file.closed:
                pickle.dump(event, self._file)
                self._file.flush()

    def begin(self, name: str, message: Message, cls: type, args: Any, kwargs: Any) -> None:
        """Writes how the actor is made, and listens to the calls of its worker from now on."""
        worker = self._worker
        frames, parcel = worker.write((cls, args, kwargs), worker.id, by_value=True)
        made = tuple(map(bytes, frames))
        parcel.restart()
        records = [peer.record.to_json() for peer in worker.peers.values()]
        self._write(FORMAT, worker.record.to_json(), records, name, message.caller, made)
        self._messages[message] = 0
        taps = taps_of(worker)
        self._taken.append(taps.put(worker.calls, "post", self._post))
        self._taken.append(taps.put(worker.answers, "read", self._result))
        self._taken.append(taps.put(worker, "stop", self._stop))

    def end_with(self, value: actor.Actor) -> None:
        """Ends when an actor does that is never told to stop: its `on_start` raises. (Others are kept by the entry.)"""
        self._finalizer = weakref.finalize(value, self.end)
        self._finalizer.atexit = False

    def end(self) -> None:
        """Writes no more. May be called twice."""
        with self._door:
            taken, self._taken = self._taken, []
            release(self._file)
            if self._finalizer is not None:
                self._finalizer.detach()
        for take_away in taken:
            take_away()

    def _stop(self, stop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return stop(*args, **kwargs)
        finally:
            self.end()

    def run(self, message: Message) -> None:
        """Runs one message."""
        last = False
        with self._door:
            self._count += 1
            self._messages[message] = number = self._count
            if message.frames:
                frames = tuple(map(bytes, message.frames))
                self._write("message", number, message.caller, message.flags, message.wants_answer, frames)
            else:
                own = message.load()
                last = own[0] == "on_stop"
                self._write("own message", number, own)
        try:
            self._run(message)
        finally:
            self._messages.pop(message, None)
            if last:
                self.end()

    def _post(self, post: Callable[..., Call], *args: Any, **kwargs: Any) -> Call:
        handling = here.handling
        number = None if handling is None or handling.message is None else self._messages.get(handling.message)
        if number is None:
            return post(*args, **kwargs)
        bound = inspect.signature(post).bind(*args, **kwargs)
        given = bound.arguments
        if given.get("flags", 0) & Flag.CONTROL:
            return post(*args, **kwargs)
        if given.get("number") is None:
            given["number"] = self._worker.calls.next_id()
        with self._door:
            place = self._made.get(number, 0)
            self._made[number] = place + 1
            self._calls[given["number"]] = number, place
        self._write("call", number, place, describe(given["what"]), given["to"])
        try:
            return post(*bound.args, **bound.kwargs)
        except BaseException as e:
            self._calls.pop(given["number"], None)
            self._write("refused", number, place, _pickled(e))
            raise

    def _result(self, result: Callable[[Call], Any], call: Call) -> Any:
        known = self._calls.pop(call.id, None)
        if known is not None:
            failure = None if call.failure is None else _pickled(call.failure)
            self._write("answer", *known, failure, call.failed, call.flags, tuple(map(bytes, call.frames)))
        return result(call)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RemoteError(f"{type(error).__name__}: {error}", type_name=type(error).__qualname__))
    return data
