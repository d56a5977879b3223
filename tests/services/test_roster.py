"""Who fits into a world: hellos in, refusals out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from actorrpc.runtime.peers import Record
from actorrpc.services.devices import Devices
from actorrpc.services.roster import Hello, Roster, versions_here
from actorrpc.wire.envelope import PROTOCOL

HERE = {"actorrpc": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}


def hello(rank: int, name: str = "", *, size: int = 3, incarnation: int = 0, **more: Any) -> Hello:
    record = Record(
        rank, name or f"w{rank}", incarnation or rank + 1, (f"tcp://{rank}",), f"host{rank}", "boot", 100 + rank
    )
    fields: dict[str, Any] = {"protocol": PROTOCOL, "versions": HERE, **more}
    return Hello(record, size, **fields)


def roster_of(*hellos: Hello) -> Roster:
    roster = Roster(3)
    for one in hellos:
        roster.hello(one)
    return roster


def test_all_who_fit_make_a_world_in_any_order() -> None:
    roster = roster_of(hello(2), hello(0))
    assert (roster.complete, roster.missing) == (False, [1])
    assert "missing rank 1" in roster.status()
    assert '"w2" (rank 2, host host2, pid 102)' in roster.status()
    assert roster.hello(hello(1)) is None
    assert (roster.complete, roster.refusal, roster.differences()) == (True, None, None)


def test_a_worker_that_says_hello_again_is_still_one() -> None:
    roster = roster_of(hello(0), hello(1), hello(1))
    assert (roster.missing, roster.refusal) == ([2], None)


@pytest.mark.parametrize(
    "last, words",
    [
        (
            hello(1, "w0"),
            ['name "w0" is not unique', "Workers 0 and 1 share the same name", "host0", "host1", "100", "101"],
        ),
        (hello(1, size=4), ["world_size=4", "world_size=3", '"w1" (rank 1, host host1, pid 101)']),
        (hello(3), ['"w3" (rank 3', "0 to 2"]),
        (hello(0, "x", incarnation=9), ["two workers have rank 0", '"w0"', '"x"', "each of two programs"]),
        (hello(1, withdrawn="ValueError: bad name"), ["could not take part", "ValueError: bad name", "rank 1"]),
        (
            hello(1, protocol=PROTOCOL + 1, versions={"actorrpc": "9.9"}),
            [
                f"version {PROTOCOL + 1} of the protocol",
                f"rank 0 version {PROTOCOL}",
                "it has 9.9, rank 0 0.1.0",
                '"w1"',
            ],
        ),
        (hello(1, devices=Devices(1, listed=("cuda:1",))), ['"w1"', "cuda:1", "1 CUDA device"]),
    ],
)
def test_one_who_does_not_fit_ends_it_for_all_at_once(last: Hello, words: list[str]) -> None:
    roster = roster_of(hello(0))
    reason = roster.hello(last)
    assert reason is not None
    assert reason == roster.refusal == roster.hello(hello(2))
    for word in words:
        assert word in reason, (word, reason)
    assert roster.about_devices == ("cuda" in reason)
    assert not roster.complete


def test_maps_are_checked_against_each_other_when_all_have_come() -> None:
    mapped = hello(0, devices=Devices(1, {"w2": {"cuda:0": "cuda:1"}}))
    roster = roster_of(mapped, hello(1))
    assert not roster.about_devices
    reason = roster.hello(hello(2, devices=Devices(1)))
    assert reason is not None
    assert '"w0"' in reason
    assert '"w2"' in reason
    assert roster.refusal == reason
    assert roster.about_devices


def test_who_comes_when_the_world_is_complete_is_refused_alone() -> None:
    roster = roster_of(hello(0), hello(1), hello(2))
    for late in (hello(1, "late", incarnation=9), hello(1, "late", size=5, incarnation=9), hello(5, "late")):
        reason = roster.hello(late)
        assert reason is not None
        assert "late" in reason
    assert roster.refusal is None
    assert roster.hello(hello(1)) is None  # it asks again, since its answer was lost
    assert [r.name for r in roster.records] == ["w0", "w1", "w2"]


def test_different_versions_are_told_with_who_has_which() -> None:
    roster = roster_of(
        hello(0),
        hello(1, versions={**HERE, "torch": "2.14.0", "python": "3.11.9"}),
        hello(2, versions={**HERE, "torch": "2.13.0+cpu", "python": "3.12.1"}),
    )
    assert roster.refusal is None
    assert roster.differences() == (
        'python 3.11 on "w0" (rank 0), "w1" (rank 1), 3.12 on "w2" (rank 2); '
        'torch 2.13.0 on "w0" (rank 0), "w2" (rank 2), 2.14.0 on "w1" (rank 1)'
    )


def test_versions_of_many_workers_are_told_shortly() -> None:
    roster = Roster(64)
    for rank in range(64):
        roster.hello(hello(rank, size=64, versions={**HERE, "torch": "2.14.0"} if rank else HERE))
    text = roster.differences()
    assert text is not None
    assert "and 59 more" in text
    assert len(text) < 300


def test_a_hello_survives_the_way_as_json() -> None:
    one = hello(1, devices=Devices(2, {"w0": {"cuda:0": "cuda:1"}}, ("cuda:0",)), withdrawn="for a reason")
    assert Hello.from_json(json.loads(json.dumps(one.to_json()))) == one
    versions = versions_here("1.2.3")
    assert versions["actorrpc"] == "1.2.3"
    assert set(versions) == set(HERE)


def test_a_hello_of_another_version_is_read_whatever_else_it_has() -> None:
    told = {
        "protocol": PROTOCOL + 7,
        "session": "s",
        "record": {"id": 1, "name": "new", "incarnation": 5, "endpoints": ["tcp://h:1"], "colour": "blue"},
        "devices": "another thing by now",
        "versions": ["and so is this"],
    }
    read = Hello.from_json(told)
    assert (read.record.name, read.record.id, read.record.endpoints) == ("new", 1, ("tcp://h:1",))
    assert read.protocol == PROTOCOL + 7
    reason = roster_of(hello(0)).hello(read)
    assert reason is not None
    assert f"version {PROTOCOL + 7}" in reason


def test_a_record_that_is_none_is_no_hello() -> None:
    good = hello(1).to_json()
    for wrong in ({}, {**good, "record": 3}, {**good, "record": {"id": "x"}}, {**good, "protocol": None}):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Hello.from_json(wrong)


def test_a_record_comes_through_json_with_every_field() -> None:
    given = Record(3, "w", 7, ("tcp://a",), "host", "boot", 11, "role", 2, "main", 4, True)
    assert Record.from_json(json.loads(json.dumps(given.to_json()))) == given
    plain = {field.name: field.default for field in dataclasses.fields(Record)}
    assert all(getattr(given, name) != default for name, default in plain.items()), "a new field has its default here"


def test_of_many_workers_the_first_are_named_and_the_others_counted() -> None:
    roster = Roster(1000)
    for rank in range(900):
        roster.hello(hello(rank, size=1000))
    assert "901, 902" in roster.status()
    assert "and 68 more; joined: " in roster.status()
    assert roster.status().endswith("and 868 more")
    assert len(roster.status()) < 4000
