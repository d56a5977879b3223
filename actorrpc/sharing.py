"""Tensors in shared memory that travel by handle: the reader's tensor is the same memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import DeserializationError, SerializationError
from actorrpc.rref import RRef
from actorrpc.runtime.message import Parcel
from actorrpc.wire.codec import writing
from actorrpc.wire.segments import Place, open_of_peer

if TYPE_CHECKING:
    from collections.abc import Sequence


def shared(tensor: torch.Tensor) -> Any:
    """Has a tensor in shared memory sent by handle, as an argument or result of calls, instead of a copy of it: what is
    read is a tensor over the same memory, and **what either side writes, both see**, as with `torch.multiprocessing`.

        table = torch.zeros(1000, 64).share_memory_()
        rpc.rpc_sync("worker1", fill, args=(rpc.shared(table),))  # fill(table) gets a tensor, and writes into it

    It goes to workers of the same host and user only. The memory lives as long as either side has a tensor over it;
    who has received it may pass it on in the same way. Nothing orders what the two sides write, but that who receives a
    message sees what its sender wrote before. A leaf that requires grad arrives as one, over the same data, with a
    `grad` of its own; in autograd contexts that is refused, since nothing would be recorded.

    Arguments:
        tensor: a `torch.Tensor` or `torch.nn.Parameter` on the CPU, on which `share_memory_()` was called, or a view of
            one.

    Returns:
        What to send in its place; it may be sent more than once.

    Raises:
        TypeError: it is no such tensor.
        ValueError: it is not in shared memory, or has no elements.
        SerializationError: (from the call) its reader is on another host, or torch's sharing strategy is not
            "file_descriptor".
        DeserializationError: (from the call) its reader cannot open the memory: it is in another container, or runs as
            another user.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a tensor is sent by handle, not a {type(tensor).__name__}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise TypeError(f"a {type(tensor).__name__} of layout {tensor.layout} cannot be sent by handle")
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"only plain tensors on the CPU are sent by handle; this one is on {tensor.device}")
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError("a tensor that was computed with grad cannot be sent by handle; send tensor.detach()")
    if not tensor.is_shared() or not tensor.numel():  # type: ignore[no-untyped-call]
        raise ValueError("the tensor is not in shared memory, or is empty; call tensor.share_memory_() first")
    return _Handle(tensor)


class _Handle:
    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        tensor, parcel = self._tensor, writing()
        if not isinstance(parcel, Parcel):
            raise SerializationError("a tensor by handle travels in RPC calls only; save or copy the tensor itself")
        _check_reader(parcel)
        if tensor.requires_grad and parcel.trace is not None:
            raise SerializationError("a tensor that requires grad cannot be sent by handle in an autograd context")
        return _open, (
            _place_of(tensor.untyped_storage()),
            RRef(tensor),  # the memory stays until it is opened, or the message is known not to be read
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
            type(tensor) is torch.nn.Parameter,
        )

    def __repr__(self) -> str:
        return f"rpc.shared(<tensor of shape {tuple(self._tensor.shape)}>)"


def _check_reader(parcel: Parcel) -> None:
    worker = parcel.worker
    reader, own = worker.peers[parcel.peer].record, worker.record
    if reader.boot != own.boot:
        raise SerializationError(f"a tensor by handle cannot leave its host {own.host}, and {reader} is on another one")


def _place_of(storage: torch.UntypedStorage) -> Place:
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy != "file_descriptor":  # torch would move it, from under others
        raise SerializationError('a tensor is sent by handle under torch\'s sharing strategy "file_descriptor" only')
    fd, _ = storage._share_fd_cpu_()
    if fd < 0:
        raise SerializationError("a tensor over a file cannot be sent by handle: call share_memory_() on a copy of it")
    found = os.fstat(fd)
    return Place(os.getpid(), fd, found.st_dev, found.st_ino, found.st_size)


def _open(
    place: Place,
    _: RRef[torch.Tensor],
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    requires_grad: bool,
    parameter: bool,
) -> torch.Tensor:
    try:
        fd = open_of_peer(place, os.O_RDWR)
    except OSError as e:
        raise DeserializationError(
            f"a tensor by handle cannot be opened here: {e}; process {place.pid}, which has it, must be of the same "
            f"user and container; send the tensor itself, which is copied"
        ) from e
    kind: Any = torch.UntypedStorage
    try:
        storage = kind._new_shared_fd_cpu(fd, place.size)
    except RuntimeError as e:
        raise DeserializationError(f"a tensor by handle cannot be mapped here: {e}") from e
    finally:
        os.close(fd)  # torch has its own
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
