"""Ctrl-C at random points leaves a working world, or a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import actorrpc
from actorrpc.runtime.interrupts import InterruptShield, must_wait
from actorrpc.wire.exposed import EXPOSED

ROOT = Path(__file__).parents[1]
PACKAGE = Path(actorrpc.__file__).parent

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")


# --- the rule, KI1 ----------------------------------------------------------------------------------------------------


def verdict(*files: str, exposed: tuple[int, ...] = ()) -> bool:
    """Returns what the rule says of a stack of functions, one a file (relative to the package), outermost first.

    Arguments:
        files: where each function stands.
        exposed: the numbers of those that are marked.
    """
    said: list[bool] = []

    def innermost() -> None:
        said.append(must_wait(sys._getframe(1)))

    call: Callable[[], None] = innermost
    marked = set()
    for number in reversed(range(len(files))):
        space: dict[str, Callable[[], None]] = {"call": call}
        # Codes compare by what is in them, their names too, and not by their files.
        exec(compile(f"def run{number}():\n    call()", str(PACKAGE / files[number]), "exec"), space)
        call = space[f"run{number}"]
        if number in exposed:
            marked.add(call.__code__)
    EXPOSED.update(marked)
    try:
        call()
    finally:
        EXPOSED.difference_update(marked)
    return said[0]


@pytest.mark.parametrize("room", ["wire", "runtime", "services", "autograd"])
def test_an_interrupt_waits_in_the_rooms_below_the_face(room: str) -> None:
    assert verdict(f"{room}/a.py")
    assert verdict("/user/program.py", "rpc.py", f"{room}/a.py")
    assert verdict(f"{room}/a.py", "/usr/lib/python3/threading.py"), "also in what they call"


@pytest.mark.parametrize("path", ["rpc.py", "actor.py", "launch/child.py", "/user/program.py", "/user/runtime/a.py"])
def test_an_interrupt_surfaces_in_the_face_and_in_programs(path: str) -> None:
    assert not verdict(path)
    assert not verdict("/user/program.py", path)


def test_an_interrupt_surfaces_in_exposed_functions_and_in_what_they_call() -> None:
    assert not verdict("runtime/a.py", exposed=(0,))
    assert not verdict("runtime/a.py", "runtime/b.py", exposed=(1,))
    assert not verdict("runtime/a.py", "runtime/b.py", "/user/callback.py", exposed=(1,))


def test_the_innermost_of_our_frames_decides() -> None:
    assert verdict("runtime/a.py", "runtime/b.py", exposed=(0,))
    assert verdict("wire/a.py", "/user/reducer.py", "services/b.py", exposed=(0,))
    assert not verdict("services/a.py", "wire/b.py", "/user/program.py", exposed=(1,))


def test_no_frame_means_that_nothing_is_in_the_way() -> None:
    assert not must_wait(None)


def test_exposed_functions_are_few() -> None:
    """Whoever marks one more has thought about what it holds, and says so here."""
    names = {code.co_qualname if sys.version_info >= (3, 11) else code.co_name for code in EXPOSED}
    known = {"wait", "_poll", "keep", "_await", "_call", "_wait_alone"}
    assert {name.rpartition(".")[2] for name in names} <= known, names


def test_the_shield_stands_before_the_handler_and_leaves_as_it_came() -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        shield = InterruptShield()
        assert shield.install()
        assert signal.getsignal(signal.SIGINT) != handler
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
        shield.remove()
        assert signal.getsignal(signal.SIGINT) == handler
        shield.remove()
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_shield_leaves_an_ignored_signal_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not InterruptShield().install()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_shield_does_not_push_a_later_handler_aside() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        shield = InterruptShield()
        assert shield.install()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        shield.remove()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- programs that are interrupted ------------------------------------------------------------------------------------

HEAD = """
import faulthandler, gc, os, random, signal, sys, threading, time
import torch
import actorrpc as rpc
from actorrpc import session

faulthandler.dump_traceback_later(100, exit=True)
MAIN = threading.get_ident()

def interrupt_in(seconds):
    def run():
        time.sleep(seconds)
        signal.pthread_kill(MAIN, signal.SIGINT)
    threading.Thread(target=run, daemon=True).start()
