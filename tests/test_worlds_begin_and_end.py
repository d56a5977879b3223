"""How worlds begin and end: rendezvous, shutdown, exit, death, fork. Real processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.services import rendezvous
from actorrpc.services.ending import Ending
from tests.joining import add, fine, free_port, greet_all, join_and_fail, join_world, options
from tests.worlds import World, raised_within, run_processes, run_world, stop, until

# -- beginning


def test_a_world_of_one() -> None:
    run_world(greet_all, 1, args=(1,))


@pytest.mark.parametrize("n", [2, 4])
def test_worlds_meet_at_a_file_and_at_a_port(n: int) -> None:
    run_world(greet_all, n, args=(n,))
    run_world(greet_all, n, args=(n,), init_method=f"tcp://127.0.0.1:{free_port()}")


def test_a_world_meets_by_the_environment() -> None:
    def program(rank: int, port: int) -> None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        rpc.init_rpc(f"w{rank}")
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2, args=(free_port(),)))


def test_a_late_worker_is_waited_for(meet: str) -> None:
    def program(rank: int) -> None:
        time.sleep(1.5 * rank)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2))


@pytest.mark.parametrize("late", [1, 0])
def test_who_waits_long_for_others_says_in_the_log_for_whom(late: int, meet: str, tmp_path: Path) -> None:
    said = tmp_path / "said"

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.write_text(record.getMessage())

    def program(rank: int) -> None:
        rendezvous._QUIET_SECONDS = 0.2
        if rank == late:
            until(said.exists, 60)
        else:
            logging.getLogger("actorrpc").addHandler(Said())
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        rpc.shutdown()

    fine(run_processes(program, 2))
    text = said.read_text()
    assert text.startswith(f"w{1 - late}: its world has not begun yet: ")
    assert "more (init_timeout)" in text
    assert ("missing rank 1; joined: " if late else "rank 0 ") in text


@pytest.mark.parametrize("missing", [1, 0])
def test_a_missing_rank_is_named_on_every_rank_that_came(missing: int, meet: str) -> None:
    def program(rank: int) -> tuple[str, float] | None:
        return join_and_fail(rank, f"w{rank}", 3, meet, 3.0) if rank != missing else None

    for rank, got in enumerate(fine(run_processes(program, 3))):
        if rank != missing:
            text, took = got
            assert took < 8
            assert ("missing rank 1" in text and "w0" in text and "w2" in text) if missing else "rank 0" in text


def test_two_workers_of_one_name_are_refused_everywhere(meet: str) -> None:
    def program(rank: int) -> tuple[str, float]:
        return join_and_fail(rank, "same" if rank < 2 else "other", 3, meet, 20.0)

    for text, took in fine(run_processes(program, 3)):
        assert took < 8
        assert "Workers 0 and 1 share the same name" in text


def test_two_workers_of_one_rank_and_wrong_sizes_are_refused(meet: str) -> None:
    def same_rank(rank: int) -> tuple[str, float]:
        return join_and_fail(min(rank, 1), f"w{rank}", 3, meet, 20.0)

    for text, _ in fine(run_processes(same_rank, 3)):
        assert "two workers have rank 1" in text

    def wrong_size(rank: int) -> tuple[str, float]:
        return join_and_fail(rank, f"w{rank}", 2 + rank, f"{meet}2", 20.0)

    for text, _ in fine(run_processes(wrong_size, 2)):
        assert "world_size=3" in text
        assert "world_size=2" in text


def test_after_a_failed_init_shutdown_does_nothing_and_init_works_again(meet: str) -> None:
    def program(rank: int) -> None:
        join_and_fail(rank, "same", 2, meet, 20.0)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(f"{meet}2"))
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2))


@pytest.mark.parametrize("where", ["file", "tcp", "env"])
def test_a_process_may_join_ten_worlds_one_after_the_other(where: str, meet: str) -> None:
    port = free_port()
    method = {"file": meet, "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[where]

    def program(rank: int) -> list[tuple[int, int]]:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        sizes = []
        for _ in range(10):
            join_world(rank, 2, method)
            greet_all(rank, 2)
            assert rpc.remote(1 - rank, add, args=(1, 2)).to_here() == 3
            rpc.shutdown()
            sizes.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        return sizes

    for sizes in fine(run_processes(program, 2, timeout=60)):
        assert sizes[9][0] <= sizes[1][0]
        assert sizes[9][1] <= sizes[1][1]


# -- ending


def test_a_worker_serves_in_shutdown_until_all_have_come(meet: str) -> None:
    def program(rank: int) -> float:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        began = time.monotonic()
        if rank == 0:
            while time.monotonic() < began + 1.0:
                assert rpc.rpc_sync(1, add, args=(1, 2)) == 3
                assert rpc.rpc_sync(1, threading.active_count) > 0
        rpc.shutdown()
        return time.monotonic() - began

    assert min(fine(run_processes(program, 2))) >= 0.8  # rank 1 may have joined a little later


def chain(depth: int, seconds: float) -> int:
    time.sleep(seconds)
    other = (rpc.get_worker_info().id + 1) % 3
    return 1 if depth == 0 else 1 + int(rpc.rpc_sync(other, chain, args=(depth - 1, seconds)))


def test_shutdown_waits_for_nested_work_that_is_under_way(meet: str) -> None:
    def program(rank: int) -> list[int]:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(meet))
        futures = [rpc.rpc_async((rank + 1) % 3, chain, args=(6, 0.05)) for _ in range(3)]
        rpc.shutdown()
        assert all(future.done() for future in futures)
        return [future.wait() for future in futures]

    assert fine(run_processes(program, 3)) == [[7] * 3] * 3


def test_shutdown_waits_for_callbacks_and_what_they_start(meet: str) -> None:
    def program(rank: int) -> list[int]:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        seen: list[int] = []
        future = rpc.rpc_async(1 - rank, chain_of_one, args=(0.2,))
        future.add_done_callback(lambda f: seen.append(rpc.rpc_sync(1 - rank, chain_of_one, args=(0.2,))))
        rpc.shutdown()
        return seen

    assert fine(run_processes(program, 2)) == [[1], [1]]


def chain_of_one(seconds: float) -> int:
    time.sleep(seconds)
    return 1


def has_arrived(rank: int) -> bool:
    """On rank 0: whether a worker is known to be in shutdown."""
    return rank in session.current().worker.services[Ending]._done


def rank_0_is_gone() -> bool:
    try:
        return not rpc.rpc_sync(0, add, args=(1, 1))
    except rpc.WorkerLostError:
        return True


def test_shutdown_has_a_bound_and_says_on_every_rank_who_is_late(meet: str) -> None:
    def program(rank: int) -> str:
        join_world(rank, 4, meet)
        if rank in (1, 3):
            until(rank_0_is_gone)
            rpc.shutdown(graceful=False)
            return ""
        if rank == 2:
            until(lambda: rpc.rpc_sync(0, has_arrived, args=(0,)))
        with raised_within(10), pytest.raises(rpc.RendezvousError, match="in shutdown") as caught:
            rpc.shutdown(timeout=0.3 if rank else 2.0)
        return str(caught.value)

    for rank, text in enumerate(fine(run_processes(program, 4))):
        if rank in (0, 2):
            late = text.partition("not in shutdown yet: ")[2]
            assert 'worker "w1" (rank 1' in late
            assert 'worker "w3" (rank 3' in late
            assert '"w0"' not in late
            assert '"w2"' not in late


def test_shutdown_that_waits_for_work_says_whose(meet: str) -> None:
    def program(rank: int) -> str:
        join_world(rank, 3, meet)
        if rank == 2:
            rpc.rpc_async(1, time.sleep, args=(2,))
        if rank != 0:
            with contextlib.suppress(rpc.WorkerLostError):
                rpc.shutdown()
            return ""
        with pytest.raises(rpc.RendezvousError, match="all are in shutdown") as caught:
            rpc.shutdown(timeout=1)
        return str(caught.value)

    text = fine(run_processes(program, 3))[0].partition("under way at ")[2]
    assert '"w1"' in text  # its handler runs
    assert '"w2"' in text  # its call is pending
    assert '"w0"' not in text


def test_shutdown_says_why_it_does_not_know_who_is_late(meet: str) -> None:
    """Rank 0's process is there and says nothing: stopped, or its host cut off."""

    def program(rank: int) -> str:
        join_world(rank, 2, meet)
        if rank == 0:
            greet_all(0, 2)
            time.sleep(60)
        stop(rpc.rpc_sync(0, os.getpid))
        with raised_within(5), pytest.raises(rpc.RendezvousError, match="rank 0 does not say for whom") as caught:
            rpc.shutdown(timeout=0.3)
        return str(caught.value)

    with World(2, join=False) as world:
        world.start(0, program, 0)
        assert "w1" in world.on(1, program, 1)
        world.kill(0)


