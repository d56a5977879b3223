"""Worlds of processes that stand side by side, one for each library, and are measured in turn.

A machine's speed drifts by tens of per cent within seconds. So both libraries' worlds stay up, blocks of a third of a
second alternate between them, and the world that is not being measured is stopped (SIGSTOP): an idle worker of
`torch.distributed.rpc` spins, and would take a core from the other. What counts is the median of the ratios of blocks
that lay side by side. A *round* is a fresh set of worlds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self

PATIENCE = 300.0
"""Seconds after which a world is given up."""
ENDING = 20.0
"""Seconds that a world gets to end, before its processes are killed."""
TORCH, OURS = "torch.distributed.rpc", "actorrpc"
PRELOAD = ["torch", "torch.distributed.rpc", "torch._dynamo", "actorrpc", "actorrpc.testing", "benchmarks.traffic"]

Figures = dict[str, float]
Measure = Callable[[float], float]
"""Measures for so many seconds, and returns one figure."""
Measures = Mapping[str, Callable[[float], Any]]
Samples = dict[str, dict[str, list[float]]]
"""By what was measured, and by lane, the figures of all blocks; those with the same place lay side by side."""


@dataclass(frozen=True)
class Lane:
    """One of the worlds that are compared.

    Arguments:
        name: its column.
        program: makes the measures: `program(lane, rank, port)` is a context manager that gives them on rank 0.
        library: the module that has `init_rpc`.
        size: how many processes.
        tcp: whether everything is to travel by tcp, although the processes are on one host.
        token: whether the world has a security token.
        share: which part of a block's seconds it gets.
    """

    name: str
    program: Callable[[Lane, int, int], AbstractContextManager[Measures]]
    library: str = ""
    size: int = 2
    tcp: bool = False
    token: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """How long is measured: `rounds` fresh sets of worlds, with `blocks` blocks of `seconds` for each row."""

    rounds: int = 3
    blocks: int = 7
    seconds: float = 0.3
    check: bool = False


# -- in the processes


def latency(call: Callable[[], object], warm_up: int = 3) -> Measure:
    """Returns what measures the median time of a call, in microseconds."""

    def measure(seconds: float) -> float:
        for _ in range(warm_up):
            call()
        times: list[int] = []
        end = time.perf_counter_ns() + int(seconds * 1e9)
        now = 0
        while now < end or len(times) < 2:
            begun = time.perf_counter_ns()
            call()
            now = time.perf_counter_ns()
            times.append(now - begun)
        return statistics.median(times) / 1000

    return measure


def rate(burst: Callable[[], int], warm_up: Callable[[], object] | None = None) -> Measure:
    """Returns what measures how many things a second bursts of them make."""

    def measure(seconds: float) -> float:
        if warm_up is not None:
            warm_up()
        made, begun = 0, time.perf_counter()
        while not made or time.perf_counter() < begun + seconds:
            made += burst()
        return made / (time.perf_counter() - begun)

    return measure


def bandwidth(call: Callable[[], object], size: int) -> Measure:
    """Returns what measures how many GB/s a call moves that moves `size` bytes; of several calls the median counts."""
    timed = latency(call, warm_up=1)
    return lambda seconds: size / timed(seconds) / 1000


@contextlib.contextmanager
def rpc_world(lane: Lane, rank: int, port: int) -> Generator[Any]:
    """A member of a world "w0", "w1", ..., from `init_rpc` to `shutdown`. Gives the library."""
    rpc: Any = importlib.import_module(lane.library)
    join(rpc, lane, rank, port)
    yield rpc
    rpc.shutdown()  # whoever has no program serves in here


def join(rpc: Any, lane: Lane, rank: int, port: int) -> None:
    """Calls `init_rpc` as a lane wants it."""
    import torch

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    os.environ.setdefault("ACTORRPC_HEARTBEAT_TIMEOUT", "80")  # a world that is stopped is not dead
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's shutdown warns of torch's own code
    warnings.filterwarnings("ignore", ".*support for functional optimizers")
    options = rpc.TensorPipeRpcBackendOptions()
    if lane.tcp and lane.library == OURS:
        by_tcp()
    elif lane.tcp:
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    if lane.token:
        options.security_token = "a token of the benchmarks"
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=lane.size, rpc_backend_options=options)


def by_tcp() -> None:
    """Has this process's worker use tcp only, for want of an option that nobody else would need."""
    from actorrpc import session

    session_module: Any = session
    session_module.ZmqTransport = functools.partial(session_module.ZmqTransport, ipc=False)


