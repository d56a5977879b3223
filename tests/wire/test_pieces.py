"""Large frames in pieces: what goes in comes out, and what is not as the plan says is dropped."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.wire import dealer, pieces, zeromq
from actorrpc.wire.zeromq import ZmqTransport


def joined(parts: list[Any]) -> list[Any] | None:
    try:
        joining, left, whole = pieces.Joining(bytes(parts[0])), parts[1:], None
        while left and whole is None:
            whole = joining.take(left.pop(0))
    except ValueError:
        return None
    return None if left else whole


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=5), st.integers(1, 40))
def test_what_is_cut_is_joined_again(frames: list[bytes], piece: int) -> None:
    parts = pieces.cut(frames, piece)
    assert max(memoryview(part).nbytes for part in parts[1:]) <= piece
    again = joined([bytes(part) for part in parts])
    assert again is not None
    assert [bytes(frame) for frame in again] == frames


@given(st.data())
def test_parts_that_are_not_as_the_plan_says_are_no_message(data: st.DataObject) -> None:
    frames = data.draw(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4))
    parts = [bytes(part) for part in pieces.cut(frames, data.draw(st.integers(1, 20)))]
    which = data.draw(st.integers(1, len(parts) - 1))
    how = data.draw(st.sampled_from(["longer", "shorter", "missing", "more", "another plan"]))
    if how == "longer":
        parts[which] += b"x"
    elif how == "shorter":
        parts[which] = parts[which][:-1]
    elif how == "missing":
        del parts[which]
    elif how == "more":
        parts.append(b"x")
    else:
        parts[0] = parts[0] + bytes([data.draw(st.integers(1, 255))]) * 8
    assert joined(parts) is None


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("piece", [0, 1, 1 << 20])
def test_a_plan_that_promises_too_much_costs_nothing(size: int, piece: int) -> None:
    plan = struct.pack("<2sQQ", pieces.PLAN, piece, size)
    assert joined([plan, b"x"]) is None
    assert joined([plan]) is None


def test_large_messages_keep_their_order_among_small_ones_and_arrive_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealer, "_LOCAL_PIECE", 1000)
    here, there = ZmqTransport(directly=False), ZmqTransport(directly=False)
    try:
        here.dial(1, there.endpoints)
        sent: list[list[Any]] = [
            [b"a\1small"], [b"a\1" + bytes(5000)], [b"a\1head", bytearray(b"x" * 10_001), b"", bytearray(b"y" * 1000)],
            [b"a\1last"],
        ]  # fmt: skip
        for frames in sent:
            here.send(1, frames)
        here.send(1, [b"a\1held"], hold=True)
        here.send(1, [b"a\1" + bytes(3000)], hold=True)
        sent += [[b"a\1held"], [b"a\1" + bytes(3000)]]
        for frames in sent:
            got = there.receive(5.0)
            assert got is not None
            assert [bytes(frame) for frame in got] == [bytes(frame) for frame in frames]
            assert isinstance(got[0], bytes)
            for frame in got[1:]:
                if memoryview(frame).nbytes:
                    memoryview(frame)[0] = 1
    finally:
        here.close()
        there.close()


def test_what_strangers_send_in_pieces_does_not_shift_what_comes_after() -> None:
    here, there = ZmqTransport(directly=False), ZmqTransport(directly=False)
    try:
        here.dial(1, there.endpoints)
        plan = struct.pack("<2sQ2Q", pieces.PLAN, 10, 5, 25)
        for bad in (
            [[plan], [b"12345"], [b"1234567890"], [b"short"]], [[plan], [b"1"]], [[plan], [b"12345", b"x"]],
            [[plan[:10]]], [[plan], [b"12345"], [plan]],
        ):  # fmt: skip
            for part in bad:
                here.send(1, part)
            here.send(1, [b"a\1good"])
            assert there.receive(5.0) == [b"a\1good"]
    finally:
        here.close()
        there.close()


def test_pieces_of_several_senders_come_in_any_order_and_one_that_breaks_off_holds_up_nobody() -> None:
    there, senders = ZmqTransport(directly=False), [ZmqTransport(directly=False) for _ in range(3)]
    try:
        for sender in senders:
            sender.dial(1, there.endpoints)
        cut = [pieces.cut([b"a\1" + bytes([i]), bytes([i]) * 95], 10) for i in range(3)]
        for n, parts in enumerate(zip(*cut, strict=True)):
            for sender, part in list(zip(senders, parts, strict=True))[: 3 if n < 5 else 2]:
                sender.send(1, [part])
        for _ in range(2):
            got = there.receive(5.0)
            assert got is not None
            assert got[0][:2] == b"a\1"
            assert bytes(got[1]) == bytes([got[0][2]]) * 95
        assert there.receive(0.1) is None
    finally:
        for transport in (there, *senders):
            transport.close()


def test_what_has_come_of_a_message_that_broke_off_is_dropped_though_nothing_else_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = ZmqTransport(directly=False), ZmqTransport(directly=False, silence=0.01)
    try:
        here.dial(1, there.endpoints)
        for part in pieces.cut([b"a\1", bytes(95)], 10)[:5]:
            here.send(1, [part])
        end = time.monotonic() + 20
        while not any(joining._at for joining in there._joining.values()):
            assert time.monotonic() < end
            assert there.receive(0.01) is None
        monkeypatch.setattr(zeromq, "_PIECE_SECONDS", 0.05)
        while there._joining:
            assert time.monotonic() < end
            assert there.receive(5.0) is None  # it wakes up by itself
    finally:
        here.close()
        there.close()


def test_pieces_that_lie_there_as_a_process_wakes_are_joined() -> None:
    here, there = ZmqTransport(directly=False), ZmqTransport(directly=False)
    try:
        here.dial(1, there.endpoints)
        parts, end, got = pieces.cut([b"a\1", bytes(95)], 10), time.monotonic() + 20, None
        for part in parts[:5]:
            here.send(1, [part])
        while not any(joining._at for joining in there._joining.values()):
            assert time.monotonic() < end
            assert there.receive(0.01) is None
        for part in parts[5:]:
            here.send(1, [part])
        assert there._inbox.poll(20_000)
        there._more = True  # the descriptor has told this test (ZQ8)
        for joining in there._joining.values():
            joining.since -= 1000.0  # for so long it has stood still
        while got is None:
            assert time.monotonic() < end
            got = there.receive(0.01)
        assert [len(frame) for frame in got] == [2, 95]
    finally:
        here.close()
        there.close()
