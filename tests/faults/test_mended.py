"""Faults of this library's own that were found and mended, and must not come back."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from tests.worlds import World, inside, no_references, run_world, until

OTHER = "worker1"


class Member:
    """Counts its calls; fails on demand."""

    def __init__(self) -> None:
        self.calls = 0

    def ping(self, *_: Any) -> int:
        self.calls += 1
        return self.calls

    def count(self) -> int:
        return self.calls

    def boom(self) -> None:
        raise KeyError("boom")


# -- groups with a dead member


def test_a_group_with_a_dead_member_calls_the_others_and_names_the_dead_one() -> None:
    def program() -> None:
        group = rpc.Group([rpc.remote(to, Member) for to in (0, 1, 2)])
        assert group.rpc_sync().ping() == [1, 1, 1]
        os.kill(rpc.rpc_sync(1, os.getpid), signal.SIGKILL)
        until(lambda: lost(1))
        failing: dict[str, Callable[[], Any]] = {
            "rpc_sync": lambda: group.rpc_sync().ping(),
            "rpc_async": lambda: group.rpc_async().ping().wait(),
            "scatter": lambda: group.scatter([1, 2, 3]).rpc_sync().ping(),
            "tell": lambda: group.tell().ping(),
            "remote": lambda: group.remote().ping(),
        }
        calls = 1
        for name, call in failing.items():
            with pytest.raises(rpc.GroupError, match=r"1 of 3 members.*worker1: WorkerLostError") as caught:
                call()
            assert [who for who, _ in caught.value.errors] == ["worker1"], name
            calls += 1
            until(lambda n=calls: [group[i].rpc_sync().count() for i in (0, 2)] == [n, n])  # type: ignore[misc]
        assert group.any().rpc_sync().ping() == calls + 1
        assert group.any().scatter([1, 2, 3]).rpc_sync().ping() >= calls + 1
        outcomes = [one for _, one in group.rpc_async().ping().as_completed()]
        assert len(outcomes) == 3
        with pytest.raises(rpc.GroupError, match="1 of 1 members"):
            group[1:2].any().rpc_sync().ping()

    with World(3) as world:
        world.let_die(1)
        world.on(0, program)


def lost(rank: int) -> bool:
    try:
        rpc.rpc_sync(rank, abs, args=(1,))
    except rpc.WorkerLostError:
        return True
    return False


# -- errors that keep things alive, where the collector does not see it


def failing_group_call() -> None:
    group = rpc.Group([rpc.remote(OTHER, Member) for _ in range(2)])
    with pytest.raises(rpc.GroupError):
        group.rpc_sync().boom()


def failing_group_call_whose_members_are_waited_for() -> None:
    group = rpc.Group([rpc.remote(OTHER, Member) for _ in range(2)])
    future = group.rpc_async().boom()
    for _, one in future.as_completed():
        with pytest.raises(KeyError):
            one.wait()
    with pytest.raises(rpc.GroupError):
        future.wait()


def failing_call_with_a_child_that_knows_its_reference() -> None:
    ref = rpc.remote(OTHER, Member)
    child = ref.rpc_async().boom().then(lambda done, ref=ref: done.value())
    with pytest.raises(KeyError):
        child.wait()


def failing_call_with_a_callback_that_knows_its_reference() -> None:
    ref = rpc.remote(OTHER, Member)
    future = ref.rpc_async().boom()
    future.add_done_callback(lambda done, ref=ref: None)
    with pytest.raises(KeyError):
        future.wait()


def failing_call_that_has_its_reference() -> None:
    ref = rpc.remote(OTHER, Member)
    future = ref.rpc_async().boom()
    future.ref = ref
    with pytest.raises(KeyError):
        future.wait()


def failing_future_of_ones_own() -> None:
    future: Any = rpc.Future()
    future.ref = rpc.remote(OTHER, Member)
    future.set_exception(ValueError("of one's own"))
    with pytest.raises(ValueError, match="own"):
        future.wait()


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("it does not load")


class Unreadables:
    def get(self) -> Unreadable:
        return Unreadable()


def failing_call_whose_answer_cannot_be_read() -> None:
    """Its error has a cause of this side's own, with a traceback."""
    ref = rpc.remote(OTHER, Unreadables)
    future = ref.rpc_async().get()
    with pytest.raises(rpc.DeserializationError):
        future.wait()


FAILING: list[Callable[[], None]] = [
    failing_group_call,
    failing_group_call_whose_members_are_waited_for,
    failing_call_with_a_child_that_knows_its_reference,
    failing_call_with_a_callback_that_knows_its_reference,
    failing_call_that_has_its_reference,
    failing_future_of_ones_own,
    failing_call_whose_answer_cannot_be_read,
]


@pytest.mark.parametrize("fail", FAILING)
def test_a_future_that_failed_keeps_neither_itself_nor_its_references_alive(
    pair: World, fail: Callable[[], None]
) -> None:
    pair.on(0, fails_and_is_gone, fail)


def fails_and_is_gone(fail: Callable[[], None]) -> None:
    for _ in range(5):
        fail()
    no_references(5)

    def none_left() -> bool:
        gc.collect()
        return not any(isinstance(o, rpc.Future) and o.done() for o in gc.get_objects())

    until(none_left)


# -- the pool


EVENT = threading.Event()


def block(seconds: float) -> bool:
    return EVENT.wait(seconds)


def release() -> None:
    EVENT.set()


def nothing() -> None:
    pass


def busy_with_callbacks() -> None:
    """Has callbacks end all the time, until `release` was called."""
    until(lambda: rpc.rpc_async(1, nothing).then(lambda done: EVENT.is_set()).wait(), 30)


def test_handlers_that_stand_still_are_seen_to_though_callbacks_go_on() -> None:
    """Two that wait unseen for a third, which is queued behind them, on a worker of two threads."""

    def program(rank: int) -> None:
        if rank == 0:
            busy_with_callbacks()
        else:
            futures: list[rpc.Future[Any]] = [rpc.rpc_async(0, block, args=(5,)) for _ in range(2)]
            futures.append(rpc.rpc_async(0, release))
            assert [future.wait() for future in futures] == [True, True, None]

    run_world(program, 2, options={"num_worker_threads": 2})


# -- sends within sends


@inside
def test_what_a_finalizer_sends_in_the_midst_of_a_send_follows_it() -> None:
    """The collector may run it while a message is numbered and on its way: the order of numbers is kept."""
    ref = rpc.remote(OTHER, Member)
    ref.rpc_sync().count()
    transport: Any = session.current().worker.transport
    send, garbage = transport.send, list[int]()

    def sending(*args: Any) -> None:
        if garbage:
            garbage.pop()
            ref.tell().ping()
        send(*args)

    transport.send = sending
    try:
        for n in range(50):
            garbage.append(n)
            assert rpc.rpc_sync(OTHER, abs, args=(-n,), timeout=10) == n
    finally:
        del transport.send
    until(lambda: ref.rpc_sync().count() == 50)
