"""Which devices of one worker stand for which of another: the checks of device maps, and what follows from them.

Plain functions upon names of devices ("cpu", "cuda:0"); they ask no GPU for anything, and take how many each worker has
as given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CPU: Final = "cpu"
_CUDA = "cuda:"


@dataclass(frozen=True)
class Devices:
    """What a worker says of its devices when it joins.

    Attributes:
        count: how many CUDA devices it has.
        maps: by the name of another worker, which of its devices each of this one's becomes there.
        listed: the devices that it may use for calls; empty where it leaves that open.
    """

    count: int = 0
    maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    listed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {"count": self.count, "maps": {to: dict(m) for to, m in self.maps.items()}, "listed": self.listed}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Devices:
        """Reads what `to_json` wrote.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        maps = {str(to): {str(a): str(b) for a, b in m.items()} for to, m in data["maps"].items()}
        return Devices(int(data["count"]), maps, tuple(map(str, data["listed"])))


NO_DEVICES: Final = Devices()
"""What most workers say."""


@dataclass(frozen=True)
class Placement:
    """What the device maps of a world come to for one worker; they are known to be sound.

    Attributes:
        maps: its own: by callee, which device there each of its own becomes.
        inverse: by caller, which device of that caller each of its own becomes on the way back.
        devices: those of its own that take part, by index.
    """

    maps: Mapping[str, Mapping[str, str]]
    inverse: Mapping[str, Mapping[str, str]]
    devices: tuple[str, ...]


def fault_of_one(name: str, own: Devices) -> str | None:
    """Looks for what is wrong with a worker's devices whoever the others are; returns it in words, or None."""
    who = f'worker "{name}"'
    twice = _twice(own.listed)
    if twice is not None:
        return f"{who} lists {twice} twice in its devices: {', '.join(own.listed)}"
    strange = _outside(own.listed, own.count)
    if strange is not None:
        return f"{who} lists {strange} in its devices, but {_has('it', own.count)}"
    for to, device_map in own.maps.items():
        where = f'in its device map for "{to}" ({_shown(device_map)})'
        twice = _twice(device_map.values())
        if twice is not None:
            return f"{who} maps two devices to {twice} {where}: a device map must be one to one"
        if own.listed:
            strange = _unlisted(device_map, own.listed)
            if strange is not None:
                return f"{who} maps from {strange} {where}, which is not among its devices: {', '.join(own.listed)}"
        else:
            strange = _outside(device_map, own.count)
            if strange is not None:
                return f"{who} maps from {strange} {where}, but {_has('it', own.count)}"
    return None


def fault_between(all_of_them: Mapping[str, Devices], *, complete: bool = True) -> str | None:
    """Looks for what is wrong with the device maps of a world; returns it in words, or None.

    Arguments:
        all_of_them: every worker's devices, by its name; each has passed `fault_of_one`.
        complete: whether nobody comes later, so that maps for others are wrong.
    """
    for name, own in all_of_them.items():
        for to, device_map in own.maps.items():
            who = f'worker "{name}"'
            if to not in all_of_them and not complete:
                continue
            if to not in all_of_them:
                known = ", ".join(f'"{other}"' for other in all_of_them)
                return f'{who} has a device map for "{to}", but there is no such worker; there are: {known}'
            where, other = f"({_shown(device_map)})", all_of_them[to]
            if other.listed:
                strange = _unlisted(device_map.values(), other.listed)
                if strange is not None:
                    return (
                        f'{who} maps to {strange} of worker "{to}" {where}, which is not among the devices of that '
                        f"one: {', '.join(other.listed)}"
                    )
            else:
                strange = _outside(device_map.values(), other.count)
                if strange is not None:
                    return f'{who} maps to {strange} of worker "{to}" {where}, but {_has("that one", other.count)}'
    return None


def inverse_maps(name: str, all_of_them: Mapping[str, Devices]) -> dict[str, dict[str, str]]:
    """Returns, by caller, the device maps for a worker turned round: from its own device to the caller's."""
    return {
        caller: {there: here for here, there in its.maps[name].items()}
        for caller, its in all_of_them.items()
        if name in its.maps
    }


