"""What ZeroMQ could spoil, seen from worlds of real processes: stopped and killed peers, forks, long paths, IPv6."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.worlds import Plan, World, inside, join, raised_within, run_world, stop, until

MANY = 10_000
NO_LIMITS = {"max_pending": 10**9, "max_pending_bytes": 2**40}
"""For what is to pile up in the transport; a sender would wait before that."""
ROOT = str(Path(__file__).parents[1])


class Counter(rpc.Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int, load: bytes = b"") -> int:
        self.seen.append(number)
        return number

    def all(self) -> list[int]:
        return self.seen


def pid_of(rank: int) -> int:
    return rpc.rpc_sync(rank, os.getpid)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still in the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@inside
def test_a_stopped_peer_misses_none_of_ten_thousand_messages() -> None:
    counter = Counter.spawn(1)
    with stopped(pid_of(1)), raised_within(60):  # nor does it hold the sender up
        for i in range(MANY):
            counter.tell().add(i, bytes(1000))
    assert counter.rpc_sync().all() == list(range(MANY))


@inside
def test_a_stopped_caller_misses_no_answer() -> None:
    def count_to(n: int) -> list[int]:
        counter = Counter.spawn(0)
        futures = [counter.rpc_async().add(i) for i in range(n)]
        return [f.wait() for f in futures]

    pid = pid_of(1)
    future = rpc.rpc_async(1, count_to, args=(3000,))
    for _ in range(20):  # wherever it is in its work
        with stopped(pid):
            time.sleep(0.01)
        time.sleep(0.005)
    assert future.wait() == list(range(3000))


def test_a_peer_that_is_killed_while_messages_pile_up_for_it_blocks_nobody() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            time.sleep(30)
        counter, pid = Counter.spawn(1), pid_of(1)
        stop(pid)
        with raised_within(60):
            for i in range(2000):
                counter.tell().add(i, bytes(20_000))
            pending = [counter.rpc_async().add(i, bytes(200_000)) for i in range(50)]
            os.kill(pid, signal.SIGKILL)
            for future in pending:
                with pytest.raises(rpc.WorkerLostError, match="worker1"):
                    future.wait()
        with raised_within(10):
            rpc.shutdown()

    with World(2, strict=False, options=NO_LIMITS) as world:
        world.start(1, program, 1)
        world.on(0, program, 0)


def test_a_program_ends_though_messages_for_a_stopped_peer_have_not_left() -> None:
    def program(_: int) -> None:
        counter, pid = Counter.spawn(1), pid_of(1)
        with stopped(pid):
            for i in range(100):
                counter.tell().add(i, bytes(1_000_000))
            with raised_within(15):
                rpc.shutdown(graceful=False)

    with World(2, strict=False, options=NO_LIMITS) as world:
        world.on(0, program, 0)


def test_a_new_process_may_take_the_name_and_rank_of_one_that_was_killed() -> None:
    """The store is left over, and rank 0 still knows the dead one: nothing goes to it, or comes from it."""

    def old(plan: Plan) -> None:
        join(1, plan)
        time.sleep(60)

    def new(plan: Plan) -> int:
        def joined() -> bool:
            try:
                join(1, plan)
            except rpc.RendezvousError as e:
                if "two workers have rank 1" not in str(e):  # as long as the old world is there
                    raise
                return False
            return True

        until(joined)
        rpc.shutdown()
        return os.getpid()

    def survivor(plan: Plan) -> int:
        join(0, plan)
        first = pid_of(1)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            rpc.rpc_sync(1, time.sleep, args=(30,))
        rpc.shutdown(graceful=False)
        join(0, plan)
        second = pid_of(1)
        assert second != first
        rpc.shutdown()
        return second

    with World(3, join=False, strict=False) as world:
        plan = Plan(**{**vars(world.plan), "size": 2})
        world.start(0, survivor, plan)
        world.start(1, old, plan)
        until(lambda: not psutil.pid_exists(world.pid(1)) or psutil.Process(world.pid(1)).status() == "zombie", 20)
        world.start(2, new, plan)
        assert world.result(0) == world.result(2)


def test_a_second_worker_of_a_name_is_refused_with_an_answer_and_harms_nobody() -> None:
    def member(rank: int, plan: Plan) -> None:
        join(rank, plan)
        if rank == 1:
            Path(f"{plan.folder}/joined").touch()
            until(lambda: os.path.exists(f"{plan.folder}/refused"), 20)
        rpc.rpc_sync(1 - rank, abs, args=(-1,))
        rpc.shutdown()

    def late(plan: Plan) -> None:
        with raised_within(15), pytest.raises(rpc.RendezvousError, match="two workers have rank 1"):
            join(1, plan)
        Path(f"{plan.folder}/refused").touch()

    with World(3, join=False) as world:
        plan = Plan(**{**vars(world.plan), "size": 2})
        for rank in range(2):
            world.start(rank, member, rank, plan)
        until(lambda: os.path.exists(f"{plan.folder}/joined"), 20)
        world.start(2, late, plan)
        world.results()


@inside
def test_threads_finalizers_and_signal_handlers_may_all_send_at_once() -> None:
    counter = Counter.spawn(1)
    sent, done = [0] * 3, threading.Event()

    class Last:
        def __init__(self) -> None:
            self.me = self  # for the collector to find, in whatever thread and line

        def __del__(self) -> None:
            sent[0] += 1
            counter.tell().add(0)

    def ring(*_: Any) -> None:
        sent[1] += 1
        counter.tell().add(1)

    def work() -> None:
        for _ in range(150):
            Last()
            assert rpc.rpc_sync(1, abs, args=(-1,)) == 1
            sent[2] += 1  # under the GIL, and only a bound
        gc.collect()

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert rpc.rpc_sync(1, abs, args=(-2,)) == 2
    finally:
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        done.set()
    gc.collect()
    seen = until(lambda: [c for c in [counter.rpc_sync().all()] if len(c) == sent[0] + sent[1]])[0]
    assert seen.count(1) == sent[1] > 0
    assert seen.count(0) == sent[0] >= 1


FORKS = """
    import os, sys
    import actorrpc as rpc

    folder = sys.argv[1]
    def options(name): return rpc.RpcBackendOptions(init_method=f"file://{folder}/{name}", init_timeout=30)
    rpc.init_rpc("parent", rank=0, world_size=1, rpc_backend_options=options("parent"))
    ref = rpc.remote("parent", dict, kwargs={"a": 1})
    def check(): assert ref.to_here() == {"a": 1} and rpc.rpc_sync("parent", abs, args=(-1,)) == 1
    check()
    for kind in ("normal", "exception", "exit", "world"):
        if not (pid := os.fork()):
            if kind == "exception":
                raise ValueError("on purpose")
            if kind == "exit":
                sys.exit(7)
            if kind == "world":
                rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=options("child"))
                assert rpc.rpc_sync("child", abs, args=(-2,)) == 2
                rpc.shutdown()
            break
        print(kind, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        check()
    else:
        rpc.shutdown()
        print("fine")
"""


def test_a_forked_child_ends_in_any_way_and_may_have_a_world_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(textwrap.dedent(FORKS))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["normal", "0", "exception", "1", "exit", "7", "world", "0", "fine"], done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "ValueError: on purpose" in done.stderr
    assert "Assertion failed" not in done.stderr


def test_a_world_lives_with_a_long_path_for_temporary_files(tmp_path: Path) -> None:
    def program(rank: int, plan: Plan) -> list[str]:
        tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path / ("x" * 150))
        os.makedirs(tempfile.tempdir, exist_ok=True)
        join(rank, plan)
        assert rpc.rpc_sync(1 - rank, torch.add, args=(torch.ones(50_000), 1)).sum() == 100_000
        endpoints = list(session.current().worker.record.endpoints)
        rpc.shutdown()
        return endpoints

    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, program, rank, world.plan)
        for endpoints in world.results():
            assert endpoints[-1].startswith("tcp://")
            assert all(len(e) < 108 for e in endpoints)


@pytest.mark.parametrize("by", ["tcp", "env"])
def test_a_world_meets_at_an_ipv6_address(by: str) -> None:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
            port = int(s.getsockname()[1])
    except OSError:
        pytest.skip("this host has no IPv6")

    def program(rank: int) -> str:
        assert rpc.rpc_sync(1 - rank, abs, args=(-1,)) == 1
        return session.current().worker.record.endpoints[-1]

    def with_environment(rank: int, plan: Plan) -> str:
        os.environ.update(MASTER_ADDR="::1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        join(rank, plan)
        endpoint = program(rank)
        rpc.shutdown()
        return endpoint

    if by == "tcp":
        endpoints = run_world(program, 2, init_method=f"tcp://[::1]:{port}")
    else:
        with World(2, join=False, init_method="env://") as world:
            for rank in range(2):
                world.start(rank, with_environment, rank, world.plan)
            endpoints = world.results()
    assert all(e.startswith("tcp://[::1]:") for e in endpoints)


@pytest.mark.slow
def test_large_results_leave_no_memory_behind(pair: World) -> None:
    def resident(_: Any = None) -> int:
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    def fetch(count: int) -> None:
        def work() -> None:
            for _ in range(count):
                assert rpc.rpc_sync(1, torch.zeros, args=(2_500_000,)).numel() == 2_500_000  # 10 MB
                rpc.rpc_sync(1, lambda x: x[:10], args=(torch.zeros(1000, 1000)[5],))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pair.on(0, fetch, 10)  # what is kept for ever is there
    before = [pair.on(rank, resident) for rank in range(2)]
    pair.on(0, fetch, 60)
    after = [pair.on(rank, resident) for rank in range(2)]
    for a, b in zip(before, after, strict=True):
        assert b - a < 200 << 20, f"{(b - a) >> 20} MiB more after 2.4 GB of results"
