"""Tensors in shared memory that are sent by handle: both sides have the same memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import signal
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd, session, sharing
from actorrpc.wire import direct, segments
from tests.worlds import World, inside, no_references, until

pytestmark = pytest.mark.skipif(
    not (direct.AVAILABLE and segments.AVAILABLE), reason="this system has no shared memory without a name"
)
kept: list[torch.Tensor] = []


def in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def table(size: int = 1000) -> torch.Tensor:
    return in_shared_memory(torch.arange(float(size)))


def fill(tensor: torch.Tensor, number: float) -> None:
    tensor.fill_(number)


def keep(tensor: torch.Tensor) -> None:
    kept[:] = [tensor]


def first_kept() -> float:
    return float(kept[0].flatten()[0])


def set_kept(number: float) -> None:
    kept[0].fill_(number)


def forget() -> None:
    kept.clear()
    gc.collect()


def mapped() -> tuple[int, int]:
    """How many mappings and descriptors of torch's shared memory this process has."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    with open("/proc/self/maps") as file:
        return sum("/torch_" in line for line in file), sum("/torch_" in name for name in names)


@inside
def test_what_either_side_writes_both_see() -> None:
    mine = table()
    rpc.rpc_sync(1, fill, args=(rpc.shared(mine), 7.0))
    assert (mine == 7).all()
    rpc.rpc_sync(1, keep, args=(rpc.shared(mine),))
    mine.fill_(8)
    assert rpc.rpc_sync(1, first_kept) == 8
    rpc.rpc_sync(1, set_kept, args=(9.0,))
    assert (mine == 9).all()
    rpc.rpc_sync(1, forget)
    no_references()


@inside
def test_without_being_asked_a_tensor_in_shared_memory_is_copied() -> None:
    mine = table()
    rpc.rpc_sync(1, fill, args=(mine, 7.0))
    assert torch.equal(mine, torch.arange(1000.0))


