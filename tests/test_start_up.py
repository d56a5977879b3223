"""How workers come together under adverse conditions: many, late, beside process groups, after an earlier run."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import actorrpc as rpc
from actorrpc import session
from actorrpc.services.store import HintStore
from actorrpc.wire import folders
from tests.joining import add, fine, free_port, greet_all, join_and_fail, join_world, options
from tests.worlds import World, raised_within, run_processes

ROOT = Path(__file__).parents[1]


# -- many


def worlds_one_after_the_other(rank: int, size: int, rounds: int, threads: int, method: str) -> None:
    for _ in range(rounds):
        join_world(rank, size, method, num_worker_threads=threads, init_timeout=60)
        assert rpc.rpc_sync((rank + 1) % size, add, args=(rank, 1)) == rank + 1
        rpc.shutdown(timeout=60)


@pytest.mark.parametrize(
    "size, rounds",
    [
        (12, 2),
        pytest.param(32, 20, marks=pytest.mark.slow),
        pytest.param(64, 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_workers_on_one_host_meet_whatever_their_pools_size(
    size: int, rounds: int, threads: int, meet: str
) -> None:
    def program(rank: int) -> None:
        worlds_one_after_the_other(rank, size, rounds, threads, meet)

    fine(run_processes(program, size, timeout=100))


def two_worlds_of_which_rank_0_ends_the_first_slowly(rank: int, method: str) -> None:
    join_world(rank, 2, method)
    here = session.current()
    close = here.close

    def close_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(2.0)  # in which the other one greets it again
        close(*args, **kwargs)

    if rank == 0:
        here.close = close_late  # type: ignore[method-assign]
    rpc.shutdown(timeout=20)
    join_world(rank, 2, method)
    greet_all(rank, 2)
    rpc.shutdown(timeout=20)


def test_a_worker_that_comes_for_the_next_world_while_rank_0_still_leaves_the_last_one_waits(meet: str) -> None:
    fine(run_processes(two_worlds_of_which_rank_0_ends_the_first_slowly, 2, args=(meet,), timeout=90))


# -- late


@pytest.mark.slow
def test_workers_may_come_a_minute_apart_and_calls_have_a_limit_of_their_own() -> None:
    """Two worlds at once: in one rank 0 is the first to come, in the other the last."""

    def program(number: int, ports: list[int]) -> None:
        world, rank = divmod(number, 3)
        time.sleep((0, 22, 62)[rank if world == 0 else 2 - rank])
        join_world(rank, 3, f"tcp://127.0.0.1:{ports[world]}", init_timeout=90, rpc_timeout=5)
        greet_all(rank, 3)
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync((rank + 1) % 3, time.sleep, args=(0.5,), timeout=0.1)
        rpc.shutdown(timeout=30)

    fine(run_processes(program, 6, args=([free_port(), free_port()],), timeout=110))


def test_the_limit_for_joining_is_not_that_for_calls(meet: str) -> None:
    def program(rank: int) -> None:
        time.sleep(1.5 * rank)
        join_world(rank, 2, meet, rpc_timeout=0.5)
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2))


# -- one of them fails


@pytest.mark.parametrize("wrong", ["name", "options"])
def test_where_one_rank_cannot_begin_shutdown_does_nothing_and_the_others_are_told(wrong: str, meet: str) -> None:
    """As a program has it that calls shutdown in a `finally`."""

    def program(rank: int) -> str:
        try:
            if rank == 1:
                more: dict[str, Any] = {"num_worker_threads": 0} if wrong == "options" else {}
                with pytest.raises(ValueError, match="threads" if more else "name"):
                    rpc.init_rpc(
                        "w1" if more else "w 1", rank=1, world_size=2, rpc_backend_options=options(meet, **more)
                    )
                return ""
            return join_and_fail(0, "w0", 2, meet, 2.0)[0]
        finally:
            with raised_within(1):
                rpc.shutdown()
            assert not session.is_available()

    text = fine(run_processes(program, 2))[0]
    # A rank that found something wrong says so, but waits no longer than 2 s for somebody to hear it.
    assert "missing rank 1" in text or (wrong == "name" and "InvalidNameError: " in text and "'w 1'" in text), text


# -- beside a process group


@pytest.mark.parametrize("how", ["env", "tcp"])
@pytest.mark.parametrize("first", ["group", "rpc"])
def test_a_process_group_may_share_the_port_first_and_last(first: str, how: str) -> None:
    def program(rank: int, port: int) -> float:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        method = "env://" if how == "env" else f"tcp://localhost:{port}"

        def group() -> None:
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)

        if first == "group":
            group()
        join_world(rank, 2, method)
        if first == "rpc":
            group()
        value = torch.ones(2)
        dist.all_reduce(value)
        greet_all(rank, 2)
        dist.barrier()
        rpc.shutdown()
        dist.all_reduce(value)  # the group does not mind
        dist.destroy_process_group()
        return float(value[0])

    outcomes = run_processes(program, 2, args=(free_port(),), check=False)
    assert fine(outcomes) == [4.0, 4.0]


@pytest.mark.parametrize("how", ["env", "tcp", "file"])
def test_no_process_group_is_made_and_none_is_left_behind(how: str, meet: str) -> None:
    def program(rank: int, port: int) -> None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        join_world(rank, 2, {"env": "env://", "tcp": f"tcp://localhost:{port}", "file": meet}[how])
        assert not dist.is_initialized()
        greet_all(rank, 2)
        assert not rpc.rpc_sync(1 - rank, dist.is_initialized)
        rpc.shutdown()
        assert not dist.is_initialized()
        with pytest.raises((AssertionError, ValueError)):  # there is nothing to destroy
            dist.destroy_process_group()

    fine(run_processes(program, 2, args=(free_port(),)))


def weigh(model: torch.nn.Module) -> float:
    return float(sum(p.sum() for p in model.parameters()))


@pytest.mark.parametrize("first", ["group", pytest.param("rpc", marks=pytest.mark.slow)])
def test_ddp_and_calls_work_in_one_program(first: str) -> None:
    def program(rank: int, port: int) -> float:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        if first == "group":
            dist.init_process_group("gloo")
        join_world(rank, 2, "env://")
        if first == "rpc":
            dist.init_process_group("gloo")
        torch.manual_seed(rank)  # DDP makes the parameters equal
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(10):
            optimizer.zero_grad()
            inputs = rpc.rpc_sync(1 - rank, torch.full, args=((8, 4), float(i)))
            pending = rpc.rpc_async(1 - rank, add, args=(i, 1))
            model(inputs).sum().backward()
            optimizer.step()
            assert pending.wait() == i + 1
        weight = weigh(model.module)
        assert rpc.rpc_sync(1 - rank, weigh, args=(model.module,)) == weight
        dist.barrier()
        rpc.shutdown()
        dist.destroy_process_group()
        return weight

    weights = fine(run_processes(program, 2, args=(free_port(),), check=False))
    assert weights[0] == weights[1]


# -- after an earlier run


@pytest.mark.parametrize("where", ["file", "tcp"])
def test_what_a_killed_run_left_behind_does_not_mislead_the_next_one(where: str, meet: str) -> None:
    """The file with its hint stays; a port's store dies with its host."""
    method = meet if where == "file" else f"tcp://127.0.0.1:{free_port()}"

    def begin(rank: int) -> None:
        join_world(rank, 3, method)
        greet_all(rank, 3)

    def lives(rank: int) -> None:
        time.sleep(0.5 * (rank == 0))  # so that the others read the old hint
        join_world(rank, 2, method)
        greet_all(rank, 2)
        rpc.shutdown()

    with World(3, join=False) as world:
        world.everywhere(begin, ranked=True)
        for rank in range(3):
            world.kill(rank)
    assert Path(meet.removeprefix("file://")).exists() is (where == "file")
    fine(run_processes(lives, 2))


