"""The direct way between processes of one host, without workers (DW1 to DW5): streams, backlogs, ends, nonsense."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.wire import direct, segments
from actorrpc.wire.outgoing import Outgoing
from actorrpc.wire.transport import COPIED_BELOW, LATER
from actorrpc.wire.zeromq import ZmqTransport
from tests.wire.test_zeromq import receive, send_and_flush_at_once

pytestmark = pytest.mark.skipif(not direct.AVAILABLE, reason="this system has no direct way")


@pytest.fixture
def pair() -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
    """Two transports, the first of which has dialled the second as number 1."""
    here, there = ZmqTransport(), ZmqTransport()
    here.dial(1, there.endpoints)
    yield here, there
    here.close()
    there.close()


def until(condition: Callable[[], bool], *transports: ZmqTransport) -> None:
    """Lets transports do what their leaders would until something holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        for transport in transports:
            transport.receive(0.01)


def knock(transport: ZmqTransport) -> socket.socket:
    """Connects to a transport as any process of this user may."""
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.settimeout(20)
    way.connect(transport.endpoints[0].removeprefix(direct.SCHEME))
    return way


def test_messages_of_all_shapes_arrive_whole_and_in_order(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    dice = random.Random(3)
    sizes = (0, 1, 7, 500, 4000, 65_535, 65_536, 65_537, 262_143, 262_144, 1_000_000)
    sent = []
    for _ in range(150):
        more = [dice.randbytes(dice.choice(sizes)) for _ in range(dice.choice((0, 0, 1, 3)))]
        sent.append([dice.randbytes(dice.choice(sizes) or 1), *more])
    for frames in sent:
        here.send(1, frames, hold=dice.random() < 0.3)
    here.flush()
    got = receive(there, len(sent), here)
    assert [[bytes(frame) for frame in frames] for frames in got] == sent


def test_a_stream_that_comes_byte_by_byte_is_understood() -> None:
    there = ZmqTransport()
    stream = struct.pack("<I", 3) + b"one" + struct.pack("<I3Q", 1 << 31 | 3, 2, 0, 4) + b"twofour"[:2] + b"four"
    got = []
    with knock(there) as way:
        for byte in stream:
            way.send(bytes([byte]))
            for _ in range(2):
                frames = there.receive(0)
                if frames is not None:
                    got.append([bytes(frame) for frame in frames])
    there.close()
    assert got == [[b"one"], [b"tw", b"", b"four"]]


@pytest.mark.parametrize(
    "nonsense",
    [
        struct.pack("<I", 1 << 31),  # no frames
        struct.pack("<I", 0xFFFFFFFF),  # too many
        struct.pack("<IQ", 1 << 31 | 1, 1 << 62),  # larger than any memory
    ],
)
def test_nonsense_ends_its_way_and_no_other(nonsense: bytes, pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    with knock(there) as way:
        way.send(nonsense + bytes(100))
        until(lambda: bool(select.select([way], [], [], 0)[0]), there)
        assert way.recv(1) == b""
    here.send(1, [b"still there"])
    assert receive(there, 1, here) == [[b"still there"]]


def test_what_a_full_socket_does_not_take_leaves_when_there_is_room(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    large = os.urandom(5_000_000)
    here.send(1, [b"first", large])
    here.send(1, [b"second"])
    (first, second) = receive(there, 2, here)
    assert bytes(first[1]) == large
    assert second == [b"second"]


@pytest.mark.parametrize("in_the_midst_of_a_send", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_small_frames_and_those_that_do_not_last_may_change_as_soon_as_they_are_sent(
    lasting: bool, in_the_midst_of_a_send: bool, pair: tuple[ZmqTransport, ZmqTransport]
) -> None:
    here, there = pair
    way: Any = here._ways[1]
    sizes = (1000, 70_000, 200_000, 300_000) * 4  # together far more than a socket takes
    for size in sizes:
        frame = bytearray(b"a" * size)
        way._sending = in_the_midst_of_a_send
        here.send(1, [b"head", frame], lasting=lasting)
        way._sending = False
        if not lasting or size < COPIED_BELOW:
            frame[:] = b"b" * size
    here.flush()
    came: list[bytes] = []

    def all_came() -> bool:
        frames = there.receive(0.01)
        if frames is not None:
            came.append(bytes(frames[1]))
        return len(came) == len(sizes)

    until(all_came, here)
    assert came == [b"a" * size for size in sizes]


def test_who_sends_does_not_wait_for_who_flushes_and_is_not_overtaken(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    """Who flushes may be in a finalizer that waits for what who sends has."""
    here, there = pair
    way: Any = here._ways[1]
    entered, over = threading.Event(), threading.Event()

    def flush() -> None:
        with way._turn():
            entered.set()
            assert over.wait(20)

    large, changed, small = os.urandom(300_000), bytearray(b"a" * 1000), bytearray(b"a" * (COPIED_BELOW - 1))
    here.send(1, [b"0"], LATER)
    thread = threading.Thread(target=flush)
    thread.start()
    assert entered.wait(20)
    here.send(1, [b"1"])
    here.send(1, [b"2"], LATER)
    here.send(1, [b"3", large])
    here.send(1, [b"4", changed], lasting=False)
    here.send(1, [b"5", small])
    changed[:] = b"b" * 1000
    small[:] = b"b" * len(small)
    over.set()
    thread.join(20)
    here.send(1, [b"6"])
    got = receive(there, 7, here)
    assert [bytes(frames[0]) for frames in got] == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert (bytes(got[3][1]), bytes(got[4][1])) == (large, b"a" * 1000)
    assert set(bytes(got[5][1])) == set(b"a")


def test_threads_that_send_and_flush_at_once_lose_nothing(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    send_and_flush_at_once(*pair, 1500)


def test_an_order_does_not_keep_back_what_another_thread_sends_just_then(
    pair: tuple[ZmqTransport, ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    way: Any = here._ways[1]
    plain, sent = Outgoing._gather, threading.Event()

    def send() -> None:
        here.send(1, [b"m"])
        sent.set()

    def gather(way: Outgoing) -> None:
        if not sent.is_set() and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=send)  # finds the lock taken
            other.start()
            other.join(20)
        plain(way)

    monkeypatch.setattr(Outgoing, "_gather", gather)
    way.order(segments.order(segments.DROP, 77))
    if not sent.is_set():
        send()
    assert receive(there, 1) == [[b"m"]]


def test_a_backlog_that_could_not_be_waited_for_is_waited_for_with_the_next_message(
    pair: tuple[ZmqTransport, ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    ways: Any = here._direct
    plain, refusals = ways._epoll, [OSError(errno.ENOSPC, "the limit of user watches was reached")]

    def register(*what: int) -> None:
        if refusals:
            raise refusals.pop()
        plain.register(*what)

    monkeypatch.setattr(ways, "_epoll", SimpleNamespace(register=register, unregister=plain.unregister))
    large = os.urandom(5_000_000)
    with pytest.raises(OSError, match="watches"):
        here.send(1, [b"first", large])
    here.send(1, [b"second"])
    first, second = receive(there, 2, here)
    assert bytes(first[1]) == large
    assert second == [b"second"]


def test_what_is_sent_before_hanging_up_arrives(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    here.send(1, [b"x" * 2_000_000])
    here.send(1, [b"goodbye"], hold=True)
    here.hang_up(1, 5.0)
    got = receive(there, 2, here)
    assert [len(frames[0]) for frames in got] == [2_000_000, 7]
    with pytest.raises(KeyError):
        here.send(1, [b"too late"])


def test_a_way_whose_other_end_is_gone_takes_and_drops(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    here.send(1, [b"x"])
    receive(there, 1)
    there.close()
    for _ in range(3):
        here.send(1, [b"y" * 1_000_000, b"z"])
        here.receive(0)


def test_a_peer_that_is_gone_already_is_dialled_all_the_same() -> None:
    here, there = ZmqTransport(), ZmqTransport()
    endpoints = there.endpoints
    there.close()
    here.dial(1, endpoints)
    here.send(1, [b"x"])
    here.close()


def test_an_end_is_seen_though_a_forked_child_holds_the_socket() -> None:
    there = ZmqTransport()
    with knock(there) as way:
        assert there.receive(0.05) is None
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        try:
            there.close()
            assert way.recv(1) == b""
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_descriptors_are_given_back(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    _, there = pair
    there.receive(0.01)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        other = ZmqTransport()
        other.dial(1, there.endpoints)
        other.send(1, [b"x" * 300_000])
        receive(there, 1, other)
        other.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, there)


def test_a_process_of_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ZmqTransport()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # so that this process is somebody else's
    with knock(there) as way:
        way.send(struct.pack("<I", 3) + b"one")
        assert there.receive(0.2) is None
        until(lambda: bool(select.select([way], [], [], 0)[0]), there)
        with pytest.raises(ConnectionResetError):
            way.recv(1)
    there.close()


def test_only_a_private_folder_is_dialled(tmp_path: Path) -> None:
    here, there = ZmqTransport(), ZmqTransport()
    try:
        os.chmod(os.path.dirname(there.endpoints[0].removeprefix(direct.SCHEME)), 0o755)
        here.dial(1, there.endpoints)
        here.send(1, [b"by tcp"])
        assert receive(there, 1) == [[b"by tcp"]]
        assert here._direct is not None
        assert not there._direct._incoming  # type: ignore[union-attr]
    finally:
        here.close()
        there.close()


# -- staying awake (RULE DW4; `test_vigil` has the rest)


def test_a_leader_that_stayed_awake_in_vain_sleeps_and_is_woken(pair: tuple[ZmqTransport, ZmqTransport]) -> None:
    here, there = pair
    there._vigil._awake = True
    for _ in range(40):
        there.receive(0.001)
    assert there._vigil.first.in_vain == 5
    there._vigil.first.left = 10
    here.send(1, [b"a message"])
    until(lambda: there.receive(0.001) == [b"a message"])
    here.send(1, [b"another"])
    there._vigil.first.left = 0
    assert there.receive(20) == [b"another"]
    assert there._vigil.first.in_vain == 0


def test_whom_nobody_sends_to_directly_sleeps_at_once_and_no_wait_outlasts_its_timeout(
    pair: tuple[ZmqTransport, ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def keep(poll: Callable[[float], Sequence[Any]], timeout: float | None) -> Sequence[Any]:
        asked.append(timeout)
        time.sleep(0.05)
        return ()

    here, there = pair
    for transport in pair:
        monkeypatch.setattr(transport._vigil, "keep", keep)
    until(lambda: there.receive(0.001) is None and bool(asked))
    asked.clear()
    here.receive(0.001)
    assert asked == []
    polled: list[float | None] = []
    assert there._epoll is not None

    def poll(timeout: float | None) -> list[tuple[int, int]]:
        polled.append(timeout)
        return []

    monkeypatch.setattr(there, "_epoll", SimpleNamespace(poll=poll))
    there._poll(30.0)
    there._poll(0.01)
    there._poll(None)
    monkeypatch.undo()
    assert asked == [30.0, 0.01, None]
    assert polled[0] is not None
    assert 0 < polled[0] <= 29.95
    assert polled[1:] == [0.0, None]
