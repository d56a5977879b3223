"""References between real processes: use, the four ways in which they travel, exact counts, and their end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.worlds import World, counts, inside, no_references, raised_within, run_world, until, until_counts

OTHER = "worker1"


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> Any:
        self.value, old = value, self.value
        return old

    def where(self) -> str:
        return rpc.get_worker_info().name

    def slow(self, seconds: float) -> Any:
        time.sleep(seconds)
        return self.value

    def fail(self) -> None:
        raise LookupError("in the box")

    def __len__(self) -> int:
        return 3


KEPT: dict[str, Any] = {}
"""What a worker of these tests holds on to between calls."""


def keep(name: str, value: Any) -> None:
    KEPT[name] = value


def kept(name: str) -> Any:
    return KEPT[name]


def drop(name: str) -> None:
    KEPT.pop(name, None)


def use(ref: Any, value: Any = 0) -> Any:
    return ref.to_here() + value


def owned_there() -> dict[str, int]:
    return counts()


def make_ref(value: Any) -> Any:
    return rpc.RRef(value)


def hand_back(ref: Any) -> Any:
    return ref


def is_mine(ref: Any) -> bool:
    return bool(ref.is_owner())


def slow_box(seconds: float, value: Any) -> Box:
    time.sleep(seconds)
    return Box(value)


def fails(text: str, seconds: float = 0.0) -> None:
    time.sleep(seconds)
    raise LookupError(text)


def unreadable() -> Any:
    return Unreadable()


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("it does not load")


def there(key: str) -> int:
    """The owner's count, over there."""
    return int(rpc.rpc_sync(OTHER, owned_there)[key])


# -- use


@inside
def test_an_own_value_has_all_of_a_references_properties() -> None:
    value = [1, 2]
    ref = rpc.RRef(value)
    assert ref.is_owner()
    assert ref.confirmed_by_owner()
    assert ref.owner() == rpc.get_worker_info()
    assert ref.owner_name() == "worker0"
    assert ref.local_value() is value
    assert ref.to_here() is value
    assert ref.rpc_sync().index(2) == 1
    assert ref.rpc_async().index(2).wait() == 1
    assert ref.remote().index(2).to_here() == 1
    assert "OwnerRRef" in repr(ref)


@inside
def test_a_remote_object_is_used_through_the_three_proxies() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert not ref.is_owner()
    assert ref.owner() == rpc.get_worker_info(OTHER)
    assert ref.owner_name() == OTHER
    assert ref.rpc_sync().get() == 5
    assert ref.confirmed_by_owner()
    assert ref.rpc_sync().where() == OTHER
    assert ref.rpc_async().set(value=6).wait() == 5
    assert ref.remote().get().to_here() == 6
    assert ref.to_here().value == 6
    assert ref.rpc_sync().__len__() == 3
    assert "UserRRef" in repr(ref)
    with pytest.raises(RuntimeError, match=r"Call it on owner .*worker1.*to_here"):
        ref.local_value()
    with pytest.raises(LookupError, match="in the box"):
        ref.rpc_sync().fail()
    with pytest.raises(LookupError, match="in the box"):
        ref.remote().fail().to_here()
    with pytest.raises(AttributeError, match="nothing_such"):
        ref.rpc_sync().nothing_such()  # type: ignore[attr-defined]


@inside
def test_to_here_copies_and_the_owner_keeps_its_own() -> None:
    ref = rpc.remote(OTHER, torch.zeros, args=(3,))
    copy_here = ref.to_here()
    copy_here.add_(1)
    assert ref.to_here().tolist() == [0, 0, 0]
    ref.rpc_sync().add_(2)
    assert ref.to_here().tolist() == [2, 2, 2]


@inside
def test_a_reference_to_oneself_is_an_owners() -> None:
    ref = rpc.remote(0, Box, args=([1],))
    assert ref.is_owner()
    assert ref.rpc_sync().get() == [1]
    assert ref.local_value() is ref.to_here()
    with pytest.raises(LookupError, match="here"):
        rpc.remote(0, fails, args=("here",)).local_value()
    slow = rpc.remote(0, slow_box, args=(0.1, 2))
    assert slow.local_value().value == 2


@inside
def test_a_proxys_method_may_be_sent_as_a_function() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert rpc.rpc_sync(ref.owner(), ref.rpc_sync().get) == 5
    assert rpc.rpc_async(ref.owner(), ref.rpc_sync().set, args=(7,)).wait() == 5
    assert rpc.rpc_async(0, ref.rpc_sync().get).wait() == 7
    mine = rpc.RRef(Box(3))
    assert rpc.rpc_sync(OTHER, mine.rpc_sync().set, args=(4,)) == 3
    assert mine.local_value().value == 4


