"""Common segments at the level of transports: one copy for several receivers, each with its own value."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actorrpc.wire import commons, direct, outgoing, segments, shelf
from actorrpc.wire.commons import Commons
from actorrpc.wire.segments import COMMON, LARGE, NEWS, OPEN, REFUSED, order
from actorrpc.wire.zeromq import ZmqTransport
from tests.wire.test_direct import knock, until
from tests.wire.test_segments import (
    descriptors,
    in_a_finalizer_of_the_leaders,
    in_child,
    mappings,
    nothing_is_left,
    pattern,
)
from tests.wire.test_zeromq import receive

pytestmark = pytest.mark.skipif(
    not (direct.AVAILABLE and segments.AVAILABLE), reason="this system has no shared memory along direct ways"
)


class Cast:
    """A sender and its receivers, which are numbered from 1."""

    def __init__(self, size: int) -> None:
        self.here = ZmqTransport()
        self.there = [ZmqTransport() for _ in range(size)]
        for number, transport in enumerate(self.there, 1):
            self.here.dial(number, transport.endpoints)

    @property
    def commons(self) -> Commons:
        assert self.here._direct is not None
        assert self.here._direct.commons is not None
        return self.here._direct.commons

    def send(self, *buffers: Any, to: list[int] | None = None) -> list[list[Any]]:
        """Sends a message to all, or some; returns what each one has of it."""
        numbers = to or list(range(1, len(self.there) + 1))
        frames: list[Any] = [b"head", *(memoryview(buffer) for buffer in buffers)]
        with self.here.sharing(numbers, frames):
            for number in numbers:
                self.here.send(number, [b"to %d" % number, *frames[1:]])
        got = []
        for number in numbers:
            (message,) = receive(self.there[number - 1], 1, self.here)
            assert message.pop(0) == b"to %d" % number
            got.append(message)
        return got

    def held(self) -> int:
        """How many receivers hold a segment."""
        with self.commons._lock:
            self.commons._hear(())
            self.commons._settle()
            return sum(len(segment.held) for segment in self.commons._segments.values())

    def get_going(self, size: int = LARGE) -> None:
        """Sends until a message of that size to all goes through one segment."""
        for _ in range(20):
            got = self.send(bytes(size))
            if self.held() == len(self.there):
                return
            got.clear()
        raise AssertionError("nothing went through one segment")

    def close(self) -> None:
        for transport in (self.here, *self.there):
            transport.close()


@pytest.fixture
def cast() -> Iterator[Cast]:
    nothing_is_left()
    made = Cast(3)
    yield made
    made.close()
    nothing_is_left()


def shared(frame: Any) -> bool:
    """Whether a frame lies in a common segment."""
    address = np.frombuffer(frame, np.uint8).ctypes.data
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < end:
                return "/memfd:actorrpc-group" in line
    return False


def open_segments() -> int:
    """How many common segments this process has open."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    return sum("actorrpc-group" in name for name in names)


# -- contents


def test_one_segment_is_filled_for_all(cast: Cast) -> None:
    cast.get_going()
    copied: list[int] = []
    before = [way._stock._away.copy() for way in cast.here._ways.values()]  # type: ignore[union-attr]
    for i in range(5):
        got = cast.send(pattern(i), pattern(100 + i, 1000), pattern(200 + i))
        got = got if i else cast.send(pattern(i), pattern(100 + i, 1000), pattern(200 + i))
        for first, second, third in got:
            assert (bytes(first), bytes(third)) == (pattern(i), pattern(200 + i))
            assert bytes(second) == pattern(100 + i, 1000)
        copied.append(sum(shared(frames[0]) for frames in got))
        first = second = third = None
        got.clear()
    assert copied[2:] == [3, 3, 3]
    assert open_segments() <= 2
    after = [way._stock._away.copy() for way in cast.here._ways.values()]  # type: ignore[union-attr]
    assert [set(a) - set(b) for a, b in zip(after, before, strict=True)] == [set()] * 3


def test_what_one_receiver_writes_no_other_sees_nor_does_a_later_message(cast: Cast) -> None:
    cast.get_going()
    for i in range(6):
        got = cast.send(pattern(i))
        assert all(shared(frame) for (frame,) in got)
        for which, (frame,) in enumerate(got):
            np.frombuffer(frame, np.uint8)[i * 5000 :: 3 + which] = which
        for which, (frame,) in enumerate(got):
            expected = np.frombuffer(pattern(i), np.uint8).copy()
            expected[i * 5000 :: 3 + which] = which
            assert bytes(frame) == expected.tobytes()
            del frame
        got.clear()
        assert cast.held() == 0
        assert len(cast.commons._apart) == 3  # they would get copies for a while
        cast.commons._apart.clear()


