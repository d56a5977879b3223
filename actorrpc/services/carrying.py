"""Tensors on devices: where those of a message go (`devices` decides it), and how they get there.

They travel as bytes. Who writes a message copies them from the device to the CPU and says with them on which device
they shall be; who reads it puts them there. Gradients are an exception: whoever has sent a tensor knows where it was,
and puts its gradient there (RULE DV1: so a gradient is always on its tensor's device, whichever way that had gone).

RULE DV2: before bytes of a device are copied, the device's stream of the thread that writes is waited for, once a
message and device; and a message is not handed out before all is where it shall be, on the reader's streams. So what
others do with a tensor comes after what its writer has done, on whatever stream.

Nothing here knows CUDA but `Cuda`, in whose place tests put another `Hardware`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from actorrpc.errors import DeserializationError, DeviceMapError
from actorrpc.runtime.message import Parcel, Route
from actorrpc.services.devices import CPU, Devices, Placement, counterpart, placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.message import Way


class Hardware(Protocol):
    """The devices of a process, other than the CPU."""

    def device_of(self, what: torch.Tensor | torch.UntypedStorage) -> str | None:
        """Returns the name of the device that a tensor or storage is on; None for the CPU."""

    def synchronise(self, device: str) -> None:
        """Waits for all that the present thread has begun on a device, on the stream that is its current one there."""

    def fetch(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the CPU."""

    def put(self, what: torch.Tensor, device: str) -> torch.Tensor:
        """Begins to copy from the CPU to a device. The source must live until `synchronise`."""


class Cuda:
    """CUDA devices, by torch."""

    def device_of(self, what: torch.Tensor | torch.UntypedStorage) -> str | None:
        """See `Hardware`."""
        device = what.device
        return None if device.type == "cpu" else str(device)

    def synchronise(self, device: str) -> None:
        """See `Hardware`."""
        torch.cuda.current_stream(torch.device(device)).synchronize()

    def fetch(self, raw: torch.Tensor) -> torch.Tensor:
        """See `Hardware`."""
        return raw.cpu()

    def put(self, what: torch.Tensor, device: str) -> torch.Tensor:
        """See `Hardware`."""
        return what.to(torch.device(device), non_blocking=True)


class Carrying:
    """What a worker knows of everybody's devices, and does with tensors on its own.

    Arguments:
        worker: whose.
        hardware: its devices.
    """

    def __init__(self, worker: Worker, hardware: Hardware | None = None) -> None:
        self.worker = worker
        self.hardware: Hardware = Cuda() if hardware is None else hardware
        self._everybody: Mapping[str, Devices] = {}
        self._ways: dict[tuple[int, Route], dict[str | None, Way | None]] = {}
        worker.services[Carrying] = self
        worker.codec.landing = self._land

    @staticmethod
    def learn(worker: Worker, everybody: Mapping[str, Devices]) -> None:
        """Takes note of the devices of all workers, by name. Where this worker has none and no map names any of its
        own, messages are written as if there were no devices at all.
        """
        self = worker.services.get(Carrying) or Carrying(worker)
        name = worker.record.name
        placed = worker.services[Placement] = placement(name, everybody)
        self._everybody, self._ways = everybody, {}
        concerned = everybody.get(name, Devices()).count or placed.maps or placed.inverse
        worker.codec.leaving = self._leave if concerned else None

    # -- for the codec

    def _leave(self, notes: Any) -> _Leaving | None:
        # The text of an error, what `launch` sends and the like have no Parcel; their tensors arrive on the CPU.
        return _Leaving(self, notes.peer, notes.route) if isinstance(notes, Parcel) else None

    def _land(self, _: Any) -> _Landing:
        return _Landing(self)

    def way_of(self, device: str | None, peer: int, route: Route) -> Way | None:
        """Returns the way of what is on a device (None: the CPU), in a message of some kind to a peer.

        Raises:
            DeviceMapError: there is none.
        """
        if route is Route.GRADIENTS:
            return None if device is None else (device, None)
        ways = self._ways.get((peer, route))
        if ways is None:
            ways = self._ways[peer, route] = {}
        try:
            return ways[device]
        except KeyError:
            way = ways[device] = self._find(device, peer, route)
            return way

    def _find(self, device: str | None, peer: int, route: Route) -> Way | None:
        known = self.worker.peers.get(peer)
        to = known.record.name if known is not None else f"rank {peer}"
        here = CPU if device is None else device
        there, fault = counterpart(here, self.worker.record.name, to, self._everybody, route is Route.ANSWER)
        if fault is not None:
            raise DeviceMapError(fault)
        return None if device is None and there == CPU else (device, None if there == CPU else there)

    # -- for autograd (RULE DV1)

    def places_of(self, tensors: Sequence[torch.Tensor]) -> list[str | None] | None:
        """Returns the devices of tensors that are sent; None where all are on the CPU."""
        if self.worker.codec.leaving is None:
            return None
        places = [self.hardware.device_of(tensor) for tensor in tensors]
        return places if any(places) else None

    def wait_for(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Waits until gradients are there that stay in this process, and may be used on other streams (RULE DV2)."""
        if self.worker.codec.leaving is not None:
            for place in {self.hardware.device_of(grad) for grad in grads if grad is not None}:
                if place is not None:
                    self.hardware.synchronise(place)

    def put_back(self, grads: Sequence[torch.Tensor | None], places: Sequence[str | None]) -> list[torch.Tensor | None]:
        """Puts gradients on the devices of their tensors."""
        landing, found = _Landing(self), []
        try:
            for grad, place in zip(grads, places, strict=True):
                here = None if grad is None else self.hardware.device_of(grad)
                if grad is None or here == place:
                    found.append(grad)
                    continue
                on_cpu = grad if here is None else self.hardware.fetch(grad)
                found.append(on_cpu if place is None else landing.put(on_cpu, place))
        finally:
            landing.done()
        return found


class _Leaving:
    """See `wire.message.Leaving`."""

    __slots__ = ("_carrying", "_met", "_peer", "_route")

    def __init__(self, carrying: Carrying, peer: int, route: Route) -> None:
        self._carrying, self._peer, self._route = carrying, peer, route
        self._met: set[str] = set()

    def way_of(self, what: torch.Tensor | torch.UntypedStorage) -> Way | None:
        carrying = self._carrying
        return carrying.way_of(carrying.hardware.device_of(what), self._peer, self._route)

    def fetch(self, raw: torch.Tensor, device: str) -> torch.Tensor:
        if device not in self._met:  # RULE DV2
            self._met.add(device)
            self._carrying.hardware.synchronise(device)
        return self._carrying.hardware.fetch(raw)


class _Landing:
    """See `wire.message.Landing`. It holds the sources until they are copied, which may be memory that is lent."""

    __slots__ = ("_carrying", "_met", "_sources")

    def __init__(self, carrying: Carrying) -> None:
        self._carrying = carrying
        self._met: set[str] = set()
        self._sources: list[torch.Tensor] = []

    def put(self, raw: torch.Tensor, device: str) -> torch.Tensor:
        self._sources.append(raw)
        self._met.add(device)
        try:
            return self._carrying.hardware.put(raw, device)
        except Exception as e:
            raise DeserializationError(
                f"{self._carrying.worker} cannot put {raw.nbytes} bytes of a tensor on its {device}: "
                f"{type(e).__name__}: {e}"
            ) from e

    def done(self) -> None:
        try:
            for device in self._met:  # RULE DV2
                self._carrying.hardware.synchronise(device)
        finally:
            self._sources.clear()