@pytest.mark.parametrize("seconds", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_rank_0_may_be_busy_in_every_thread_while_the_others_shut_down(seconds: float, meet: str) -> None:
    def program(rank: int) -> list[Any]:
        join_world(rank, 3, meet, num_worker_threads=2)
        futures = [rpc.rpc_async(0, time.sleep, args=(seconds,)) for _ in range(2)] if rank else []
        rpc.shutdown()
        return [future.wait() for future in futures]

    assert fine(run_processes(program, 3, timeout=60)) == [[], [None] * 2, [None] * 2]


def test_a_world_in_which_no_call_was_made_shuts_down(meet: str) -> None:
    def program(rank: int) -> None:
        join_world(rank, 3, meet, num_worker_threads=1)
        rpc.shutdown(timeout=15)

    fine(run_processes(program, 3))


def test_a_worker_that_dies_before_anybody_spoke_to_it_does_not_hold_up_the_others(meet: str) -> None:
    def program(rank: int) -> None:
        join_world(rank, 4, meet)
        if rank in (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        rpc.shutdown()

    outcomes = run_processes(program, 4, timeout=30)
    fine(outcomes[:2])


got: list[int] = []


class Store:
    def put(self, tensor: torch.Tensor) -> None:
        got.append(tensor.numel())


def what_came() -> list[int]:
    return got


def test_a_tell_that_is_under_way_at_shutdown_is_not_lost(meet: str) -> None:
    """Nobody waits for a tell, so that sender and receiver may both be quiet while it lies in a socket between them."""

    def program(rank: int, size: int) -> list[int]:
        join_world(rank, 3, meet)
        if rank == 1:
            store = rpc.remote(2, Store)
            store.rpc_sync().put(torch.zeros(1))
            store.tell().put(torch.zeros(size))
        rpc.shutdown()
        return what_came()

    size = 30_000_000
    assert fine(run_processes(program, 3, args=(size,)))[2] == [1, size]


def test_a_handler_cannot_ask_for_a_graceful_end_and_is_told_so(meet: str) -> None:
    def program(rank: int) -> None:
        join_world(rank, 2, meet)
        with raised_within(8), pytest.raises(RuntimeError, match="a handler cannot wait for the end of the world"):
            rpc.rpc_sync(1 - rank, rpc.shutdown)
        greet_all(rank, 2)  # nothing was ended
        rpc.shutdown()

    fine(run_processes(program, 2))


def call_for_ever(to: int) -> None:
    while True:
        rpc.rpc_sync(to, add, args=(1, 2))


def test_a_local_shutdown_does_not_wait_and_the_others_hear_of_it(meet: str) -> None:
    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(meet))
        greet_all(rank, 3)
        if rank == 1:
            time.sleep(0.3)
            with raised_within(3):
                rpc.shutdown(graceful=False)
            return
        with raised_within(5), pytest.raises(rpc.WorkerLostError, match=r"w1.*has left") as caught:
            call_for_ever(1)
        assert (caught.value.worker, caught.value.rank) == ("w1", 1)
        greet_all(0, 1)
        rpc.shutdown()

    fine(run_processes(program, 3))


@pytest.mark.parametrize("graceful", [True, False])
def test_rank_0_that_gives_up_or_leaves_does_not_keep_the_others_waiting(graceful: bool, meet: str) -> None:
    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        if rank == 1:
            if graceful:
                time.sleep(1.0)
            with raised_within(5), pytest.raises(rpc.WorkerLostError, match=r"w0.*has left"):
                rpc.shutdown()
            return
        if graceful:
            with pytest.raises(rpc.RendezvousError):
                rpc.shutdown(timeout=0.3)
        else:
            time.sleep(0.5)
            rpc.shutdown(graceful=False)
        time.sleep(3)  # the process lives on, so that nothing but its word can tell

    fine(run_processes(program, 2))


def test_a_worker_that_dies_does_not_hold_up_the_others_shutdown(meet: str) -> None:
    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(meet))
        greet_all(rank, 3)
        if rank == 1:
            time.sleep(0.5)
            os._exit(3)
        with raised_within(8):
            rpc.shutdown()

    outcomes = run_processes(program, 3)
    assert outcomes[1].exitcode == 3
    fine([outcomes[0], outcomes[2]])