@inside
def test_every_use_takes_a_timeout() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    ref.rpc_sync().get()
    with raised_within(2):
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            ref.rpc_sync(timeout=0.05).slow(0.3)
        slow = ref.remote(timeout=0.05).slow(0.3)
        time.sleep(0.1)
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            slow.to_here()
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            rpc.remote(OTHER, slow_box, args=(0.3, 1)).to_here(timeout=0.05)
    assert ref.rpc_sync(timeout=0).get() == 5


# -- the four ways to travel, and counts


@inside
def test_user_to_owner_as_return_value_is_counted_once() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert ref.rpc_sync().get() == 5
    assert (there("owned"), there("forks")) == (1, 1)
    assert counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0}
    del ref
    no_references()
    until(lambda: there("owned") == 0)


@inside
def test_user_to_owner_as_argument_is_the_owners_own_reference() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert rpc.rpc_sync(OTHER, is_mine, args=(ref,))
    rpc.rpc_sync(OTHER, keep, args=("ref", ref))
    until_counts(lambda: counts()["children"] == 0)
    assert there("forks") == 1
    del ref
    no_references()
    until(lambda: there("owned") == 0)
    assert rpc.rpc_sync(OTHER, kept, args=("ref",)).rpc_sync().get() == 5  # the owner still has it
    rpc.rpc_sync(OTHER, drop, args=("ref",))
    no_references()


@inside
def test_owner_to_user_is_counted_until_the_user_drops_it() -> None:
    ref = rpc.RRef(Box(5))
    assert counts()["owned"] == 0
    rpc.rpc_sync(OTHER, keep, args=("ref", ref))
    assert (counts()["owned"], counts()["forks"]) == (1, 1)
    gone = weakref.ref(ref.local_value())
    del ref
    gc.collect()
    assert gone() is not None  # the user holds it
    rpc.rpc_sync(OTHER, drop, args=("ref",))
    until(lambda: gone() is None)
    no_references()


@inside
def test_owner_to_user_as_return_value() -> None:
    ref = rpc.rpc_sync(OTHER, make_ref, args=(5,))
    assert not ref.is_owner()
    assert ref.confirmed_by_owner()
    assert ref.to_here() == 5
    assert (there("owned"), there("forks")) == (1, 1)


@inside
def test_a_reference_that_comes_home_is_the_same_object() -> None:
    value = Box(1)
    ref = rpc.RRef(value)
    back = rpc.rpc_sync(OTHER, hand_back, args=(ref,))
    assert back.is_owner()
    assert back.local_value() is value


def test_user_to_user_hands_over_a_reference_that_outlives_the_sender() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            ref = rpc.remote(1, Box, args=(5,))
            rpc.rpc_sync(2, keep, args=("ref", ref))
            until(lambda: rpc.rpc_sync(1, owned_there)["forks"] == 2)
            until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0})
            del ref
            no_references()
            until(lambda: rpc.rpc_sync(1, owned_there)["forks"] == 1)
            back = rpc.rpc_sync(2, kept, args=("ref",))
            assert back.rpc_sync().get() == 5
            assert rpc.rpc_sync(2, use, args=(rpc.remote(1, int, args=(3,)), 4)) == 7
            rpc.rpc_sync(2, drop, args=("ref",))
            assert back.owner_name() == "worker1"
            assert back.rpc_sync().get() == 5
            del back
            for to in range(3):
                rpc.rpc_sync(to, no_references)

    run_world(program, 3)


def test_a_reference_travels_round_in_circles_and_its_counts_return_to_zero() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            for hops in range(12):
                ref = rpc.remote(1, Box, args=(hops,))
                assert rpc.rpc_sync(1, travel, args=(ref, hops, 3)) == hops
                del ref
            for to in range(3):
                rpc.rpc_sync(to, no_references)

    run_world(program, 3)


def travel(ref: Any, hops: int, size: int) -> Any:
    if hops == 0:
        return ref.rpc_sync().get()
    after = (rpc.get_worker_info().id + 1) % size
    return rpc.rpc_sync(after, travel, args=(ref, hops - 1, size))


@inside
def test_references_travel_in_containers_results_and_closures() -> None:
    ref = rpc.remote(OTHER, int, args=(5,))
    mine = rpc.RRef(7)
    assert rpc.rpc_sync(OTHER, lambda: ref.to_here() + mine.to_here()) == 12
    got = rpc.rpc_sync(OTHER, hand_back, args=({"a": [ref, (mine,)], "b": ref},))
    assert got["a"][0].to_here() == 5
    assert got["a"][1][0].is_owner()
    assert got["b"].to_here() == 5
    assert rpc.remote(OTHER, hand_back, args=([ref],)).to_here()[0].to_here() == 5
    assert rpc.rpc_sync(0, hand_back, args=([ref, mine],))[1].local_value() == 7