def _live(lane: Lane, rank: int, port: int, pipe: Connection[Any, Any]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the fork server does, stopped or not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent sees to the end
    try:
        with lane.program(lane, rank, port) as measures:
            pipe.send(("ready", sorted(measures)))
            while rank == 0:
                asked = pipe.recv()
                if asked is None:
                    break
                key, seconds = asked
                pipe.send(("value", measures[key](seconds)))
        pipe.send(("ended", None))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
        raise


# -- in the process that measures


class Team:
    """The processes of one lane. They are stopped unless they are asked something.

    Use it as a context manager; whatever happens, its processes are gone after the block.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.measures: list[str] = []
        self._processes: list[Any] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._stopped = False

    def __enter__(self) -> Self:
        context, port = processes_context(), free_port()
        try:
            for rank in range(self.lane.size):
                mine, theirs = context.Pipe()
                process = context.Process(target=_live, args=(self.lane, rank, port, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)
            self.measures = self._answer("ready")
            self.stop()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._kill()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [int(process.pid) for process in self._processes]

    def ask(self, key: str, seconds: float) -> float:
        """Lets the processes go on for one measure, and returns its figure."""
        with self.going_on():
            return float(self.have(key, seconds * self.lane.share))

    def have(self, key: str, seconds: float) -> Any:
        """Has one measure made, while the processes go on anyway; returns what it found.

        Raises:
            SystemExit: a process has failed or died; the text has its traceback.
        """
        with contextlib.suppress(ConnectionError):  # the answer says it
            self._pipes[0].send((key, seconds))
        return self._answer("value")

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Lets the processes go on for the block."""
        self.go_on()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops the processes."""
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets them go on."""
        if self._stopped:
            self._stopped = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _answer(self, wanted: str) -> Any:
        ends, who = time.monotonic() + PATIENCE, f"{self.lane.name}, rank 0"
        while not self._pipes[0].poll(0.5):
            for rank, process in enumerate(self._processes):
                if not process.is_alive() and not self._pipes[0].poll():
                    raise SystemExit(f"{self.lane.name}: rank {rank} has died{self._last_words(rank)}")
            if time.monotonic() > ends:
                raise SystemExit(f"{who}: no answer in {PATIENCE:.0f} s")
        try:
            kind, value = self._pipes[0].recv()
        except (EOFError, ConnectionError):
            raise SystemExit(f"{who}: died without a word") from None
        if kind != wanted:
            raise SystemExit(f"{who}: {kind}\n{value}")
        return value

    def _last_words(self, rank: int) -> str:
        words = ""
        with contextlib.suppress(EOFError, OSError):
            while self._pipes[rank].poll():
                kind, value = self._pipes[rank].recv()
                words = f"\n{value}" if kind == "failed" else words
        return words

    def _end(self) -> None:
        self.go_on()
        with contextlib.suppress(ConnectionError):
            self._pipes[0].send(None)
        ends = time.monotonic() + ENDING
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))

    def _kill(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=False):
            pipe.close()
            if process.is_alive():
                process.kill()  # those that are stopped die as well
            process.join()


def processes_context() -> Any:
    """Returns where processes come from: a server that forks them."""
    return multiprocessing.get_context("forkserver")


def free_port() -> int:
    """Returns a port of loopback at which nobody listens just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(lanes: Sequence[Lane], keys: Sequence[str], plan: Plan, what: str = "") -> Samples:
    """Measures rows in all lanes that have them, in alternation.

    Arguments:
        lanes: the worlds; those that have no measure of a key sit it out, unless they have one of "*".
        keys: what to measure.
        plan: for how long.
        what: says what this is, on stderr.

    Raises:
        SystemExit: a world failed; the text has its traceback.
    """
    samples: Samples = {key: {lane.name: [] for lane in lanes} for key in keys}
    for number in range(plan.rounds):
        if what:
            say(f"{what}: round {number + 1} of {plan.rounds}")
        with contextlib.ExitStack() as stack:
            teams = [stack.enter_context(Team(lane)) for lane in lanes]
            for key in keys:
                known = [(team, key if key in team.measures else "*") for team in teams]
                asked = [(team, key) for team, key in known if key in team.measures]
                for team, name in asked:
                    team.ask(name, plan.seconds / 2)  # to warm up
                for block in range(plan.blocks):
                    for team, name in asked if (block + number) % 2 == 0 else reversed(asked):
                        samples[key][team.lane.name].append(team.ask(name, plan.seconds))
    return samples


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median of the ratios of figures that were taken side by side."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def say(text: str) -> None:
    """Tells how far things are."""
    print(text, file=sys.stderr, flush=True)


def is_failure(error: SystemExit) -> bool:
    """Whether a world has failed, which the text says; else this process is to end (`prepare`)."""
    return isinstance(error.code, str)


def prepare() -> None:
    """Prepares this process, which is to measure and nothing else: its children, and its own end."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch logs every connection that ends
    processes_context().set_forkserver_preload(PRELOAD)  # it has imported both libraries, and begun nothing

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # all blocks are left, so that no process stays behind, stopped

    signal.signal(signal.SIGTERM, leave)
