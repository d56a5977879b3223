"""Faults by rule and by seed: what a network, or a process that dies in the midst, does to messages.

```python
faults = Faults(seed=7).drop(0.01, kind="reply").kill(kind="request", skip=2)
with faulty(faults):
    rpc.init_rpc(...)     # this process's messages pass through the faults from here on
```

In a simulated world the same rules govern its network: `SimWorld(..., faults=...)`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from actorrpc.process import process
from actorrpc.runtime.clock import SystemClock
from actorrpc.wire import envelope
from actorrpc.wire.envelope import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from actorrpc.runtime.clock import Clock, Gate, Thread
    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.transport import Transport

KINDS = {
    Kind.REQUEST: "request", Kind.TELL: "tell", Kind.REPLY: "reply", Kind.ERROR: "error", Kind.GREETING: "greeting",
}  # fmt: skip


@dataclass(frozen=True)
class Passing:
    """A message that is about to leave.

    Attributes:
        kind: "request", "tell", "reply", "error", "greeting", or "" for what is no message of this protocol.
        to: the receiver's worker id; its rank, in a world of fixed size. Ways that are no worker's are below 0.
        size: bytes.
        control: whether it is house-keeping of the library's (references, membership), or an answer to that.
        sender: the sender's worker id; -1 where the message does not say.
        call: the number of the call that it is, or answers.
    """

    kind: str
    to: int
    size: int
    control: bool = False
    sender: int = -1
    call: int = -1

    @staticmethod
    def of(to: int, frames: Sequence[Frame]) -> Passing:
        """Looks at a message."""
        size = envelope.size_of(frames)
        try:
            header = envelope.unpack(memoryview(frames[0]))
        except Exception:
            return Passing("greeting" if envelope.read_greeting(frames) is not None else "", to, size)
        control = bool(header.flags & Flag.CONTROL)
        return Passing(KINDS.get(header.kind, ""), to, size, control, header.caller, header.call)


@dataclass
class Verdict:
    """What is to become of one message.

    Attributes:
        copies: how many of it arrive; 0: it is dropped.
        delay: seconds that it, and those behind it to the same receiver, take longer.
        overtaken: whether the next one to the same receiver goes before it.
        altered: whether bits of it are turned.
        death: "" or when its sender dies: "before" it has left, or "after" it.
    """

    copies: int = 1
    delay: float = 0.0
    overtaken: bool = False
    altered: bool = False
    death: str = ""


@dataclass
class _Rule:
    act: Callable[[Verdict], None]
    chance: float
    fits: Callable[[Passing], bool]
    skip: int
    left: float
    name: str = ""


@dataclass
class Faults:
    """Rules by which messages come to harm. Each applies on its own, in the order in which they were given.

    All that make a rule take the same arguments, and return the faults, so that rules can be chained:

        chance: the share of the messages that fit which the rule harms; all by default.
        kind: the kind of message, see `Passing.kind`; any by default.
        to: only those to this worker id.
        control: only house-keeping of the library's (True) or only what the program says (False).
        when: a condition of one's own.
        skip: how many that fit are let pass first.
        times: how many it harms at the most; no bound by default.

    Arguments:
        seed: of all draws. With threads of the system, which message is the n-th is the system's doing; in a simulated
            world a seed does the same every time.

    Attributes:
        done: how many messages each rule has harmed, by its name ("drop", "delay", ...).
        active: whether the rules apply; may be switched off and on.
    """

    seed: int = 0
    active: bool = True
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(f"faults {self.seed}")
        self._rules: list[_Rule] = []
        self._lock = threading.RLock()

    def drop(self, chance: float = 1.0, **which: Any) -> Self:
        """Messages do not arrive."""

        def act(verdict: Verdict) -> None:
            verdict.copies = 0

        return self._add("drop", act, chance, **which)

    def delay(self, chance: float = 1.0, seconds: float = 0.1, **which: Any) -> Self:
        """Messages take up to `seconds` longer, and hold up those behind them: order is kept."""

        def act(verdict: Verdict) -> None:
            verdict.delay += self._random.random() * seconds

        return self._add("delay", act, chance, **which)

    def repeat(self, chance: float = 1.0, **which: Any) -> Self:
        """Messages arrive twice."""

        def act(verdict: Verdict) -> None:
            verdict.copies *= 2

        return self._add("repeat", act, chance, **which)

    def reorder(self, chance: float = 1.0, **which: Any) -> Self:
        """Messages arrive behind the next one to the same receiver."""

        def act(verdict: Verdict) -> None:
            verdict.overtaken = True

        return self._add("reorder", act, chance, **which)

    def alter(self, chance: float = 1.0, **which: Any) -> Self:
        """Bits of messages are turned. (With a token ZeroMQ sees that; these are turned before it looks.)"""

        def act(verdict: Verdict) -> None:
            verdict.altered = True

        return self._add("alter", act, chance, **which)

    def kill(self, chance: float = 1.0, *, before: bool = False, **which: Any) -> Self:
        """The sender dies (by SIGKILL, where it is a process) once such a message has left; `before`: instead of it.

        A message that has left may still be lost: what the process had not yet handed to the system.
        """

        def act(verdict: Verdict) -> None:
            verdict.death = "before" if before else "after"

        return self._add("kill", act, chance, **which)

    def _add(
        self,
        name: str,
        act: Callable[[Verdict], None],
        chance: float,
        *,
        kind: str | None = None,
        to: int | None = None,
        control: bool | None = None,
        when: Callable[[Passing], bool] | None = None,
        skip: int = 0,
        times: int | None = None,
    ) -> Self:
        if kind is not None and kind not in KINDS.values():
            raise ValueError(f"kind must be one of {', '.join(KINDS.values())}, not {kind!r}")

        def fits(passing: Passing) -> bool:
            return (
                (kind is None or passing.kind == kind)
                and (to is None or passing.to == to)
                and (control is None or passing.control == control)
                and (when is None or when(passing))
            )

        self._rules.append(_Rule(act, chance, fits, skip, float("inf") if times is None else times, name))
        return self

    def judge(self, to: int, frames: Sequence[Frame]) -> Verdict:
        """Says what is to become of a message to a worker."""
        verdict = Verdict()
        if not self.active or not self._rules:
            return verdict
        with self._lock:
            passing = Passing.of(to, frames)
            for rule in self._rules:
                if rule.left <= 0 or not rule.fits(passing):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                elif self._random.random() < rule.chance:
                    rule.left -= 1
                    self.done[rule.name] = self.done.get(rule.name, 0) + 1
                    rule.act(verdict)
        return verdict

    def altered(self, frames: Sequence[Frame]) -> list[Frame]:
        """Returns a copy of a message with one to four bits turned."""
        copies = [bytearray(memoryview(frame).cast("B")) for frame in frames]
        filled = [copy for copy in copies if copy]
        with self._lock:
            for _ in range(self._random.randrange(1, 5) if filled else 0):
                copy = filled[self._random.randrange(len(filled))]
                copy[self._random.randrange(len(copy))] ^= 1 << self._random.randrange(8)
        return [bytes(copies[0]), *copies[1:]]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyTransport:
    """A transport whose messages pass through faults as they leave. What comes in is left alone.

    Arguments:
        inner: what carries them. What it has beyond `wire.transport.Transport` is there as well.
        faults: the rules.
        clock: what passes the time of delays.
        die: kills this process.
    """

    def __init__(
        self, inner: Transport, faults: Faults, clock: Clock | None = None, die: Callable[[], None] = _die
    ) -> None:
        self._inner, self._faults, self._clock, self._die = inner, faults, clock or SystemClock(), die
        self._lock = threading.RLock()
        self._late: dict[int, deque[tuple[float, Sequence[Frame]]]] = {}
        """By receiver: what is delayed, and all behind it."""
        self._overtaken: dict[int, list[Sequence[Frame]]] = {}
        self._thread: Thread | None = None
        self._gate: Gate = self._clock.gate()
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        """See `Transport`; what is delayed is dropped."""
        with self._lock:
            self._late.pop(peer, None)
            self._overtaken.pop(peer, None)
        self._inner.hang_up(peer, linger)

    def send(self, peer: int, frames: Sequence[Frame], hold: int = 0, lasting: bool = True) -> None:
        """See `Transport`."""
        verdict = self._faults.judge(peer, frames)
        if verdict.death == "before":
            self._die()
        if verdict.altered:
            frames = self._faults.altered(frames)
        with self._lock:
            overtaken = self._overtaken.pop(peer, []) if verdict.copies and not verdict.overtaken else []
            if verdict.overtaken and verdict.copies:
                self._overtaken.setdefault(peer, []).extend([_kept(frames)] * verdict.copies)
            elif verdict.delay or peer in self._late:
                for one in [frames] * verdict.copies + overtaken:
                    self._put_off(peer, verdict.delay, one)
            else:
                for one in [frames] * verdict.copies + overtaken:
                    self._inner.send(peer, one, hold, lasting)
        if verdict.death == "after":
            self._inner.flush()
            self._clock.gate().wait(0.05)  # for ZeroMQ's own thread to put it on its way
            self._die()

    def _put_off(self, peer: int, seconds: float, frames: Sequence[Frame]) -> None:
        queue = self._late.setdefault(peer, deque())
        due = max(self._clock.now() + seconds, queue[-1][0] if queue else 0.0)
        queue.append((due, _kept(frames)))
        if self._thread is None:
            self._thread = self._clock.start(self._run, "actorrpc-faults")
        self._gate.open()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                now = self._clock.now()
                for peer, queue in list(self._late.items()):
                    while queue and queue[0][0] <= now:
                        with contextlib.suppress(KeyError):  # hung up meanwhile
                            self._inner.send(peer, queue.popleft()[1])
                    if not queue:
                        self._late.pop(peer, None)
                due = min((queue[0][0] for queue in self._late.values()), default=None)
            self._gate.wait(None if due is None else max(0.0, due - now))

    def close(self, linger: float = 0.0) -> None:
        """See `Transport`; what is delayed is dropped."""
        self._closed = True
        self._gate.open()
        if self._thread is not None:
            self._thread.join(5.0)
        self._inner.close(linger)


def _kept(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Copies what its sender may change before it leaves."""
    return [bytes(memoryview(frame)) for frame in frames]


@contextlib.contextmanager
def faulty(faults: Faults, die: Callable[[], None] = _die) -> Iterator[Faults]:
    """Has the messages of workers that are made in the block, in this process, pass through faults.

    Arguments:
        faults: the rules. They hold as long as the worker lives; see `Faults.active`.
        die: what kills this process; by default a SIGKILL.
    """
    own = process()
    before = own.wrap
    own.wrap = lambda inner: cast("Transport", FaultyTransport(inner, faults, die=die))
    try:
        yield faults
    finally:
        own.wrap = before