@inside
def test_a_thousand_references_dropped_leave_no_counts() -> None:
    for _ in range(2):
        refs = [rpc.remote(OTHER, int, args=(i,)) for i in range(500)]
        assert refs[499].to_here() == 499
        assert there("owned") == 500
        del refs
        no_references()
        until(lambda: there("owned") == 0)
    for i in range(500):
        rpc.remote(OTHER, int, args=(i,))  # dropped before it can be confirmed
        rpc.remote(0, int, args=(i,))
    no_references()
    until(lambda: there("owned") == 0)


@pytest.mark.slow
def test_ten_thousand_references_dropped_leave_no_counts() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            refs = [rpc.remote(1, int, args=(i,)) for i in range(10_000)]
            assert refs[-1].to_here() == 9_999
            del refs
            no_references(30)
            until(lambda: rpc.rpc_sync(1, owned_there)["owned"] == 0, 30)

    run_world(program, 2, timeout=90)


@pytest.mark.slow
def test_a_hundred_thousand_references_in_rings_and_out_of_them_leave_nothing() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            before = rpc.rpc_sync(1, places)
            for _ in range(20):
                refs: list[Any] = [rpc.remote(1, int, args=(i,)) for i in range(4_900)]
                assert refs[-1].to_here() == 4_899
                for i in range(100):
                    refs = [rpc.remote(1, int, args=(i,)), rpc.RRef(i)]
                    refs.append(refs)
                del refs
            no_references(30)
            until(lambda: rpc.rpc_sync(1, places) == before, 30)

    run_world(program, 2, timeout=110)


def places() -> tuple[int, int]:
    """How many objects and how many actors this worker knows."""
    objects = session.current().objects
    return len(objects._entries), objects.worker.statistics()["actors"]


# -- the end of a reference


@inside
def test_references_in_cyclic_garbage_are_released() -> None:
    for _ in range(20):
        ring: list[Any] = [rpc.remote(OTHER, Box, args=(1,))]
        ring.append(ring)
        del ring
    gc.collect()
    no_references()
    until(lambda: there("owned") == 0)


def garbage(n: int) -> None:
    for i in range(n):
        ring: list[Any] = [rpc.remote("worker0", int, args=(i,)), rpc.RRef(i)]
        ring.append(ring)
        del ring
        if i % 7 == 0:
            gc.collect()


class Collecting:
    """Runs the collector while it is written and while it is read."""

    def __reduce__(self) -> Any:
        gc.collect()
        return collected, ()


def collected() -> int:
    gc.collect()
    return 1


@inside
def test_the_collector_may_run_in_handlers_and_in_pickling_under_load() -> None:
    futures = [rpc.rpc_async(OTHER, garbage, args=(20,)) for _ in range(20)]
    for _ in range(50):
        ring: list[Any] = [rpc.remote(OTHER, int, args=(1,))]
        ring.append(ring)
        del ring
        assert rpc.rpc_sync(OTHER, hand_back, args=(Collecting(),)) == 1
    for future in futures:
        future.wait()
    rpc.rpc_sync(OTHER, no_references)


@inside
def test_a_reference_in_a_message_that_cannot_be_written_is_taken_back() -> None:
    mine, ref = rpc.RRef(1), rpc.remote(OTHER, int, args=(5,))
    for verb in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(rpc.SerializationError):
            verb(OTHER, hand_back, args=([mine, ref, threading.Lock()],))
    assert counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0}
    assert ref.to_here() == 5
    assert counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0}


@inside
def test_a_reference_in_a_message_that_cannot_be_read_is_taken_back() -> None:
    mine, ref = rpc.RRef(1), rpc.remote(OTHER, int, args=(5,))
    for args in ([mine, ref, Unreadable()], [Unreadable(), mine, ref]):
        with pytest.raises(rpc.DeserializationError):
            rpc.rpc_sync(OTHER, hand_back, args=(args,))
        with pytest.raises(rpc.DeserializationError):
            rpc.remote(OTHER, hand_back, args=(args,)).to_here()
    until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0})


