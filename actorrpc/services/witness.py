"""Notes down when what happened to a worker's calls, while somebody records (`tracing`); times are monotonic
nanoseconds of the worker's host.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.runtime.message import RETURNED, RUNNING, Message
from actorrpc.services.autograd import Autograd
from actorrpc.services.handles import Dressed
from actorrpc.services.ids import AUTOGRAD, CREATOR, EXECUTOR, ROOT, SYSTEM
from actorrpc.services.spans import name_of
from actorrpc.services.taps import taps_of
from actorrpc.wire.envelope import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.worker import Worker

BACKWARD = "torch::distributed::autograd::backward"
_SEEN = {EXECUTOR, CREATOR, ROOT}
_making = threading.Lock()


class Sent:
    """A call as its caller sees it. Times are 0 for what has not happened.

    Attributes:
        peer, number: the callee's worker id, and the caller's number of the call.
        verb, name: "rpc_sync" and so on, and what is called.
        thread, reader: system's numbers of the threads that sent it and read the answer.
        began, written: when its payload was begun and written.
        emitted, sent: when it was handed to the transport, and when that had taken it.
        arrived, reading, read: when the answer had come, and was read.
        failed: whether it came to an error.
        parent: the caller and number of the message whose handler made it; None outside of handlers.
    """

    __slots__ = (
        "arrived", "began", "emitted", "failed", "name", "number", "parent", "peer", "read", "reader", "reading",
        "sent", "thread", "verb", "written",
    )  # fmt: skip

    def __init__(self, peer: int, number: int, verb: str, what: object, thread: int, wrote: tuple[int, int]) -> None:
        self.peer, self.number, self.verb, self.name, self.thread = peer, number, verb, name_of(what), thread
        self.began, self.written = wrote
        self.emitted = self.sent = self.arrived = self.reading = self.read = self.reader = 0
        self.failed = False
        message = None if here.handling is None else here.handling.message
        self.parent = None if message is None or not message.call else (message.caller, message.call)


class Served:
    """A call, or a tell, as its callee sees it.

    Attributes:
        caller, number: see `Sent.number`.
        verb, name: see `Sent`.
        thread, answerer: system's numbers of the threads that ran its handler and that answered it.
        arrived: when it was taken from the transport.
        begun, loading, loaded, returned: when its turn came, its payload was read, and its handler had returned.
        replying, emitted, answered: when the answer was begun, handed to the transport, and taken by that.
        failed: whether it was answered with an error.
    """

    __slots__ = (
        "answered", "answerer", "arrived", "begun", "caller", "emitted", "failed", "loaded", "loading", "name",
        "number", "replying", "returned", "thread", "verb",
    )  # fmt: skip

    def __init__(self, caller: int, number: int, verb: str) -> None:
        self.caller, self.number, self.verb, self.name = caller, number, verb, ""
        self.arrived = monotonic_ns()
        self.begun = self.loading = self.loaded = self.returned = self.replying = self.emitted = self.answered = 0
        self.thread = self.answerer = 0
        self.failed = False


class Block:
    """Something else that a thread did: the root's part in a backward pass.

    Attributes:
        name: what.
        thread: the system's number of the thread.
        begun, ended: when.
    """

    __slots__ = ("begun", "ended", "name", "thread")

    def __init__(self, name: str, thread: int) -> None:
        self.name, self.thread, self.begun, self.ended = name, thread, monotonic_ns(), 0


class Notes:
    """What was noted down for one recording.

    Arguments:
        most: how many calls to keep, sent and served together; those that come later are only counted.

    Attributes:
        sent, served, blocks: in the order in which they began.
        dropped: how many were left out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.sent: list[Sent] = []
        self.served: list[Served] = []
        self.blocks: list[Block] = []
        self.dropped = 0

    def take(self, what: Any, into: list[Any]) -> None:
        """Keeps one, if there is room."""
        if len(self.sent) + len(self.served) + len(self.blocks) < self._most:
            into.append(what)
        else:
            self.dropped += 1


class _Own(threading.local):
    """What the present thread did last."""

    number = 0
    """The system's number of it."""
    wrote = (0, 0)
    emitted = 0
    telling: Sent | None = None
    answering: Served | None = None


def witness_of(worker: Worker) -> Witness:
    """Returns a worker's witness."""
    with _making:
        witness: Witness = worker.services.get(Witness) or worker.services.setdefault(Witness, Witness(worker))
        return witness