def test_a_worker_says_where_rank_0_did_not_answer(meet: str) -> None:
    """The address tells a user what is wrong: loopback, another network, an earlier run's."""

    def program(rank: int) -> str:
        store = HintStore(meet, 0)
        store.publish(
            json.dumps({"session": "gone", "endpoints": ["tcp://127.0.0.1:9"]}).encode(), time.monotonic() + 10
        )
        text, _ = join_and_fail(1, "w1", 2, meet, 1.0)
        store.close()
        return text

    assert "rank 0 does not answer at tcp://127.0.0.1:9" in fine(run_processes(program, 1))[0]


def test_under_torchrun_a_world_may_meet_at_a_port_that_is_not_the_agents() -> None:
    def program(rank: int, port: int) -> None:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="localhost", MASTER_PORT="1")
        join_world(rank, 2, f"tcp://localhost:{port}")
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2, args=(free_port(),)))


ROUNDS = """
import os, sys
import actorrpc as rpc

rank, size, again = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
port = int(sys.argv[1])
options = rpc.RpcBackendOptions(init_method=f"tcp://localhost:{port}" if port else "env://", init_timeout=60)
rpc.init_rpc(f"w{rank}", rpc_backend_options=options)
for to in range(size):
    assert rpc.rpc_sync(to, abs, args=(-rank,)) == rank
if not again and rank == 1:
    sys.exit(1)
rpc.shutdown(timeout=60)
print(f"rank {rank} came through in round {again}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["agent", "own"])
def test_the_world_of_torchruns_next_round_is_not_misled_by_the_last_one(where: str, tmp_path: Path) -> None:
    """The agent's store lives on from round to round, and with it the hint of the last one's rank 0."""
    script = tmp_path / "rounds.py"
    script.write_text(ROUNDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    process = subprocess.Popen(
        [*command, str(script), str(free_port() if where == "own" else 0)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.terminate()  # by which torchrun ends its workers; killed, it would leave them behind
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, err
    for rank in range(3):
        assert f"rank {rank} came through in round 1" in out


# -- hosts that lack something


class Listener(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("actorrpc")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("lack", ["no place", "long path", "full disk", "no ipc"])
def test_where_ipc_is_not_to_be_had_tcp_is_used_and_a_line_logged(
    lack: str, meet: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("x" * 120))

    def program(rank: int) -> None:
        patch = pytest.MonkeyPatch()
        if lack == "no place":
            patch.setattr(tempfile, "tempdir", "/proc")
        elif lack == "long path":
            patch.setattr(tempfile, "tempdir", folder)
            patch.setattr(os, "access", lambda path, mode: path == folder)  # not /tmp either
        elif lack == "full disk":
            patch.setattr(tempfile, "tempdir", str(Path(meet.removeprefix("file://")).parent))
            patch.setattr(os, "rename", refuse)
        else:
            patch.setattr(folders, "AVAILABLE", False)
        log = Listener()
        join_world(rank, 2, meet)
        patch.undo()
        assert [e.partition("://")[0] for e in session.current().worker.record.endpoints] == ["tcp"]
        assert sum("no ipc socket" in line for line in log.lines) == (lack != "no ipc"), log.lines
        greet_all(rank, 2)
        assert rpc.rpc_sync(1 - rank, torch.numel, args=(torch.zeros(100_000),)) == 100_000
        rpc.shutdown()

    fine(run_processes(program, 2))
    left = list(Path(meet.removeprefix("file://")).parent.glob("actorrpc-*"))
    assert left == []


def refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_worker_without_ipc_and_one_with_it_call_each_other(meet: str) -> None:
    def program(rank: int) -> None:
        patch = pytest.MonkeyPatch()
        if rank:
            patch.setattr(folders, "AVAILABLE", False)
        join_world(rank, 2, meet)
        patch.undo()
        assert len(session.current().worker.record.endpoints) == 2 - rank
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2))


def test_what_only_linux_has_is_not_needed(meet: str) -> None:
    """No pidfd, no eventfd, no poll, no boot id and no ipc: as elsewhere."""

    def program(rank: int) -> None:
        patch = pytest.MonkeyPatch()
        for module, name in ((os, "pidfd_open"), (os, "eventfd"), (select, "poll")):
            patch.delattr(module, name)
        patch.setattr(folders, "AVAILABLE", False)
        patch.setattr(Path, "read_text", refuse)
        join_world(rank, 2, meet)
        greet_all(rank, 2)
        ref: rpc.RRef[list[Any]] = rpc.remote(1 - rank, list)
        ref.rpc_sync().append(1)
        assert ref.to_here() == [1]
        assert rpc.rpc_async(1 - rank, add, args=(1, 2)).wait() == 3
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync(1 - rank, time.sleep, args=(0.5,), timeout=0.1)
        del ref
        rpc.shutdown()
        patch.undo()

    fine(run_processes(program, 2))


SPAWNED = """
import sys
import tempfile
import torch
import torch.multiprocessing as mp
import actorrpc as rpc


