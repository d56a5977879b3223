"""Who may come into an elastic world, as plain logic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from actorrpc.runtime.peers import Record
from actorrpc.services import residents
from actorrpc.services.devices import Devices
from actorrpc.services.residents import IDS, Residents
from actorrpc.services.roster import ELASTIC, Hello
from actorrpc.wire.envelope import PROTOCOL

_incarnations = itertools.count(1)


def hello(rank: int, name: str = "", size: int = ELASTIC, protocol: int = PROTOCOL, **more: Any) -> Hello:
    record = Record(rank, name or f"w{rank}", next(_incarnations), (f"tcp://h:{rank}",), "h", "b", 100 + rank)
    return Hello(record, size, protocol, {"actorrpc": "0.1.0"}, **more)


def residents_of(*comers: Hello) -> Residents:
    made = Residents(hello(0))
    for comer in comers:
        assert made.objection(comer) is None
        made.admit(comer)
    return made


@pytest.mark.parametrize(
    "comer, words, passing",
    [
        (hello(1, "other"), ["rank 1,", '"other"', 'taken by worker "w1" (rank 1, host h, pid 101)'], True),
        (hello(2, "w1"), ['name "w1"', "(rank 2,", 'taken by worker "w1" (rank 1, host h, pid 101)'], True),
        (hello(0, "again"), ["rank 0,", 'taken by worker "w0"'], True),
        (hello(2, size=3), ["mixes statically and dynamically", '"w2"', "world_size=3"], False),
        (hello(2, protocol=PROTOCOL + 1), [f"version {PROTOCOL + 1} of the protocol", '"w2"'], False),
    ],
)
def test_who_does_not_fit_is_told_why(comer: Hello, words: list[str], passing: bool) -> None:
    objection = residents_of(hello(1)).objection(comer)
    assert objection is not None
    assert objection.passing == passing
    assert not objection.about_devices
    for word in words:
        assert word in objection.text, (word, objection.text)


def test_an_id_is_the_rank_at_first_and_never_used_again() -> None:
    made = residents_of(hello(1), hello(2))
    seen = {0, 1, 2}
    for _ in range(50):
        for rank in (1, 2):
            number = next(n for n, known in made.hellos.items() if known.record.rank == rank)
            made.leave(number)
            again = hello(rank)
            assert made.objection(again) is None
            record = made.admit(again).record
            assert record == made.known(record.incarnation)
            assert (record.rank, record.name) == (rank, f"w{rank}")
            assert record.id not in seen
            seen.add(record.id)


def test_an_id_that_is_some_other_rank_is_no_hindrance() -> None:
    made = residents_of(hello(1))
    made.leave(1)
    first = made.admit(hello(1)).record
    other = made.admit(hello(first.id, "of that rank")).record
    assert other.rank == first.id
    assert other.id not in (0, 1, first.id)
    assert made.admit(hello(IDS + 5, "of a high rank")).record.id < IDS


def test_ids_run_out_at_some_time_which_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "IDS", 1030)
    made, comers = residents_of(), itertools.count(1)
    for _ in range(1029):
        comer = hello(1, f"n{next(comers)}")
        assert made.objection(comer) is None
        number = made.admit(comer).record.id
        assert 0 < number < 1030
        made.leave(number)
    objection = made.objection(hello(1))
    assert objection is not None
    assert "1030 workers" in objection.text


def test_maps_for_those_who_are_not_there_yet_are_no_fault() -> None:
    made = residents_of(hello(1, devices=Devices(1, {"w2": {"cuda:0": "cuda:1"}})))
    objection = made.objection(hello(2, devices=Devices(1)))
    assert objection is not None
    assert objection.about_devices
    assert '"w1"' in objection.text
    assert made.objection(hello(2, devices=Devices(2))) is None
