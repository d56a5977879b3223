"""Small worlds of real processes for tests, at about 0.3 s a world.

The processes are forked from a server (`multiprocessing`'s forkserver) that has imported torch and actorrpc and has
started neither RPC nor ZeroMQ. Everything is bounded: what is not done in time is killed, and fails the test with the
stacks of all its threads.

    def program(rank: int, word: str) -> str: ...
    assert run_world(program, 2, args=("hello",)) == [...]       # init_rpc, program, shutdown in every process

    with World(2) as world:                                        # a standing world, for many short tests
        assert world.on(0, function, 1, 2) == 3                    # runs function(1, 2) in rank 0's main thread

    outcomes = run_processes(program, 3)                           # no init_rpc; outcomes, also of those that died

Functions, arguments and results go by cloudpickle, so they may be local.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import glob
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
import zmq

import actorrpc as rpc
from actorrpc import session

_CONTEXT = multiprocessing.get_context("forkserver")
# torch imports torch._dynamo with a process's first optimizer, and takes 2 s over it.
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "actorrpc", "pytest", "tests.worlds"])
_LEAK_SECONDS = 3.0

Options = Mapping[str, Any]
"""Keywords for `RpcBackendOptions`."""


@dataclass
class Outcome:
    """What became of one process.

    Attributes:
        rank: which one.
        value: what its program returned.
        error: what it raised, where that can be loaded here.
        traceback: the same as text; "" where it returned.
        problems: what it left behind: threads, descriptors.
        exitcode: as `multiprocessing` has it; -9 for one that was killed.
        stderr: what it wrote there, log included.
        returned: whether it came to its end, by value or error.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    problems: list[str] = field(default_factory=list)
    exitcode: int | None = None
    stderr: str = ""
    returned: bool = False


class WorldError(AssertionError):
    """Something in a world failed, leaked or did not end; the text has the tracebacks."""


def run_world(
    program: Callable[..., Any],
    n: int,
    *,
    args: Sequence[Any] = (),
    names: Sequence[str] | None = None,
    options: Options | Sequence[Options] | None = None,
    init_method: str | None = None,
    graceful: bool = True,
    timeout: float = 30.0,
    check: bool = True,
) -> list[Any]:
    """Runs `program(rank, *args)` in n processes, between `init_rpc` and `shutdown`; returns the results by rank.

    Arguments:
        program: what to run; may be local.
        n: how many processes.
        names: the workers' names; "worker0" and so on.
        options: keywords for `RpcBackendOptions`, the same for all or one for each.
        init_method: where to meet; by default a file of the world's own.
        graceful: for `shutdown`.
        timeout: seconds for everything.
        check: whether to look for threads and descriptors that are left.

    Raises:
        WorldError: a program raised, died, leaked, or did not end in time.
    """
    with World(n, names=names, options=options, init_method=init_method, timeout=timeout, check=check, join=False) as w:
        for rank in range(n):
            w.start(rank, _between, program, rank, args, w.plan, graceful)
        return w.results()


def run_processes(
    program: Callable[..., Any],
    n: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = 30.0,
    check: bool = True,
) -> list[Outcome]:
    """Runs `program(rank, *args)` in n processes, which join a world themselves, or not; returns all outcomes.

    Raises:
        WorldError: a process did not end in time.
    """
    with World(n, timeout=timeout, check=check, join=False, strict=False) as w:
        for rank in range(n):
            w.start(rank, program, rank, *args)
        return w.outcomes()