"""

WORK = """
def add(a, b): return a + b
def count(*args): return len(args)
def fail(): raise ValueError("sent")
def held(): return session.current().objects.statistics()["owned"]

class Box:
    def __init__(self, value): self.value = value
    def get(self): return self.value
    def put(self, value): self.value = value

class Pest(threading.Thread):
    '''Sends one interrupt for each go; again where it went down in a finalizer.'''
    def __init__(self, dice):
        super().__init__(daemon=True)
        self.dice, self.go, self.caught, self.again = dice, threading.Semaphore(0), threading.Event(), 0
        self.start()
    def run(self):
        while True:
            self.go.acquire()
            time.sleep(self.dice.uniform(0.0001, 0.005))
            signal.pthread_kill(MAIN, signal.SIGINT)
            while not self.caught.wait(1):
                self.again += 1
                signal.pthread_kill(MAIN, signal.SIGINT)
            self.caught.clear()

def torture(dice, times, peer, box, callback):
    def one_sync():
        assert rpc.rpc_sync(peer, add, args=(1, 2)) == 3
    def to_itself():
        assert rpc.rpc_sync(0, add, args=(1, 2)) == 3
    def many_async():
        assert [f.wait() for f in [rpc.rpc_async(peer, add, args=(i, i)) for i in range(5)]] == [0, 2, 4, 6, 8]
    def unwaited():
        rpc.rpc_async(peer, add, args=(1, 1))
    def then():
        assert rpc.rpc_async(peer, add, args=(1, 1)).then(lambda f: f.wait() + 1).wait() == 3
    def collect():
        fs = [rpc.rpc_async(peer, add, args=(i, 1)) for i in range(3)]
        assert [f.wait() for f in torch.futures.collect_all(fs).wait()] == [1, 2, 3]
    def remote():
        assert rpc.remote(peer, add, args=(4, 5)).to_here() == 9
    def drop():
        for i in range(3): rpc.remote(peer, Box, args=(i,))
        rpc.remote(0, Box, args=(3,))
    def proxy():
        box.rpc_sync().put(5)
        assert box.rpc_async().get().wait() == 5
        box.tell().put(5)
    def passed():
        assert rpc.rpc_sync(peer, count, args=([box], rpc.RRef(1))) == 2
    def error():
        try: rpc.rpc_sync(peer, fail)
        except ValueError: pass
    def big():
        assert rpc.rpc_sync(peer, add, args=(torch.ones(50000), 1))[0] == 2
    def unpicklable():
        try: rpc.rpc_sync(peer, add, args=(threading.Lock(), 1))
        except rpc.SerializationError: pass
    def closure():
        x = 5
        assert rpc.rpc_sync(peer, lambda y: x + y, args=(1,)) == 6
    def late():
        try: rpc.rpc_sync(peer, time.sleep, args=(0.02,), timeout=0.005)
        except rpc.RPCTimeoutError: pass
    def threads():
        ts = [threading.Thread(target=one_sync, daemon=True) for _ in range(3)]
        for t in ts: t.start()
        for t in ts: t.join()
    kinds = [one_sync, to_itself, many_async, unwaited, then, collect, remote, drop, proxy, passed, error, big,
             unpicklable, closure, late, threads, callback]
    pest, done = Pest(dice), dict.fromkeys([k.__name__ for k in kinds], 0)
    for number in range(times):
        kind = dice.choice(kinds)  # here: the interrupt may come as soon as it is let go
        try:
            pest.go.release()
            while True:
                kind()
                kind = dice.choice(kinds)
        except KeyboardInterrupt:
            pest.caught.set()
            done[kind.__name__] += 1
        assert rpc.rpc_sync(peer, add, args=(number, 1), timeout=30) == number + 1
        assert rpc.rpc_async(0, add, args=(number, 2), timeout=30).wait() == number + 2
        if number % 10 == 0:
            callback()
    del pest
    assert box.rpc_sync().get() == 5
    gc.collect()
    worker = session.current().worker
    end = time.monotonic() + 10
    while (held_there := rpc.rpc_sync(peer, held)) > 1 + LEFT or held() > 0 or worker.statistics()["pending"]:
        gc.collect()
        assert time.monotonic() < end, (held_there, held(), worker.statistics())
        time.sleep(0.01)
    return done
