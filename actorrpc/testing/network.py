"""A network within the process: messages take a drawn time, and keep their order from one sender to one receiver."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.testing.simulation import Simulation, Task
    from actorrpc.wire.envelope import Frame

_LATENCY_SECONDS = 200e-6
_STALL_SECONDS = 10e-3


class Network:
    """Carries messages between the transports of one simulation.

    Arguments:
        simulation: whose time and seed.

    Attributes:
        carried: how many messages have arrived.
        stalls: the share of messages that take much longer than the others, and hold up those behind them.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.transports: dict[str, SimTransport] = {}
        self.carried = 0
        self.stalls = 0.0
        self._last: dict[tuple[str, str], float] = {}

    def carry(self, source: SimTransport, to: str, frames: Sequence[Frame]) -> None:
        """Takes a message from a sender; it arrives some time later, unless either end is gone by then."""
        simulation = self.simulation
        way = source.address, to
        latency = simulation.random.random() * _LATENCY_SECONDS
        if self.stalls and simulation.random.random() < self.stalls:
            latency = simulation.random.random() * _STALL_SECONDS
        time = max(self._last.get(way, 0.0) + 1e-9, simulation.time + latency)
        self._last[way] = time
        copies: list[Frame] = [bytes(frames[0]), *(bytearray(f) for f in frames[1:])]

        def arrive() -> None:
            target = self.transports.get(to)
            if target is not None:
                self.carried += 1
                target.take(copies)

        simulation.at(time, arrive)


class SimTransport:
    """A transport over a simulated network. See `wire.transport.Transport`."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self._network = network
        self._ways: dict[int, str] = {}
        self._inbox: deque[list[Frame]] = deque()
        self._woken = False
        self._receiver: Task | None = None
        network.transports[address] = self

    @property
    def endpoints(self) -> list[str]:
        return [self.address]

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        self._ways[peer] = endpoints[0]

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        self._ways.pop(peer, None)

    holding = crowded = False
    emptied = 0

    def flush(self) -> None:
        pass

    def send(self, peer: int, frames: Sequence[Frame], hold: bool = False, lasting: bool = True) -> None:
        self._network.carry(self, self._ways[peer], frames)

    def take(self, frames: list[Frame]) -> None:
        """Takes what the network brings."""
        self._inbox.append(frames)
        self._rouse()

    def _rouse(self) -> None:
        if self._receiver is not None:
            self._receiver.ready = True

    def receive(self, timeout: float | None) -> list[Frame] | None:
        if not self._woken and not self._inbox:
            self._receiver = self._network.simulation.here.task
            self._network.simulation.block(timeout, "a message")
            self._receiver = None
        if self._woken:
            self._woken = False
            return None
        return self._inbox.popleft() if self._inbox else None

    def wake(self) -> None:
        self._woken = True
        self._rouse()

    def close(self, linger: float = 0.0) -> None:
        self._network.transports.pop(self.address, None)
        self._ways.clear()
