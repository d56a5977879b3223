"""Broadcasts of large tensors in worlds of real processes of one host: one segment for all, and nobody can tell."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.wire import commons, direct, folders, segments, zeromq
from tests.joining import options
from tests.test_shared_memory import numbers, what_is_left
from tests.worlds import World, until

pytestmark = pytest.mark.skipif(
    not (direct.AVAILABLE and segments.AVAILABLE), reason="this system has no shared memory along direct ways"
)
SIZE = 4


def where(tensor: torch.Tensor) -> str:
    """What a tensor's memory belongs to: "shared" with others, "own" segment, or neither."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < end:
                return "shared" if "actorrpc-group" in line else "own" if "/memfd:actorrpc" in line else ""
    return ""


class Player:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.places: list[str] = []

    def load(self, weights: torch.Tensor) -> str:
        self.kept = [weights]
        return where(weights)

    def keep(self, weights: torch.Tensor) -> None:
        self.kept.append(weights)
        self.places.append(where(weights))

    def told(self) -> list[str]:
        return self.places

    def add(self, number: float) -> None:
        for tensor in self.kept:
            tensor[:1000].add_(number)  # who changes most of it is sent copies

    def get(self) -> list[torch.Tensor]:
        return self.kept

    def forget(self) -> None:
        self.kept.clear()
        self.places.clear()
        gc.collect()

    def change(self, weights: torch.Tensor) -> torch.Tensor:
        weights[:1000].add_(int(rpc.get_worker_info().id))
        return weights


players: list[rpc.Group] = []


def begin() -> None:
    """On rank 0: a group of one player on each other worker."""
    players[:] = [rpc.Group([rpc.remote(rank, Player) for rank in range(1, SIZE)])]


def end() -> None:
    players.clear()
    gc.collect()


def send_until_shared(count: int = SIZE - 1, seed: int = 0) -> None:
    """Sends numbers until that many members have theirs in one segment; they keep it."""

    def shared() -> bool:
        places: list[str] = players[0].rpc_sync().load(numbers(seed))
        return places.count("shared") == count

    until(shared, what="nothing is shared")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(SIZE) as made:
        made.on(0, begin)
        yield made
        made.on(0, end)


# -- values


def with_more(number: float) -> torch.Tensor:
    expected = numbers(1)
    expected[:1000].add_(number)
    return expected


def each_has_its_own() -> None:
    (group,) = players
    mine = numbers(1)
    for _ in range(3):
        send_until_shared(seed=1)
        assert torch.equal(mine, numbers(1))
        for number, player in enumerate(group, 1):
            player.rpc_sync().add(number)
        for number, ((value,),) in enumerate(zip(group.rpc_sync().get(), strict=True), 1):
            assert torch.equal(value, with_more(number))
            del value
    for _ in range(3):
        for number, answer in enumerate(group.rpc_sync().change(mine), 1):
            assert torch.equal(answer, with_more(number))
    assert torch.equal(mine, numbers(1))


def test_each_members_tensor_is_its_own(world: World) -> None:
    world.on(0, each_has_its_own)


def many_in_flight() -> None:
    send_until_shared()
    (group,) = players
    group.rpc_sync().forget()
    calls = [group.rpc_async().keep(numbers(i)) for i in range(30)]
    for call in calls:
        call.wait()
    for kept in group.rpc_sync().get():
        assert sorted(float(t.sum()) for t in kept) == sorted(float(numbers(i).sum()) for i in range(30))
        del kept
    group.rpc_sync().forget()


def test_many_broadcasts_in_flight_stay_as_they_were_sent(world: World) -> None:
    world.on(0, many_in_flight)


def shared_segments() -> list[tuple[int, bool]]:
    """Of this worker's common segments: how many hold each, and whether it may be filled again."""
    own = pool()
    own._hear(())
    with own._lock:
        own._settle()
        return [(len(segment.held), segment.free) for segment in own._segments.values()]


def pool() -> commons.Commons:
    transport = session.current().worker.transport
    assert isinstance(transport, zeromq.ZmqTransport)
    assert transport._direct is not None
    assert transport._direct.commons is not None
    return transport._direct.commons


def comes_back() -> None:
    send_until_shared()
    assert (3, False) in shared_segments()
    players[0][0].rpc_sync().forget()
    until(lambda: (2, False) in shared_segments())
    players[0].rpc_sync().forget()
    until(lambda: all(state == (0, True) for state in shared_segments()))
    before = len(shared_segments())
    for _ in range(20):
        players[0].rpc_sync().load(numbers(1))
    assert len(shared_segments()) <= max(before, 3)


def test_a_segment_comes_back_when_the_last_member_has_let_go(world: World) -> None:
    world.on(0, comes_back)


