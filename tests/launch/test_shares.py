"""Cores and GPUs of roles: shared out over numbers that are made up, and taken in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc.launching import shares, starting
from actorrpc.launching.processes import Member, run
from actorrpc.launching.seats import Seat
from actorrpc.launching.shares import Share, shares_of
from actorrpc.launching.starting import share_of_seat
from actorrpc.roles import Part, parts_of
from tests.checks import options

can_pin = pytest.mark.skipif(not shares.CAN_PIN, reason="this system cannot pin processes to cores")


def work() -> None:
    """A role's function."""


def parts(**roles: dict[str, Any]) -> list[Part]:
    return parts_of({name: rpc.Role(work, wish.pop("count", 1), **wish) for name, wish in roles.items()})


def seat(rank: int, size: int, **more: Any) -> Seat:
    return Seat("srun (SLURM_PROCID)", rank, size, "env://", **{"here": tuple(range(size)), **more})


# --- what roles may ask for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [-1, True, 1.5, "2", [0, 0], [-1], ["0"], {1: 2}.items()])
@pytest.mark.parametrize("what", ["cpus", "devices"])
def test_what_is_no_number_and_no_list_of_numbers_is_refused(what: str, wish: Any) -> None:
    with pytest.raises(ValueError, match=f"{what} must say how many, or which ones"):
        rpc.Role(work, 1, **{what: wish})


@pytest.mark.parametrize("wish", [0, [], set()])
def test_a_worker_needs_a_core_but_no_gpu(wish: Any) -> None:
    with pytest.raises(ValueError, match="cannot do without cpus"):
        rpc.Role(work, 1, cpus=wish)
    assert rpc.Role(work, 1, devices=wish).devices in (0, ())


def test_a_role_keeps_the_order_of_its_devices() -> None:
    role = rpc.Role(work, 1, cpus={3, 1}, devices=[2, 0])
    assert (role.cpus, role.devices) == ((1, 3), (2, 0))


# --- sharing out ------------------------------------------------------------------------------------------------------


def test_numbers_are_shared_out_in_order_of_what_nobody_has_named() -> None:
    made = parts(agent={"cpus": 2}, fixed={"cpus": {0, 3}}, observer={"count": 2, "cpus": 1}, free={})
    assert [share.cpus for share in shares_of(made, range(8))] == [(1, 2), (0, 3), (4,), (5,), None]


def test_members_that_share_cores_share_threads() -> None:
    made = parts(agent={"cpus": 4}, observer={"count": 3, "cpus": {0, 1, 2, 3, 4, 5}}, many={"count": 4, "cpus": {6}})
    assert [share.threads for share in shares_of(made, range(16))] == [4, 2, 2, 2, 1, 1, 1, 1]


def test_gpus_are_named_as_the_system_names_them() -> None:
    made = parts(
        agent={"devices": 2}, observer={"count": 2, "devices": 1}, fixed={"devices": [4, 0]}, none={"devices": 0}
    )
    there = ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-f"]
    found = [share.devices for share in shares_of([*made, *parts(free={})], devices=there)]
    assert found == ["GPU-b,GPU-c", "GPU-d", "GPU-f", "GPU-e,GPU-a", "", None]


def test_more_than_there_is_is_an_error_that_tells_who_asked() -> None:
    with pytest.raises(
        ValueError, match=r"ask for 10 cpus on this host \(.*\) \(agent 1 x 2, observer 4 x 2\), and .* 8"
    ):
        shares_of(parts(agent={"cpus": 2}, observer={"count": 4, "cpus": 2}), range(8))
    with pytest.raises(ValueError, match=r"ask for 2 devices .*\(observer 2 x 1\), and there are 1 for them"):
        shares_of(parts(agent={"devices": [0]}, observer={"count": 2, "devices": 1}), devices=["0", "1"])
    with pytest.raises(ValueError, match=r"name cpus 8, 9, which this host .* does not have for them: it has 0, 1"):
        shares_of(parts(agent={"cpus": [1, 8, 9]}), [0, 1])
    with pytest.raises(ValueError, match=r"name devices 1, .*: it has none"):
        shares_of(parts(agent={"devices": [1]}), devices=[])


def test_who_asks_for_nothing_has_nothing_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "usable_cpus", pytest.fail)
    monkeypatch.setattr(shares, "visible_devices", pytest.fail)
    assert shares_of(parts(agent={}, observer={"count": 2})) == [Share()] * 3


