"""Workers that die, stop, are cut off, or only seem to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import actorrpc as rpc
from tests.chaos.load import LIMIT, Ended, call_many, leave, leave_all, one_call, pid_of_fork, runs
from tests.chaos.table import Tally, cases, heartbeat, needs_heartbeats
from tests.hosts import Hosts, why_no_slow_links, why_not
from tests.joining import join_world
from tests.worlds import World, until
from tests.worlds import stop as stop_process

_SILENCE = 2.0


def in_mid_call(
    tally: Tally, world: World, begin: Callable[[], float | None], caller: int = 0, callee: int = 1, other: int = 2,
    running: int = 8,
) -> None:  # fmt: skip
    """Has a worker make twenty calls, and something happen once so many run; then sees what came of them, of one
    call more, and of the other workers' calls. `begin` may return when it has happened to the caller.
    """
    path, to = f"{world.folder}/runs", world.plan.names[callee]
    world.timeout = LIMIT + 60
    world.start(caller, call_many, to, path, [f"call {n}" for n in range(20)], 600.0)
    until(lambda: len(runs(path)) >= running, 30)
    began = time.monotonic()
    began = begin() or began
    tally.check(world.result(caller), runs(path), began)
    if other in world._busy:  # it has called as well
        tally.check(world.result(other), runs(path), began)
    later: Ended = world.on(caller, one_call, to, path, "after", 30.0)
    if later.kind != "lost":
        tally.is_lost(f"a call after it ended with {later.kind}: {later.text}")
    for a, b in ((caller, other), (other, caller)):
        well: Ended = world.on(a, one_call, world.plan.names[b], path, f"{a} to {b}", 30.0)
        if well.kind != "value":
            tally.is_lost(f"rank {a} called rank {b}, which is well: {well.kind}: {well.text}")
    tally.check_runs(runs(path))


@contextlib.contextmanager
def three(tally: Tally, **options: Any) -> Iterator[World]:
    """Three on one host; in every other case with a token, so that ZeroMQ carries their messages."""
    if tally.tried % 2 == 0:
        options["security_token"] = "of three"
    with World(3, strict=False, check=False, timeout=60, options=options) as world:
        yield world


@cases("sigkill", "SIGKILL of the callee in mid-call", 2, 20)
def sigkill(tally: Tally, chance: random.Random) -> None:
    with three(tally) as world:
        in_mid_call(tally, world, lambda: world.kill(1))
        leave_all(world, 0, 2)


@cases("sigkill-child", "SIGKILL of the callee, a forked child of which lives", 2, 20)
def sigkill_with_a_child(tally: Tally, chance: random.Random) -> None:
    with three(tally) as world:
        child = world.on(1, pid_of_fork)
        try:
            in_mid_call(tally, world, lambda: world.kill(1))
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
        leave_all(world, 0, 2)


@cases("crash", "crash of the callee: os._exit, os.abort, SIGSEGV", 3, 21)
def crash(tally: Tally, chance: random.Random) -> None:
    how = (_exit, os.abort, _fault)[tally.tried % 3]
    with three(tally) as world:
        world.let_die(1)
        in_mid_call(tally, world, lambda: world.on(2, _ask_to, how))
        leave_all(world, 0, 2)


def _exit() -> None:
    os._exit(3)


def _fault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _ask_to(crash: Callable[[], None]) -> None:
    with contextlib.suppress(rpc.WorkerLostError):
        rpc.rpc_sync("worker1", crash, timeout=LIMIT)


@cases("rank0", "SIGKILL of rank 0, to which calls go", 2, 20)
def rank_0(tally: Tally, chance: random.Random) -> None:
    with three(tally) as world:
        in_mid_call(tally, world, lambda: world.kill(0), caller=1, callee=0)
        for rank in (1, 2):
            world.start(rank, _leave_in_vain)
        for rank, said in enumerate([world.result(1), world.result(2)], 1):
            if "rank 0" not in said:
                tally.is_lost(f"rank {rank} in shutdown, without rank 0: {said}")


def _leave_in_vain() -> str:
    try:
        rpc.shutdown(timeout=30)
    except rpc.WorkerLostError as e:
        return str(e)
    except Exception as e:
        return f"{type(e).__name__}"
    return "no error"


@cases("sigstop", "SIGSTOP of the callee (heartbeats: 2 s)", 1, 10, needs=needs_heartbeats)
def sigstop(tally: Tally, chance: random.Random) -> None:
    with three(tally, **heartbeat(_SILENCE)) as world:
        path = f"{world.folder}/runs"

        def stop() -> None:
            stop_process(world.pid(1))
            world.start(2, call_many, "worker1", path, [f"late {n}" for n in range(5)])  # they lie in its inbox

        try:
            in_mid_call(tally, world, stop, running=20)
            before = runs(path)
        finally:
            os.kill(world.pid(1), signal.SIGCONT)
        time.sleep(1.0)  # for what lies in its inbox to be run, which must not be
        if extra := set(runs(path)) - set(before):
            tally.repeated += len(extra)
            tally.note(f"run after SIGCONT, though its caller was told that it is lost: {extra}")
        world.kill(1)
        leave_all(world, 0, 2)


# -- on several hosts


def needs_hosts_and_heartbeats() -> str:
    return needs_heartbeats() or why_not()


@contextlib.contextmanager
def on_three_hosts(**options: Any) -> Iterator[tuple[World, Hosts]]:
    with Hosts(3) as hosts, World(3, strict=False, check=False, timeout=60, join=False) as world:
        for rank in range(3):
            world.on(rank, hosts.enter, rank)
        for rank in range(3):
            world.start(rank, _come, rank, hosts.method, options)
        world.results()
        world.plan.names = [f"w{rank}" for rank in range(3)]
        yield world, hosts


def _come(rank: int, method: str, options: dict[str, Any]) -> None:
    join_world(rank, 3, method, **options)


@cases("cut", "the callee's host is cut off (heartbeats: 2 s)", 1, 10, needs=needs_hosts_and_heartbeats)
def cut(tally: Tally, chance: random.Random) -> None:
    with on_three_hosts(**heartbeat(_SILENCE)) as (world, hosts):

        def isolate() -> float:
            hosts.cut(1, 0)
            cut = time.monotonic()
            hosts.cut(1, 2)
            return cut

        in_mid_call(tally, world, isolate)
        hosts.heal()
        again: Ended = world.on(0, one_call, "w1", f"{world.folder}/runs", "healed", 20.0)
        if again.kind != "lost":
            tally.is_lost(f"lost is final, but after the cut was healed a call ended with {again.kind}")
        leave_all(world, 0, 1, 2)


@cases("killed-host", "SIGKILL of the callee on another host", 1, 10, needs=needs_hosts_and_heartbeats)
def killed_on_another_host(tally: Tally, chance: random.Random) -> None:
    with on_three_hosts(**heartbeat(_SILENCE)) as (world, _):
        in_mid_call(tally, world, lambda: world.kill(1))
        leave_all(world, 0, 2)


# -- not lost


def gil_holder(seconds: float) -> str:
    """Computes for so long that no other thread of its process gets on."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "done"


