"""The outbox without a worker: finalizers that send in the midst of a send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.runtime.handling import NO_CONTEXT
from actorrpc.runtime.outbox import Outbox
from actorrpc.runtime.peers import Peer, Record
from actorrpc.wire.envelope import Kind, unpack

Sent = dict[int, list[tuple[int, int]]]


def made(during: Callable[[Outbox, int, int], None]) -> tuple[Outbox, Sent]:
    """Makes an outbox, and what it has sent to its peers 1 and 2: the messages' own numbers and those in the sequence.

    Arguments:
        during: called, in a send, with the outbox, the peer and the message's number.
    """
    sent: Sent = {1: [], 2: []}

    def send(to: int, frames: Any, *_: Any) -> None:
        head = unpack(memoryview(frames[0]))
        sent[to].append((head.call, head.sequence))
        during(outbox, to, head.call)

    peers = {number: Peer(Record(number, f"{number}", 1, (), "here", "", 0)) for number in sent}
    for peer in peers.values():
        peer.dialled = True
    worker: Any = SimpleNamespace(
        open=True, id=0, record=SimpleNamespace(incarnation=1, name="0"), peers=peers,
        transport=SimpleNamespace(send=send),
    )  # fmt: skip
    outbox = Outbox(worker)
    return outbox, sent


def tell(outbox: Outbox, to: int, number: int) -> None:
    outbox.emit(to, (Kind.TELL, 0, number, 0, 0, 0, NO_CONTEXT, float("inf")), (b"x",))


def test_finalizers_that_send_across_in_the_midst_of_two_sends_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)

    def during(outbox: Outbox, to: int, number: int) -> None:
        if number < 10:  # what it interrupts; each thread has its peer's lock now
            both.wait(20)
            tell(outbox, 3 - to, 10 + number)

    outbox, sent = made(during)
    threads = [threading.Thread(target=tell, args=(outbox, n, n), daemon=True) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "two threads wait for each other"
    assert sent == {1: [(1, 1), (12, 2)], 2: [(2, 1), (11, 2)]}


@pytest.mark.parametrize("overtaking", [False, True])
def test_what_a_finalizer_left_to_who_has_just_sent_leaves_at_once(
    overtaking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lock:
        """A peer's lock, as its holder has looked for the last time, and not let go yet."""

        def __init__(self) -> None:
            self.plain, self.releases = threading.RLock(), 0

        def acquire(self, blocking: bool = True) -> bool:
            return self.plain.acquire(blocking)

        def release(self) -> None:
            self.releases += 1
            if self.releases == 1:
                other = threading.Thread(target=tell, args=(outbox, 2, 2))  # its finalizer tells 1
                other.start()
                other.join(20)
            self.plain.release()
            if self.releases == 1 and overtaking:
                other = threading.Thread(target=tell, args=(outbox, 1, 3))
                other.start()
                other.join(20)

    def during(outbox: Outbox, to: int, number: int) -> None:
        if number == 2:
            tell(outbox, 1, 12)

    outbox, sent = made(during)
    monkeypatch.setattr(outbox._worker.peers[1], "lock", Lock())
    tell(outbox, 1, 1)
    assert sent == {1: [(1, 1), (12, 2), *([(3, 3)] if overtaking else [])], 2: [(2, 1)]}


def test_a_message_with_a_trace_is_no_finalizers() -> None:
    """It waits for the lock like any other: who sends it is to hear of it where it cannot leave."""
    waits, over = threading.Event(), threading.Event()

    class Trace:
        tensors = (1,)

        def __enter__(self) -> None:
            waits.set()

        def __exit__(self, *_: object) -> None:
            over.set()

    def during(outbox: Outbox, to: int, number: int) -> None:
        if number == 1:
            thread.start()
            assert waits.wait(20)
            assert not over.wait(0.1)

    def send() -> None:
        outbox.emit(1, (Kind.TELL, 0, 2, 0, 0, 0, NO_CONTEXT, float("inf")), (b"x",), trace=Trace())  # type: ignore[arg-type]

    outbox, sent = made(during)
    thread = threading.Thread(target=send)
    tell(outbox, 1, 1)
    thread.join(20)
    assert over.is_set()
    assert sent[1] == [(1, 1), (2, 2)]