class World:
    """Processes that stand ready. Use it as a context manager.

    Arguments: as for `run_world`, and
        join: whether the processes form a world at once; else they only run what they are given.
        strict: whether leaving the block fails for processes that died or left something behind.
        timeout: seconds for each step.
    """

    def __init__(
        self,
        n: int,
        *,
        names: Sequence[str] | None = None,
        options: Options | Sequence[Options] | None = None,
        init_method: str | None = None,
        timeout: float = 30.0,
        check: bool = True,
        join: bool = True,
        strict: bool = True,
    ) -> None:
        self.size, self.timeout = n, timeout
        self.folder = tempfile.mkdtemp(prefix="aw-", dir="/tmp" if os.path.isdir("/tmp") else None)
        each = [options or {}] * n if options is None or isinstance(options, Mapping) else list(options)
        self.plan = Plan(
            n, list(names or [f"worker{i}" for i in range(n)]), each, init_method or f"file://{self.folder}/meet",
            self.folder, check,
        )  # fmt: skip
        self._join, self._strict, self._check = join, strict, check
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._outcomes = [Outcome(rank) for rank in range(n)]
        self._busy: set[int] = set()
        self._killed: set[int] = set()
        self._deadline = time.monotonic() + timeout

    def __enter__(self) -> World:
        try:
            for rank in range(self.size):
                mine, theirs = _CONTEXT.Pipe()
                process = _CONTEXT.Process(target=_live, args=(theirs, rank, self.plan), name=f"rank{rank}")
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
            if self._join:
                self.everywhere(_join, self.plan, ranked=True)
        except BaseException:
            self._end_by_force()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            self._end_by_force()
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- running

    def pid(self, rank: int) -> int:
        """Returns the process id of a rank."""
        pid = self._processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank, whose death is then no failure."""
        self._killed.add(rank)
        os.kill(self.pid(rank), number)

    def let_die(self, rank: int) -> None:
        """Says that a rank's death will be no failure."""
        self._killed.add(rank)

    def has_ended(self, rank: int) -> bool:
        """Returns whether a rank's process is no more."""
        return not self._processes[rank].is_alive()

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Has a rank run something in its main thread; `results`, `result` or `outcomes` waits for it."""
        assert rank not in self._busy, f"rank {rank} is busy"
        self._outcomes[rank] = Outcome(rank)
        self._deadline = time.monotonic() + self.timeout
        self._pipes[rank].send_bytes(cloudpickle.dumps((function, args)))
        self._busy.add(rank)

    def on(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Runs something in a rank's main thread, and returns its result."""
        self.start(rank, function, *args)
        return self.result(rank)

    def everywhere(self, function: Callable[..., Any], *args: Any, ranked: bool = False) -> list[Any]:
        """Runs something in all ranks at the same time; `ranked`: with the rank before the other arguments."""
        for rank in range(self.size):
            self.start(rank, function, *((rank, *args) if ranked else args))
        return self.results()

    def result(self, rank: int) -> Any:
        """Waits for what a rank runs, and returns its result."""
        self._wait({rank})
        self._raise_failures([rank])
        return self._outcomes[rank].value

    def results(self) -> list[Any]:
        """Waits for all ranks, and returns their results. Once one has failed, the others get 5 s."""
        self._wait(set(self._busy), hurry=True)
        self._raise_failures(range(self.size))
        return [outcome.value for outcome in self._outcomes]

    def outcomes(self) -> list[Outcome]:
        """Waits for all ranks, ends them, and returns what became of them, failed ones too."""
        self._wait(set(self._busy))
        self._close()
        return self._outcomes

    # -- inside

    def _wait(self, ranks: set[int], hurry: bool = False) -> None:
        deadline = self._deadline
        while waiting := ranks & self._busy:
            sources = {self._pipes[rank]: rank for rank in waiting}
            left = deadline - time.monotonic()
            ready = connection.wait(list(sources), max(0.0, left))
            if not ready:
                failed = [self._describe(o) for o in self._outcomes if o.rank not in waiting and self._has_failed(o)]
                self._fail(f"ranks {sorted(waiting)} did not come to an end in time", *failed, self._stacks(waiting))
            for source in ready:
                assert isinstance(source, connection.Connection)
                rank = sources[source]
                self._busy.discard(rank)
                self._take(self._outcomes[rank], source)
                if hurry and (self._outcomes[rank].traceback or not self._outcomes[rank].returned):
                    deadline = min(deadline, time.monotonic() + 5.0)

    def _take(self, outcome: Outcome, pipe: connection.Connection) -> None:
        try:
            kind, data = pipe.recv()
        except (EOFError, OSError):
            process = self._processes[outcome.rank]
            process.join(10.0)
            outcome.exitcode = process.exitcode
            return
        outcome.returned = True
        if kind == "value":
            outcome.value = cloudpickle.loads(data)
        elif kind == "ended":
            outcome.problems = data
        else:
            outcome.traceback, whole = data
            with contextlib.suppress(Exception):
                outcome.error = cloudpickle.loads(whole)

    def _raise_failures(self, ranks: Sequence[int]) -> None:
        failed = [self._outcomes[rank] for rank in ranks if self._has_failed(self._outcomes[rank])]
        if failed:
            self._fail(f"{len(failed)} of {self.size} ranks failed", *map(self._describe, failed))

    def _has_failed(self, outcome: Outcome) -> bool:
        died = outcome.exitcode not in (None, 0) and outcome.rank not in self._killed
        return bool(outcome.traceback) or died

    def _describe(self, outcome: Outcome) -> str:
        ended = f" (exit code {outcome.exitcode})" if outcome.exitcode is not None else ""
        return f"--- rank {outcome.rank}{ended}\n{outcome.traceback}{_tail(self._stderr(outcome.rank))}"

    def _close(self) -> None:
        """Shuts down everywhere, ends the processes, and gathers what they left behind."""
        self._deadline = time.monotonic() + self.timeout
        living = [rank for rank in range(self.size) if self._processes[rank].is_alive() and rank not in self._killed]
        ending = []
        for rank in living:
            with contextlib.suppress(OSError):
                self._pipes[rank].send_bytes(b"")
                ending.append(rank)
        kept = [Outcome(**vars(outcome)) for outcome in self._outcomes]
        self._busy |= set(ending)
        self._wait(set(ending))
        for rank in ending:
            self._processes[rank].join(10.0)
        for rank, was in enumerate(kept):
            end = self._outcomes[rank]
            was.problems, was.exitcode = end.problems, self._processes[rank].exitcode
            was.stderr = self._stderr(rank)
            if end.traceback and end.traceback != was.traceback:
                was.traceback += end.traceback
            self._outcomes[rank] = was
        if not self._strict:
            return
        texts = []
        for outcome in self._outcomes:
            if "Exception in thread" in outcome.stderr:
                outcome.problems.append("a thread ended with an exception")
            if outcome.problems or (self._has_failed(outcome) and outcome.rank in living):
                texts.append("\n".join([self._describe(outcome), *outcome.problems]))
        if self._check and not self._killed and (left := glob.glob(f"{self.folder}/actorrpc-*")):
            texts.append(f"folders are left: {left}")
        if texts:
            self._fail("the world did not end well", *texts)

    def _end_by_force(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with contextlib.suppress(ValueError):
                process.close()
        self._pipes, self._processes = [], []

    def _stderr(self, rank: int) -> str:
        try:
            return Path(self.folder, f"stderr-{rank}").read_text(errors="replace")
        except OSError:
            return ""

    def _stacks(self, ranks: set[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(OSError, TypeError):
                os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{_tail(self._stderr(rank), 12000)}" for rank in sorted(ranks))

    def _fail(self, *texts: str) -> None:
        raise WorldError("\n".join(texts))


@dataclass
class Plan:
    """What every process of a world is told."""

    size: int
    names: list[str]
    options: list[Options]
    init_method: str
    folder: str
    check: bool


# -- in the processes


def _live(pipe: connection.Connection, rank: int, plan: Plan) -> None:
    _settle_in(rank, plan)
    before = _census()
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            return
        if not data:
            break
        _do(pipe, data)
        del data
    try:
        if session.is_available():
            rpc.shutdown()
    except BaseException as e:
        pipe.send(("error", (_rendered(e), b"")))
    else:
        pipe.send(("ended", _left(before) if plan.check else []))
    pipe.close()


def _do(pipe: connection.Connection, data: bytes) -> None:
    try:
        function, args = cloudpickle.loads(data)
        answer = "value", cloudpickle.dumps(function(*args))
    except BaseException as e:
        try:
            whole = cloudpickle.dumps(e)
        except Exception:
            whole = b""
        pipe.send(("error", (_rendered(e), whole)))
        return
    pipe.send(answer)


def _between(program: Callable[..., Any], rank: int, args: Sequence[Any], plan: Plan, graceful: bool) -> Any:
    join(rank, plan)
    try:
        value = program(rank, *args)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown(graceful=graceful)
    return value


def join(rank: int, plan: Plan) -> None:
    """Calls `init_rpc` as a world's plan says."""
    options = rpc.RpcBackendOptions(**{"init_method": plan.init_method, "init_timeout": 20, **plan.options[rank]})
    rpc.init_rpc(plan.names[rank], rank=rank, world_size=plan.size, rpc_backend_options=options)


_join = join


def _settle_in(rank: int, plan: Plan) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the fork server does
    error = os.open(f"{plan.folder}/stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(error, 2)
    os.close(error)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # No `dump_traceback_later`: it walks the stacks of threads that run, which has ended a process with SIGSEGV.
    tempfile.tempdir = os.environ["TMPDIR"] = plan.folder
    torch.set_num_threads(1)
    gc.freeze()  # what the imports made need not be looked at by every collection
    _warm_up()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _warm_up() -> None:
    """Has pyzmq make what it keeps for ever once a large frame was sent without a copy: a thread, some descriptors."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://warm-up")
        b.connect("inproc://warm-up")
        for _ in range(2):
            tracker = a.send(bytes(1 << 17), copy=False, track=True)
            b.recv()
            assert tracker is not None
            tracker.wait(5)


def _rendered(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _census() -> tuple[set[int], dict[str, str]]:
    threads = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
    return threads, _descriptors()


def _descriptors() -> dict[str, str]:
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[name] = os.readlink(f"/proc/self/fd/{name}")
    return {name: where for name, where in found.items() if not where.endswith("/fd")}  # that of the listing itself


def _left(before: tuple[set[int], dict[str, str]]) -> list[str]:
    """What is there now and was not before; waits a while for it to go."""
    threads_before, files_before = before
    until = time.monotonic() + _LEAK_SECONDS
    while True:
        threads = [t for t in threading.enumerate() if t.ident not in threads_before]
        files = {n: f for n, f in _descriptors().items() if files_before.get(n) != f}
        extra = len(_descriptors()) - len(files_before) - _signal_pipe(files)
        if not threads and extra <= 0:
            return []
        if time.monotonic() > until:
            break
        gc.collect()
        time.sleep(0.02)
    problems = [f"the thread {t.name!r} is left:\n{_stack(t)}" for t in threads]
    if extra > 0:
        problems.append(f"{extra} descriptors are left, of these: {files}")
    return problems


def _signal_pipe(files: dict[str, str]) -> int:
    """2 where a pipe with both its ends here is new: libuv's, made once by a process's first TCPStore server."""
    pipes = [where for where in files.values() if where.startswith("pipe:")]
    return 2 if any(pipes.count(where) == 2 for where in pipes) else 0


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _tail(text: str, limit: int = 6000) -> str:
    return text if len(text) <= limit else f"...{text[-limit:]}"


# -- tests that run inside a standing world

STANDING: set[int] = set()
"""The processes of worlds that outlive a test."""


class Pairs:
    """Keeps one standing world (of two, by default) for many tests, and makes another where one has broken it."""

    def __init__(self, options: Options | None = None, size: int = 2) -> None:
        self._options, self._size = options, size
        self._world: World | None = None

    @contextlib.contextmanager
    def lend(self) -> Iterator[World]:
        """Lends the world to a test, and sees whether it still works afterwards."""
        world = self._world
        if world is None:
            world = self._world = World(self._size, options=self._options).__enter__()
            STANDING.update(map(world.pid, range(self._size)))
        try:
            yield world
            world.everywhere(_still_works)
        except BaseException:
            self._world = None
            world.__exit__(WorldError, None, None)
            raise

    def close(self) -> None:
        """Ends the world."""
        if self._world is not None:
            world, self._world = self._world, None
            world.__exit__(None, None, None)


def _still_works() -> None:
    for rank in range(len(session.current().worker.peers)):
        assert rpc.rpc_sync(rank, abs, args=(-1,), timeout=10) == 1
    no_references(3)
    worker = session.current().worker
    until(lambda: not worker.calls.pending, what=f"calls are pending: {worker.calls.pending}")
    until(lambda: worker.statistics()["queued"] == 0 and worker.statistics()["running"] == 0, what="handlers run on")


def inside(body: Callable[[], None]) -> Callable[[World], None]:
    """Makes a test of a function that is to run on rank 0 of a standing world of two, in its main thread."""

    def test(pair: World) -> None:
        pair.on(0, run_body, body.__module__, body.__qualname__)

    return dressed(test, body)


def dressed(test: Callable[[World], None], body: Callable[[], None]) -> Callable[[World], None]:
    """Gives a test the name of its body, by which `run_body` finds that."""
    test.body = body  # type: ignore[attr-defined]
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(test, name, getattr(body, name))
    return test


def run_body(module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).body()


# -- for programs to use


def until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "") -> Any:
    """Waits until a condition holds, and returns what it returned."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, what or f"{getattr(condition, '__qualname__', condition)} did not come true"
        time.sleep(0.005)
    return value


def stop(pid: int) -> None:
    """Stops a process, and waits until all of its threads stand still, which takes them a moment."""
    os.kill(pid, signal.SIGSTOP)

    def still() -> bool:
        stats = [Path(stat).read_text() for stat in glob.glob(f"/proc/{pid}/task/*/stat")]
        return all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)

    until(still)


def counts() -> dict[str, int]:
    """Returns this worker's reference counts."""
    return session.current().objects.statistics()


def no_references(seconds: float = 10.0) -> None:
    """Waits until this worker holds and owns nothing, and fails if it does not come to that."""

    def zero() -> bool:
        gc.collect()
        return not any(counts().values())

    until_counts(zero, seconds)


def until_counts(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for a condition on this worker's reference counts; a failure shows them."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the counts are {counts()}"
        time.sleep(0.005)


@contextlib.contextmanager
def raised_within(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"it took {took:.2f} s"