def _not_lost(call: Callable[[], Any]) -> Ended:
    began = time.monotonic()
    try:
        value = call()
    except Exception as e:
        return Ended("the call", type(e).__name__, str(e), began, time.monotonic())
    return Ended("the call", "value", repr(value), began, time.monotonic())


def _hold(seconds: float) -> Ended:
    return _not_lost(lambda: rpc.rpc_sync("worker1", gil_holder, args=(seconds,), timeout=seconds + 60))


def _hold_for(tally: Tally, seconds: float, options: dict[str, Any]) -> None:
    with three(tally, **options) as world:
        world.timeout = seconds + 90
        ended: Ended = world.on(0, _hold, seconds)
        if ended.kind != "value":
            tally.is_lost(f"the callee holds the GIL for {seconds:g} s and is taken for lost: {ended.text}")
        leave_all(world, 0, 1, 2)


@cases("gil", "the callee holds the GIL for 5 s (heartbeats: 2 s): not lost", 1, 3)
def gil(tally: Tally, chance: random.Random) -> None:
    _hold_for(tally, 5.0, heartbeat(_SILENCE))


@cases("gil-long", "the callee holds the GIL for 30 s: not lost", 0, 1)
def gil_long(tally: Tally, chance: random.Random) -> None:
    _hold_for(tally, 30.0, {})


def _send(megabytes: int, limit: float) -> Ended:
    tensor = torch.ones(megabytes << 18)
    return _not_lost(lambda: rpc.rpc_sync("w1", torch.numel, args=(tensor,), timeout=limit))


def _over_a_slow_link(tally: Tally, megabytes: int, speed: float, options: dict[str, Any]) -> None:
    with on_three_hosts(**options) as (world, hosts):
        world.timeout = megabytes / speed * 3 + 90
        hosts.throttle(0, speed)
        ended: Ended = world.on(0, _send, megabytes, world.timeout - 30)
        if ended.kind != "value":
            tally.is_lost(f"{megabytes} MiB over a link of {speed:g} MB/s, and the callee is lost: {ended.text}")
        tally.note(f"{megabytes} MiB at {speed:g} MB/s took {ended.at - ended.sent:.0f} s")
        for rank in range(3):
            world.start(rank, leave)
        world.results()


@cases("slow", "32 MiB over a link of 4 MB/s (heartbeats: 2 s): not lost", 1, 3, needs=why_no_slow_links)
def slow(tally: Tally, chance: random.Random) -> None:
    _over_a_slow_link(tally, 32, 4.0, heartbeat(_SILENCE))


@cases("slow-long", "1 GiB over a link of 10 MB/s: not lost", 0, 1, needs=why_no_slow_links)
def slow_long(tally: Tally, chance: random.Random) -> None:
    _over_a_slow_link(tally, 1024, 10.0, {})


