"""Has a world begin: by starting all its processes here, or by taking the seat that a launcher has given this one."""

from __future__ import annotations

import copy
import functools
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actorrpc.launching import processes
from actorrpc.launching.member import take_part
from actorrpc.launching.output import Output
from actorrpc.launching.shares import CAN_PIN, CANNOT_PIN, Share, shares_of
from actorrpc.options import RpcBackendOptions, own_options
from actorrpc.wire.folders import HeldFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from actorrpc.launching.seats import Seat
    from actorrpc.roles import Part

log = logging.getLogger("actorrpc")
_GRACE = 2.0
"""Seconds that a process gets to end after its worker has been ended (see `member`)."""


def prepared(
    parts: Sequence[Part], options: RpcBackendOptions | None, seat: Seat | None, logs: bool = False
) -> Callable[[], Any]:
    """Sees to all that can be wrong before a world begins.

    Arguments:
        parts: what its workers are, by rank.
        options: for all of them.
        seat: this process's own place in it; None: this process starts them all.
        logs: whether it shows what they print and log, as for `launch`.

    Returns what plays the world to its end: it returns and raises as `launch` does.

    Raises:
        OSError, ValueError, TypeError: as `launch` does.
    """
    options = copy.copy(own_options(options)) if options is not None else RpcBackendOptions()
    for directory in {part.checkpoints for part in parts if part.checkpoints is not None}:
        os.makedirs(directory, exist_ok=True)
    if seat is not None:
        return functools.partial(_take, seat, share_of_seat(seat, parts), parts, options)
    return functools.partial(_start_all, parts, shares_of(parts), options, logs)


def _start_all(parts: Sequence[Part], each: Sequence[Share], options: RpcBackendOptions, logs: bool) -> Any:
    supervised, size = any(part.restarts for part in parts), len(parts)
    if not CAN_PIN and any(share.cpus is not None for share in each):
        log.warning(CANNOT_PIN)
    output = Output() if logs else None
    folder = HeldFolder()
    try:
        options.init_method = f"file://{folder.path}/store"
        members = [
            processes.Member(
                part.name, _play, (share, part, rank, size, options, False, supervised), part.restarts, part.backoff,
                share.environment,
            )
            for rank, (part, share) in enumerate(zip(parts, each, strict=True))
        ]  # fmt: skip
        return processes.run(members, grace=_GRACE, output=output)
    finally:
        if output is not None:
            output.close()
        folder.close()


def _play(share: Share, *arguments: Any, **keywords: Any) -> Any:
    """What a process that was started here runs."""
    share.take()
    return take_part(*arguments, **keywords)


def _take(seat: Seat, share: Share, parts: Sequence[Part], options: RpcBackendOptions) -> Any:
    if seat.rank == 0 and any(part.restarts for part in parts):
        again = ", which starts all again together: --max-restarts" if seat.name == "torchrun" else ""
        log.warning("the restarts that roles ask for do not happen under %s%s", seat.name, again)
    options.init_method = seat.init_method
    share.take()
    return take_part(parts[seat.rank], seat.rank, seat.world_size, options, exit_after=True)


def share_of_seat(
    seat: Seat, parts: Sequence[Part], cpus: Collection[int] | None = None, devices: Sequence[str] | None = None
) -> Share:
    """Returns what the worker of a seat gets of its host.

    Arguments:
        seat, parts: as for `prepared`.
        cpus, devices: what the host has, as for `shares_of`.

    Raises:
        ValueError: the seats are not as many as the parts; the roles ask for what is not there; or it cannot be known
            who else is on this host.
    """
    if seat.world_size != len(parts):
        raise ValueError(f"the roles make {len(parts)} workers, but {seat.name} started {seat.world_size} processes")
    here, own = seat.here, parts[seat.rank]
    if here is None:
        if any(isinstance(wish, int) and wish for wish in (own.cpus, own.devices)):
            raise ValueError(
                f"the role {own.role!r} asks for a number of cpus or devices, and it is not known who else is on this "
                "host: set LOCAL_RANK and LOCAL_WORLD_SIZE for each process, or name the cpus and devices in the role"
            )
        here = (seat.rank,)
    there = [parts[rank] for rank in here]
    if seat.own_devices:
        there = [part if part is own else replace(part, devices=None) for part in there]
    if seat.bound:
        there = [replace(part, cpus=None) for part in there]
    share = shares_of(there, cpus, devices)[here.index(seat.rank)]
    tells = seat.rank == here[0]
    if seat.bound and own.cpus is not None:
        share = replace(share, threads=own.cpus if isinstance(own.cpus, int) else len(own.cpus))
        if tells:
            log.warning(
                "the cpus of roles only set numbers of threads: %s has bound its processes to cores (--bind-to none, "
                "or for srun --cpu-bind=none, leaves that to the roles)", seat.name,
            )  # fmt: skip
    elif share.cpus is not None and tells and not CAN_PIN:
        log.warning(CANNOT_PIN)
    return share