def slow_to_receive(when: Callable[[], bool]) -> None:
    """Has this worker take in what came a second late, while a condition holds."""
    transport = session.current().worker.transport
    receive = transport.receive

    def late(timeout: float | None) -> Any:
        if when():
            time.sleep(1.0)
        return receive(timeout)

    transport.receive = late  # type: ignore[method-assign]
    transport.wake()


def test_the_end_of_the_world_is_heard_though_its_sender_has_ended(meet: str) -> None:
    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        if rank == 0:
            rpc.shutdown()
            os._exit(0)  # as children of multiprocessing end: at once
        worker = session.current().worker
        slow_to_receive(lambda: worker.ending)
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2)[1:])


def test_an_answer_is_taken_in_though_its_sender_has_ended(meet: str) -> None:
    def last_answer() -> int:
        def end() -> None:
            time.sleep(0.3)  # the answer leaves at once
            os._exit(0)

        threading.Thread(target=end, daemon=True).start()
        return 7

    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        if rank == 1:
            time.sleep(20)
        asked = threading.Event()
        slow_to_receive(asked.is_set)
        greet_all(rank, 2)
        asked.set()
        assert rpc.rpc_sync(1, last_answer) == 7
        asked.clear()
        with pytest.raises(rpc.WorkerLostError, match="its process"):
            call_for_ever(1)
        rpc.shutdown()

    fine(run_processes(program, 2)[:1])


