"""The first bytes of every message, and what workers of different versions can read of each other."""

from __future__ import annotations

import pytest

from actorrpc.errors import ProtocolError
from actorrpc.wire import envelope
from actorrpc.wire.envelope import HEADER_SIZE, PROTOCOL, Flag, Header, Kind, pack, read_greeting, unpack

HEADER = Header(Kind.REQUEST, Flag.REFS, 3, 2**63, 4, 5, 6, 7, 8, -1, 2.5)


def test_a_header_comes_back_as_it_was() -> None:
    data = pack(HEADER)
    assert len(data) == HEADER_SIZE
    assert unpack(data + b"payload") == HEADER


def test_what_is_no_header_says_what_it_is_instead() -> None:
    data = pack(HEADER)
    with pytest.raises(ProtocolError, match="too short"):
        unpack(data[:-1])
    with pytest.raises(ProtocolError, match="not one of actorrpc's"):
        unpack(b"x" + data[1:])
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL + 1} of the protocol, this worker version {PROTOCOL}"):
        unpack(b"a" + bytes([PROTOCOL + 1]) + data[2:])


def test_the_first_three_bytes_of_every_message_are_for_ever() -> None:
    for kind in (Kind.REQUEST, Kind.TELL, Kind.REPLY, Kind.ERROR, Kind.GREETING):
        assert pack(HEADER._replace(kind=kind))[:3] == b"a" + bytes([PROTOCOL, kind])
    assert int(Kind.GREETING) == 5
    assert envelope.greeting(b"{}") == [b"a" + bytes([PROTOCOL, 5]), b"{}"]


@pytest.mark.parametrize("version", [0, PROTOCOL, PROTOCOL + 1, 255])
def test_a_greeting_of_any_version_is_read(version: int) -> None:
    assert read_greeting([b"a" + bytes([version, 5]), memoryview(bytearray(b"{}"))]) == b"{}"


@pytest.mark.parametrize(
    "frames",
    [
        [b"a\x01\x05{}"],
        [b"a\x01\x05", b"{}", b""],
        [b"a\x01\x01", b"{}"],
        [b"x\x01\x05", b"{}"],
        [b"", b"{}"],
        [pack(HEADER), b"{}"],
    ],
)
def test_what_is_no_greeting_is_not_read_as_one(frames: list[bytes]) -> None:
    assert read_greeting(frames) is None