def two_on_one_worker() -> None:
    send_until_shared()
    group = rpc.Group([*players[0], rpc.remote(1, Player)])
    until(lambda: group.rpc_sync().load(numbers(2)).count("shared") == 3)
    group[0].rpc_sync().add(1.0)
    assert torch.equal(group[3].rpc_sync().get()[0], numbers(2))
    assert not torch.equal(group[0].rpc_sync().get()[0], numbers(2))


def test_two_members_on_one_worker_have_each_their_own(world: World) -> None:
    world.on(0, two_on_one_worker)


def told_and_changed_at_once() -> None:
    send_until_shared()
    (group,) = players
    group.rpc_sync().forget()
    mine = numbers(5)
    for _ in range(8):
        group.tell().keep(mine)
        mine.add_(1)
    until(lambda: all(len(kept) == 8 for kept in group.rpc_sync().get()))
    assert all("shared" in places for places in group.rpc_sync().told())
    for kept in group.rpc_sync().get():
        assert sorted(round(float(t.double().mean() - numbers(5).double().mean())) for t in kept) == list(range(8))
        del kept
    group.rpc_sync().forget()


def test_a_tells_tensor_may_be_changed_at_once(world: World) -> None:
    world.on(0, told_and_changed_at_once)


# -- ends


def nothing_shared_is_open(held: int = 0) -> None:
    until(lambda: what_is_left() == (0, held), what=f"left is {what_is_left()}")


def go_on_without(lost: int) -> None:
    (group,) = players
    until(lambda: all(count < 3 for count, _ in shared_segments()), what=str(shared_segments()))
    with pytest.raises(rpc.GroupError) as caught:
        group.rpc_sync().load(numbers(3))
    assert [type(error) for error in caught.value.exceptions] == [rpc.WorkerLostError]
    left = [ref for ref in group if ref.owner().id != lost]
    players[:] = [rpc.Group(left)]
    send_until_shared(2)
    for value in players[0].rpc_sync().get():
        assert torch.equal(value[0], numbers(0))
    players[0].rpc_sync().forget()
    until(lambda: all(state == (0, True) for state in shared_segments()), what=str(shared_segments()))


def test_a_killed_members_share_comes_back() -> None:
    before = set(os.listdir("/dev/shm"))
    with World(SIZE, strict=False) as world:
        world.on(0, begin)
        world.on(0, send_until_shared)
        world.kill(2, signal.SIGKILL)
        world.on(0, go_on_without, 2)
        world.on(0, end)
    assert set(os.listdir("/dev/shm")) <= before


def hold_one() -> None:
    """On rank 0: has each member keep a tensor that lies in the one segment, as a global of its process."""
    send_until_shared()
    for rank in range(1, SIZE):
        rpc.rpc_sync(rank, take_from, args=(players[0][rank - 1],))
    players[0].rpc_sync().forget()


held: list[torch.Tensor] = []


def take_from(player: rpc.RRef[Player]) -> None:
    held[:] = player.local_value().kept
    assert where(held[0]) == "shared"


def check_held(number: float) -> None:
    until(lambda: session.current().worker.peers[0].standing.name != "MEMBER", what="rank 0 is not lost")
    (tensor,) = held
    assert torch.equal(tensor, numbers(0))
    tensor.add_(number)
    assert torch.equal(tensor, numbers(0) + number)


def drop_held() -> None:
    held.clear()
    gc.collect()
    until(lambda: what_is_left()[1] == 0, what=f"left is {what_is_left()}")


def test_a_killed_sender_takes_no_tensor_with_it_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    with World(SIZE, strict=False) as world:
        world.on(0, begin)
        world.on(0, hold_one)
        world.kill(0, signal.SIGKILL)
        for rank in range(1, SIZE):
            world.on(rank, check_held, float(rank))
        for rank in range(1, SIZE):
            world.on(rank, drop_held)
    assert set(os.listdir("/dev/shm")) <= before


def far_away() -> None:
    """Has this process's worker have no direct ways, as on another host."""
    direct.AVAILABLE = False
    folders.AVAILABLE = False


def join(rank: int, method: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=SIZE, rpc_backend_options=options(method))


def send_to_near_and_far() -> None:
    begin()
    send_until_shared(2)
    for i in range(4):
        assert players[0].rpc_sync().load(numbers(i))[2] == ""
        values = players[0].rpc_sync().get()
        for (value,) in values:
            assert torch.equal(value, numbers(i))
    end()


def test_members_on_another_host_get_theirs_by_socket() -> None:
    with World(SIZE, join=False, strict=False) as world:
        world.on(3, far_away)
        world.everywhere(join, f"file://{world.folder}/place", ranked=True)
        world.on(0, send_to_near_and_far)
        world.everywhere(rpc.shutdown)
        world.everywhere(nothing_shared_is_open)
