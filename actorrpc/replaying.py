"""A recorded actor run again, alone and without a world (`debug.replay`); `recordings` says what the file has.

A replay runs the messages one after the other in the calling thread; where a handler waits, what comes next in the file
comes next: messages that were served meanwhile, and the answer.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorrpc import actor, reducers, rref
from actorrpc.errors import ActorRPCError
from actorrpc.recordings import FORMAT
from actorrpc.runtime.clock import SystemClock
from actorrpc.runtime.completion import Call, Completion, describe
from actorrpc.runtime.handling import NO_CONTEXT, Handling, here
from actorrpc.runtime.message import Message, Parcel
from actorrpc.runtime.peers import Record
from actorrpc.runtime.worker import Worker
from actorrpc.services.carrying import Carrying
from actorrpc.services.handles import Entry
from actorrpc.session import Session
from actorrpc.wire.envelope import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.wire.envelope import Frame

_MUCH = 1 << 60


class ReplayError(ActorRPCError):
    """A recording cannot be read, or its replay has gone another way than what was recorded."""


@dataclass
class Step:
    """One message of a replay.

    Attributes:
        caller: the name of the worker that sent it; the actor's own for the calls of `on_...` methods.
        method: the method's name.
        args, kwargs: its arguments.
        value: what the handler returned.
        error: what it raised; None where it returned.
    """

    caller: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any = None
    error: BaseException | None = None


@dataclass
class Replay:
    """What a replay came to.

    Attributes:
        actor: the actor as it was at the end.
        steps: its messages, in the order in which they began.
    """

    actor: Any = None
    steps: list[Step] = field(default_factory=list)


def replay(path: str | os.PathLike[str], cls: type | None = None, *, stop: bool = False) -> Replay:
    """Makes a recorded actor again, without a world, and gives it the messages of the recording, in this thread. So a
    debugger works as ever: `breakpoint()` in a method, or `pdb.runcall(rpc.debug.replay, path)`.

    The calls that it makes are answered from the recording; what it tells goes nowhere.

    Arguments:
        path: the file. It is made of pickles: open none that you do not trust.
        cls: a class to use instead of the recorded one, with a fix in it, say.
        stop: whether the first error that a handler raises is raised here (for `pdb.pm()`); else it is noted in its
            step, and the next message runs, as in the world.

    Not replayed: time, random numbers and other inputs that did not come by messages; threads and how handlers
    interleaved (with `concurrency` above 1, messages run in the order in which they began); `async def` methods and
    streams, `main`; autograd contexts. `Future.done()` is True only once a wait has come to the answer's place.

    Raises:
        OSError: the file cannot be read.
        ReplayError: it is no recording, or the actor makes other calls than it did.
        BaseException: what the constructor raised, or with `stop` a handler.
    """
    with Path(path).open("rb") as file:
        events = _read(file, path)
    if not events:
        raise ReplayError(f"{os.fspath(path)} is empty: the actor was not made")
    return _Player(events, stop).play(cls)


def _read(file: Any, path: object) -> list[Any]:
    events: list[Any] = []
    try:
        while True:
            events.append(pickle.load(file))
    except EOFError:
        pass
    except Exception as e:
        if not events:
            raise ReplayError(f"{path} is no recording: {e}") from e
        # The last event was cut off: its worker was killed in the midst of it.
    if events and (not isinstance(events[0], tuple) or events[0][0] != FORMAT):
        raise ReplayError(f"{path} is no recording, or one of another version (this one's begin with {FORMAT!r})")
    return events


class _Nowhere:
    """A transport without a network."""

    told: Any = None
    silence = 0.0
    endpoints: list[str] = []  # noqa: RUF012
    holding = crowded = False
    emptied = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Player:
    def __init__(self, events: Sequence[Any], stop: bool) -> None:
        _, own, records, self._name, self._maker, self._made = events[0]
        self._events, self._stop = iter(events[1:]), stop
        self._calls: dict[tuple[int, int], Call] = {}
        self._counts: dict[int, int] = {}
        self._messages: dict[Message, int] = {}
        self._early: dict[tuple[int, int], Any] = {}
        self._said = {event[1:3]: event[3:] for event in events[1:] if event[0] == "call"}
        self._refused = {event[1:3]: event[3] for event in events[1:] if event[0] == "refused"}
        self._result = Replay()
        self._worker = worker = Worker(
            Record.from_json(own), _Nowhere(), SystemClock(), threads=1, timeout=0.0
        )  # fmt: skip
        worker.limits.set(_MUCH, _MUCH)
        Carrying(worker)  # for tensors that were on a GPU, where there is one
        self._session = Session(worker)
        for room in (reducers, rref, actor):
            room.install(self._session)
        worker.members.admit([Record.from_json(record) for record in records])
        worker.crew.stopping = True
        worker.crew.submit = self._now  # type: ignore[method-assign]
        worker.emit = lambda *_: None
        worker.wait = self._wait
        self._post = worker.calls.post
        worker.calls.post = self._posted  # type: ignore[method-assign]
        self._entry = Entry(self._session.objects, (worker.id, 1 << 62))

    @staticmethod
    def _now(job: Any) -> bool:
        job[1](job[2])
        return True

    def play(self, cls: type | None) -> Replay:
        """Runs it all."""
        worker = self._worker
        recorded, args, kwargs = worker.codec.loads(
            [bytearray(frame) for frame in self._made], Parcel(worker, self._maker)
        )
        made = self._session.objects.construct
        maker = self._message(self._maker, 0, False, ())
        self._messages[maker] = 0

        def construct() -> Any:
            return made(self._entry, functools.partial(_named, self._name, cls or recorded), *args, **kwargs)

        value = self._result.actor = self._within(maker, construct)
        self._entry.fill(value)
        while self._advance():
            pass
        return self._result

    def _message(self, caller: int, flags: int, wants_answer: bool, frames: Sequence[Frame]) -> Message:
        kind = Kind.REQUEST if wants_answer else Kind.TELL
        worker = self._worker
        return Message(
            worker, kind, flags & Flag.REFS, caller, 0, *self._entry.id, worker.chain(), NO_CONTEXT, None, 0, frames
        )  # fmt: skip

    def _within(self, message: Message, run: Callable[[], Any]) -> Any:
        outside, here.handling = here.handling, Handling(self._worker, message, message.chain)
        try:
            return run()
        finally:
            here.handling = outside

    def _advance(self) -> bool:
        """Plays the next event; returns whether there was one."""
        event = next(self._events, None)
        if event is None:
            return False
        kind, number, *rest = event
        if kind == "message":
            caller, flags, wants_answer, frames = rest
            message = self._message(caller, flags, wants_answer, [bytearray(frame) for frame in frames])
            peer = self._worker.peers.get(caller)
            self._run(number, message, peer.record.name if peer is not None else f"worker {caller}", None)
        elif kind == "own message":
            message = self._message(self._worker.id, 0, False, ())
            self._run(number, message, self._worker.record.name, rest[0])
        elif kind == "answer":
            place, *answer = rest
            if (number, place) in self._calls:
                self._deliver(self._calls[number, place], answer)
            else:
                self._early[number, place] = answer
        return True

    def _run(self, number: int, message: Message, caller: str, own: Any) -> None:
        self._messages[message] = number
        try:
            method, args, kwargs = message.load() if own is None else own
        except ActorRPCError as e:
            raise ReplayError(f"message {number}, from {caller}, cannot be read here: {e}") from e
        name = method if isinstance(method, str) else getattr(method, "name", None) or describe(method)
        step = Step(caller, name, args, kwargs)
        self._result.steps.append(step)
        if inspect.iscoroutinefunction(getattr(self._result.actor, name, None)):
            raise ReplayError(f"message {number} calls {name}, which is async: such methods cannot be replayed")
        again = _Loaded(message, (method, args, kwargs))
        self._messages[again] = number
        try:
            self._within(again, lambda: self._entry._call(again, lambda value: setattr(step, "value", value)))
        except ReplayError:
            raise
        except BaseException as e:
            step.error = e
            if self._stop or not isinstance(e, Exception):
                raise

    def _posted(self, *args: Any, **kwargs: Any) -> Call:
        given = inspect.signature(self._post).bind(*args, **kwargs).arguments
        handling = here.handling
        number = None if handling is None or handling.message is None else self._messages.get(handling.message)
        if number is None or given.get("flags", 0) & Flag.CONTROL:
            return self._post(*args, **kwargs)
        place = self._counts.get(number, 0)
        self._counts[number] = place + 1
        what = describe(given["what"]), given["to"]
        said = self._said.get((number, place))
        if said != what:
            peer = self._worker.peers.get(what[1])
            told = f"{what[0]} on {peer.record.name if peer is not None else what[1]}"
            then = f"it was {said[0]}" if said is not None else "there was none; or the recording ends before it"
            raise ReplayError(f"message {number} calls {told} where in the recording {then}")
        if (number, place) in self._refused:
            raise pickle.loads(self._refused[number, place])
        call = self._calls[number, place] = self._post(*args, **kwargs)
        if (number, place) in self._early:
            self._deliver(call, self._early.pop((number, place)))
        return call

    def _deliver(self, call: Call, answer: Sequence[Any]) -> None:
        failure, failed, flags, frames = answer
        calls = self._worker.calls
        if failure is not None:
            calls.fail(call, pickle.loads(failure))
        else:
            own = [bytearray(frame) for frame in frames]
            job = calls.answered(call.id, call.peer, failed, flags & Flag.REFS, own, self._worker.place())
            if job is not None:
                self._now(job)
        calls.settle_soon()

    def _wait(self, what: Completion, deadline: float | None, *, lead: bool = True) -> bool:
        while not what.done:
            if not self._advance():
                name = describe(what.what) if isinstance(what, Call) else "something that is no call"
                raise ReplayError(f"the recording ends while the actor waits for {name}")
        return True


class _Loaded(Message):
    """A message that has been read."""

    __slots__ = ("_body",)

    def __init__(self, message: Message, body: Any) -> None:
        super().__init__(
            message.worker, Kind.REQUEST if message.wants_answer else Kind.TELL, message.flags, message.caller,
            message.call, message.creator, message.local, message.chain, message.context, None, message.number, (),
        )  # fmt: skip
        self._body = body

    def load(self) -> Any:
        return self._body


def _named(name: str, cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if actor._births.home is not None:
        actor._births.home.name = name
    return cls(*args, **kwargs)
