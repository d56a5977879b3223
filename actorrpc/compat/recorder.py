"""The callee's side of torch's legacy profiler: what a call's function does is recorded on the thread that runs it, and
kept until the caller's profile has ended and asks for it. Answers carry nothing of it, so that a profile changes
neither what calls return nor how they fail. `profiler.py` is the caller's side.

A worker in whose process torch's modules are not patched does all this as well: what is sent imports this module.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.autograd.profiler_legacy

from actorrpc.compat.tapes import Tape
from actorrpc.errors import ActorRPCError
from actorrpc.runtime.handling import here
from actorrpc.services.executor import ASYNC_MARK, is_async
from actorrpc.services.handles import Dressed
from actorrpc.services.ids import EXECUTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_legacy: Any = torch.autograd.profiler_legacy
_ASK_SECONDS = 20.0
"""How long the end of a profile waits for a worker that it asks for events."""
_MEMORY = "[memory]"
"""Torch's name for memory that was taken outside of all operators; its tables look for it."""
_SEPARATOR = "#remote_op: "

Settings = dict[str, bool]
"""The keywords of `profiler_legacy.profile`."""
Token = tuple[int, int]
"""Names a call among all that are recorded: the caller's worker id, and a number of its own."""
Group = list[Any]
"""The events of one function's run, on one thread; times are in microseconds, since the outermost call was sent."""


class Heard(NamedTuple):
    """What a callee has to say of a call.

    Attributes:
        begun, ended: when the function ran, on the callee's clock, in nanoseconds.
        groups: its events, and those of the calls that it made in turn; since `begun`.
    """

    begun: int
    ended: int
    groups: list[Group]