"""

PLAIN = """
LEFT = 0
def main():
    folder, rank, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if rank == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{folder}/store", init_timeout=60))
    if rank == 0:
        box = rpc.remote(1, Box, args=(5,))
        box.to_here()
        def back():
            assert rpc.rpc_sync(1, rpc.rpc_sync, args=(0, add, (1, 1))) == 2
        done = torture(random.Random(seed), times, 1, box, back)
        del box, back
        print("done", sum(done.values()), len([k for k, n in done.items() if n]))
    rpc.shutdown(timeout=30)
if __name__ == "__main__":
    main()
"""

ROLES = """
LEFT = 0
class Driver(rpc.Actor):
    def main(self):
        self.seen = 0
        other = self.world.other[0]
        box = rpc.remote("other:0", Box, args=(5,))
        box.to_here()
        def back():
            seen = self.seen
            other.rpc_sync().touch(self.rref)
            assert self.seen > seen
        done = torture(random.Random(int(sys.argv[4])), int(sys.argv[3]), "other:0", box, back)
        return "done", sum(done.values()), len([k for k, n in done.items() if n])
    def touched(self):
        self.seen += 1
class Other(rpc.Actor):
    def touch(self, driver):
        driver.tell().touched()
        driver.rpc_sync().touched()
if __name__ == "__main__":
    print(*rpc.launch(driver=Driver, other=Other))
"""


def start(folder: Path, program: str, *arguments: object) -> subprocess.Popen[str]:
    path = folder / "main.py"
    path.write_text(HEAD + program)
    return subprocess.Popen(
        [sys.executable, str(path), str(folder), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str], seconds: float = 110.0) -> list[tuple[int, str, str]]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                print(process.communicate())
    return ended


def check_torture(outcome: tuple[int, str, str], times: int) -> None:
    code, out, err = outcome
    assert code == 0, err
    word, caught, kinds = out.split()
    assert (word, int(caught)) == ("done", times)
    assert int(kinds) > 6, "most kinds of calls were interrupted"
    assert not err.count("Traceback"), err


TIMES = [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


@pytest.mark.parametrize("times", TIMES)
def test_ctrl_c_at_random_points_of_calls_leaves_a_working_world(tmp_path: Path, times: int) -> None:
    outcomes = finish(*(start(tmp_path, WORK + PLAIN, rank, times, 1) for rank in range(2)), seconds=200)
    check_torture(outcomes[0], times)
    assert outcomes[1][0] == 0, outcomes[1]


@pytest.mark.parametrize("times", TIMES)
def test_ctrl_c_at_random_points_of_an_actors_main_leaves_a_working_world(tmp_path: Path, times: int) -> None:
    (outcome,) = finish(start(tmp_path, WORK + ROLES, 0, times, 2), seconds=200)
    check_torture(outcome, times)


LOST_REPLY = """
def give_back(value):
    time.sleep(0.5)
    return value
LEFT = 0
def main():
    folder, rank = sys.argv[1], int(sys.argv[2])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{folder}/store", init_timeout=60))
    if rank == 0:
        interrupt_in(0.2)
        mine, its = rpc.RRef(1), rpc.remote(1, Box, args=(5,))
        try:
            rpc.rpc_sync(1, give_back, args=([mine, its],))
        except KeyboardInterrupt:
            del mine, its
        end = time.monotonic() + 3
        while (held() or rpc.rpc_sync(1, held)) and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        print(held(), rpc.rpc_sync(1, held))
    rpc.shutdown(timeout=30)
if __name__ == "__main__":
    main()
"""


def test_references_in_the_answer_to_an_interrupted_call_are_let_go(tmp_path: Path) -> None:
    outcomes = finish(*(start(tmp_path, WORK + LOST_REPLY, rank) for rank in range(2)))
    assert outcomes[0][:2] == (0, "0 0\n"), outcomes[0]


FINALIZER = """
from collections import deque
from operator import methodcaller
import _thread, zmq
from actorrpc.runtime.interrupts import InterruptShield
if __name__ == "__main__":
    assert InterruptShield().install()
    messages = [zmq.Frame(b"x" * 100000)]
    try:
        # In one go, with no line of Python between: the interrupt is pending when the message is freed.
        deque(map(methodcaller("__call__"), [_thread.interrupt_main, messages.clear]), maxlen=0)
        time.sleep(1)
        print("lost")
    except KeyboardInterrupt:
        print("raised")
