"""Processes that are forked beside a running world: they are no workers, are told so, and do their parent no harm."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import actorrpc as rpc
from tests.forking import in_child
from tests.worlds import World


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def up(self, by: int = 1) -> int:
        self.count += by
        return self.count


def try_all_in_children(other: rpc.RRef[Counter]) -> list[str]:
    """Tries in children all that could send; returns what was not refused as it should be."""
    actions: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc.rpc_sync(1, abs, args=(-3,), timeout=4),
        "rpc_async": lambda: rpc.rpc_async(1, abs, args=(-3,), timeout=4).wait(),
        "remote": lambda: rpc.remote(1, Counter),
        "a reference": lambda: other.rpc_sync(timeout=4).up(),
        "to_here": lambda: other.to_here(timeout=4),
        "RRef": lambda: rpc.RRef(3),
        "get_worker_info": lambda: rpc.get_worker_info(),
    }
    wrong = []
    for name, action in actions.items():
        got = in_child(action)
        if not (got.startswith("NotAMemberError") and "forked" in got):
            wrong.append(f"{name}: {got}")
    if (got := in_child(rpc.shutdown)) != "returned None":
        wrong.append(f"shutdown: {got}")
    return wrong


def fork_and_go_on(to: int) -> list[str]:
    """In a main program or a handler: forks again and again, and calls between."""
    other = rpc.remote(to, Counter)
    assert other.rpc_sync().up() == 1
    wrong = try_all_in_children(other)
    assert other.rpc_sync(timeout=10).up() == 2, "what children tried has counted"
    assert rpc.rpc_sync(to, abs, args=(-7,), timeout=10) == 7
    return wrong


def test_children_of_a_program_are_refused_and_it_goes_on(pair: World) -> None:
    assert pair.on(0, fork_and_go_on, 1) == []


def test_children_of_a_handler_are_refused_and_it_goes_on(pair: World) -> None:
    def call() -> Any:
        return rpc.rpc_sync(1, fork_and_go_on, args=(0,), timeout=60)

    assert pair.on(0, call) == []


class Numbers(Dataset[Any]):
    """Numbers, with what came of a call in the process that loads them."""

    def __init__(self, to: int) -> None:
        self.to = to

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[int, str]:
        try:
            return i, str(rpc.rpc_sync(self.to, abs, args=(-i,), timeout=4))
        except rpc.NotAMemberError as e:
            return i, str(e)


def load(to: int) -> int:
    """Loads with forked workers, and calls between the batches; returns how many numbers came."""
    seen = []
    for _ in range(2):
        loader = DataLoader(Numbers(to), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for numbers, texts in loader:
            assert all("forked" in text for text in texts), texts
            total = rpc.rpc_sync(to, torch.sum, args=(numbers,), timeout=10)
            assert total == numbers.sum()
            seen += numbers.tolist()
    return len(seen)


class Progress:
    """Whether the loading has ended."""

    ended = False


def has_ended() -> bool:
    return Progress.ended


def load_and_say_so(to: int) -> int:
    Progress.ended = False
    try:
        return load(to)
    finally:
        Progress.ended = True


def call_meanwhile(to: int) -> int:
    """Calls without a pause until the loading has ended; returns how often."""
    times = 1
    while not rpc.rpc_sync(to, has_ended, timeout=10):
        times += 1
    return times


def test_dataloader_workers_beside_a_running_world(pair: World) -> None:
    pair.start(0, load_and_say_so, 1)
    assert pair.on(1, call_meanwhile, 0) > 1
    assert pair.result(0) == 64


# -- children that come back


class Forker(rpc.Actor):
    """Forks, and lets the child come back from where it was forked."""

    def __init__(self) -> None:
        self.children: list[int] = []

    def fork(self) -> int:
        return self._child(os.fork())

    async def fork_awaiting(self) -> int:
        await asyncio.sleep(0)
        return self._child(os.fork())

    async def fork_in_a_task(self) -> int:
        async def one() -> int:
            await asyncio.sleep(0)
            return self._child(os.fork())

        return await asyncio.create_task(one())

    async def fork_in_a_thread(self) -> int:
        return self._child(await asyncio.to_thread(os.fork))

    def fork_and_fail(self) -> int:
        if not os.fork():
            raise ValueError("in the child")
        return 1

    def fork_and_wait(self, future: Any = None) -> int:
        future = rpc.rpc_async(0, abs, args=(-1,))
        pid = os.fork()
        assert future.wait() == 1
        return self._child(pid)

    def _child(self, pid: int) -> int:
        print("said", end="")
        self.children.append(pid)
        return pid

    def up(self) -> int:
        return len(self.children)


HOWS = ["fork", "fork_awaiting", "fork_in_a_task", "fork_in_a_thread", "fork_and_fail", "fork_and_wait"]


def have_it_forked(how: str) -> list[int]:
    """Returns what each fork came to; the world's calls go on meanwhile."""
    forker = Forker.spawn(1)
    pids = []
    for _ in range(5):
        pids.append(getattr(forker.rpc_sync(timeout=20), how)())
        for n in range(40):
            assert rpc.rpc_sync(1, abs, args=(-n,), timeout=20) == n
    return pids


def children_left() -> list[int]:
    """Waits for the children of this process that have ended; returns those that have not."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.05)
            continue
        return []
    return [child.pid for child in psutil.Process().children()]


@pytest.mark.parametrize("how", HOWS)
def test_a_child_that_comes_back_from_a_handler_ends_and_takes_no_message_of_its_parents(
    how: str, pair: World
) -> None:
    def mark_the_exit() -> None:
        atexit.register(os.write, 2, b"the code of the end was run")

    pair.on(1, mark_the_exit)
    assert all(pid > 0 for pid in pair.on(0, have_it_forked, how))
    assert pair.on(1, children_left) == []
    assert pair.on(1, rpc.rpc_sync, 0, abs, (-1,)) == 1
    assert "the code of the end was run" not in pair._stderr(1)


@pytest.mark.slow
def test_a_child_that_comes_back_from_a_launched_main_reports_nothing(tmp_path: Any) -> None:
    class Driver(rpc.Actor):
        def main(self) -> str:
            pid = os.fork()
            if pid == 0:
                return "the child's"
            os.waitpid(pid, 0)
            names: list[str] = self.world.helper.rpc_sync().name_of()
            return names[0]

    class Helper(rpc.Actor):
        def name_of(self) -> str:
            return self.name

    assert rpc.launch(driver=Driver, helper=Helper) == "helper:0"