def test_references_in_a_request_that_goes_again_by_value_are_counted_once() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            main = sys.modules["__main__"]
            known_here_alone = types.FunctionType(add_all.__code__, {"__builtins__": __builtins__}, "known_here_alone")
            known_here_alone.__module__, known_here_alone.__qualname__ = "__main__", "known_here_alone"
            main.known_here_alone = known_here_alone  # type: ignore[attr-defined]
            mine, far = rpc.RRef(1), rpc.remote(1, int, args=(5,))
            peer = session.current().worker.peers[1]
            assert rpc.rpc_sync(1, known_here_alone, args=([mine, far],)) == 6
            assert peer.by_value  # it did go twice
            peer.by_value = False
            assert rpc.remote(1, known_here_alone, args=([mine, far],)).to_here() == 6
            until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0})
            del mine, far
            for to in range(2):
                rpc.rpc_sync(to, no_references)

    run_world(program, 2)


def add_all(refs: Any) -> Any:
    return sum(ref.to_here() for ref in refs)


def refs_and_what_does_not_load() -> Any:
    return [rpc.RRef(1), Unreadable(), rpc.RRef(2)]


@inside
def test_a_reference_in_a_result_that_cannot_be_read_is_taken_back() -> None:
    with pytest.raises(rpc.DeserializationError):
        rpc.rpc_sync(OTHER, refs_and_what_does_not_load)
    until(lambda: there("owned") == 0, 2)


def late_refs(ref: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return [rpc.RRef(1), ref]


@inside
def test_references_in_a_late_answer_are_released() -> None:
    mine, ref = rpc.RRef(1), rpc.remote(OTHER, int, args=(5,))
    for one in (mine, ref):
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync(OTHER, late_refs, args=(one, 0.2), timeout=0.05)
    time.sleep(0.2)
    until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0})
    until(lambda: there("owned") == 1)


@inside
def test_references_in_a_call_that_timed_out_before_it_began_are_released() -> None:
    mine, ref = rpc.RRef(1), rpc.remote(OTHER, int, args=(5,))
    ref.to_here()
    busy = [rpc.rpc_async(OTHER, time.sleep, args=(0.2,)) for _ in range(64)]
    with pytest.raises(rpc.RPCTimeoutError):
        rpc.rpc_sync(OTHER, hand_back, args=([mine, ref],), timeout=0.02)
    late = rpc.remote(OTHER, hand_back, args=([mine, ref],), timeout=0.02)
    for future in busy:
        future.wait()
    with pytest.raises(rpc.RPCTimeoutError):
        late.to_here()
    until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 2, "children": 0})
    del late
    gc.collect()
    until_counts(lambda: counts() == {"owned": 0, "forks": 0, "held": 1, "children": 0})
    until(lambda: there("owned") == 1)


# -- creation that fails, is late, or is still under way


@inside
def test_an_error_of_creation_is_raised_at_the_next_use() -> None:
    for to in (OTHER, 0):
        for wait in (0.0, 0.15):
            uses: list[Callable[[Any], Any]] = [
                lambda ref: ref.to_here(),
                lambda ref: ref.rpc_sync().get(),
                lambda ref: ref.remote().get().to_here(),
            ]
            for attempt in uses if wait else [*uses, lambda ref: rpc.rpc_sync(OTHER, use, args=(ref,))]:
                ref = rpc.remote(to, fails, args=("no box", 0.05))
                time.sleep(wait)
                with raised_within(2), pytest.raises(LookupError, match="no box"):
                    attempt(ref)
                del ref


@inside
def test_an_error_of_creation_that_is_known_is_raised_when_the_reference_is_passed_on() -> None:
    ref = rpc.remote(OTHER, fails, args=("no box",))
    with pytest.raises(LookupError, match="no box"):
        ref.to_here()
    until(ref.confirmed_by_owner)  # the answer to the use may overtake that to the creation
    with pytest.raises(LookupError, match="no box"):
        rpc.rpc_sync(OTHER, hand_back, args=(ref,))


@inside
def test_a_timeout_of_creation_is_raised_at_the_next_use() -> None:
    ref = rpc.remote(OTHER, slow_box, args=(0.4, 5), timeout=0.05)
    time.sleep(0.1)
    with raised_within(0.2):
        for verb in ("rpc_sync", "rpc_async", "remote"):
            with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
                getattr(ref, verb)().get()
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            ref.to_here()
    time.sleep(0.4)


def test_a_third_worker_may_use_a_reference_whose_object_is_still_being_made() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            for _ in range(3):
                ref = rpc.remote(1, slow_box, args=(0.2, 5))
                assert not ref.confirmed_by_owner()
                future = rpc.rpc_async(2, get_of, args=(ref,))
                del ref
                assert future.wait() == 5
            bad = rpc.remote(1, fails, args=("no box", 0.2))
            with pytest.raises(LookupError, match="no box"):
                rpc.rpc_sync(2, get_of, args=(bad,))
            del bad
            for to in range(3):
                rpc.rpc_sync(to, no_references)

    run_world(program, 3)


