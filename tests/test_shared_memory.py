"""Large tensors in worlds of real processes of one host: they lie in shared memory, and nobody can tell."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.wire import direct, segments, shelf
from tests.worlds import World, inside, no_references, until

pytestmark = pytest.mark.skipif(
    not (direct.AVAILABLE and segments.AVAILABLE), reason="this system has no shared memory along direct ways"
)
NUMBERS = 200_000
kept: list[torch.Tensor] = []


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a segment."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < end:
                return "/memfd:actorrpc" in line
    return False


def echo(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    return tensor, in_shared_memory(tensor)


def get_going() -> None:
    """Calls until large tensors lie in shared memory both ways."""

    def going() -> bool:
        there, arrived = rpc.rpc_sync(1, echo, args=(torch.ones(NUMBERS),))
        return arrived and in_shared_memory(there)

    until(going, what="nothing lies in shared memory")


def keep(tensor: torch.Tensor) -> float:
    kept.append(tensor)
    return float(tensor.sum())


def change(tensor: torch.Tensor) -> torch.Tensor:
    tensor.mul_(2)
    kept.append(tensor)
    return tensor


def change_kept() -> None:
    kept[-1].fill_(-1)


def forget() -> None:
    kept.clear()
    gc.collect()


def pid_and_segments() -> tuple[int, int]:
    return os.getpid(), len(shelf._LOANS)


def numbers(seed: int) -> torch.Tensor:
    return torch.rand(NUMBERS, generator=torch.Generator().manual_seed(seed))


class Holder:
    def __init__(self, seed: int) -> None:
        self.value = numbers(seed)

    def get(self) -> torch.Tensor:
        return self.value

    def change(self) -> None:
        self.value.fill_(0)


@inside
def test_what_one_side_changes_the_other_does_not_see() -> None:
    get_going()
    mine = numbers(1)
    was = mine.clone()
    for _ in range(5):
        answer = rpc.rpc_sync(1, change, args=(mine,))
        assert torch.equal(mine, was)
        assert torch.equal(answer, was * 2)
        rpc.rpc_sync(1, change_kept)  # the callee still has what it answered
        assert torch.equal(answer, was * 2)
        answer.zero_()
    rpc.rpc_sync(1, forget)


@inside
def test_tensors_that_are_kept_stay_as_they_are_while_more_come() -> None:
    get_going()
    sums = [rpc.rpc_sync(1, keep, args=(numbers(i),)) for i in range(40)]
    assert sums == [float(numbers(i).sum()) for i in range(40)]
    assert rpc.rpc_sync(1, pid_and_segments)[1] > 5
    assert rpc.rpc_sync(1, kept_sums) == sums
    rpc.rpc_sync(1, forget)
    until(lambda: rpc.rpc_sync(1, pid_and_segments)[1] == 0)


def kept_sums() -> list[float]:
    return [float(tensor.sum()) for tensor in kept]


@inside
def test_to_here_gives_a_copy_of_the_owners_large_tensor() -> None:
    get_going()
    holder = rpc.remote(1, Holder, args=(3,))
    values = [holder.rpc_sync().get() for _ in range(5)]
    tensor = rpc.remote(1, numbers, args=(4,))
    copies = [tensor.to_here() for _ in range(5)]
    assert any(map(in_shared_memory, values))
    assert any(map(in_shared_memory, copies))
    holder.rpc_sync().change()
    values[0].fill_(1)
    for value in values[1:]:
        assert torch.equal(value, numbers(3))
    copies[0].fill_(1)
    for copy in copies[1:]:
        assert torch.equal(copy, numbers(4))
    assert torch.equal(tensor.to_here(), numbers(4))
    del holder, tensor
    no_references()


@inside
def test_gradients_of_large_tensors_are_those_of_one_process() -> None:
    get_going()
    for _ in range(5):
        a, b = numbers(1).requires_grad_(), numbers(2).requires_grad_()
        with autograd.context() as context_id:
            product = rpc.rpc_sync(1, torch.mul, args=(a, b))
            again = rpc.rpc_sync(1, torch.mul, args=(product, b))
            autograd.backward(context_id, [again.sum()])
            gradients = autograd.get_gradients(context_id)
        again = a * b * b
        again.sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients[a], a.grad)
        torch.testing.assert_close(gradients[b], b.grad)


@inside
def test_a_tells_tensor_may_be_changed_at_once() -> None:
    get_going()
    holder = rpc.remote(1, Keeper)
    mine = numbers(5)
    for _ in range(10):
        holder.tell().keep(mine)
        mine.add_(1)
    assert holder.rpc_sync().sums() == [float((numbers(5) + i).double().mean().round(decimals=3)) for i in range(10)]
    del holder
    no_references()


class Keeper(rpc.Actor):
    def __init__(self) -> None:
        self.means: list[float] = []

    def keep(self, tensor: torch.Tensor) -> None:
        self.means.append(float(tensor.double().mean().round(decimals=3)))

    def sums(self) -> list[float]:
        return self.means


@inside
def test_a_forked_child_keeps_what_its_parent_received() -> None:
    get_going()
    tensor, arrived = rpc.rpc_sync(1, echo, args=(numbers(6),))
    assert arrived
    assert in_shared_memory(tensor)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.read(read, 1)  # until the parent has dropped it and received more
            tensor[0] = numbers(6)[0]
            status = int(not torch.equal(tensor, numbers(6)))
        finally:
            os._exit(status)
    tensor.fill_(0)
    del tensor
    for i in range(10):
        rpc.rpc_sync(1, echo, args=(numbers(10 + i),))
    os.write(write, b"x")
    os.close(write)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0


# -- ends


def hold_some(rank: int) -> None:
    other = 1 - rank
    for i in range(10):
        answer, arrived = rpc.rpc_sync(other, echo, args=(numbers(i),))
        kept[:] = [answer]
        if arrived and in_shared_memory(answer):
            return
    raise AssertionError("nothing lies in shared memory")


def what_is_left() -> tuple[int, int]:
    """Segments open and mapped here."""
    gc.collect()
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    with open("/proc/self/maps") as file:
        mapped = sum("/memfd:actorrpc" in line for line in file)
    return sum(name.startswith("/memfd:actorrpc") for name in names), mapped


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def until_little_is_left(held: int) -> None:
    until(lambda: what_is_left() == (held, held), what=f"left is {what_is_left()}")


def check_kept_and_drop() -> None:
    (tensor,) = kept
    assert any(torch.equal(tensor, numbers(i)) for i in range(10))
    tensor.fill_(1)
    del tensor
    kept.clear()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_leaves_nothing_and_takes_no_tensor_with_it(victim: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with World(2, strict=False) as world:
        world.on(0, hold_some, 0)
        world.on(1, hold_some, 1)
        world.kill(victim, signal.SIGKILL)
        other = 1 - victim
        world.on(other, until_little_is_left, 1)
        world.on(other, check_kept_and_drop)
        world.on(other, until_little_is_left, 0)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_worker_that_shuts_down_leaves_nothing() -> None:
    with World(2) as world:
        world.on(0, hold_some, 0)
        world.everywhere(shut_down)
        world.on(0, until_little_is_left, 1)
        world.on(0, check_kept_and_drop)
        world.everywhere(until_little_is_left, 0)


def shut_down() -> None:
    rpc.shutdown()
