"""The transport over ZeroMQ alone, without workers: what the facts of ZeroMQ (ZQ1 to ZQ6) could spoil."""

from __future__ import annotations

import ast
import gc
import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from actorrpc.errors import RendezvousError
from actorrpc.services import address
from actorrpc.wire import dealer, folders, lookout, zeromq
from actorrpc.wire.transport import AT_ONCE, COPIED_BELOW, LATER, taken_out
from actorrpc.wire.waking import Waker
from actorrpc.wire.zeromq import ZmqTransport
from tests.worlds import raised_within, until

PACKAGE = Path(zeromq.__file__).parents[1]


@pytest.fixture
def made() -> Iterator[list[ZmqTransport]]:
    """Transports to be closed."""
    transports: list[ZmqTransport] = []
    yield transports
    for transport in transports:
        transport.close()


WAYS: dict[str, Callable[[], ZmqTransport]] = {
    "direct": ZmqTransport,
    "ipc": lambda: ZmqTransport(directly=False),
    "tcp": lambda: ZmqTransport(ipc=False),
}
"""Makes a transport, for each way that messages may take."""


def receive(transport: ZmqTransport, count: int, *senders: ZmqTransport) -> list[list[Any]]:
    """Receives so many messages, while the senders do what their leaders would."""
    got: list[list[Any]] = []
    end = time.monotonic() + 20
    while len(got) < count:
        assert time.monotonic() < end, f"only {len(got)} of {count} messages came"
        for sender in senders:
            assert sender.receive(0) is None
        frames = transport.receive(0.01 if senders else 5.0)
        assert senders or frames is not None, f"only {len(got)} of {count} messages came"
        if frames is not None:
            got.append(frames)
    return got


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_closing_with_messages_for_a_dead_peer_takes_no_longer_than_its_linger() -> None:
    transport = ZmqTransport()
    transport.dial(1, [f"tcp://127.0.0.1:{closed_port()}"])
    for i in range(1000):
        transport.send(1, [bytes(10_000), bytes(100_000)] if i % 100 == 0 else [b"x" * 1000])
    with raised_within(5):
        transport.close(0.3)


def test_a_transport_that_could_not_be_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no descriptors left")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(zeromq, "Waker", fail)
    for _ in range(5):
        with raised_within(5), pytest.raises(OSError, match="no descriptors"):
            ZmqTransport()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("way", WAYS)
def test_a_burst_to_a_peer_that_does_not_receive_neither_blocks_nor_loses(way: str, made: list[ZmqTransport]) -> None:
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)
    with raised_within(60):
        for i in range(10_000):
            here.send(1, [b"m" + i.to_bytes(4, "little") + bytes(2000)])
    assert [int.from_bytes(frames[0][1:5], "little") for frames in receive(there, 10_000, here)] == list(range(10_000))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_wakes_the_leader_learns_when_all_is_taken_in_though_messages_came_as_well(
    way: str, made: list[ZmqTransport]
) -> None:
    """It once waited for an end of a wait without a message: a dead worker that others sent beside stayed unknown."""
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)
    here.send(1, [b"first"])
    assert receive(there, 1) == [[b"first"]]
    until(lambda: there.receive(0) is None)
    here.send(1, [b"second"])
    until(lambda: there._poll(0))  # it lies there
    before = there.emptied
    there.wake()
    got: list[Any] = []
    with raised_within(20):
        while there.emptied == before:
            got.append(there.receive(60))
    assert [frames for frames in got if frames is not None] == [[b"second"]]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_way_to_the_same_peer_carries_messages_as_the_first_did(way: str, made: list[ZmqTransport]) -> None:
    """An identity used twice would be ignored by the other side's ROUTER, while the first one lives."""
    here, again, there = (WAYS[way]() for _ in range(3))
    made += [here, again, there]
    for transport in (here, again, here):
        transport.dial(1, there.endpoints)
        transport.send(1, [b"x"])
        assert receive(there, 1) == [[b"x"]]