class Witness:
    """Looks on at one worker's calls while anybody records. Made by `witness_of`.

    Attributes:
        threads: the names of the threads that did something, by the system's numbers.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.threads: dict[int, str] = {}
        self._recordings: list[Notes] = []
        self._open: dict[int, Sent] = {}
        """Calls whose answers are still to be read."""
        self._own = _Own()
        self._take_away: list[Callable[[], None]] = []
        self._door = threading.Lock()

    def begin(self, notes: Notes) -> None:
        """Has what comes from now on noted down."""
        with self._door:
            self._recordings = [*self._recordings, notes]
            if len(self._recordings) > 1:
                return
            worker, taps = self.worker, taps_of(self.worker)
            self._take_away = [
                taps.put(worker, "write", self._write),
                taps.put(worker, "emit", self._emit),
                taps.put(worker, "tell", self._tell),
                taps.put(worker.calls, "post", self._post),
                taps.put(worker.answers, "read", self._result),
                taps.put(worker.services[Autograd], "backward", self._backward),
            ]
            worker.message_class = _Witnessed

    def end(self, notes: Notes) -> None:
        """Notes nothing more down."""
        with self._door:
            if notes not in self._recordings:
                return
            self._recordings = [other for other in self._recordings if other is not notes]
            if self._recordings:
                return
            self.worker.message_class = Message
            while self._take_away:
                self._take_away.pop()()
            self._open.clear()

    def thread(self) -> int:
        """Returns the system's number of the present thread, whose name is noted down."""
        own = self._own
        if not own.number:
            own.number = threading.get_native_id()
        if own.number not in self.threads:
            self.threads[own.number] = threading.current_thread().name
        return own.number

    def answering(self, record: Served | None) -> Served | None:
        """Says which message the present thread answers; returns the one from before."""
        before, self._own.answering = self._own.answering, record
        return before

    def served(self, caller: int, number: int, verb: str) -> Served | None:
        """Notes down that a message has come; returns None where nobody records."""
        recordings = self._recordings
        if not recordings:
            return None
        record = Served(caller, number, verb)
        for notes in recordings:
            notes.take(record, notes.served)
        return record

    def _note_sent(self, record: Sent) -> None:
        for notes in self._recordings:
            notes.take(record, notes.sent)

    # -- around the worker's own

    def _write(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = monotonic_ns()
        try:
            return plain(*args, **kwargs)
        finally:
            self._own.wrote = began, monotonic_ns()

    def _wrote(self) -> tuple[int, int]:
        """Returns when the message that the present thread sends was written: now, where that was for others as well,
        as in a group call.
        """
        wrote, self._own.wrote = self._own.wrote, (0, 0)
        if not wrote[0]:
            now = monotonic_ns()
            return now, now
        return wrote

    def _emit(self, plain: Callable[..., Any], to: int, out: Any, *args: Any, **kwargs: Any) -> Any:
        self._own.emitted = monotonic_ns()
        record, answer = self._own.telling, self._own.answering
        if record is not None and out[0] == Kind.TELL and not record.number:
            record.number, record.emitted = out[2], self._own.emitted
        elif answer is not None and out[0] in (Kind.REPLY, Kind.ERROR) and out[2] == answer.number:
            answer.emitted = self._own.emitted  # now: the caller may ask for it as soon as it has the answer
        return plain(to, out, *args, **kwargs)

    def _post(
        self, plain: Callable[..., Call], to: int, target: tuple[int, int], frames: Any, timeout: float, what: object,
        parcel: Any = None, again: Any = None, then: Any = None, note: Any = None, flags: int = 0,
        chain: int | None = None, context: int = NO_CONTEXT, number: int | None = None, *more: Any, **named: Any,
    ) -> Call:  # fmt: skip
        if not is_call(target, flags):
            return plain(
                to, target, frames, timeout, what, parcel, again, then, note, flags, chain, context, number, *more,
                **named,
            )  # fmt: skip
        if number is None:
            number = self.worker.calls.next_id()
        counted = named.get("counted", len(more) > 1 and more[1])
        verb = "rpc_remote" if flags & Flag.KEEP else "rpc_async" if counted or target == AUTOGRAD else "rpc_sync"
        record = Sent(to, number, verb, BACKWARD if target == AUTOGRAD else what, self.thread(), self._wrote())
        self._open[number] = record
        self._note_sent(record)

        def noted(call: Call) -> None:  # under leadership
            record.arrived, record.failed = monotonic_ns(), call.failed
            if note is not None:
                note(call)

        try:
            call = plain(
                to, target, frames, timeout, what, parcel, again, then, noted, flags, chain, context, number, *more,
                **named,
            )  # fmt: skip
        except BaseException:
            self._open.pop(number, None)
            record.failed = True
            raise
        finally:
            record.sent, record.emitted = monotonic_ns(), self._own.emitted
        return call

    def _result(self, plain: Callable[[Call], Any], call: Call) -> Any:
        record = self._open.pop(call.id, None)
        if record is None:
            return plain(call)
        record.reader, record.reading = self.thread(), monotonic_ns()
        try:
            return plain(call)
        finally:
            record.read = monotonic_ns()

    def _tell(
        self, plain: Callable[..., None], to: int, target: tuple[int, int], body: object, *, control: bool = False,
        what: object = "a tell",
    ) -> None:  # fmt: skip
        if control or not is_call(target, 0):
            plain(to, target, body, control=control, what=what)
            return
        began, own = monotonic_ns(), self._own
        record = own.telling = Sent(to, 0, "tell", what, self.thread(), (began, began))
        try:
            plain(to, target, body, control=control, what=what)
            record.written = own.wrote[1] or began
        except BaseException:
            record.failed = True
            raise
        finally:
            own.telling, record.sent = None, monotonic_ns()
            self._note_sent(record)

    def _backward(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        block = Block(BACKWARD, self.thread())
        for notes in self._recordings:
            notes.take(block, notes.blocks)
        try:
            plain(*args, **kwargs)
        finally:
            block.ended = monotonic_ns()


def is_call(target: tuple[int, int], flags: int) -> bool:
    """Returns whether a message is one of the user's, or has a part in a backward pass run; not house-keeping."""
    if target == AUTOGRAD:
        return bool(flags & Flag.CONTROL)
    return not flags & Flag.CONTROL and (target[0] != SYSTEM or target in _SEEN)


class _Witnessed(Message):
    """A message that says when what happened to it."""

    __slots__ = ("_stage", "_witness", "record")

    def __init__(self, worker: Worker, kind: int, flags: int, caller: int, call: int, creator: int, local: int,
                 *rest: Any) -> None:  # fmt: skip
        self.record: Served | None = None
        super().__init__(worker, kind, flags, caller, call, creator, local, *rest)
        self._witness: Witness = worker.services[Witness]
        if is_call((creator, local), flags) and (kind == Kind.REQUEST or (creator, local) != AUTOGRAD):
            verb = "rpc_async" if flags & Flag.COUNTED or (creator, local) == AUTOGRAD else "rpc_sync"
            verb = "tell" if kind == Kind.TELL else "rpc_remote" if flags & Flag.KEEP else verb
            self.record = self._witness.served(caller, call, verb)
            if self.record is not None and (creator, local) == AUTOGRAD:
                self.record.name = BACKWARD

    @property
    def stage(self) -> int:
        return self._stage

    @stage.setter
    def stage(self, stage: int) -> None:
        self._stage = stage
        record = self.record
        if record is None:
            return
        if stage == RUNNING:
            record.begun, record.thread = monotonic_ns(), self._witness.thread()
        elif stage == RETURNED:
            record.returned = monotonic_ns()

    def load(self) -> Any:
        record = self.record
        if record is None:
            return super().load()
        record.loading = monotonic_ns()
        body = super().load()
        record.loaded = monotonic_ns()
        record.name = record.name or _name_in(body)
        return body

    def reply(self, value: object) -> None:
        if self.wants_answer and not self.answered and self.record is not None:
            self._answer(self.record, lambda: super(_Witnessed, self).reply(value))
        else:
            super().reply(value)

    def fail(self, error: BaseException, flags: int = 0) -> None:
        if not self.answered and self.record is not None:
            self.record.failed = True
            self._answer(self.record, lambda: super(_Witnessed, self).fail(error, flags))
        else:
            super().fail(error, flags)

    def _answer(self, record: Served, answer: Callable[[], None]) -> None:
        record.replying, record.answerer = monotonic_ns(), self._witness.thread()
        before = self._witness.answering(record)
        try:
            answer()
        finally:
            self._witness.answering(before)
        if record.emitted:
            record.answered = monotonic_ns()


def _name_in(body: Any) -> str:
    """Returns the name of what a message asks for."""
    what = body[0] if isinstance(body, tuple) and body else body
    return "to_here" if what is None else what.name if isinstance(what, Dressed) else name_of(what)
