"""A leader that stays awake for a while before it sleeps (RULE DW4)."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from actorrpc.wire import vigil
from actorrpc.wire.vigil import Vigil
from tests.worlds import until

MICROSECOND = 1e-6
FOUND = [(3, 1)]


class Machine:
    """Stands in for the clocks and the scheduler.

    Attributes:
        now: the time.
        others: the part of it that other threads of the process compute.
        taken: how long somebody else has the core when it is offered.
        offered: how often it was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.others, self.taken, self.offered = 1000.0, 0.0, 0.0, 0
        self._computed = 0.0
        self.leader = 1
        clocks = SimpleNamespace(
            monotonic=lambda: self.now, process_time=lambda: self.now + self._computed, thread_time=lambda: self.now
        )
        monkeypatch.setattr(vigil, "time", clocks)
        monkeypatch.setattr(vigil, "_offer", self._offer)
        monkeypatch.setattr(vigil, "threading", SimpleNamespace(get_ident=lambda: self.leader))
        monkeypatch.setattr(vigil, "cores", lambda: 2)
        monkeypatch.setattr(vigil, "has_quota", lambda: False)

    def vigil(self) -> Vigil:
        """Returns one that knows the process for an idle one."""
        made = Vigil()
        made._may_go_on(self.now)
        self.pass_by(0.01)
        return made

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self._computed += seconds * self.others

    def _offer(self) -> None:
        self.offered += 1
        self.pass_by(self.taken)

    def wait(self, of: Vigil, after: float | None, timeout: float | None = None) -> float | None:
        """Has something come after so many seconds (None: nothing comes). Returns how long the leader was awake; None
        where that was in vain."""
        begun = self.now

        def poll(seconds: float) -> list[tuple[int, int]]:
            assert seconds == 0
            self.pass_by(MICROSECOND)
            return FOUND if after is not None and self.now - begun >= after else []

        found = of.keep(poll, timeout)
        assert found in (FOUND, ())
        return self.now - begun if found else None

    def awake(self, of: Vigil, timeout: float | None = None) -> float:
        """Returns how long the leader stays awake when nothing comes."""
        begun = self.now
        assert self.wait(of, None, timeout) is None
        return self.now - begun


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_comes_soon_is_found_awake_without_the_core_being_offered(machine: Machine) -> None:
    of = machine.vigil()
    for _ in range(100):
        assert machine.wait(of, 200 * MICROSECOND) is not None
    assert not machine.offered


def test_what_comes_later_is_found_awake_where_the_process_is_idle_and_nobody_wants_the_core(machine: Machine) -> None:
    of = machine.vigil()
    for _ in range(100):
        assert machine.wait(of, 0.004) is not None
    assert machine.offered > 100


def test_after_5_ms_or_at_its_end_a_wait_sleeps(machine: Machine) -> None:
    assert machine.awake(machine.vigil()) == pytest.approx(0.005, rel=0.01)
    assert machine.awake(machine.vigil(), 0.002) == pytest.approx(0.002, rel=0.01)
    assert machine.awake(machine.vigil(), 0.0001) == pytest.approx(0.0001, rel=0.05)


@pytest.mark.parametrize("others,seconds", [(0.0, 0.005), (0.3, 0.005), (0.5, 0.0003), (2.0, 0.0003)])
def test_where_other_threads_of_the_process_compute_it_is_300_us(
    machine: Machine, others: float, seconds: float
) -> None:
    machine.others = others
    assert machine.awake(machine.vigil()) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("taken,seconds", [(0.0, 0.005), (5e-5, 0.005), (2e-4, 0.0005), (0.002, 0.0023)])
def test_where_somebody_wants_the_core_he_gets_it_after_300_us(machine: Machine, taken: float, seconds: float) -> None:
    of = machine.vigil()
    machine.taken = taken
    assert machine.awake(of) == pytest.approx(seconds, rel=0.02)
    assert (machine.offered == 1) == (taken > 1e-4)


def test_another_leader_begins_with_300_us_which_is_no_failure_of_the_longer_time(machine: Machine) -> None:
    of = machine.vigil()
    for machine.leader in (2, 3):
        of.first.left = 0
        assert machine.awake(of) == pytest.approx(0.0003, rel=0.01)
        assert of.longer.in_vain == 0
        of.first.left = 0
        assert machine.wait(of, 0.003) is not None


def test_the_longer_time_is_left_the_more_often_the_more_often_it_was_in_vain(machine: Machine) -> None:
    """What comes within 300 us does not make it worth while. Once is forgiven."""
    of, offers = machine.vigil(), []
    machine.taken = 0.002
    for _ in range(200):
        before = machine.offered
        of.first.left = 0
        machine.awake(of)
        of.first.left = 0
        machine.wait(of, 100 * MICROSECOND)
        offers.append(machine.offered > before)
    assert offers[:2] == [True, True]
    gaps = [len(list(group)) for offered, group in itertools.groupby(offers) if not offered]
    assert gaps[:5] == [1, 3, 7, 15, 31]
    assert set(gaps[5:-1]) == {31}
    machine.taken = 0.0
    of.longer.left = of.first.left = 0
    assert machine.wait(of, 0.001) is not None
    assert of.longer.in_vain == of.first.in_vain == 0


def test_a_core_that_is_taken_once_costs_no_wait(machine: Machine) -> None:
    of = machine.vigil()
    for _ in range(10):
        machine.taken = 0.002
        machine.awake(of)
        machine.taken = 0.0
        assert machine.wait(of, 0.003) is not None


def test_waits_sleep_at_once_the_more_often_the_more_often_being_awake_was_in_vain(machine: Machine) -> None:
    machine.others = 2.0
    of, lefts = machine.vigil(), []
    for _ in range(100):
        machine.awake(of)
        lefts.append(of.first.left)
    assert lefts[:6] == [1, 0, 3, 2, 1, 0]
    assert max(lefts) == 31
    of.first.left = 0
    assert machine.wait(of, 100 * MICROSECOND) is not None
    assert of.first.in_vain == 0


def test_on_one_core_no_wait_stays_awake(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "cores", lambda: 1)
    assert machine.awake(machine.vigil()) == 0


@pytest.mark.parametrize("what,value", [("has_quota", lambda: True), ("_offer", None)])
def test_with_a_quota_or_where_a_core_cannot_be_offered_it_is_300_us(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str, value: object
) -> None:
    monkeypatch.setattr(vigil, what, value)
    assert machine.awake(machine.vigil()) == pytest.approx(0.0003, rel=0.01)


@pytest.mark.parametrize(
    "files,limited",
    [
        ({}, False),
        ({"cpu.max": ""}, False),
        ({"cpu.max": "max 100000\n"}, False),
        ({"cpu.max": "150000 100000\n"}, True),
        ({"cpu/cpu.cfs_quota_us": "-1\n"}, False),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, True),
    ],
)
def test_a_containers_quota_is_read(tmp_path: Path, files: dict[str, str], limited: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert vigil.has_quota(tmp_path) == limited


def test_a_process_that_only_waits_counts_as_idle_and_one_with_a_busy_thread_does_not() -> None:
    """With the system's own clocks."""
    of, over = Vigil(), threading.Event()

    def is_idle() -> bool:
        time.sleep(0.05)
        of.longer.left = 0
        return of._may_go_on(time.monotonic())

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    until(is_idle)
    busy = threading.Thread(target=compute)
    busy.start()
    try:
        until(lambda: not is_idle())
    finally:
        over.set()
        busy.join()
    until(is_idle)