@pytest.mark.parametrize("way", WAYS)
def test_many_threads_and_finalizers_may_send_through_one_socket(way: str, made: list[ZmqTransport]) -> None:
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)

    class Last:
        def __del__(self) -> None:
            here.send(1, [b"last"])

    def work(number: int) -> None:
        for i in range(500):
            here.send(1, [bytes([number]), i.to_bytes(4, "little")])
            if i % 10 == 0:
                last = Last()
                last.me = last  # type: ignore[attr-defined]  # for the collector to find, wherever it runs

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    got = receive(there, 6 * 550, here)
    for number in range(6):
        mine = [int.from_bytes(f[1], "little") for f in got if len(f) == 2 and f[0] == bytes([number])]
        assert mine == list(range(500))
    assert sum(frames == [b"last"] for frames in got) == 300


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_who_sends_does_not_wait_for_who_flushes_and_is_not_overtaken(way: str, made: list[ZmqTransport]) -> None:
    """Who flushes may be in a finalizer that waits for what who sends has: its peer's lock."""
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)
    on_its_way: Any = here._ways[1]
    peer, entered, sent = threading.RLock(), threading.Event(), threading.Event()

    class Way(dealer.DealerWay):
        __slots__ = ()

        def _flush(self) -> None:
            if threading.current_thread().name == "who flushes" and not entered.is_set():
                entered.set()  # a finalizer, which sends to the same peer
                assert peer.acquire(timeout=20)
                peer.release()
            dealer.DealerWay._flush(self)

    on_its_way.__class__ = Way
    large, changed = os.urandom(300_000), bytearray(b"a" * 1000)

    def send() -> None:
        with peer:
            assert entered.wait(20)
            here.send(1, [b"1"])
            here.send(1, [b"2", changed], lasting=False)
            changed[:] = b"b" * 1000
            here.send(1, [b"3"], LATER)
            here.send(1, [b"4", large])
            sent.set()

    here.send(1, [b"0"], LATER)
    threads = [threading.Thread(target=send), threading.Thread(target=here.flush, name="who flushes")]
    for thread in threads:
        thread.start()
    assert sent.wait(10), "who sends waits for who flushes"
    for thread in threads:
        thread.join(20)
    here.send(1, [b"5"])
    got = receive(there, 6)
    assert [bytes(frames[0]) for frames in got] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert (bytes(got[2][1]), bytes(got[4][1])) == (b"a" * 1000, large)


