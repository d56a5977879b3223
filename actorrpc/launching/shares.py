"""What each member gets of its host: cores, threads of torch, GPUs."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from actorrpc.roles import Part

_DEVICES = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"
CAN_PIN = hasattr(os, "sched_setaffinity")
CANNOT_PIN = f"the cpus of roles only set numbers of threads: {sys.platform} cannot pin a process to cores"


@dataclass(frozen=True)
class Share:
    """What one member gets.

    Attributes:
        cpus: the cores to run on; None: as the system has it.
        threads: how many threads torch gets; None: as it has them.
        devices: what CUDA_VISIBLE_DEVICES is; None: as it is.
    """

    cpus: tuple[int, ...] | None = None
    threads: int | None = None
    devices: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process should have from its beginning: its main module may use OpenMP or CUDA."""
        found = {} if self.threads is None else {_THREADS: str(self.threads)}
        return found if self.devices is None else {**found, _DEVICES: self.devices}

    def take(self) -> None:
        """Confines this process to its share.

        Raises:
            RuntimeError: CUDA is in use already, so that GPUs can no longer be chosen.
        """
        late: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if late and self.devices is not None and os.environ.get(_DEVICES) != self.devices:
            raise RuntimeError(
                "the GPUs of a role cannot be chosen, since this process has begun to use CUDA: "
                "call launch before anything is done on a GPU"
            )
        os.environ.update(self.environment)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.cpus is not None and CAN_PIN:
            _pin(self.cpus)


def shares_of(
    parts: Sequence[Part], cpus: Collection[int] | None = None, devices: Sequence[str] | None = None
) -> list[Share]:
    """Shares a host out among those of its members who ask for something.

    Arguments:
        parts: the members on this host.
        cpus: the cores that there are; by default those that this process may use.
        devices: the GPUs that there are, as CUDA_VISIBLE_DEVICES names them; by default those that this process sees.

    Raises:
        ValueError: more is asked for than there is.
    """
    got: list[tuple[int, ...] | None] = [None] * len(parts)
    if any(part.cpus is not None for part in parts):
        got = _split("cpus", parts, [part.cpus for part in parts], usable_cpus() if cpus is None else cpus)
    seen: list[tuple[int, ...] | None] = [None] * len(parts)
    if any(part.devices is not None for part in parts):
        devices = visible_devices() if devices is None else devices
        seen = _split("devices", parts, [part.devices for part in parts], range(len(devices)))
    sharing = Counter(cores for cores in got if cores is not None)
    return [
        Share(
            cores,
            None if cores is None else max(1, len(cores) // sharing[cores]),
            None if numbers is None or devices is None else ",".join(devices[number] for number in numbers),
        )
        for cores, numbers in zip(got, seen, strict=True)
    ]


def usable_cpus() -> set[int]:
    """Returns the cores that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def visible_devices() -> list[str]:
    """Returns the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(_DEVICES)
    if named is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def _split(
    what: str, parts: Sequence[Part], wishes: Sequence[int | tuple[int, ...] | None], there: Collection[int]
) -> list[tuple[int, ...] | None]:
    """Gives to each what it asks for: those it names, or so many of those that nobody has named."""
    named = {number for wish in wishes if isinstance(wish, tuple) for number in wish}
    if unknown := sorted(named - set(there)):
        raise ValueError(
            f"the roles name {what} {_list(unknown)}, which {_host()} does not have for them: it has "
            f"{_list(sorted(there)) or 'none'}"
        )
    free = sorted(set(there) - named)
    asked = sum(wish for wish in wishes if isinstance(wish, int))
    if asked > len(free):
        roles = Counter(part.role for part, wish in zip(parts, wishes, strict=True) if isinstance(wish, int))
        each = {part.role: wish for part, wish in zip(parts, wishes, strict=True)}
        sums = ", ".join(f"{role} {count} x {each[role]}" for role, count in roles.items())
        raise ValueError(
            f"the roles ask for {asked} {what} on {_host()} ({sums}), and there are {len(free)} for them: ask for "
            f"fewer, or name which ones they are to share"
        )
    given: list[tuple[int, ...] | None] = []
    for wish in wishes:
        if isinstance(wish, int):
            given.append(tuple(free[:wish]))
            del free[:wish]
        else:
            given.append(wish)
    return given


def _pin(cpus: tuple[int, ...]) -> None:
    """Pins all threads of this process: the setting is a thread's own, and libraries may have begun some."""
    threads = Path("/proc/self/task")
    numbers = [0, *(int(entry.name) for entry in threads.iterdir())] if threads.is_dir() else [0]
    for number in numbers:
        try:
            os.sched_setaffinity(number, cpus)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _host() -> str:
    return f"this host ({socket.gethostname()})"