"""


def test_an_interrupt_that_goes_down_in_the_end_of_a_received_tensor_comes_again(tmp_path: Path) -> None:
    assert finish(start(tmp_path, FINALIZER)) == [(0, "raised\n", "")]


JOIN = """
rank, delay = int(sys.argv[2]), float(sys.argv[3])
def options(name): return rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}/{name}", init_timeout=60)
if __name__ == "__main__":
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    interrupt_in(delay)
    begun = time.monotonic()
    try:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options("one"))
    except KeyboardInterrupt:
        print("interrupted")
    assert time.monotonic() - begun < delay + 3
    try:
        rpc.get_worker_info()
    except rpc.NotAMemberError:
        print("no member")
    end = time.monotonic() + 5
    gc.collect()
    while threading.active_count() > before[0] and time.monotonic() < end: time.sleep(0.01)
    print("threads left:", [t.name for t in threading.enumerate()][before[0]:])
    print("handler:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    rpc.init_rpc("again", rank=0, world_size=1, rpc_backend_options=options("two"))
    print(rpc.rpc_sync(0, abs, args=(-1,)))
    rpc.shutdown()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("delay", [0.01, 0.7])
def test_ctrl_c_while_joining_ends_it_soon_and_leaves_nothing(tmp_path: Path, rank: int, delay: float) -> None:
    ((code, out, err),) = finish(start(tmp_path, JOIN, rank, delay))
    assert code == 0, err
    assert out == "interrupted\nno member\nthreads left: []\nhandler: True\n1\n", err
    assert err == ""


SHUTDOWN = """
rank = int(sys.argv[2])
options = rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}/store", init_timeout=60)
if __name__ == "__main__":
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == int(sys.argv[3]):
        rpc.rpc_sync(1 - rank, abs, args=(-1,))
        interrupt_in(0.4)
        begun = time.monotonic()
        try:
            rpc.shutdown()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - begun < 4)
        try:
            rpc.get_worker_info()
        except rpc.NotAMemberError:
            print("no member", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        rpc.shutdown()
    else:
        end = time.monotonic() + 20
        try:
            while time.monotonic() < end:
                rpc.rpc_sync(1 - rank, abs, args=(-1,), timeout=10)
        except rpc.WorkerLostError as e:
            print("lost")
        try:
            rpc.shutdown(timeout=20)
        except rpc.WorkerLostError:
            print("orphaned")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_in_shutdown_ends_it_soon_and_the_other_one_learns_of_it(tmp_path: Path, rank: int) -> None:
    outcomes = finish(*(start(tmp_path, SHUTDOWN, i, rank) for i in range(2)))
    code, out, err = outcomes[rank]
    assert (code, out) == (0, "interrupted True\nno member True\n"), err
    assert err == ""
    code, out, err = outcomes[1 - rank]
    assert (code, out) == (0, "lost\norphaned\n" if rank == 0 else "lost\n"), err


TORTURED_ENDS = """
options = lambda n: rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}/{n}", init_timeout=60)
if __name__ == "__main__":
    dice = random.Random(3)
    caught = 0
    for number in range(int(sys.argv[2])):
        begun = time.monotonic()
        try:
            interrupt_in(dice.uniform(0, 0.06))  # here: on a busy machine it comes before the next line
            rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options(number))
            rpc.rpc_sync(0, abs, args=(-1,))
            rpc.shutdown()
            time.sleep(1)
        except KeyboardInterrupt:
            caught += 1
        rpc.shutdown(graceful=False)
        assert time.monotonic() - begun < 10, number
    gc.collect()
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options("last"))
    assert rpc.rpc_sync(0, abs, args=(-1,)) == 1
    rpc.shutdown()
    end = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < end: time.sleep(0.01)
    left = [t.name for t in threading.enumerate()][1:]
    print(caught, left, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_at_random_points_of_joining_and_leaving_leaves_nothing_behind(tmp_path: Path) -> None:
    ((code, out, err),) = finish(start(tmp_path, TORTURED_ENDS, 40))
    assert code == 0, err
    assert out == "40 [] True\n", err