def send_and_flush_at_once(here: ZmqTransport, there: ZmqTransport, each: int) -> None:
    """Has two threads send so many messages each to a peer, and a third flush; all arrive, in order."""
    door, over, count = threading.Lock(), threading.Event(), itertools.count()
    interval = sys.getswitchinterval()

    def flush() -> None:
        while not over.is_set():
            here.flush()

    def send() -> None:
        for _ in range(each):
            with door:
                number = next(count)
                here.send(1, [b"%d" % number], (AT_ONCE, LATER)[number % 3 == 0])

    threads = [threading.Thread(target=run) for run in (flush, send, send)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        got = receive(there, 2 * each, here)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(20)
    assert [int(bytes(frames[0])) for frames in got] == list(range(2 * each))


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_threads_that_send_and_flush_at_once_lose_nothing(way: str, made: list[ZmqTransport]) -> None:
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)
    send_and_flush_at_once(here, there, 1000)


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_finalizer_may_dial_as_the_first_way_is_dialled(
    where: str, made: list[ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = WAYS["tcp"](), WAYS["tcp"]()
    made += [here, there]
    poller: Any = here._lookout._poller

    class Interrupted(Waker):
        def __init__(self) -> None:
            super().__init__()
            finalize()

    class Poller(zmq.Poller):
        def register(self, *what: Any) -> None:
            if where == "within":
                finalize()
            zmq.Poller.register(self, *what)

    def finalize() -> None:
        monkeypatch.undo()
        poller.__class__ = zmq.Poller
        here.dial(2, there.endpoints)
        here.send(2, [b"2"])

    def dial() -> None:
        here.dial(1, there.endpoints)
        here.send(1, [b"1"])

    if where == "before":
        monkeypatch.setattr(lookout, "Waker", Interrupted)
    poller.__class__ = Poller
    thread = threading.Thread(target=dial, daemon=True)
    thread.start()
    thread.join(10)
    if thread.is_alive():
        made.remove(here)
    assert not thread.is_alive(), "a thread waits for itself"
    assert sorted(receive(there, 2)) == [[b"1"], [b"2"]]


def test_what_came_late_is_moved_though_a_finalizer_sends_in_the_midst_of_it() -> None:
    late, held = deque(range(5)), [-1]
    moving = taken_out(late)
    held.append(late.popleft())  # the finalizer's
    with pytest.raises(IndexError):
        held.extend(moving)
    assert (held, len(late)) == ([-1, 0, 1, 2, 3, 4], 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_frame_is_copied_when_it_is_sent_unless_it_is_large(way: str, made: list[ZmqTransport]) -> None:
    here, there = WAYS[way](), WAYS[way]()
    made += [here, there]
    here.dial(1, there.endpoints)
    for in_the_midst_of_a_send in (False, True):
        small = bytearray(b"a" * (COPIED_BELOW - 1))
        if isinstance(on_its_way := here._ways[1], dealer.DealerWay):
            on_its_way.busy = in_the_midst_of_a_send
        here.send(1, [b"head", small])
        small[:] = b"b" * len(small)
        if isinstance(on_its_way, dealer.DealerWay):
            on_its_way.busy = False
        here.flush()
        ((_, frame),) = receive(there, 1, here)
        assert bytes(frame) == b"a" * len(small)
    large = bytearray(b"a" * (1 << 20))
    here.send(1, [b"head", large])
    ((_, frame),) = receive(there, 1, here)
    assert bytes(frame) == bytes(large)
    frame[0] = 99  # what has come is writable, and is nobody else's
    assert large[0] == ord("a")


def test_a_long_path_for_temporary_files_costs_no_more_than_the_fast_way(
    made: list[ZmqTransport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_base(_: Any) -> str:
        raise OSError("no folder for temporary files has a path short enough")

    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for base_is_writable in (True, False):
        if not base_is_writable:  # nor is /tmp to be had
            monkeypatch.setattr(folders, "_base", no_base)
        here, there = ZmqTransport(), ZmqTransport()
        made += [here, there]
        assert [e.partition(":")[0] for e in there.endpoints] == (["unix", "tcp"] if base_is_writable else ["tcp"])
        assert all(len(e) < 108 for e in there.endpoints)
        here.dial(1, there.endpoints)
        here.send(1, [b"x"])
        assert receive(there, 1) == [[b"x"]]


def test_an_ipv6_address_is_bound_and_dialled_in_brackets(made: list[ZmqTransport]) -> None:
    try:
        here, there = ZmqTransport("::1", ipc=False), ZmqTransport("::1", ipc=False)
    except zmq.ZMQError:
        pytest.skip("this host has no IPv6")
    made += [here, there]
    assert there.endpoints[0].startswith("tcp://[::1]:")
    here.dial(1, there.endpoints)
    here.send(1, [b"x"])
    assert receive(there, 1) == [[b"x"]]


def test_sockets_of_a_host_without_ipv6_do_not_ask_for_it(made: list[ZmqTransport]) -> None:
    here, there = ZmqTransport(ipc=False), ZmqTransport(ipc=False)
    made += [here, there]
    here.dial(1, there.endpoints)
    assert here._inbox.getsockopt(zmq.IPV6) == 0
    way = here._ways[1]
    assert isinstance(way, dealer.DealerWay)
    assert way.dealer.getsockopt(zmq.IPV6) == 0


@pytest.mark.parametrize("master", ["::1", "[::1]", "127.0.0.1", "localhost"])
def test_the_address_to_bind_is_that_by_which_rank_0_is_reached(master: str) -> None:
    assert address.local_address(master) in ("::1", "127.0.0.1")


def test_a_host_without_ipv6_takes_the_other_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("2001:db8::1", 9, 0, 0)),  # of documentation: no route to it
            (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 9)),
        ]

    plain = socket.socket

    def without_ipv6(family: int = -1, *args: Any, **kwargs: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError("Address family not supported by protocol")
        return plain(family, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr(socket, "socket", without_ipv6)
    assert address.local_address("somewhere") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: both()[:1])
    with pytest.raises(RendezvousError, match=r"not supported.*MASTER_ADDR"):
        address.local_address("somewhere")


def test_no_event_loop_reads_a_socket() -> None:
    """ZeroMQ's descriptor tells once: two readers of it lose wake-ups. Only `_poll` waits, on the leader (ZQ8)."""
    for path in PACKAGE.rglob("*.py"):
        if path == Path(zeromq.__file__):
            assert path.read_text().count("zmq.FD") == 1
            continue
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"asyncio", "FD", "EVENTS"}, path
        assert "zmq.asyncio" not in path.read_text(), path
