"""Where a module is to be: the worker and the device that a `remote_device` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from actorrpc.workers import resolve

if TYPE_CHECKING:
    from actorrpc.runtime.worker import Worker

_RANK = "rank:"


def parse(worker: Worker, remote_device: object) -> tuple[int, str]:
    """Returns the id of the worker and the name of the device that a text such as "ps/cuda:0" or "rank:1" names.

    Whether the worker has such a device is known there only.

    Raises:
        TypeError: it is no text.
        ValueError: it is not of the form, or names a device without a worker.
        RuntimeError: what stands behind the slash is no device.
        NotAMemberError: there is no such worker.
    """
    if not isinstance(remote_device, str):
        kind = type(remote_device).__name__
        raise TypeError(f"remote_device is a text such as 'worker1/cpu', not {remote_device!r} of type {kind}")
    name, slash, device = remote_device.partition("/")
    if not name or "/" in device:
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
            f"'rank:<rank>/<device>'; without a device it is the CPU"
        )
    if not slash:
        if name not in worker.names and _is_device(name):
            raise ValueError(
                f"remote_device {remote_device!r} names a device but no worker: write '<workername>/{name}'; "
                f"this worker's own name is {worker.record.name!r}"
            )
        device = "cpu"
    try:
        torch.device(device)
    except RuntimeError as e:
        raise RuntimeError(f"remote_device {remote_device!r}: {e}") from None
    return _worker_of(worker, name, remote_device), device


def _worker_of(worker: Worker, name: str, remote_device: str) -> int:
    if not name.startswith(_RANK) or name in worker.names:
        return resolve(worker, name)
    rank = name[len(_RANK) :]
    if not (rank.isascii() and rank.isdigit()):
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is 'rank:<rank>/<device>', with a number"
        )
    return resolve(worker, int(rank))


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
