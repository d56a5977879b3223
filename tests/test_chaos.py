"""The rows of `python -m tests.chaos`: nothing is lost silently, nothing runs twice, nothing hangs."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.testing import Faults, faulty
from actorrpc.testing.faults import FaultyTransport
from tests.chaos import storms, table
from tests.chaos.__main__ import main
from tests.chaos.load import Ended
from tests.chaos.rows import ROWS
from tests.chaos.table import Row, Tally, play
from tests.joining import join_world
from tests.worlds import World, until

QUICK = {"sigkill": 1, "sigkill-child": 1, "rank0": 1, "repeat": 1, "fuzz": 2_000, "fuzz-token": 2_000}
"""What the quick tests try, and how many cases of it."""


def tried(row: Row, count: int) -> Tally:
    reason = row.needs()
    if reason:
        pytest.skip(reason)
    tally = play(row, count)
    assert tally.tried >= count
    assert tally.good, "\n".join(tally.notes)
    return tally


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", QUICK)
def test_a_row_of_the_table_in_few_cases(name: str) -> None:
    tried(ROWS[name], QUICK[name])


@pytest.mark.timeout(120)
def test_a_small_storm_loses_repeats_and_hangs_nothing() -> None:
    tally = Tally()
    storms.storm(tally, random.Random("small"), 400)
    assert tally.good, "\n".join(tally.notes)
    assert "members killed" in tally.notes[-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.full and name != "strangers"])
def test_a_row_of_the_table(name: str) -> None:
    tried(ROWS[name], ROWS[name].full)


# (The row of strangers is `test_security.py`'s.)


# -- faults in real processes


def join_and_die(rank: int, method: str) -> None:
    with faulty(Faults(seed=1).kill(kind="reply", control=False, skip=3)):
        join_world(rank, 2, method)
    rpc.shutdown()
    raise AssertionError("it lives")


def call_until_lost(rank: int, method: str) -> list[str]:
    join_world(rank, 2, method)
    kinds = []
    for _ in range(6):
        try:
            kinds.append(str(rpc.rpc_sync(1, abs, args=(-1,), timeout=30)))
        except rpc.WorkerLostError:
            kinds.append("lost")
    rpc.shutdown(graceful=False)
    return kinds


def test_a_real_process_dies_with_the_message_that_a_rule_names() -> None:
    with World(2, join=False, strict=False, check=False) as world:
        world.let_die(1)
        for rank, program in enumerate((call_until_lost, join_and_die)):
            world.start(rank, program, rank, f"file://{world.folder}/place")
        kinds = world.result(0)
        assert kinds in (["1"] * 4 + ["lost"] * 2, ["1"] * 3 + ["lost"] * 3), "the last one may not have left in time"
        until(lambda: world.has_ended(1))


def test_what_a_wrapped_transport_has_beyond_the_protocol_is_there_too() -> None:
    inner: Any = SimpleNamespace(strangers="nobody", holding=False)
    outer: Any = FaultyTransport(inner, Faults())
    outer.told = len
    assert (outer.strangers, outer.holding, inner.told) == ("nobody", False, len)


# -- the table itself


def ended(kind: str, key: str = "a", sent: float = 1.0, at: float = 2.0) -> Ended:
    return Ended(key, kind, "text", sent, at)


@pytest.mark.parametrize(
    "one,runs,counts",
    [
        (ended("value"), {"a": 1}, (0, 0, 0)),
        (ended("value"), {}, (1, 0, 0)),
        (ended("value"), {"a": 3}, (0, 2, 0)),
        (ended("lost"), {}, (0, 0, 0)),
        (ended("lost"), {"a": 2}, (0, 1, 0)),
        (ended("limit"), {"a": 1}, (1, 0, 0)),
        (ended("another value"), {"a": 1}, (1, 0, 0)),
        (ended("ValueError"), {"a": 1}, (1, 0, 0)),
        (ended("hung"), {"a": 1}, (0, 0, 1)),
    ],
)
def test_what_came_of_a_call_is_counted_in_its_column(one: Ended, runs: dict[str, int], counts: Any) -> None:
    tally = Tally()
    tally.check([one], runs, 1.5)
    assert (tally.lost, tally.repeated, tally.hung) == counts
    assert tally.good is (counts == (0, 0, 0))
    assert tally.noticed == ([0.5] if one.kind == "lost" else [])


def test_the_exit_code_says_whether_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def well(tally: Tally, chance: random.Random) -> None:
        tally.noticed += [0.5, 0.25, 4.0]

    def badly(tally: Tally, chance: random.Random) -> None:
        raise OSError("it broke")

    monkeypatch.setattr(table, "ROWS", {})
    table.cases("well", "all is well", 1, 3)(well)
    table.cases("badly", "it hangs", 1, 3)(badly)
    table.cases("not", "it is not here", 1, 3, needs=lambda: "it needs more")(badly)
    monkeypatch.setattr("tests.chaos.__main__.ROWS", table.ROWS)
    assert main(["--only", "well", "not"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"all is well .* 3 seeds .* 0\.50 s .* 4\.00 s .*\| 0 .*\| 0 .*\| 0 ", lines[2])
    assert "not tried: it needs more" in lines[3]
    assert main(["--seeds", "2"]) == 1
    assert re.search(r"it hangs .* 2 seeds .*\| 0 .*\| 0 .*\| 2 ", capsys.readouterr().out)


def test_the_page_of_faults_has_all_rows() -> None:
    page = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
    for name in ROWS:
        assert f"| `{name}` |" in page, name