def device_list(own: Devices, inverse: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Returns the CUDA devices that take part on a worker, by index: those it lists, else those of any map."""
    used = set(own.listed)
    if not used:
        for device_map in (*own.maps.values(), *inverse.values()):
            used.update(device_map)
    return tuple(sorted((d for d in used if d.startswith(_CUDA)), key=lambda d: int(d[len(_CUDA) :])))


def placement(name: str, all_of_them: Mapping[str, Devices]) -> Placement:
    """Returns what the device maps of a world come to for one of its workers."""
    own = all_of_them.get(name, Devices())
    inverse = inverse_maps(name, all_of_them)
    return Placement({to: dict(m) for to, m in own.maps.items()}, inverse, device_list(own, inverse))


def counterpart(
    device: str, sender: str, receiver: str, everybody: Mapping[str, Devices], answering: bool
) -> tuple[str, str | None]:
    """Returns the device of the receiver on which a tensor arrives, and None; or anything, and why it cannot.

    Where the caller has a device map for the callee, that decides, in answers turned round; but what is on the CPU
    stays on one unless the map names "cpu". Where there is none, a CUDA device becomes the one of the same index.

    Arguments:
        device: that which it is on.
        sender, receiver: the workers' names.
        everybody: all workers' devices, by name.
        answering: whether the message is an answer: then the receiver is the caller.
    """
    caller, callee = (receiver, sender) if answering else (sender, receiver)
    own, other = everybody.get(sender, NO_DEVICES), everybody.get(receiver, NO_DEVICES)
    device_map = everybody.get(caller, NO_DEVICES).maps.get(callee)
    verb = "answer" if answering else "send"
    what = f'worker "{sender}" cannot {verb} worker "{receiver}" {"with " * answering}a tensor on {device}'
    if device_map:
        table = {there: here for here, there in device_map.items()} if answering else device_map
        if device in table or device == CPU:
            return table.get(device, CPU), None
        turned = ", which answers take the other way round," if answering else ""
        named = f'the device map of worker "{caller}" for "{callee}" ({_shown(device_map)})'
        why = f"{named}{turned} does not name {device}"
        return CPU, _advised(what, why, device, caller, callee, answering)
    if device == CPU:
        return CPU, None
    if not device.startswith(_CUDA):
        return CPU, f"{what}: only tensors on the CPU and on CUDA devices can be sent; send tensor.cpu() instead"
    if own.listed and device not in own.listed:
        why = f"it is not among the devices that it may use for calls: {', '.join(own.listed)}"
    elif other.listed and device not in other.listed:
        why = f'it is not among the devices that worker "{receiver}" may use for calls: {", ".join(other.listed)}'
    elif not other.listed and not _exists(device, other.count):
        why = f"without a device map it becomes {device} there, but {_has('that one', other.count)}"
    else:
        return device, None
    return CPU, _advised(what, why, device, caller, callee, answering)


def _advised(what: str, why: str, device: str, caller: str, callee: str, answering: bool) -> str:
    example = f'{{"cuda:<index>": "{device}"}}' if answering else f'{{"{device}": "cuda:<index>"}}'
    return (
        f'{what}: {why}. Say which devices belong together in the options of worker "{caller}" '
        f'(TensorPipeRpcBackendOptions.set_device_map("{callee}", {example})), or send tensor.cpu()'
    )


def _outside(devices: Iterable[str], count: int) -> str | None:
    """Returns the first that a worker with so many CUDA devices does not have."""
    return next((d for d in devices if not _exists(d, count)), None)


def _exists(device: str, count: int) -> bool:
    index = device.removeprefix(_CUDA)
    return device == "cpu" or (index != device and index.isdecimal() and int(index) < count)


def _unlisted(devices: Iterable[str], listed: tuple[str, ...]) -> str | None:
    return next((d for d in devices if d != "cpu" and d not in listed), None)


def _twice(devices: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for device in devices:
        if device in seen:
            return device
        seen.add(device)
    return None


def _has(who: str, count: int) -> str:
    if not count:
        return f"{who} has no CUDA device"
    return (
        f"{who} has {count} CUDA device{'s' if count > 1 else ''} (cuda:0" + f" to cuda:{count - 1}" * (count > 1) + ")"
    )


def _shown(device_map: Mapping[str, str]) -> str:
    return ", ".join(f"{here} to {there}" for here, there in device_map.items())
