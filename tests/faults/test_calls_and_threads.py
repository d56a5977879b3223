"""Faults that users of such systems have met in calls, threads and memory; `docs/faults.md` tells them."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import actorrpc as rpc
from actorrpc.wire import folders
from tests.worlds import World, inside, run_world, until

OTHER = "worker1"


def give(value: Any) -> Any:
    return value


def add(a: int, b: int) -> int:
    return a + b


# -- 16: nested calls


def outer(caller: str, x: int) -> int:
    return int(rpc.rpc_sync(caller, inner, args=(rpc.get_worker_info().name, x)))


def inner(caller: str, x: int) -> int:
    return int(rpc.rpc_sync(caller, add, args=(x, 1)))


def test_calls_that_call_back_and_forth_finish_with_as_few_threads_as_can_be() -> None:
    """Three deep, more at once than there are threads, in both directions."""

    def program(rank: int) -> None:
        me, other = f"worker{rank}", f"worker{1 - rank}"
        futures = [rpc.rpc_async(other, outer, args=(me, i), timeout=20) for i in range(8)]
        assert [future.wait() for future in futures] == list(range(1, 9))

    for threads in (1, 2):
        run_world(program, 2, options={"num_worker_threads": threads})


# -- 19: a callee that dies


def test_a_call_without_a_limit_ends_when_its_callee_dies() -> None:
    def calls() -> dict[str, Callable[[], Any]]:
        ref: rpc.RRef[list[Any]] = rpc.remote(1, list, timeout=0)
        ref.to_here()
        waiting = rpc.rpc_async(1, signal.pause, timeout=0)
        kept = rpc.remote(1, signal.pause, timeout=0)
        return {
            "rpc_sync": lambda: rpc.rpc_sync(1, signal.pause, timeout=0),
            "rpc_async": lambda: waiting.wait(),
            "wait(0)": lambda: waiting.wait(0),
            "then": lambda: waiting.then(lambda done: done.wait()).wait(),
            "remote": lambda: kept.to_here(timeout=0),
            "to_here": lambda: ref.to_here(timeout=0),
            "proxy": lambda: ref.rpc_sync(timeout=0).copy(),
        }

    def program() -> None:
        seen: dict[str, BaseException] = {}

        def attempt(name: str, call: Callable[[], Any]) -> None:
            try:
                call()
            except BaseException as e:
                seen[name] = e

        made = calls()
        early = {name: made[name] for name in ("rpc_sync", "rpc_async", "wait(0)", "then", "remote")}
        threads = [threading.Thread(target=attempt, args=one) for one in early.items()]
        for thread in threads:
            thread.start()
        os.kill(rpc.rpc_sync(1, os.getpid), signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        for name in ("to_here", "proxy"):
            attempt(name, made[name])
        assert {name: type(error) for name, error in seen.items()} == dict.fromkeys(made, rpc.WorkerLostError)
        assert all("worker1" in str(error) for error in seen.values())

    with World(2) as world:
        world.let_die(1)
        world.on(0, program)


# -- 22: results that do not travel, in a reference's method


class Trouble:
    """Gives what cannot be written or read."""

    def lock(self) -> Any:
        return threading.Lock()

    def generator(self) -> Any:
        yield 1

    def unreadable(self) -> Any:
        return Unreadable()

    def error_with_lock(self) -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def two_for_one(self) -> None:
        raise TwoForOne(1, 2)


class TwoForOne(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("it does not load")


@inside
def test_what_does_not_travel_from_a_method_is_an_error_and_never_a_timeout() -> None:
    ref = rpc.remote(OTHER, Trouble)
    calls: list[Callable[[str], Any]] = [
        lambda name: getattr(ref.rpc_sync(timeout=0), name)(),
        lambda name: getattr(ref.rpc_async(timeout=0), name)().wait(),
        lambda name: getattr(ref.remote(timeout=0), name)().to_here(timeout=0),
    ]
    for call in calls:
        for name, kind, words in (
            ("lock", rpc.SerializationError, "lock"),
            ("generator", rpc.SerializationError, "generator"),
            ("unreadable", rpc.DeserializationError, "it does not load"),
            ("error_with_lock", ValueError, "with a lock"),
            ("two_for_one", TwoForOne, "1 and 2"),
        ):
            with pytest.raises(kind, match=words):
                call(name)


# -- 26: one argument for many


class Weighty:
    """Counts how often it is written."""

    written = 0

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def __getstate__(self) -> Any:
        Weighty.written += 1
        return {"weights": self.weights}


class Taker:
    def __init__(self) -> None:
        self.total = 0.0

    def take(self, what: Weighty, by: float = 1.0) -> float:
        self.total += float(what.weights.sum()) * by
        return self.total


@inside
def test_what_a_group_is_called_with_is_written_once_for_all_members() -> None:
    group = rpc.Group([rpc.remote(to, Taker) for to in (OTHER, 0) * 4])
    what = Weighty(torch.ones(1 << 18))
    calls: list[Callable[[], Any]] = [
        lambda: group.rpc_sync().take(what),
        lambda: group.rpc_async().take(what, by=1.0).wait(),
        lambda: [one.wait() for _, one in group.rpc_async().take(what).as_completed()],
    ]
    for n, call in enumerate(calls, start=1):
        before = Weighty.written
        assert call() == [n * (1 << 18)] * 8
        assert Weighty.written - before == 1
    before = Weighty.written
    for ref in group:
        ref.rpc_sync().take(what)
    assert Weighty.written - before == 8  # so the count does see what goes one by one


# -- 29: memory


def resident() -> int:
    """Returns this process' resident memory in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def megabyte(n: int) -> torch.Tensor:
    return torch.full((1 << 18,), n, dtype=torch.float32)