def reference_to_five() -> rpc.RRef[int]:
    return rpc.RRef(5)


def test_the_first_call_may_come_before_init_rpc_has_returned(meet: str) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            enter = session.Session.enter

            def slow(self: session.Session, *args: Any) -> None:
                enter(self, *args)
                until(lambda: self.worker.peers[1].heard == 2, what="rank 1 did not call twice")

            session.Session.enter = slow  # type: ignore[method-assign, assignment]
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        if rank == 1:
            assert rpc.rpc_sync(0, reference_to_five).to_here() == 5
        rpc.shutdown()

    fine(run_processes(program, 2))


def test_the_death_of_rank_0_ends_the_others_shutdown_with_an_error(meet: str) -> None:
    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        greet_all(rank, 2)
        if rank == 0:
            time.sleep(0.5)
            os._exit(3)
        with raised_within(8), pytest.raises(rpc.WorkerLostError, match="w0"):
            rpc.shutdown()

    fine(run_processes(program, 2)[1:])


# -- death of a peer


@pytest.mark.parametrize("first", [0, 1])
def test_calls_to_a_killed_worker_fail_soon_and_say_who_it_was(first: int) -> None:
    def pending(rank: int) -> dict[str, Any]:
        with raised_within(10), pytest.raises(rpc.WorkerLostError) as caught:
            rpc.rpc_sync(rank, time.sleep, args=(30,))
        return {**vars(caught.value), "text": str(caught.value)}

    def later(rank: int) -> float:
        began = time.monotonic()
        for call in (
            lambda: rpc.rpc_sync(rank, add, args=(1, 2)),
            lambda: rpc.rpc_async(rank, add, args=(1, 2)).wait(),
            lambda: rpc.remote(rank, add, args=(1, 2)).to_here(),
        ):
            with pytest.raises(rpc.WorkerLostError, match=f"worker{rank}"):
                call()  # type: ignore[no-untyped-call]
        assert rpc.rpc_sync(2, add, args=(1, 2)) == 3
        return time.monotonic() - began

    caller, callee = 1 - first, first
    with World(3) as world:
        pid = world.pid(callee)
        world.start(caller, pending, callee)
        time.sleep(0.3)
        began = time.monotonic()
        world.kill(callee)
        got = world.result(caller)
        assert time.monotonic() - began < 3
        assert (got["worker"], got["rank"], got["pid"]) == (f"worker{callee}", callee, pid)
        assert got["host"] == socket.gethostname()
        assert "may or may not have run" in got["text"]
        assert world.on(caller, later, callee) < 1
        if callee == 0:  # nobody is left to say when all is done
            for rank in (1, 2):
                world.on(rank, rpc.shutdown, False)


def test_a_forked_child_is_no_worker_and_does_its_parent_no_harm(meet: str) -> None:
    def in_child() -> int:
        with pytest.raises(rpc.NotAMemberError, match="forked"):
            rpc.rpc_sync(1, add, args=(1, 2))
        with pytest.raises(rpc.NotAMemberError, match="forked"):
            rpc.RRef(1)
        rpc.shutdown()
        return 0

    def program(rank: int) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(meet))
        ref: rpc.RRef[list[Any]] = rpc.remote(1 - rank, list)
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = in_child()
                    del ref
                finally:
                    os._exit(code)
            assert rpc.rpc_sync(1 - rank, add, args=(1, 2)) == 3
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ref.to_here() == []
        greet_all(rank, 2)
        rpc.shutdown()

    fine(run_processes(program, 2))