class Box:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


def run(rank, size, path):
    options = rpc.RpcBackendOptions(init_method="file://" + path, init_timeout=60)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    box = rpc.remote((rank + 1) % size, Box, args=(torch.ones(2) * rank,))
    assert box.rpc_sync().get().sum() == 2 * rank
    del box
    rpc.shutdown(timeout=60)


if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    processes = [mp.Process(target=run, args=(rank, 2, sys.argv[2])) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_in_each_way_that_python_has(method: str, tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(script), method, str(tmp_path / "meet")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.stdout == "[0, 0]\n", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("token", [None, "of the test"])
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_who_joins_hears_soon_that_rank_0_has_ended_meanwhile(method: str, token: str | None, tmp_path: Path) -> None:
    """And not only that others are missing, as rank 0 said while it could."""
    meet = f"file://{tmp_path}/meet" if method == "file" else f"tcp://127.0.0.1:{free_port()}"

    def program(rank: int, meet: str) -> tuple[str, float]:
        if rank == 0:
            threading.Timer(2.0, os._exit, (1,)).start()
        options = rpc.RpcBackendOptions(init_method=meet, init_timeout=300, security_token=token)
        began = time.monotonic()
        with pytest.raises(rpc.RendezvousError) as caught:
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        return str(caught.value), time.monotonic() - began

    _, joined = run_processes(program, 2, args=(meet,))
    text, seconds = joined.value
    assert seconds < 60
    assert "rank 0 has ended: nobody listens at" in text
    assert "missing rank 2" in text


@pytest.mark.slow
def test_who_joins_waits_for_a_rank_0_that_does_not_get_to_answer(meet: str) -> None:
    """A process that stands still, or whose every thread is kept from running, listens all the same."""

    def program(rank: int, meet: str) -> int:
        if rank == 0:
            threading.Timer(1.0, ctypes.PyDLL(None).usleep, (8_000_000,)).start()
        if rank == 2:
            time.sleep(7.0)
        options = rpc.RpcBackendOptions(init_method=meet, init_timeout=60, heartbeat_timeout=1)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        rpc.shutdown()
        return rank

    assert [outcome.value for outcome in run_processes(program, 3, args=(meet,))] == [0, 1, 2]


def test_of_two_threads_that_call_init_rpc_at_once_one_makes_the_worker() -> None:
    def program(rank: int) -> None:
        alone, errors = threading.Barrier(2), []

        def begin(name: str) -> None:
            options = rpc.RpcBackendOptions(init_method=f"file://{os.environ['TMPDIR']}/meet", init_timeout=20)
            alone.wait()
            try:
                rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
            except RuntimeError as e:
                errors.append(str(e))

        threads = [threading.Thread(target=begin, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 1
        assert "another thread" in errors[0] or "already initialized" in errors[0]
        assert rpc.rpc_sync(0, abs, args=(-1,)) == 1
        rpc.shutdown()

    (outcome,) = run_processes(program, 1)
    assert not outcome.traceback, outcome.traceback
    assert not outcome.problems, outcome.problems