@inside
def test_views_kinds_and_parameters_arrive_as_they_are() -> None:
    whole = in_shared_memory(torch.arange(24, dtype=torch.bfloat16))
    view = whole.view(4, 6)[1:3, ::2].T
    assert rpc.rpc_sync(1, describe, args=(rpc.shared(view),)) == (view.tolist(), (3, 2), (2, 6), "Tensor", False)
    rpc.rpc_sync(1, fill, args=(rpc.shared(view), -1.0))
    assert whole.tolist() == [-1.0 if i // 6 in (1, 2) and i % 2 == 0 else float(i) for i in range(24)]
    layer = torch.nn.Linear(2, 1).share_memory()
    assert rpc.rpc_sync(1, describe, args=(rpc.shared(layer.weight),))[3:] == ("Parameter", True)
    rpc.rpc_sync(1, step, args=([rpc.shared(p) for p in layer.parameters()],))
    assert torch.equal(layer.weight, torch.full((1, 2), 5.0))
    assert layer.weight.grad is None


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    assert tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor.tolist(), tuple(tensor.shape), tensor.stride(), type(tensor).__name__, tensor.requires_grad


def step(parameters: list[torch.Tensor]) -> None:
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.fill_(5.0)


def given(number: float) -> Any:
    return rpc.shared(in_shared_memory(torch.full((1000,), number)))


@inside
def test_the_memory_lives_as_long_as_either_side_has_it() -> None:
    start = mapped()
    there = rpc.rpc_sync(1, mapped)
    rpc.rpc_async(1, keep, args=(rpc.shared(table()),)).wait()  # nobody here has it any more
    until(lambda: mapped() == start, what=f"{mapped()} of {start}")
    assert rpc.rpc_sync(1, first_kept) == 0
    rpc.rpc_sync(1, forget)
    until(lambda: rpc.rpc_sync(1, mapped) == there)
    value = rpc.rpc_sync(1, given, args=(3.0,))  # nor there
    assert (value == 3).all()
    until(lambda: rpc.rpc_sync(1, mapped) == there)
    again = rpc.rpc_sync(1, passed_on, args=(rpc.shared(value),))
    again.fill_(4)
    assert (value == 4).all()
    del value, again
    until(lambda: mapped() == start, what=f"{mapped()} of {start}")
    no_references()


def passed_on(tensor: torch.Tensor) -> Any:
    return rpc.shared(tensor)


class Holder:
    def keep(self, tensor: torch.Tensor) -> None:
        kept[:] = [tensor]


@inside
def test_a_tells_tensor_may_be_dropped_at_once() -> None:
    holder = rpc.remote(1, Holder)
    rpc.rpc_sync(1, forget)
    for i in range(20):
        holder.tell().keep(rpc.shared(in_shared_memory(torch.full((100,), float(i)))))
    until(lambda: rpc.rpc_sync(1, has_kept, args=(19.0,)))
    rpc.rpc_sync(1, forget)
    del holder
    no_references()


def has_kept(number: float) -> bool:
    return bool(kept) and first_kept() == number


@inside
def test_all_members_of_a_group_get_the_same_memory() -> None:
    group = rpc.Group([rpc.remote(1, Adder), rpc.remote(1, Adder), rpc.remote(0, Adder)])
    mine = in_shared_memory(torch.zeros(100_000))
    group.rpc_sync().add(rpc.shared(mine))
    assert (mine == 3).all()
    del group
    no_references()


class Adder:
    def add(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor += 1


@inside
def test_what_cannot_go_by_handle_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not a list"):
        rpc.shared([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call tensor.share_memory_\(\) first"):
        rpc.shared(torch.ones(3))
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo"):
        rpc.shared(torch.ones(3).to_sparse())
    with pytest.raises(TypeError, match=r"send tensor.detach\(\)"):
        rpc.shared(table().requires_grad_() * 2)
    handle = rpc.shared(table())
    for save in (pickle.dumps, copy.deepcopy):
        with pytest.raises(rpc.SerializationError, match="in RPC calls only"):
            save(handle)


@inside
def test_in_an_autograd_context_only_what_needs_no_gradient_goes_by_handle() -> None:
    with autograd.context():
        rpc.rpc_sync(1, fill, args=(rpc.shared(mine := table()), 2.0))
        assert (mine == 2).all()
        with pytest.raises(rpc.SerializationError, match="in an autograd context"):
            rpc.rpc_sync(1, fill, args=(rpc.shared(mine.requires_grad_()), 2.0))
    no_references()


@inside
def test_a_reader_on_another_host_is_an_error_that_names_it() -> None:
    peer = session.current().worker.peers[1]
    record = peer.record
    peer.record = dataclasses.replace(record, boot="another", host="far")
    try:
        with pytest.raises(rpc.SerializationError, match=r"cannot leave its host .* \(rank 1, host far"):
            rpc.rpc_sync(1, fill, args=(rpc.shared(table()), 2.0))
    finally:
        peer.record = record
    no_references()


@inside
def test_under_another_sharing_strategy_of_torchs_it_is_an_error() -> None:
    mine = table()
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(rpc.SerializationError, match="file_descriptor"):
            rpc.rpc_sync(1, fill, args=(rpc.shared(mine), 2.0))
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    no_references()


def see_nothing() -> None:
    def fail(place: segments.Place, how: int) -> int:
        raise PermissionError("of another user")

    sharing.open_of_peer, sharing.before = fail, sharing.open_of_peer  # type: ignore[attr-defined]


def see_again() -> None:
    sharing.open_of_peer = sharing.before  # type: ignore[attr-defined]


@inside
def test_a_reader_that_cannot_open_it_answers_with_an_error() -> None:
    rpc.rpc_sync(1, see_nothing)
    try:
        with pytest.raises(rpc.DeserializationError, match=r"of another user; process \d+, .* send the tensor itself"):
            rpc.rpc_sync(1, fill, args=(rpc.shared(table()), 2.0))
    finally:
        rpc.rpc_sync(1, see_again)
    no_references()


@inside
def test_another_process_of_that_number_is_not_mistaken_for_the_sender() -> None:
    mine = table()
    place = sharing._place_of(mine.untyped_storage())
    decoy = os.memfd_create("decoy")
    try:
        os.ftruncate(decoy, place.size)
        others = place._replace(pid=os.getppid()), place._replace(inode=place.inode + 1), place._replace(device=1)
        for wrong in (place._replace(fd=decoy), *others):
            with pytest.raises((FileNotFoundError, PermissionError)):
                segments.open_of_peer(wrong, os.O_RDWR)
    finally:
        os.close(decoy)


def share_with(rank: int) -> None:
    kept[:] = [table()]
    rpc.rpc_sync(rank, keep, args=(rpc.shared(kept[0]),))


def use_kept() -> None:
    set_kept(5.0)
    assert first_kept() == 5
    forget()
    until(lambda: mapped() == (0, 0), what=f"{mapped()} are left")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_takes_no_memory_with_it_and_leaves_none(victim: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with World(2, strict=False) as world:
        world.on(0, share_with, 1)
        world.kill(victim, signal.SIGKILL)
        world.on(1 - victim, use_kept)
    assert set(os.listdir("/dev/shm")) <= before