def test_a_receiver_that_changes_most_of_it_gets_copies_for_a_while(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast.get_going()
    places = []
    for i in range(6):
        got = cast.send(pattern(i))
        assert [bytes(frame) for (frame,) in got] == [pattern(i)] * 3
        places.append([shared(frame) for (frame,) in got])
        np.frombuffer(got[0][0], np.uint8)[:] = 1
        np.frombuffer(got[1][0], np.uint8)[: LARGE // 4] = 1
        got.clear()
        if i == 3:
            monkeypatch.setattr(commons, "_APART_SECONDS", 0.0)
            cast.commons._apart.clear()
    assert places == [[True] * 3, *[[False, True, True]] * 3, [True] * 3, [True] * 3]


def test_pages_that_were_only_read_stay_mapped(cast: Cast) -> None:
    cast.get_going()
    got = cast.send(pattern(1))
    frame = np.frombuffer(got[0][0], np.uint8)
    address = frame.ctypes.data
    assert frame.any()
    frame[5 * 4096] = 7
    del frame
    got.clear()
    assert cast.held() == 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // 4096 * 8)
        pages = np.frombuffer(file.read(LARGE // 4096 * 8), np.uint64)
    assert int((pages >> 63).sum()) == LARGE // 4096 - 1  # all but the one that was changed


def test_without_a_page_map_changes_are_taken_back_all_the_same(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    cast.get_going()
    real = os.open

    def no_page_map(path: Any, *how: Any, **more: Any) -> int:
        if path == "/proc/self/pagemap":
            raise PermissionError(path)
        return real(path, *how, **more)

    monkeypatch.setattr(os, "open", no_page_map)
    for i in range(3):
        got = cast.send(pattern(i))
        assert all(shared(frame) and bytes(frame) == pattern(i) for (frame,) in got)
        for (frame,) in got:
            np.frombuffer(frame, np.uint8)[::3] = 1
        del frame
        got.clear()


def test_a_second_message_along_one_way_does_not_take_the_place_of_the_first(cast: Cast) -> None:
    cast.get_going()
    frames: list[Any] = [b"head", memoryview(pattern(1))]
    with cast.here.sharing([1, 2, 1], frames):
        for number in (1, 2, 1):
            cast.here.send(number, frames)
    first, again = receive(cast.there[0], 2, cast.here)
    (other,) = receive(cast.there[1], 1, cast.here)
    assert [shared(message[1]) for message in (first, again, other)] == [True, False, True]
    np.frombuffer(first[1], np.uint8)[:] = 0
    assert bytes(again[1]) == bytes(other[1]) == pattern(1)


def test_one_receiver_alone_has_a_segment_of_its_own(cast: Cast) -> None:
    cast.get_going()
    for i in range(3):
        ((frame,),) = cast.send(pattern(i), to=[2])
        assert bytes(frame) == pattern(i)
        assert not shared(frame)
        del frame


def test_what_is_below_the_limit_travels_as_bytes(cast: Cast) -> None:
    cast.get_going()
    for i in range(3):
        got = cast.send(pattern(i, LARGE // 2))
        assert [bytes(frame) for (frame,) in got] == [pattern(i, LARGE // 2)] * 3
        assert not any(shared(frame) for (frame,) in got)


def test_the_sender_may_change_its_buffers_when_it_has_sent_them(cast: Cast) -> None:
    cast.get_going()
    buffer = bytearray(pattern(1))
    got = cast.send(buffer)
    buffer[:] = bytes(LARGE)
    assert [bytes(frame) for (frame,) in got] == [pattern(1)] * 3


# -- coming back


def test_a_segment_is_free_when_the_last_receiver_has_let_go(cast: Cast) -> None:
    cast.get_going()
    got = cast.send(pattern(1))
    (segment,) = cast.commons._segments.values()
    for left in (2, 1):
        got.pop()
        assert cast.held() == left
        assert not segment.free
        for i in range(4):  # others are filled meanwhile
            cast.send(pattern(10 + i))
        assert [bytes(frame) for (frame,) in got] == [pattern(1)] * left
    got.clear()
    assert cast.held() == 0
    assert segment.free
    assert len(cast.commons._segments) == 2


def test_what_is_kept_is_bounded(cast: Cast) -> None:
    room = cast.here._direct.room  # type: ignore[union-attr]
    assert room is not None
    room.limit = 3 * LARGE
    kept = []
    for i in range(20):
        kept.append(cast.send(pattern(i)))
        assert sum(room.segments.values()) <= room.limit
    assert cast.held() == 9
    assert [[bytes(frame) for (frame,) in got] for got in kept] == [[pattern(i)] * 3 for i in range(20)]
    kept.clear()
    assert cast.held() == 0
    room.limit = 0
    cast.commons.trim(1e18)
    assert open_segments() == 0
    got = cast.send(pattern(1))
    assert [bytes(frame) for (frame,) in got] == [pattern(1)] * 3


def test_their_number_is_bounded(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commons, "_MOST", 2)
    kept = [cast.send(pattern(i)) for i in range(12)]
    assert len(cast.commons._segments) == 2
    assert cast.held() == 6
    kept.clear()
    cast.get_going(9 * LARGE)  # makes room for what is larger


def test_what_is_idle_is_given_up_at_all_ends(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    cast.get_going()
    assert open_segments() == 1
    monkeypatch.setattr(segments, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(commons, "IDLE_SECONDS", 0.0)
    until(lambda: (descriptors(), mappings()) == (0, 0), cast.here, *cast.there)


def test_a_lost_receivers_share_comes_back_and_what_it_had_is_not_filled_again(cast: Cast) -> None:
    cast.get_going()
    got = cast.send(pattern(1))
    (segment,) = cast.commons._segments.values()
    cast.here.hang_up(3)  # it may live, and read what it has
    assert cast.held() == 2
    assert segment.spoiled
    zombie = got.pop()
    got.clear()
    assert cast.held() == 0
    assert open_segments() == 0
    for i in range(5):
        cast.send(pattern(10 + i), to=[1, 2])
    assert bytes(zombie[0]) == pattern(1)
    assert cast.held() == 0


def test_a_receiver_that_is_lost_while_it_is_sent_to_keeps_no_share(cast: Cast) -> None:
    cast.get_going()
    frames: list[Any] = [b"head", memoryview(pattern(1))]
    with cast.here.sharing([1, 2, 3], frames):
        cast.here.send(1, frames)
        cast.there[1].close()
        cast.here.send(2, frames)
        cast.here.hang_up(2)
        cast.here.send(3, frames)
    got = [receive(cast.there[i], 1, cast.here)[0] for i in (0, 2)]
    assert [bytes(frame) for _, frame in got] == [pattern(1)] * 2
    got.clear()
    assert cast.held() == 0
    assert open_segments() == 0


def test_what_was_received_outlives_the_sender(cast: Cast) -> None:
    cast.get_going()
    got = cast.send(pattern(1))
    assert all(shared(frame) for (frame,) in got)
    cast.here.close()
    until(lambda: not any(t._direct._incoming for t in cast.there), *cast.there)  # type: ignore[union-attr]
    assert descriptors() == 0
    for (frame,) in got:
        assert bytes(frame) == pattern(1)
        frame[0] = 1
        del frame
    got.clear()
    gc.collect()
    assert mappings() == 0


def test_a_sender_that_ends_while_a_segment_is_filled_lets_go_of_it_afterwards(cast: Cast) -> None:
    cast.get_going()
    frames: list[Any] = [b"head", memoryview(pattern(1))]
    with cast.here.sharing([1, 2, 3], frames):
        assert cast.commons._shared
        cast.here.close()
        assert open_segments() == 1
    assert open_segments() == 0


def test_a_forked_child_has_its_own_copy_of_what_its_parent_holds(cast: Cast) -> None:
    cast.get_going()
    got = cast.send(pattern(1))
    arrays = [np.frombuffer(frame, np.uint8) for (frame,) in got]
    got.clear()
    arrays[0][0] = 11
    read, write = os.pipe()

    def child() -> None:
        os.read(read, 1)  # meanwhile the parent writes, lets go of it, and is sent more
        assert arrays[0][0] == 11
        for array in arrays:
            assert array[1:].tobytes() == pattern(1)[1:]

    number = in_child(child)
    arrays[1][:] = 9
    arrays.clear()
    gc.collect()
    for i in range(6):
        cast.send(pattern(10 + i))
    assert cast.held() == 0
    os.write(write, b"x")
    _, status = os.waitpid(number, 0)
    os.close(read)
    os.close(write)
    assert status == 0


# -- where it cannot be


def test_who_cannot_open_it_gets_bytes_and_is_left_alone(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fail(place: segments.Place, how: int) -> int:
        asked.append(place.fd)
        raise PermissionError("another container")

    monkeypatch.setattr(shelf, "open_of_peer", fail)
    for i in range(5):
        got = cast.send(pattern(i))
        assert [bytes(frame) for (frame,) in got] == [pattern(i)] * 3
        assert not any(shared(frame) for (frame,) in got)
    assert len(asked) == 3
    assert cast.held() == 0


def test_who_comes_by_another_way_gets_its_own_copy(cast: Cast) -> None:
    far = ZmqTransport(directly=False)
    cast.there.append(far)
    cast.here.dial(4, far.endpoints)
    got: list[list[Any]] = []
    for i in range(5):
        got = cast.send(pattern(i))
        assert [bytes(frame) for (frame,) in got] == [pattern(i)] * 4
        assert not shared(got[3][0])
    assert [shared(frame) for (frame,) in got] == [True, True, True, False]
    assert cast.held() == 3


def answered(answers: list[Any], way: Any) -> bool:
    if select.select([way], [], [], 0)[0]:
        answers.extend(NEWS.iter_unpack(way.recv(64)))
    return bool(answers)


@pytest.mark.parametrize("what", ["no descriptor", "another file", "another size", "a pipe", "another segment"])
def test_nothing_but_the_segment_that_was_meant_is_opened(
    what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ZmqTransport()
    opened: list[str] = []
    real = os.open

    def watched(path: Any, *how: Any) -> int:
        opened.append(str(path))
        return real(path, *how)

    monkeypatch.setattr(os, "open", watched)
    held = [os.memfd_create("actorrpc-group"), os.memfd_create("actorrpc-group"), *os.pipe()]
    (tmp_path / "file").write_bytes(bytes(LARGE))
    held.append(real(tmp_path / "file", os.O_RDONLY))
    for fd in held[:2]:
        os.ftruncate(fd, LARGE)
    fd, inode, size = held[0], os.fstat(held[0]).st_ino, LARGE
    if what == "no descriptor":
        fd = 1 << 20
    elif what == "another file":
        fd, inode = held[4], os.fstat(held[4]).st_ino
    elif what == "another size":
        size = 2 * LARGE
    elif what == "a pipe":
        fd, inode, size = held[2], os.fstat(held[2]).st_ino, 0
    else:
        fd = held[1]
    asked = struct.pack("<I", outgoing.MANY | outgoing.ORDERED)
    asked += order(OPEN, COMMON + 1, max(size, 1), os.fstat(held[0]).st_dev, inode, fd)
    answers: list[tuple[int, int]] = []
    with knock(there) as way:
        way.send(asked)
        until(lambda: answered(answers, way), there)
    assert answers == [(REFUSED, COMMON + 1)]
    assert not [path for path in opened if "/fd/" in path]
    there.close()
    for fd in held:
        os.close(fd)
    nothing_is_left()


def together(*bodies: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed, failed


def test_broadcasts_from_several_threads_do_not_mix(cast: Cast) -> None:
    cast.get_going()
    count = 12

    def send(which: int) -> Callable[[], None]:
        def body() -> None:
            for i in range(count):
                frames: list[Any] = [b"%d %d" % (which, i), memoryview(pattern(which * 100 + i))]
                with cast.here.sharing([1, 2, 3], frames):
                    for number in (1, 2, 3):
                        cast.here.send(number, frames)

        return body

    def take(transport: ZmqTransport) -> Callable[[], None]:
        def body() -> None:
            for _ in range(3 * count):
                head, frame = receive(transport, 1)[0]
                which, i = map(int, head.split())
                assert bytes(frame) == pattern(which * 100 + i)
                frame[::4096] = bytes(LARGE // 4096)

        return body

    done: list[None] = []

    def lead() -> None:
        while not done:
            cast.here.receive(0.001)

    leader = threading.Thread(target=lead)
    leader.start()
    try:
        together(*(send(which) for which in range(3)), *(take(transport) for transport in cast.there))
    finally:
        done.append(None)
        leader.join(30)
    gc.collect()
    assert cast.held() == 0


def test_who_sends_does_not_wait_for_who_looks_after_segments(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does may be in a finalizer of the user's, which waits for what who sends has."""
    cast.get_going()
    content = pattern(1)
    frames: list[Any] = [b"head", memoryview(content)]
    run = in_a_finalizer_of_the_leaders(monkeypatch, Commons, "_settle")

    def send() -> None:
        for number in (1, 2, 3):
            cast.here.send(number, frames)

    def share_and_send() -> None:
        with cast.here.sharing([1, 2, 3], frames):
            send()

    for before, during in ((contextlib.nullcontext(), share_and_send), (cast.here.sharing([1, 2, 3], frames), send)):
        with before:
            run(lambda: cast.commons.trim(0.0), during)
        for transport in cast.there:
            ((_, frame),) = receive(transport, 1, cast.here)
            assert bytes(frame) == content
            assert shared(frame) == (during is send)
            del frame


def test_a_finalizer_that_broadcasts_in_the_midst_of_a_broadcast_sends_copies(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast.get_going()
    plain = Commons._settle

    def settle(own: Commons) -> Any:
        monkeypatch.undo()
        assert [bytes(frame) for (frame,) in cast.send(pattern(2))] == [pattern(2)] * 3
        return plain(own)

    monkeypatch.setattr(Commons, "_settle", settle)
    got = cast.send(pattern(1))
    assert [bytes(frame) for (frame,) in got] == [pattern(1)] * 3
    assert all(shared(frame) for (frame,) in got)
