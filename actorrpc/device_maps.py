"""Device maps as users write them: what is no map, or not one to one, is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

import torch

Device = Union[int, str, torch.device]  # noqa: UP007  an alias, which mypy wants so
"""A device of a worker: a number means that CUDA device, also where this machine has none."""


def callee(to: object) -> str:
    """Returns the name that a device map is for.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(to, str):
        raise TypeError(f"a device map is for a worker, given by its name, not by {to!r} of type {type(to).__name__}")
    return to


def device_map_of(
    to: str, given: Mapping[Device, Device], present: Mapping[torch.device, torch.device]
) -> dict[torch.device, torch.device]:
    """Returns a device map with what is added to it.

    Raises:
        ValueError, TypeError: it is none, or the whole would not be one to one.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f'the device map for "{to}" must be a dict of devices, not {given!r}')
    whole = dict(present)
    for here, there in ((device_of(a), device_of(b)) for a, b in given.items()):
        if whole.get(here, there) != there:
            raise ValueError(
                f'the device map for "{to}" must be one to one, but {here} would become both {whole[here]} and {there}'
            )
        whole[here] = there
    origins: dict[torch.device, torch.device] = {}
    for here, there in whole.items():
        if there in origins:
            raise ValueError(
                f'the device map for "{to}" must be one to one, but both {origins[there]} and {here} would become '
                f"{there}"
            )
        origins[there] = here
    return whole


def device_of(given: Device) -> torch.device:
    """Returns the device that a user named.

    Raises:
        ValueError, TypeError: it is none, or neither the CPU nor a certain CUDA device.
    """
    if isinstance(given, bool) or not isinstance(given, (int, str, torch.device)):
        raise TypeError(f"a device is a number, a name or a torch.device, not {given!r} of type {type(given).__name__}")
    try:
        # Not torch.device(number): that asks for an accelerator to be here.
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except RuntimeError as e:
        raise ValueError(f"{given!r} is no device: {str(e).splitlines()[0]}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"a device is the CPU or a CUDA device, not {str(device)!r}")
    if device.index is None:
        raise ValueError(f"{given!r} does not say which CUDA device; write 'cuda:0'")
    return device