class Recorded:
    """A function that records what it does, where it is called by a message. It is sent in the function's place.

    Arguments:
        function: the function.
        name: what it is called in the trace and in errors.
        token: the call's.
        settings: what to record.

    Attributes:
        sent: when it was written into a message, in nanoseconds; 0 before.
    """

    def __init__(self, function: Callable[..., Any], name: str, token: Token, settings: Settings) -> None:
        self._function, self._token, self._settings = function, token, settings
        self.__name__ = self.__qualname__ = name
        self.sent = 0
        if is_async(function):
            setattr(self, ASYNC_MARK, self)

    def __reduce__(self) -> Any:
        self.sent = self.sent or time.time_ns()
        return Recorded, (self._function, self.__name__, self._token, self._settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handling = here.handling
        if handling is None:
            return self._function(*args, **kwargs)
        run = _Run(self._settings)
        _runs_of(handling.worker).add(self._token, run)
        try:
            with run.recording():
                result = self._function(*args, **kwargs)
        except BaseException:
            run.end()
            raise
        if is_async(self) and isinstance(result, torch._C.Future):
            result.add_done_callback(run.end)
        else:
            run.end()
        return result


class RecordedMethod(Dressed):
    """The name of a method that records what it does; see `Recorded`."""

    def __init__(self, name: str, token: Token, settings: Settings) -> None:
        self.name, self._token, self._settings = name, token, settings
        self.sent = 0

    def __reduce__(self) -> Any:
        self.sent = self.sent or time.time_ns()
        return RecordedMethod, (self.name, self._token, self._settings)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return Recorded(method, getattr(method, "__qualname__", self.name), self._token, self._settings)


# -- calls that are made while something is recorded


class Noted:
    """A call that was made while the caller records.

    Attributes:
        key: the name of its span; `shown`: the name that the span gets in the profile.
        worker, to: the caller, and the callee's worker id.
        token, function: what names it, and what was sent.
        ended: when it was answered, in nanoseconds; 0 before.
    """

    def __init__(
        self, key: str, shown: str, worker: Worker, to: int, token: Token, function: Recorded | RecordedMethod
    ) -> None:
        self.key, self.shown, self.worker, self.to, self.token, self.function = key, shown, worker, to, token, function
        self.ended = 0

    def end(self) -> None:
        """Says that the answer is there."""
        self.ended = self.ended or time.time_ns()

    def watch(self, call: Call) -> None:
        """Has `end` called once a call is done."""
        before = call.note

        def note(done: Call) -> None:  # under leadership: a note neither blocks nor runs user code
            if before is not None:
                before(done)
            self.end()

        call.note = note
        if call.done:  # it may have been answered before it had the note
            self.end()


class Collection:
    """The calls that one thread makes while it records, and what callbacks of their futures do.

    Arguments:
        settings: what is recorded, here and by the callees.

    Attributes:
        calls: in the order in which they were made.
        origin: when it began, in nanoseconds.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.calls: list[Noted] = []
        self._callbacks: list[tuple[_Run, Worker]] = []
        self._over = False
        self.origin = time.time_ns()
        self._outside: Collection | None = None

    def enter(self) -> None:
        self._outside, local.collection = local.collection, self

    def leave(self) -> None:
        local.collection = self._outside

    def recorded(self, callback: Any, worker: Worker) -> Any:
        """Has a callback record what it does, on whatever thread it runs; it does so until `settle`."""

        def call(future: Any) -> Any:
            if self._over or local.collection is self:  # it runs at once, where it is recorded already
                return callback(future)
            run = _Run(self.settings)
            self._callbacks.append((run, worker))
            try:
                with run.recording():
                    return callback(future)
            finally:
                run.end()

        return call if callable(callback) else callback

    def settle(self, events: list[Any]) -> list[Group]:
        """Asks the callees for their events.

        Arguments:
            events: this thread's own; the spans of the calls among them are made to last until the answer.

        Returns the callees' events, under names that begin with the call's, and the callbacks'.
        """
        self._over = True
        heard = _ask(self.calls)
        spans: dict[str, list[Any]] = {}
        for event in sorted(events, key=_order, reverse=True):
            spans.setdefault(event.name, []).append(event)
        groups: list[Group] = []
        for noted in self.calls:  # calls of one name, and their spans, were begun in the same order
            same = spans.get(noted.key)
            span = same.pop() if same else None
            sent = noted.function.sent
            start = span.time_range.start if span is not None else (sent - self.origin) / 1e3
            if span is not None and noted.ended and sent:
                span.name = span.trace_name = noted.shown
                span.is_async = True  # as in torch: others work in its time, nothing is nested in it
                span.time_range.end = max(span.time_range.end, start + (noted.ended - sent) / 1e3)
            said = heard.get(noted.token)
            if said is not None:
                start += _offset(said, sent, noted.ended) / 1e3
                groups += [_under(noted.shown, start, group) for group in said.groups]
        for run, worker in self._callbacks:
            said = run.report(worker)
            groups += [_moved(group, (said.begun - self.origin) / 1e3) for group in said.groups]
        return groups


class _Local(threading.local):
    collection: Collection | None = None


local = _Local()
"""`local.collection`: where the present thread's calls are noted; None while it does not record."""


def _order(event: Any) -> tuple[float, float]:
    return event.time_range.start, -event.time_range.end


def _offset(said: Heard, sent: int, ended: int) -> int:
    """Returns how long after the sending of a call its function began, in nanoseconds.

    It says so where the clocks of both agree, as on one machine; where they do not, the call lies amid its round trip.
    """
    window, took = ended - sent, said.ended - said.begun
    offset = said.begun - sent
    return offset if 0 <= offset <= window - took else max(0, window - took) // 2


def _under(key: str, start: float, group: Group) -> Group:
    for event in group:
        event.is_remote = True
        if event.name != _MEMORY:
            event.name = key + _SEPARATOR + event.name
        if event.trace_name is not None:
            event.trace_name = key + _SEPARATOR + event.trace_name
    return _moved(group, start)


def _moved(group: Group, start: float) -> Group:
    for event in group:
        if event.name != _MEMORY:  # which has no time
            event.time_range.start += start
            event.time_range.end += start
    return group


def _ask(calls: list[Noted]) -> dict[Token, Heard]:
    """Asks all callees at once. What one cannot say is missing in the profile, which is no reason to fail."""
    tokens: dict[tuple[Worker, int], tuple[list[Token], list[Token]]] = {}
    for noted in calls:
        if noted.function.sent:
            done, pending = tokens.setdefault((noted.worker, noted.to), ([], []))
            (done if noted.ended else pending).append(noted.token)
    asked, heard = [], {}
    for (worker, to), body in tokens.items():
        try:
            asked.append((worker, worker.request(to, EXECUTOR, (report, body, {}), _ASK_SECONDS, "a profile")))
        except ActorRPCError as e:
            log.warning("%s: the profile lacks what rank %d did: %s", worker, to, e)
    for worker, call in asked:
        try:
            heard.update(worker.wait_result(call))
        except Exception as e:
            log.warning("%s: the profile lacks what rank %d did: %s", worker, call.peer, e)
    return heard


# -- what is recorded of a function


class _Run:
    """One run of a function, recorded.

    Attributes:
        begun, ended: in nanoseconds; 0 before.
    """

    def __init__(self, settings: Settings) -> None:
        self._tape = Tape(_legacy.profile(**settings).config())
        self._collection = Collection(settings)
        self.begun = self.ended = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        on = self._tape.begin()
        self.begun = time.time_ns()
        if not on:
            yield
            return
        self._collection.enter()
        try:
            yield
        finally:
            self._collection.leave()
            self._tape.end()

    def end(self, _: object = None) -> None:
        self.ended = time.time_ns()

    def report(self, worker: Worker) -> Heard:
        if not (self._tape.records and self.ended):
            return Heard(self.begun, self.ended, [])
        events = _legacy._parse_legacy_records(self._tape.records)
        self.begun = self._collection.origin = self._tape.begun  # from which the events count
        for event in events:
            if event.node_id < 0:
                event.node_id = worker.id
        return Heard(self.begun, self.ended, [events, *self._collection.settle(events)])


class _Runs:
    """The runs at one worker that nobody has asked for yet."""

    def __init__(self, worker: Worker) -> None:
        self._door = threading.Lock()
        self._runs: dict[Token, _Run] = {}
        self._unwanted: set[Token] = set()
        worker.members.watchers.append(self._gone)

    def add(self, token: Token, run: _Run) -> None:
        with self._door:
            if token in self._unwanted:
                self._unwanted.discard(token)
            else:
                self._runs[token] = run

    def take(self, tokens: list[Token], unwanted: list[Token]) -> dict[Token, _Run]:
        with self._door:
            self._unwanted |= {token for token in unwanted if self._runs.pop(token, None) is None}
            return {token: self._runs.pop(token) for token in tokens if token in self._runs}

    def _gone(self, peer: Peer) -> None:
        with self._door:
            self._runs = {token: run for token, run in self._runs.items() if token[0] != peer.record.id}
            self._unwanted = {token for token in self._unwanted if token[0] != peer.record.id}


_door = threading.Lock()


def _runs_of(worker: Worker) -> _Runs:
    with _door:
        found: _Runs | None = worker.services.get(_Runs)
        if found is None:
            found = worker.services[_Runs] = _Runs(worker)
        return found


def report(tokens: list[Token], unwanted: list[Token]) -> dict[Token, Heard]:
    """At the callee: tells of calls that are done, and forgets those that the caller could not wait for."""
    worker = here.handling.worker  # type: ignore[union-attr]
    runs = _runs_of(worker).take(tokens, unwanted)
    return {token: run.report(worker) for token, run in runs.items() if run.ended}