@pytest.mark.slow
def test_memory_stays_as_it_is_over_two_thousand_large_replies_to_several_threads() -> None:
    def program(rank: int) -> None:
        if rank:
            return
        wrong: list[int] = []

        def caller(k: int, count: int) -> None:
            for n in range(count):
                if n % 2:
                    got = rpc.rpc_sync(1, megabyte, args=(n,))
                else:
                    got = rpc.rpc_async(1, megabyte, args=(n,)).wait()
                if got[0] != n or got[-1] != n:
                    wrong.append(n)

        def crowd(count: int) -> None:
            threads = [threading.Thread(target=caller, args=(k, count)) for k in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        crowd(50)
        before = resident(), rpc.rpc_sync(1, resident)
        for _ in range(4):
            crowd(63)
        after = resident(), rpc.rpc_sync(1, resident)
        assert not wrong
        assert after[0] - before[0] < 150, (before, after)
        assert after[1] - before[1] < 150, (before, after)

    run_world(program, 2, timeout=110)


KEPT: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> int:
    KEPT[:] = [tensor]
    return tensor.untyped_storage().nbytes()


def view(n: int) -> torch.Tensor:
    huge = torch.zeros(1 << 22)  # 16 MiB
    huge[n : n + 1000] = n
    return huge[n : n + 1000]


@inside
def test_a_view_of_a_huge_tensor_costs_what_is_viewed_both_ways() -> None:
    for to in (OTHER, 0):
        for n in (0, 5000):
            assert rpc.rpc_sync(to, keep, args=(view(n),)) < 8192
            got = rpc.rpc_sync(to, view, args=(n,))
            assert got.untyped_storage().nbytes() < 8192
            assert set(got.tolist()) == {n}
            mine = rpc.remote(to, view, args=(n,)).to_here()
            assert to == 0 or mine.untyped_storage().nbytes() < 8192


# -- 30: latency


def test_small_messages_do_not_wait_for_others_on_their_way_over_tcp() -> None:
    """Nagle's algorithm is off on every connection, whoever opened it."""

    def program(rank: int, folder: str) -> int:
        folders.AVAILABLE = False  # no ipc
        options = rpc.RpcBackendOptions(init_method=f"file://{folder}/m")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        for _ in range(10):
            rpc.rpc_sync(1 - rank, give, args=(1,))
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        copy.getpeername()
                        found.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            except OSError:  # gone meanwhile, or one that listens
                pass
        rpc.shutdown()
        assert all(found), found
        return len(found)

    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, program, rank, world.folder)
        assert min(world.results()) >= 2  # out and in


# -- 31: collectives


INSIDE = threading.Event()


def is_inside() -> bool:
    return INSIDE.is_set()


def within(what: Callable[[], Any]) -> None:
    INSIDE.set()
    what()
    INSIDE.clear()


def test_calls_are_answered_by_workers_that_sit_in_a_collective() -> None:
    def program(rank: int, folder: str) -> float:
        def collective(what: Callable[[], Any]) -> None:
            if rank == 1:
                for to in (0, 2):
                    until(functools.partial(rpc.rpc_sync, to, is_inside, timeout=15))
                    assert [rpc.rpc_sync(to, add, args=(n, 1), timeout=15) for n in range(20)] == list(range(1, 21))
                    assert rpc.rpc_sync(to, outer, args=("worker1", 1), timeout=15) == 2  # which calls out itself
            within(what)

        store = f"file://{folder}/group"
        collective(lambda: dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3))
        total = torch.ones(2)
        dist.barrier()  # nobody asks about the next one before all have left this one
        collective(lambda: dist.all_reduce(total))
        dist.barrier()
        dist.destroy_process_group()
        return float(total[0])

    with World(3, check=False) as world:
        for rank in range(3):
            world.start(rank, program, rank, world.folder)
        assert world.results() == [3.0] * 3


# -- 60: many threads on one connection


def many_threads(rank: int, threads: int, calls: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if rank:
        return
    errors: list[BaseException] = []

    def caller(k: int) -> None:
        try:
            for i in range(calls):
                assert rpc.rpc_sync(1, add, args=(k, i), timeout=20) == k + i
        except BaseException as e:
            errors.append(e)

    crowd = [threading.Thread(target=caller, args=(k,)) for k in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert not errors, errors


def test_no_reply_is_lost_between_threads_that_share_a_peer_on_one_core() -> None:
    """A reply that another thread took, and whose waiter slept on, would show as a timeout."""
    run_world(many_threads, 2, args=(32, 20))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_reply_is_lost_between_threads_in_long_on_one_core() -> None:
    run_world(many_threads, 2, args=(32, 10_000), timeout=360)


# -- 18: finalizers


class Told:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.count = 0

    def close(self) -> None:
        self.count += 1

    def closed(self) -> int:
        return self.count


class Client:
    """Garbage in a cycle, whose finalizer tells an object of another worker, and calls it without waiting."""

    def __init__(self, ref: rpc.RRef[Told]) -> None:
        self.ref, self.me = ref, self

    def __del__(self) -> None:
        self.ref.tell().close()
        self.ref.rpc_async().close()


@inside
def test_finalizers_that_call_may_run_in_the_midst_of_any_call() -> None:
    """The collector runs them wherever it likes: also in a send, under its locks."""
    ref, thresholds = rpc.remote(OTHER, Told), gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for i in range(1500):
            Client(ref)
            rpc.rpc_async(OTHER, give, args=({"a": [i]},))
            if i % 100 == 0:
                rpc.rpc_sync(OTHER, give, args=(1,), timeout=20)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    until(lambda: ref.rpc_sync(timeout=20).closed() == 3000)
