"""A network within the process: messages take a drawn time, and keep their order from one sender to one receiver.

What may be held back is, as by the real transports: who forgets to send it is found out (TR6, TR9 in `runtime.crew`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from actorrpc.testing.faults import Faults
from actorrpc.wire.transport import AT_ONCE, SOON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from actorrpc.testing.simulation import Simulation, Task
    from actorrpc.wire.envelope import Frame

_LATENCY_SECONDS = 200e-6
_STALL_SECONDS = 10e-3
_HOLD_AT_MOST = 32


class Network:
    """Carries messages between the transports of one simulation.

    Arguments:
        simulation: whose time and seed.
        faults: what messages come to harm by.
        die: kills the process that has the transport of an address.

    Attributes:
        carried: how many messages have arrived.
        stalls: the share of messages that take much longer than the others, and hold up those behind them.
    """

    def __init__(
        self, simulation: Simulation, faults: Faults | None = None, die: Callable[[str], None] = lambda _: None
    ) -> None:
        self.simulation, self.faults, self._die = simulation, faults or Faults(), die
        self.transports: dict[str, SimTransport] = {}
        self.carried = 0
        self.stalls = 0.0
        self._last: dict[tuple[str, str], float] = {}
        self._overtaken: dict[tuple[str, str], list[list[Frame]]] = {}
        self._cut: set[frozenset[str]] = set()
        self._held: dict[tuple[str, str], list[list[Frame]]] = {}

    def carry(self, source: SimTransport, peer: int, frames: Sequence[Frame]) -> None:
        """Takes a message from a sender; it arrives some time later, unless either end is gone by then."""
        way = source.address, source.ways[peer]
        verdict = self.faults.judge(peer, frames)
        if verdict.death == "before":
            self._die(source.address)
            self.simulation.block(None, "nothing: its process is dead")
        if verdict.altered:
            frames = self.faults.altered(frames)
        copies: list[Frame] = [bytes(frames[0]), *(bytearray(f) for f in frames[1:])]
        if verdict.overtaken:
            self._overtaken.setdefault(way, []).extend([copies] * verdict.copies)
        else:
            behind = self._overtaken.pop(way, []) if verdict.copies else []
            for one in [copies] * verdict.copies + behind:
                self._send(way, one, verdict.delay)
        if verdict.death == "after":
            self._die(source.address)
            self.simulation.block(None, "nothing: its process is dead")

    def _send(self, way: tuple[str, str], message: list[Frame], delay: float = 0.0) -> None:
        if frozenset(way) in self._cut:
            self._held.setdefault(way, []).append(message)
            return
        simulation = self.simulation
        latency = simulation.random.random() * _LATENCY_SECONDS
        if self.stalls and simulation.random.random() < self.stalls:
            latency = simulation.random.random() * _STALL_SECONDS
        time = max(self._last.get(way, 0.0) + 1e-9, simulation.time + latency + delay)
        self._last[way] = time

        def arrive() -> None:
            if frozenset(way) in self._cut:  # it was cut off in mid-air
                self._held.setdefault(way, []).append(message)
                return
            target = self.transports.get(way[1])
            if target is not None:
                self.carried += 1
                target.take(list(message))

        simulation.at(time, arrive)

    def forget(self, way: tuple[str, str]) -> None:
        """Drops what waits for a way that its sender has given up."""
        self._held.pop(way, None)
        self._overtaken.pop(way, None)

    def cut(self, a: str, b: str) -> None:
        """Cuts two addresses off from each other: what they send waits, as TCP would have it."""
        self._cut.add(frozenset((a, b)))

    def is_cut(self, a: str, b: str) -> bool:
        """Returns whether two addresses are cut off from each other."""
        return frozenset((a, b)) in self._cut

    def heal(self, a: str, b: str) -> None:
        """Lets two addresses reach each other again; what has waited leaves, unless its sender has hung up."""
        self._cut.discard(frozenset((a, b)))
        for way in ((a, b), (b, a)):
            for message in self._held.pop(way, []):
                self._send(way, message)


class SimTransport:
    """A transport over a simulated network. See `wire.transport.Transport`.

    Arguments:
        network: what carries its messages.
        address: its own.
        silence: see `Transport.silence`; whoever makes it tells the news.
    """

    def __init__(self, network: Network, address: str, silence: float = 10.0) -> None:
        self.address, self.silence = address, silence
        self.emptied, self.overdue = 0, float("inf")
        self.holding = self._soon = self.crowded = False
        self._held_back: dict[int, list[Sequence[Frame]]] = {}
        self.told: Callable[[int, str], None] = lambda peer, news: None
        self._network = network
        self.ways: dict[int, str] = {}
        self._inbox: deque[list[Frame]] = deque()
        self._woken = self._unsure = False
        self._receiver: Task | None = None
        network.transports[address] = self

    @property
    def endpoints(self) -> list[str]:
        return [self.address]

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        self.ways[peer] = endpoints[0]

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        to = self.ways.pop(peer, None)
        self._held_back.pop(peer, None)
        if to is not None:
            self._network.forget((self.address, to))

    def attend(self, peer: int, pid: int) -> None:
        pass

    def is_local(self, peer: int) -> bool:
        return False

    def sharing(self, peers: Sequence[int], frames: Sequence[Frame]) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def flush(self) -> None:
        self.holding = self._soon = False
        for peer in list(self._held_back):
            self._let_leave(peer)

    def send(self, peer: int, frames: Sequence[Frame], hold: int = AT_ONCE, lasting: bool = True) -> None:
        if peer not in self.ways:
            raise KeyError(peer)
        held = self._held_back.setdefault(peer, [])
        held.append(frames)
        if hold and len(frames) == 1 and len(held) < _HOLD_AT_MOST:
            self.holding = True
            self._soon = self._soon or hold == SOON
        else:
            self._let_leave(peer)

    def _let_leave(self, peer: int) -> None:
        for frames in self._held_back.pop(peer, ()):
            self._network.carry(self, peer, frames)

    def take(self, frames: list[Frame]) -> None:
        """Takes what the network brings."""
        self._inbox.append(frames)
        self._rouse()

    def _rouse(self) -> None:
        if self._receiver is not None:
            self._receiver.ready = True

    def receive(self, timeout: float | None) -> list[Frame] | None:
        if self._soon and not self._inbox:
            self.flush()
        if not (self._woken or self._unsure or self._inbox):
            self._receiver = self._network.simulation.here.task
            self._network.simulation.block(timeout, "a message")
            self._receiver = None
        if not self._inbox:
            self.emptied += 1
            self._unsure = False
        elif self._woken:
            self._unsure = True
        if self._woken:
            self._woken = False
            return None
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        self.crowded = bool(self._inbox)
        return message

    def wake(self) -> None:
        self._woken = True
        self._rouse()

    def close(self, linger: float = 0.0) -> None:
        if linger:
            self.flush()
        self._network.transports.pop(self.address, None)
        self.ways.clear()
        self._held_back.clear()