# -- exit without shutdown: in a process that ends as any Python program does, forked from one that has imported all

EXIT = """
    import os, sys, time, signal, tempfile
    import actorrpc as rpc, torch

    class Box:
        pass

    def child(path):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + path))
        futures = [rpc.rpc_async("w", time.sleep, args=(0.2,)) for _ in range(3)]
        futures[0].add_done_callback(lambda f: None)
        kept = [rpc.remote("w", Box), rpc.RRef(1), torch.zeros(100000)]
        assert rpc.rpc_sync("w", torch.add, args=(kept[2], 1)).sum() == 100000
        globals()["kept"] = kept, futures
        KIND

    codes = []
    folder = tempfile.mkdtemp()
    for i in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            tempfile.tempdir = folder
            signal.alarm(20)
            child(f"{folder}/m{i}")
            break
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        print(codes, [f for f in os.listdir(folder) if f.startswith("actorrpc")], flush=True)
"""


def leave_without_shutdown(kind: str, times: int, tmp_path: Path) -> tuple[str, str]:
    script = tmp_path / "exit.py"
    script.write_text(textwrap.dedent(EXIT).replace("KIND", kind))
    done = subprocess.run(
        [sys.executable, str(script), str(times)], capture_output=True, text=True, timeout=110, check=False
    )
    return done.stdout.strip().splitlines()[-1], done.stderr


@pytest.mark.parametrize("times", [5, *[pytest.param(40, id=f"40-{i}", marks=pytest.mark.slow) for i in range(5)]])
def test_a_program_that_forgets_shutdown_ends_with_code_0(times: int, tmp_path: Path) -> None:
    out, err = leave_without_shutdown("pass", times, tmp_path)
    assert out == f"{[0] * times} []"
    assert "Traceback" not in err
    assert "Fatal" not in err


@pytest.mark.parametrize("kind, code", [("raise KeyError('unhandled')", 1), ("sys.exit(7)", 7)])
def test_a_program_that_fails_without_shutdown_ends_with_its_own_code(kind: str, code: int, tmp_path: Path) -> None:
    out, err = leave_without_shutdown(kind, 3, tmp_path)
    assert out == f"{[code] * 3} []"
    assert err.count("Traceback") == (3 if code == 1 else 0)
    assert "Fatal" not in err


def test_an_exception_in_one_main_ends_that_process_and_the_others_hear_of_it(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        import actorrpc as rpc

        rank, path = int(sys.argv[1]), sys.argv[2]
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2,
                     rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + path, init_timeout=30))
        if rank == 1:
            rpc.rpc_sync(0, abs, args=(1,))
            raise KeyError("unhandled")
        try:
            rpc.rpc_sync(1, time.sleep, args=(30,))
        except rpc.WorkerLostError as e:
            print("lost", e.worker)
        rpc.shutdown()
        """)
    )
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out0, err0 = both[0].communicate(timeout=40)
        _, err1 = both[1].communicate(timeout=40)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert both[1].returncode == 1
    assert err1.count("Traceback") == 1
    assert both[0].returncode == 0, err0
    assert out0 == "lost w1\n"


def test_ctrl_c_in_a_wait_is_raised_and_the_world_goes_on() -> None:
    def wait_until_interrupted(how: str) -> str:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        waits: dict[str, Callable[[], Any]] = {
            "sync": lambda: rpc.rpc_sync(1, time.sleep, args=(0.5,)),
            "async": lambda: rpc.rpc_async(1, time.sleep, args=(0.5,)).wait(),
            "self": lambda: rpc.rpc_sync(0, time.sleep, args=(0.5,)),
            "own": lambda: rpc.Future[int]().wait(),
        }
        with raised_within(3), pytest.raises(KeyboardInterrupt):
            waits[how]()
        return str(rpc.rpc_sync(1, str, args=("fine",)))

    with World(2) as world:
        for how in ("sync", "async", "self", "own"):
            assert world.on(0, wait_until_interrupted, how) == "fine"
        until(lambda: world.on(0, lambda: not session.current().worker.statistics()["pending"]))


def burst(rank: int, size: int) -> None:
    """Calls all others before they may have heard that the world has begun."""
    futures = [rpc.rpc_async(to, add, args=(i, 1)) for i in range(100) for to in range(size)]
    assert [f.wait() for f in futures] == [i + 1 for i in range(100) for _ in range(size)]


def test_what_comes_before_the_list_of_members_is_neither_lost_nor_overtaken() -> None:
    for n in (2, 3) * 8:
        run_world(burst, n, args=(n,))
