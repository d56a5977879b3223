"""Pickles that ask for too much memory are seen before they are read, once one has come that could not be read."""

from __future__ import annotations

import pickle
import random
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

from actorrpc.errors import DeserializationError
from actorrpc.wire.codec import Codec
from actorrpc.wire.memo import asks_too_much

THINGS: list[Any] = [
    None,
    list(range(1000)),
    {"a": [1, 2.5, None, 1 << 70, -3], b"b" * 300: "x" * 70_000, ("r", "p"): frozenset({1, 2})},
    [str(n) for n in range(700)],
    torch.ones(30, 4),
    torch.add,
    ValueError("r" * 50),
    bytearray(b"r" * 2000),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_picklers_write_asks_for_no_more_than_it_needs(protocol: int) -> None:
    for thing in THINGS:
        assert not asks_too_much(pickle.dumps(thing, protocol))
    assert not asks_too_much(cloudpickle.dumps(lambda: THINGS, protocol))


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"r\x00\x00\x10\x00", b"p1234567\n"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_number_beyond_all_objects_is_seen_wherever_it_is(put: bytes, kind: Any) -> None:
    for thing in THINGS:
        for protocol in (0, 2, 5):
            data = pickle.dumps(thing, protocol)
            assert asks_too_much(kind(data[:-1] + put + b"."))
    assert not asks_too_much(pickle.dumps(put))  # within a string it asks for nothing


def test_broken_bytes_are_walked_over_without_an_error() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        data = bytearray(pickle.dumps(chance.choice(THINGS[:4]), chance.randrange(6)))
        for _ in range(3):
            data[chance.randrange(len(data))] = chance.randrange(256)
        asks_too_much(bytes(data[: chance.randrange(len(data) + 1)]))


@pytest.mark.parametrize("broken", [b"nonsense", b"\x80\x05\x8c\x02os\x8c\x0cno_such_name\x93."])
def test_after_a_message_that_cannot_be_read_the_next_ones_are_looked_through(broken: bytes) -> None:
    codec = Codec()
    good = codec.dumps(list(range(10)))
    bad = b"\x80\x05Nr\x00\x00\x02\x00."  # two megabytes; it does no harm to try it
    assert codec.loads([bad]) is None  # nothing was broken yet
    with pytest.raises(DeserializationError):
        codec.loads([broken])
    if broken == b"nonsense":
        with pytest.raises(DeserializationError, match="more memory"):
            codec.loads([bad])
    else:  # a name that is unknown here says nothing of the bytes
        assert codec.loads([bad]) is None
    assert codec.loads(good) == list(range(10))