def get_of(ref: Any) -> Any:
    return ref.rpc_sync().get()


@inside
def test_creation_results_that_cannot_be_written_stay_with_their_owner() -> None:
    ref = rpc.remote(OTHER, threading.Lock)
    assert ref.rpc_sync().acquire() is True
    with pytest.raises(rpc.SerializationError, match="lock"):
        ref.to_here()
    unloadable = rpc.remote(OTHER, unreadable)
    with pytest.raises(rpc.DeserializationError):
        unloadable.to_here()


@inside
def test_a_reference_that_timed_out_cannot_be_passed_on() -> None:
    ref = rpc.remote(OTHER, slow_box, args=(0.2, 5), timeout=0.05)
    time.sleep(0.1)
    try:
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            rpc.rpc_sync(OTHER, hand_back, args=(ref,))
    finally:
        time.sleep(0.2)


@inside
def test_an_error_that_a_future_raised_keeps_nothing_alive() -> None:
    def use_and_fail(ref: Any) -> None:
        future = ref.rpc_async().fail()
        with pytest.raises(LookupError):
            future.wait()

    use_and_fail(rpc.remote(OTHER, Box, args=(1,)))
    time.sleep(0.1)
    no_references(2)


@inside
def test_a_reference_can_be_written_into_calls_only() -> None:
    for ref in (rpc.RRef(1), rpc.remote(OTHER, int)):
        for attempt in (
            lambda ref=ref: pickle.dumps(ref),
            lambda ref=ref: copy.copy(ref),
            lambda ref=ref: copy.deepcopy([ref]),
            lambda ref=ref: torch.save(ref, BytesIO()),
        ):
            with pytest.raises(RuntimeError, match="RPC"):
                attempt()


# -- the end of a holder


@pytest.mark.parametrize("way", ["SIGKILL", "os._exit", "shutdown(graceful=False)"])
def test_what_a_dead_process_held_is_released(way: str) -> None:
    with World(3) as world:
        world.on(0, hold_for_others)
        world.on(2, keep_from, 0)
        assert world.on(0, counts)["forks"] == 2
        if way == "SIGKILL":
            world.kill(2)
        elif way == "shutdown(graceful=False)":
            world.on(2, rpc.shutdown, False)
        else:
            world.let_die(2)
            world.on(0, ask_to_exit, 2)
        world.on(0, until_forks, 1)
        assert world.on(1, get_kept) == 5
        world.on(1, drop, "ref")
        world.on(0, no_longer_held)


def hold_for_others() -> None:
    KEPT["box"] = rpc.RRef(Box(5))
    rpc.rpc_sync(1, keep, args=("ref", KEPT["box"]))


def keep_from(owner: int) -> None:
    keep("ref", rpc.rpc_sync(owner, kept, args=("box",)))


def ask_to_exit(rank: int) -> None:
    with pytest.raises(rpc.WorkerLostError):
        rpc.rpc_sync(rank, os._exit, args=(3,), timeout=10)


def until_forks(n: int) -> None:
    until_counts(lambda: counts()["forks"] == n)


def get_kept() -> Any:
    return KEPT["ref"].rpc_sync().get()


def no_longer_held() -> None:
    gone = weakref.ref(KEPT.pop("box").local_value())
    until(lambda: gone() is None)
    no_references()


def test_a_reference_to_a_dead_owner_says_who_died() -> None:
    def look() -> None:
        uses: list[Callable[[Any], Any]] = [
            lambda ref: ref.to_here(),
            lambda ref: ref.rpc_sync().get(),
            lambda ref: ref.remote().get().to_here(),
            lambda ref: rpc.rpc_sync(2, use, args=(ref,)),
        ]
        for attempt in uses:
            with raised_within(3), pytest.raises(rpc.WorkerLostError, match="worker1"):
                attempt(kept("far"))
        drop("far")
        no_references()

    def prepare() -> None:
        keep("far", rpc.remote(1, Box, args=(1,)))
        kept("far").to_here()
        until(kept("far").confirmed_by_owner)

    with World(3) as world:
        world.on(0, prepare)
        world.kill(1)
        world.on(0, until_lost, 1)
        world.on(0, look)
        world.on(2, no_references)


def until_lost(rank: int) -> None:
    def lost() -> bool:
        try:
            rpc.rpc_sync(rank, abs, args=(1,))
        except rpc.WorkerLostError:
            return True
        return False

    until(lost)