@pytest.mark.parametrize(
    "named, count, found",
    [(None, 2, ["0", "1"]), ("", 2, []), ("-1", 2, []), ("3, GPU-x", 0, ["3", "GPU-x"]), ("1", 9, ["1"])],
)
def test_which_gpus_there_are_is_for_the_environment_to_say(
    named: str | None, count: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert shares.visible_devices() == found


# --- seats ------------------------------------------------------------------------------------------------------------


def test_a_host_is_shared_out_among_the_seats_on_it() -> None:
    made = parts(agent={"cpus": 3, "devices": 1}, observer={"count": 3, "cpus": 2, "devices": 1})
    first = share_of_seat(seat(0, 4, here=(0, 2)), made, range(5), ["0", "1"])
    second = share_of_seat(seat(2, 4, here=(0, 2)), made, range(5), ["0", "1"])
    other = share_of_seat(seat(3, 4, here=(1, 3)), made, range(5), ["0", "1"])
    assert [first, second, other] == [
        Share((0, 1, 2), 3, "0"), Share((3, 4), 2, "1"), Share((2, 3), 2, "1"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="ask for 7 cpus"):
        share_of_seat(seat(0, 4, here=(0, 1, 2)), made, range(5), ["0", "1", "2"])


def test_the_roles_must_be_as_many_as_the_seats() -> None:
    with pytest.raises(ValueError, match="the roles make 3 workers, but srun started 4 processes"):
        share_of_seat(seat(0, 4), parts(agent={"count": 3}))


def test_where_it_is_not_known_who_shares_the_host_numbers_are_refused_and_names_are_not() -> None:
    for wish in ({"cpus": 2}, {"devices": 1}):
        with pytest.raises(ValueError, match=r"'agent' asks for a number .* set LOCAL_RANK and LOCAL_WORLD_SIZE"):
            share_of_seat(seat(1, 2, here=None), parts(agent={"count": 2, **wish}), range(8), ["0", "1"])
    made = parts(agent={"count": 2, "cpus": [0, 1], "devices": [1]})
    assert share_of_seat(seat(1, 2, here=None), made, range(8), ["0", "1"]) == Share((0, 1), 2, "1")


def test_cores_that_the_launcher_has_given_stay_and_threads_are_set(caplog: pytest.LogCaptureFixture) -> None:
    made = parts(agent={"count": 2, "cpus": 3})
    assert share_of_seat(seat(1, 2, bound=True), made, [5]) == Share(None, 3, None)
    assert caplog.messages == []
    share_of_seat(seat(0, 2, bound=True), made, [5])
    assert len(caplog.messages) == 1
    assert "srun has bound its processes to cores" in caplog.messages[0]


def test_gpus_that_the_launcher_has_given_one_task_alone_are_shared_with_nobody() -> None:
    made = parts(agent={"count": 3, "devices": 1})
    assert share_of_seat(seat(2, 3, own_devices=True), made, devices=["7"]).devices == "7"
    with pytest.raises(ValueError, match="ask for 3 devices"):
        share_of_seat(seat(2, 3), made, devices=["7"])


# --- in processes -----------------------------------------------------------------------------------------------------


def test_where_the_system_cannot_pin_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shares, "CAN_PIN", False)
    monkeypatch.setattr(starting, "CAN_PIN", False)
    share_of_seat(seat(0, 2), parts(agent={"count": 2, "cpus": [0]}), range(4))
    assert caplog.messages == [shares.CANNOT_PIN]
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        Share((10_000,), threads + 1).take()  # there is no such core
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_gpus_cannot_be_chosen_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RuntimeError, match="begun to use CUDA: call launch before"):
        Share(devices="1").take()
    Share(devices="0,1").take()  # as it is


def surroundings(name: str) -> str | None:
    return os.environ.get(name)


def test_a_members_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTEST_IT", "before")
    driver = Member("a:0", surroundings, ("ARTEST_IT",), environment={"ARTEST_IT": "here", "ARTEST_MORE": "1"})
    assert run([driver]) == "here"
    assert run([Member("a:0", surroundings, ("ARTEST_IT",))]) == "before"
    assert "ARTEST_MORE" not in os.environ


class Looks(rpc.Actor):
    """Says what its process may use."""

    def look(self) -> tuple[set[int], int, str | None]:
        threads = [int(number) for number in os.listdir("/proc/self/task")]
        return (
            set().union(*(os.sched_getaffinity(number) for number in threads)),
            torch.get_num_threads(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def main(self) -> Any:
        return [self.look(), *self.world.other.rpc_sync().look()] if self.role == "first" else None


@can_pin
def test_members_run_on_the_cores_of_their_role_with_all_their_threads() -> None:
    there = sorted(os.sched_getaffinity(0))
    if len(there) < 2:
        pytest.skip("needs two cores")
    first = rpc.Role(Looks, cpus=1, devices=0)
    found = rpc.launch(options=options(), first=first, other=rpc.Role(Looks, 2, cpus=there[1:]))
    assert found[0] == ({there[0]}, 1, "")
    assert found[1:] == [(set(there[1:]), max(1, len(there[1:]) // 2), os.environ.get("CUDA_VISIBLE_DEVICES"))] * 2


def test_roles_that_ask_too_much_start_nothing() -> None:
    with pytest.raises(ValueError, match="ask for 100000 cpus"):
        rpc.launch(first=rpc.Role(Looks, cpus=100_000))


SEATS = """
import os, sys
sys.path.insert(0, os.environ["ARTEST_ROOT"])
import torch
import actorrpc as rpc
from tests.launch.test_shares import Looks

if __name__ == "__main__":
    print(rpc.launch(first=rpc.Role(Looks, cpus=1, devices=0), other=rpc.Role(Looks, 1, cpus=1)))
"""


@can_pin
@pytest.mark.slow
def test_a_process_that_takes_a_seat_takes_its_share() -> None:
    there = sorted(os.sched_getaffinity(0))
    if len(there) < 2:
        pytest.skip("needs two cores")
    from tests.joining import free_port

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "ARTEST_ROOT": root}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SEATS], env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outs = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(20)
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert outs == [f"{[({there[0]}, 1, ''), ({there[1]}, 1, inherited)]}\n", "None\n"]
