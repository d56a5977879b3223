"""The checks of device maps, with made-up numbers of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.rpc.backend_registry
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.services.devices import (
    Devices,
    Placement,
    device_list,
    fault_between,
    fault_of_one,
    inverse_maps,
    placement,
)

SOUND = {
    "a": Devices(2, {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "c": {"cpu": "cuda:2"}}),
    "b": Devices(2, {"a": {"cuda:0": "cuda:1"}, "b": {"cuda:0": "cuda:1"}}),
    "c": Devices(3),
    "d": Devices(0),
}


def fault_in(all_of_them: dict[str, Devices]) -> str | None:
    """Both checks, as a world makes them."""
    for name, own in all_of_them.items():
        fault = fault_of_one(name, own)
        if fault is not None:
            return fault
    return fault_between(all_of_them)


def test_sound_maps_pass() -> None:
    assert fault_in(SOUND) is None
    assert fault_in({"a": Devices()}) is None


@pytest.mark.parametrize(
    "own, words",
    [
        (Devices(2, listed=("cuda:0", "cuda:1", "cuda:0")), ["cuda:0 twice", "devices"]),
        (Devices(2, listed=("cuda:0", "cuda:2")), ["cuda:2", "2 CUDA devices (cuda:0 to cuda:1)"]),
        (Devices(1, listed=("cuda:1",)), ["cuda:1", "1 CUDA device (cuda:0)"]),
        (Devices(0, listed=("cuda:0",)), ["cuda:0", "no CUDA device"]),
        (Devices(2, {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}), ['"b"', "to cuda:1", "one to one"]),
        (Devices(2, {"b": {"cuda:2": "cuda:0"}}), ['"b"', "from cuda:2", "2 CUDA devices"]),
        (Devices(0, {"b": {"cuda:0": "cuda:0"}}), ['"b"', "from cuda:0", "no CUDA device"]),
        (Devices(4, {"b": {"cuda:2": "cuda:0"}}, ("cuda:0", "cuda:1")), ["from cuda:2", "among its devices: cuda:0"]),
        (Devices(2, {"b": {"meta": "cuda:0"}}), ["from meta"]),
        (Devices(2, {"b": {"cuda:x": "cuda:0"}}), ["from cuda:x"]),
    ],
)
def test_what_is_wrong_with_one_worker_is_said_with_its_name_and_the_device(own: Devices, words: list[str]) -> None:
    assert fault_of_one("b", Devices(2)) is None
    for text in (fault_of_one("a", own), fault_in({"a": own, "b": Devices(4)})):
        assert text is not None
        for word in ('worker "a"', *words):
            assert word in text, (word, text)


@pytest.mark.parametrize(
    "target, device_map, words",
    [
        (Devices(2), {"cuda:0": "cuda:2"}, ["cuda:2", 'worker "b"', "that one has 2 CUDA devices"]),
        (Devices(0), {"cuda:0": "cuda:0"}, ["cuda:0", 'worker "b"', "that one has no CUDA device"]),
        (Devices(4, listed=("cuda:3",)), {"cuda:0": "cuda:1"}, ["cuda:1", 'worker "b"', "among", "cuda:3"]),
        (Devices(0), {"cuda:0": "cpu"}, []),
        (Devices(4, listed=("cuda:3",)), {"cuda:0": "cuda:3"}, []),
        (Devices(4, listed=("cuda:3",)), {"cuda:0": "cpu"}, []),
    ],
)
def test_a_map_to_a_device_that_the_callee_has_not_is_refused(
    target: Devices, device_map: dict[str, str], words: list[str]
) -> None:
    text = fault_in({"a": Devices(1, {"b": device_map}), "b": target})
    if not words:
        assert text is None
    for word in words:
        assert text is not None
        assert word in text
        assert 'worker "a"' in text


def test_a_map_for_a_name_that_no_worker_has_is_refused_and_the_names_are_listed() -> None:
    text = fault_in({"a": Devices(1, {"B": {"cuda:0": "cuda:0"}}), "b": Devices(1)})
    assert text is not None
    for word in ('worker "a"', 'for "B"', '"a", "b"'):
        assert word in text


def test_the_inverse_of_a_map_leads_back_on_the_callees_side() -> None:
    assert inverse_maps("b", SOUND) == {
        "a": {"cuda:1": "cuda:0", "cuda:0": "cuda:1"},
        "b": {"cuda:1": "cuda:0"},
    }
    assert inverse_maps("a", SOUND) == {"b": {"cuda:1": "cuda:0"}}
    assert inverse_maps("c", SOUND) == {"a": {"cuda:2": "cpu"}}
    assert inverse_maps("d", SOUND) == {}


def test_the_devices_of_a_worker_are_those_of_its_own_and_its_peers_maps_unless_it_lists_them() -> None:
    assert placement("a", SOUND).devices == ("cuda:0", "cuda:1")
    assert placement("b", SOUND).devices == ("cuda:0", "cuda:1")
    assert placement("c", SOUND).devices == ("cuda:2",)
    assert placement("d", SOUND).devices == ()
    assert device_list(Devices(12, listed=("cuda:10", "cuda:9")), {"x": {"cuda:1": "cuda:0"}}) == ("cuda:9", "cuda:10")


def test_a_placement_holds_both_directions() -> None:
    assert placement("b", SOUND) == Placement(
        {"a": {"cuda:0": "cuda:1"}, "b": {"cuda:0": "cuda:1"}},
        {"a": {"cuda:1": "cuda:0", "cuda:0": "cuda:1"}, "b": {"cuda:1": "cuda:0"}},
        ("cuda:0", "cuda:1"),
    )
    assert placement("nobody", {}) == Placement({}, {}, ())


def test_devices_survive_the_way_as_plain_data() -> None:
    own = Devices(2, {"b": {"cuda:0": "cuda:1"}}, ("cuda:0",))
    assert Devices.from_json(own.to_json()) == own
    for wrong in ({}, {"count": 1, "maps": {"b": 3}, "listed": []}, {"count": "x", "maps": {}, "listed": []}):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Devices.from_json(wrong)


# -- beside torch

theirs: Any = torch.distributed.rpc.backend_registry
_CUDA = st.integers(0, 3).map("cuda:{}".format)
_ONE_TO_ONE = st.permutations(["cuda:0", "cuda:1", "cuda:2", "cuda:3"]).map(
    lambda there: dict(zip(("cuda:0", "cuda:1"), there, strict=False))
)
_SOME_MAPS = st.dictionaries(st.sampled_from(["a", "b"]), _ONE_TO_ONE, max_size=2)
_ANY_MAPS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.dictionaries(_CUDA, _CUDA, max_size=2), max_size=2)
_WORKER = st.one_of(
    st.builds(Devices, st.just(4), _SOME_MAPS),
    st.builds(Devices, st.integers(1, 4), _SOME_MAPS, st.lists(_CUDA, max_size=4, unique=True).map(tuple)),
    st.builds(Devices, st.integers(1, 3), _ANY_MAPS, st.lists(_CUDA, max_size=3).map(tuple)),
)


def as_torch(all_of_them: dict[str, Devices]) -> tuple[Any, ...]:
    counts = {name: own.count for name, own in all_of_them.items()}
    maps = {
        name: {to: {torch.device(a): torch.device(b) for a, b in m.items()} for to, m in own.maps.items()}
        for name, own in all_of_them.items()
    }
    listed = {name: [torch.device(d) for d in own.listed] for name, own in all_of_them.items()}
    return list(all_of_them), counts, maps, listed


@pytest.mark.skipif(not hasattr(theirs, "_validate_device_maps"), reason="torch's own checks have another name")
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b"]), _WORKER, min_size=2))
def test_the_checks_and_what_follows_from_them_are_torchs(all_of_them: dict[str, Devices]) -> None:
    names, counts, maps, listed = as_torch(all_of_them)
    refusal = None
    try:
        theirs._validate_device_maps(names, counts, maps, listed)
    except ValueError as e:
        refusal = str(e)
    assert (fault_in(all_of_them) is None) == (refusal is None), refusal
    if refusal is not None:
        return
    for name in names:
        found, inverse = placement(name, all_of_them), theirs._create_reverse_mapping(name, names, maps)
        assert {
            to: {torch.device(a): torch.device(b) for a, b in m.items()} for to, m in found.inverse.items()
        } == inverse
        devices = theirs._create_device_list(listed[name], maps[name], inverse)
        assert [torch.device(d) for d in found.devices] == devices
