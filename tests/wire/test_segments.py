"""Shared memory along direct ways, without workers (SG1 to SG4): contents, reuse, bounds, ends, forks."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import select
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorrpc.wire import direct, outgoing, segments, shelf
from actorrpc.wire.segments import LARGE, WANT, order
from actorrpc.wire.zeromq import ZmqTransport
from tests.wire.test_direct import knock, until
from tests.wire.test_zeromq import receive

pytestmark = pytest.mark.skipif(
    not (direct.AVAILABLE and segments.AVAILABLE), reason="this system has no shared memory along direct ways"
)
Pair = tuple[ZmqTransport, ZmqTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two transports, the first of which has dialled the second as number 1."""
    nothing_is_left()
    here, there = ZmqTransport(), ZmqTransport()
    here.dial(1, there.endpoints)
    yield here, there
    here.close()
    there.close()
    nothing_is_left()


def descriptors() -> int:
    """How many segments this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:actorrpc")
        except OSError:  # that of the listing itself
            continue
    return count


def mappings() -> int:
    """How many segments this process has mapped: once for each end of a way, since here it has both."""
    with open("/proc/self/maps") as file:
        return sum("/memfd:actorrpc" in line for line in file)


def nothing_is_left() -> None:
    gc.collect()
    assert (descriptors(), mappings()) == (0, 0)


def exchange(pair: Pair, *frames: Any) -> list[Any]:
    """Sends a message and receives it."""
    here, there = pair
    here.send(1, [b"head", *frames])
    (got,) = receive(there, 1, here)
    assert got[0] == b"head"
    return got[1:]


def lent() -> int:
    """How many segments hold something that was received."""
    return len(shelf._LOANS)


def get_going(pair: Pair, size: int = LARGE) -> None:
    """Sends until a message of that size goes through a segment."""
    for _ in range(20):
        frames = exchange(pair, bytes(size))
        if lent():
            return
        del frames
    raise AssertionError("nothing went through a segment")


def pattern(number: int, size: int = LARGE) -> bytes:
    return np.random.default_rng(number).bytes(size)


# -- contents


def test_what_arrives_is_what_was_sent_over_random_sizes(pair: Pair) -> None:
    dice = random.Random(5)
    sizes = (0, 1, 63, 64, 65, 5000, 65_535, 65_536, 100_001, LARGE - 1, LARGE, 300_001, 1_000_000)
    kept: list[tuple[list[Any], list[bytes]]] = []
    shared = 0
    for i in range(150):
        sent = [pattern(1000 * i + j, dice.choice(sizes)) for j in range(dice.randint(1, 4))]
        before = lent()
        got = exchange(pair, *sent)
        shared += lent() > before
        assert [bytes(frame) for frame in got] == sent
        kept.append((got, sent))
        for frames, were in kept:  # what came later has not touched them
            assert [bytes(frame[:100]) for frame in frames] == [frame[:100] for frame in were]
        while len(kept) > dice.randint(0, 8):
            frames, were = kept.pop(dice.randrange(len(kept)))
            assert [bytes(frame) for frame in frames] == were
        del frames, got
    assert shared > 20
    kept.clear()


def test_what_a_receiver_writes_reaches_neither_the_sender_nor_later_messages(pair: Pair) -> None:
    mine = np.arange(LARGE, dtype=np.uint8)
    before = mine.copy()
    for _ in range(10):
        (frame,) = exchange(pair, mine.data)
        received = np.frombuffer(frame, np.uint8)
        assert (received == before).all()
        received[:] = 7
        assert (mine == before).all()
        del frame, received
    mine[:] = 1  # and what the sender does later does not reach the receiver
    (frame,) = exchange(pair, mine.data)
    assert lent() == 1
    mine[:] = 2
    assert (np.frombuffer(frame, np.uint8) == 1).all()


def test_a_view_of_any_part_keeps_the_whole(pair: Pair) -> None:
    get_going(pair, 2 * LARGE)
    first, second = exchange(pair, pattern(1), pattern(2))
    part = np.frombuffer(second, np.uint8)[-10:]
    del first, second
    for i in range(5):
        exchange(pair, pattern(10 + i), pattern(20 + i))
    assert bytes(part) == pattern(2)[-10:]
    assert lent() == 1
    del part
    assert lent() == 0


def test_a_small_frame_beside_a_large_one_does_not_hold_its_segment(pair: Pair) -> None:
    get_going(pair, 2 * LARGE)
    large, small = exchange(pair, pattern(1), pattern(2, 5000))
    assert lent() == 1
    del large
    assert lent() == 0
    assert bytes(small) == pattern(2, 5000)


def test_frames_are_aligned_and_writable(pair: Pair) -> None:
    get_going(pair, 2 * LARGE)
    for frame in exchange(pair, bytes(70_001), bytes(70_003), bytes(LARGE)):
        array = np.frombuffer(frame, np.uint8)
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable


# -- memory


def test_segments_are_used_again(pair: Pair) -> None:
    for i in range(1000):
        (frame,) = exchange(pair, pattern(i % 7))
        assert bytes(frame[:8]) == pattern(i % 7)[:8]
        del frame
    assert descriptors() <= 3


def test_a_segment_is_free_when_the_last_view_of_it_dies_on_whatever_thread(pair: Pair) -> None:
    get_going(pair)
    for _ in range(50):
        frames = exchange(pair, pattern(1))
        assert lent() == 1
        views = [memoryview(frames[0])[i:] for i in range(3)]
        frames.clear()
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
        assert lent() == 0
    assert descriptors() <= 3


def test_past_the_bound_messages_travel_as_bytes(pair: Pair) -> None:
    room = pair[1]._direct.room  # type: ignore[union-attr]
    assert room is not None
    room.limit = 4 * LARGE
    kept = []
    for i in range(30):
        kept += exchange(pair, pattern(i))
        assert sum(room.segments.values()) <= room.limit
    assert lent() == 4
    assert [bytes(frame) for frame in kept] == [pattern(i) for i in range(30)]
    kept.clear()
    get_going(pair)


def test_what_was_made_for_smaller_ones_makes_room_for_larger_ones(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_PATIENCE_SECONDS", 0.0)
    pair[1]._direct.room.limit = 8 * LARGE  # type: ignore[union-attr]
    get_going(pair, 6 * LARGE)
    get_going(pair, LARGE)
    get_going(pair, 7 * LARGE)
    get_going(pair, LARGE)


def test_the_bound_is_a_quarter_of_what_there_is_and_a_gibibyte_at_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 2048}.__getitem__)
    assert shelf._default_limit(str(limit)) == 1 << 29
    limit.write_text("max\n")
    assert shelf._default_limit(str(limit)) == 1 << 29
    limit.write_text("4096000\n")
    assert shelf._default_limit(str(limit)) == 1024000
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096 << 8}.__getitem__)
    limit.unlink()
    assert shelf._default_limit(str(limit)) == 1 << 30


def test_a_frame_larger_than_the_bound_travels_as_bytes(pair: Pair) -> None:
    pair[1]._direct.room.limit = LARGE  # type: ignore[union-attr]
    for i in range(3):
        (frame,) = exchange(pair, pattern(i, 2 * LARGE))
        assert bytes(frame) == pattern(i, 2 * LARGE)
    assert descriptors() == 0


def test_without_memfd_everything_travels_as_bytes_with_one_line_in_the_log(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(segments, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(os, "memfd_create", fail)
    with caplog.at_level(logging.INFO, "actorrpc"):
        for i in range(10):
            (frame,) = exchange(pair, pattern(i))
            assert bytes(frame) == pattern(i)
    assert len([r for r in caplog.records if "shared memory" in r.message]) == 1
    assert descriptors() == 0


@pytest.mark.parametrize("end", ["both", "receiver"])
def test_an_end_that_has_no_such_thing_gets_bytes(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(segments, "AVAILABLE", False)
        there = ZmqTransport()
        here = ZmqTransport() if end == "both" else None
    here = here or ZmqTransport()
    here.dial(1, there.endpoints)
    for i in range(10):
        (frame,) = exchange((here, there), pattern(i))
        assert bytes(frame) == pattern(i)
    here.close()
    there.close()
    nothing_is_left()


def test_a_sender_without_descriptors_sends_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    original = segments.map_memory

    def fail_at_the_sender(fd: int, size: int, flags: int, at: int = 0) -> int:
        if descriptors() > 1:  # the receiver's own, and the one that was passed on
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return original(fd, size, flags, at)

    monkeypatch.setattr(segments, "map_memory", fail_at_the_sender)
    for i in range(10):
        (frame,) = exchange(pair, pattern(i))
        assert bytes(frame) == pattern(i)
    assert lent() == 0
    until(lambda: descriptors() == 0, *pair)


def test_what_is_idle_is_given_up_at_both_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    get_going(pair)
    kept = exchange(pair, pattern(1))
    exchange(pair, pattern(2))
    assert descriptors() >= 2
    monkeypatch.setattr(segments, "IDLE_SECONDS", 0.2)
    until(lambda: descriptors() == 1 and mappings() == 2, *pair)
    assert bytes(kept[0]) == pattern(1)
    kept.clear()
    until(lambda: descriptors() == 0 and mappings() == 0, *pair)
    get_going(pair)
    until(lambda: descriptors() == 0 and mappings() == 0, *pair)


def test_a_way_has_a_bounded_number_of_segments(pair: Pair) -> None:
    kept = []
    for i in range(3 * segments._MOST):
        kept += exchange(pair, pattern(i))
        assert descriptors() <= segments._MOST
    assert lent() > segments._MOST / 2
    for i, frame in enumerate(kept):
        assert bytes(frame) == pattern(i)
    kept.clear()
    del frame


# -- ends


def test_what_was_received_outlives_its_sender_and_its_receiver(pair: Pair) -> None:
    here, there = pair
    get_going(pair)
    (frame,) = exchange(pair, pattern(1))
    assert lent() == 1
    here.close()
    for _ in range(5):
        there.receive(0.01)
    assert mappings() == 1  # the free ones are gone
    assert bytes(frame) == pattern(1)
    there.close()
    assert bytes(frame) == pattern(1)
    frame[:5] = b"still"
    del frame
    nothing_is_left()


def test_a_sender_lets_go_when_it_hangs_up(pair: Pair) -> None:
    here, there = pair
    get_going(pair)
    frames = exchange(pair, pattern(1))
    there.close()
    here.hang_up(1)
    assert mappings() == 1
    assert bytes(frames[0]) == pattern(1)
    frames.clear()


def test_what_lies_in_segments_arrives_though_its_sender_has_hung_up(pair: Pair) -> None:
    here, there = pair
    get_going(pair)
    here.send(1, [b"head", pattern(3)])
    here.hang_up(1, 5.0)
    (got,) = receive(there, 1, here)
    assert lent() == 1
    assert bytes(got[1]) == pattern(3)


@pytest.mark.parametrize(
    "number, size", [(99, LARGE), (1, 1 << 40), (1, (1 << 64) - 64)], ids=["unknown", "too large", "absurd"]
)
def test_a_message_in_a_segment_that_cannot_be_ends_its_way(number: int, size: int) -> None:
    there = ZmqTransport()
    wanted = struct.pack("<I", outgoing.MANY | outgoing.ORDERED) + order(WANT, 1, LARGE)
    message = struct.pack("<II2Q", outgoing.MANY | outgoing.STOWED | 2, number, 4, size) + b"head"
    with knock(there) as way:
        way.send(wanted)
        until(lambda: bool(select.select([way], [], [], 0)[0]), there)
        _, rights, _, _ = way.recvmsg(8, 64)
        (fd,) = struct.unpack("i", rights[0][2])
        os.close(fd)
        way.send(message)
        until(lambda: bool(select.select([way], [], [], 0)[0]), there)
        assert way.recv(1) == b""
    there.close()
    nothing_is_left()


def test_a_segment_on_loan_is_not_lent_again() -> None:
    there = ZmqTransport()
    wanted = struct.pack("<I", outgoing.MANY | outgoing.ORDERED) + order(WANT, 1, LARGE)
    message = struct.pack("<II2Q", outgoing.MANY | outgoing.STOWED | 2, 1, 4, LARGE) + b"head"
    got: list[Any] = []
    with knock(there) as way:
        for byte in wanted + message:  # and as slowly as can be
            way.send(bytes([byte]))
            got.append(there.receive(0.001))
        while not any(got):
            got.append(there.receive(0.01))
        way.send(message)
        until(lambda: not there._direct._incoming, there)  # type: ignore[union-attr]
    there.close()
    got.clear()
    nothing_is_left()


# -- forks


def in_child(body: Callable[[], object]) -> int:
    """Runs something in a forked child; returns its process id."""
    child = os.fork()
    if not child:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def test_a_forked_child_has_its_own_copy_of_what_its_parent_holds(pair: Pair) -> None:
    get_going(pair)
    frames = exchange(pair, pattern(1))
    assert lent() == 1
    held = [np.frombuffer(frames.pop(), np.uint8)]
    held[0][0] = 11  # what was written before the fork, both see
    was = held[0].copy()
    read, write = os.pipe()
    go, tell = os.pipe()

    def child() -> None:
        array = held[0]
        assert (array == was).all()
        array[100:200] = 5
        os.write(write, b"x")
        os.read(go, 1)  # meanwhile the parent writes, lets go of it, and is sent more
        assert array[0] == 11
        assert (array[100:200] == 5).all()
        assert (array[200:] == was[200:]).all()

    number = in_child(child)
    assert select.select([read], [], [], 20)[0]
    assert (held[0] == was).all()
    held.pop()[:] = 9
    for i in range(10):
        (frame,) = exchange(pair, pattern(100 + i))
        assert bytes(frame) == pattern(100 + i)
        del frame
    os.write(tell, b"x")
    _, status = os.waitpid(number, 0)
    for fd in (read, write, go, tell):
        os.close(fd)
    assert status == 0


def test_a_child_that_drops_what_it_inherited_tells_nobody(pair: Pair) -> None:
    get_going(pair)
    frames = exchange(pair, pattern(1))

    stock = pair[0]._ways[1]._stock  # type: ignore[union-attr]
    assert stock is not None
    away = dict(stock._away)
    assert away

    def child() -> None:
        frames.clear()
        assert not shelf._LOANS

    _, status = os.waitpid(in_child(child), 0)
    assert status == 0
    stock._hear()
    assert stock._away == away
    for i in range(10):
        exchange(pair, pattern(10 + i))
    assert bytes(frames[0]) == pattern(1)
    assert lent() == 1
    frames.clear()
    for i in range(10):
        exchange(pair, pattern(10 + i))
    assert descriptors() <= 3


def test_forks_and_finalizers_at_the_same_time_lose_no_segment(pair: Pair) -> None:
    get_going(pair)
    for i in range(60):
        frames = exchange(pair, pattern(i))
        thread = threading.Thread(target=frames.clear)
        thread.start()
        _, status = os.waitpid(in_child(lambda: None), 0)
        thread.join()
        assert status == 0
        assert lent() == 0
        assert bytes(exchange(pair, pattern(i))[0]) == pattern(i)
    assert descriptors() <= 4


# -- locks, whose holders may be in a finalizer of the user's, which sends


def in_a_finalizer_of_the_leaders(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[..., None]:
    """Has the leader be in a finalizer, which sends to a peer, as it calls a method under a lock.

    Returns what runs a function of the leader's; and, meanwhile, a sender's, which has that peer's lock.
    """
    plain, peer, entered, sent = getattr(owner, name), threading.Lock(), threading.Event(), threading.Event()

    def method(*args: Any) -> Any:
        if threading.current_thread().name == "leader":
            entered.set()
            assert peer.acquire(timeout=20)
            peer.release()
        return plain(*args)

    def run(lead: Callable[[], object], send: Callable[[], object]) -> None:
        def sender() -> None:
            with peer:
                leader.start()
                assert entered.wait(20)
                send()
                sent.set()

        leader, thread = threading.Thread(target=lead, name="leader"), threading.Thread(target=sender)
        thread.start()
        done = sent.wait(10)
        thread.join(20)
        leader.join(20)
        assert done, "who sends waits for the leader, and the leader for who sends"

    monkeypatch.setattr(owner, name, method)
    return run


def test_who_sends_does_not_wait_for_who_looks_after_segments(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    get_going(pair)
    way: Any = here._ways[1]
    run = in_a_finalizer_of_the_leaders(monkeypatch, segments.Stock, "_hear")
    run(way.hear, lambda: here.send(1, [b"head", pattern(1)]))
    (got,) = receive(there, 1, here)
    assert bytes(got[1]) == pattern(1)
    del got
    get_going(pair)


def test_a_finalizer_that_sends_as_segments_are_given_up_finds_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    get_going(pair)
    way: Any = here._ways[1]
    plain = segments.Stock._give_up

    def give_up(stock: segments.Stock, unused: Any) -> bytes:
        monkeypatch.undo()
        assert len(unused) == 1
        here.send(1, [b"head", pattern(1)])
        return plain(stock, unused)

    monkeypatch.setattr(segments.Stock, "_give_up", give_up)
    monkeypatch.setattr(segments, "IDLE_SECONDS", 0.0)
    way.tidy(time.monotonic() + 1)
    (got,) = receive(there, 1, here)
    assert bytes(got[1]) == pattern(1)
    assert way._stock.empty


def test_a_way_that_is_closed_as_segments_are_looked_after_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = pair
    get_going(pair)
    way: Any = here._ways[1]
    plain, stock = segments.Stock._hear, way._stock
    stock._wanted[99] = LARGE

    def hear(own: segments.Stock) -> None:
        plain(own)
        monkeypatch.undo()
        closing = threading.Thread(target=here.hang_up, args=(1,))
        closing.start()
        closing.join(20)

    monkeypatch.setattr(segments, "_CLOSING_SECONDS", 0.01)
    monkeypatch.setattr(segments.Stock, "_hear", hear)
    assert way.tidy(time.monotonic())  # else it would be looked after for ever
    assert stock.empty


def test_who_wants_memory_while_somebody_is_at_it_does_without() -> None:
    room = shelf.Room(LARGE)
    with room._lock, pytest.raises(BlockingIOError):  # as in a finalizer, on the same thread
        room.make(LARGE)
    room.give_back(room.make(LARGE))
