"""Checks of what the options are given. Each returns the value, and raises ValueError or TypeError where it is none."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Union

import torch

Device = Union[int, str, torch.device]  # noqa: UP007  an alias, which mypy wants so
"""A device of a worker: a number means that CUDA device, also where this machine has none."""


def as_seconds(name: str, value: object, rule: str, holds: Callable[[float], bool]) -> float:
    """Seconds, for which something holds; `rule` says what."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        seconds = float(value)  # type: ignore[arg-type]  # whatever can be a float: numpy's numbers, too
    except TypeError:
        raise TypeError(
            f"incompatible constructor arguments: {name} must be a number of seconds, not {value!r} of type "
            f"{type(value).__name__}"
        ) from None
    if not math.isfinite(seconds) or not holds(seconds):
        raise ValueError(f"{name} {rule}, not {value}")
    return seconds


def as_count(name: str, given: int) -> int:
    """A whole number above 0."""
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {given!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def as_known_names(name: str, given: Iterable[str] | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Names, all of which are known; or None."""
    if given is None:
        return None
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of names, not {given!r}; known are: {', '.join(known)}")
    names = tuple(given)
    for one in names:
        if one not in known:
            raise ValueError(f"unknown name {one!r} in {name}; known are: {', '.join(known)}")
    return names


def as_callee(to: object) -> str:
    """The name of a worker that a device map is for."""
    if not isinstance(to, str):
        raise TypeError(f"a device map is for a worker, given by its name, not by {to!r} of type {type(to).__name__}")
    return to


def as_device_map(
    to: str, given: Mapping[Device, Device], present: Mapping[torch.device, torch.device]
) -> dict[torch.device, torch.device]:
    """Returns a device map with what is added to it.

    Raises:
        ValueError, TypeError: it is none, or the whole would not be one to one.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f'the device map for "{to}" must be a dict of devices, not {given!r}')
    whole = dict(present)
    for here, there in ((as_device(a), as_device(b)) for a, b in given.items()):
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


def as_device(given: Device) -> torch.device:
    """The CPU or a CUDA device."""
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
