"""What stands for the GPUs of a process where there are none: memory of the CPU with a tag that says where it is.

It is as lazy as a GPU: what was begun is done when somebody waits for it, and until then the memory holds rubbish. So
who reads without having waited is found out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RUBBISH = 0xA5


class Gpus:
    """Devices "cuda:0" and so on. It is an `actorrpc.services.carrying.Hardware`.

    Attributes:
        waits: the devices that were waited for, in order.
        fetched, brought: of what was copied from and to a device, the devices.
        full: devices to which nothing more can be copied.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.fetched: list[str] = []
        self.brought: list[str] = []
        self.full: set[str] = set()
        self._tags: dict[int, tuple[str, object]] = {}  # with the storage, so that its address stays its own
        self._begun: dict[str, list[Callable[[], object]]] = {}

    # -- for tests

    def on(self, device: str, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor on a device, with that of its whole storage: views of it are there as well."""
        storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        self._tags[storage._cdata] = device, storage
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def begin(self, device: str, what: Callable[[], object]) -> None:
        """Has something done when the device is next waited for."""
        self._begun.setdefault(device, []).append(what)

    @property
    def busy(self) -> bool:
        """Whether there is something that was begun and not waited for."""
        return any(self._begun.values())

    # -- as hardware

    def device_of(self, what: Tensor | torch.UntypedStorage) -> str | None:
        if isinstance(what, Tensor):
            if what.layout is not torch.strided:
                what = what._values()
            what = what.untyped_storage()
        return self._tags.get(what._cdata, (None, None))[0]

    def synchronise(self, device: str) -> None:
        self.waits.append(device)
        for what in self._begun.pop(device, ()):
            what()

    def fetch(self, raw: Tensor) -> Tensor:
        self.fetched.append(self.device_of(raw) or "cpu")
        return raw.clone()

    def put(self, what: Tensor, device: str) -> Tensor:
        if device in self.full:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.brought.append(device)
        if what.layout is not torch.strided:
            made = what.clone()
            self._tags[made._values().untyped_storage()._cdata] = device, made
            return made
        made = what.clone()
        made.untyped_storage().fill_(RUBBISH)  # type: ignore[attr-defined]
        self._tags[made.untyped_storage()._cdata] = device, made.untyped_storage()
        self.begin(device, lambda: made.copy_(what))
        return made
