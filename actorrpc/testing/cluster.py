"""Simulated processes that run a user's program, which calls `init_rpc` and `shutdown` as it would in real ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from actorrpc.process import Process, living_in
from actorrpc.runtime.peers import Record
from actorrpc.runtime.worker import Worker
from actorrpc.session import Session
from actorrpc.testing.network import Network, SimTransport
from actorrpc.testing.simulation import Simulation, SimulationError
from actorrpc.wire.lookout import LIFE, LOOK, STILL
from actorrpc.wire.transport import News

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from actorrpc.options import RpcBackendOptions
    from actorrpc.services.sealed import SealedStore
    from actorrpc.testing.faults import Faults
    from actorrpc.testing.simulation import Task

_NOTICE_SECONDS = 0.2
"""What it takes at the most until an ended process, or the end of its connections, is seen."""
_AGAIN_SECONDS = 0.5
_EPOCH = 1e9


class SimStore:
    """A rendezvous store within the process; see `services.store.HintStore`."""

    hello: Any = None

    def __init__(self) -> None:
        self._hint: bytes | None = None

    def publish(self, hint: bytes, deadline: float) -> None:
        self._hint = hint

    def read(self, deadline: float) -> bytes | None:
        return self._hint

    def peek(self) -> bytes | None:
        return self._hint

    def seen(self) -> str:
        return "in the simulated store"

    def close(self) -> None:
        pass


class SimProcess:
    """A simulated process. `SimCluster.start` makes it.

    Attributes:
        name: what it is called in the errors of tests.
        host: where it runs. The death of a process is noticed at once by those on its host.
        value: what its program has returned.
        error: what it has raised.
        lives: how many times it was started.
    """

    def __init__(self, cluster: SimCluster, name: str, host: str, program: Callable[[], Any]) -> None:
        self.name, self.host = name, host
        self.value: Any = None
        self.error: BaseException | None = None
        self.lives = 0
        self._cluster, self._program = cluster, program
        self._own = Process()
        self._task: Task | None = None
        self._killed = self._paused = False
        self.sessions: list[Session] = []
        """Those of its present life; closed ones too."""
        self._begin()

    def __repr__(self) -> str:
        return f"<SimProcess {self.name} on {self.host}>"

    @property
    def alive(self) -> bool:
        """Whether it runs: its program has not come to its end, and it was not killed."""
        return self._task is not None and not self._task.done and not self._killed

    @property
    def killed(self) -> bool:
        """Whether its present life was ended by `kill`."""
        return self._killed

    @property
    def _owner(self) -> tuple[str, int]:
        return self.name, self.lives

    def kill(self) -> None:
        """Ends it at once, as SIGKILL does. Those on its host notice within a fifth of a second; those elsewhere a
        second later, as nobody listens there any more, or, where they are cut off from it, by silence.
        """
        if not self.alive:
            return
        self._killed = True
        self._cluster.simulation.freeze(self._owner)
        for session in self.sessions:
            session.worker.transport.close()
            self._cluster._noticed(self, session)
        if self._cluster.simulation.here.task is self._task:
            self._cluster.simulation.block(None, "nothing: its process is dead")

    def restart(self) -> None:
        """Starts its program anew, as another process under the same name; kills the old one first."""
        self.kill()
        self._begin()

    def pause(self) -> None:
        """Stops it, as SIGSTOP does. Others notice by its silence."""
        self._paused, self._paused_at = True, self._cluster.simulation.time
        self._cluster.simulation.freeze(self._owner)
        for other in self._cluster.processes:
            if other is not self:
                self._cluster._listen(other, self, lambda: self._paused, both=False)

    def resume(self) -> None:
        """Lets it go on, as SIGCONT does."""
        if not self._killed:
            silence, time = self._cluster.silence, self._cluster.simulation.time
            if self._paused and silence is not None and time - self._paused_at >= silence * (LOOK + STILL):
                for session in self.sessions:
                    session.worker.transport.told(-1, News.AWAKE)
            self._paused = False
            self._cluster.simulation.thaw(self._owner)

    def _begin(self) -> None:
        self.lives += 1
        self.value = self.error = None
        self._killed = self._paused = False
        self._own, self.sessions = Process(), []
        self._own.make = functools.partial(self._cluster._make, self)
        self._task = self._cluster.simulation.spawn(self._run, f"{self.name}.{self.lives}", self._owner)

    def _run(self) -> None:
        own, life = self._own, self.lives
        with living_in(own):
            try:
                value = self._program()
            except Exception as e:
                if self.lives == life:
                    self.error = e
            else:
                if self.lives == life:
                    self.value = value
            session = own.session
            if session is not None and session.worker.open:
                session.leave("its program ended without shutdown", 0.5)


class SimCluster:
    """Simulated hosts and processes, under one virtual clock; a seed decides the order of all that happens.

    A program runs as it does in a process of its own: it calls `init_rpc`, makes calls, and `shutdown`. It must wait
    through the library only, or by `time.sleep`: in the block, `time.sleep`, `time.monotonic`, `time.perf_counter` and
    `time.time` are those of the virtual clock for it (as attributes of `time`). It starts no threads of its own, and
    shares this process's globals with the others.

    Arguments:
        seed: decides everything.
        faults: what messages come to harm by; see `Faults`.
        silence: seconds after which those who are cut off from each other, or from one that is stopped, take the other
            for lost. None: never.
    """

    def __init__(self, seed: int, *, faults: Faults | None = None, silence: float | None = 10.0) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation, faults, self._die)
        self.silence = silence
        self.processes: list[SimProcess] = []
        self._stores: dict[str, SimStore] = {}
        self._numbers = itertools.count(1)
        self._cuts: set[frozenset[str]] = set()
        self._time: contextlib.ExitStack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._time.enter_context(_virtual_time(self.simulation))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._time:
            self.simulation.end()

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.simulation.time

    @property
    def trace(self) -> str:
        """What tells one course of events from another; the same seed has the same."""
        return self.simulation.trace

    def start(self, program: Callable[..., Any], *args: Any, name: str = "", host: str = "host") -> SimProcess:
        """Starts a process.

        Arguments:
            program: what it runs, with `args`.
            name: what it is called here; by default after the function, with a number.
            host: where it runs.
        """
        shown = name or f"{getattr(program, '__name__', 'program')}-{len(self.processes)}"
        if any(process.name == shown for process in self.processes):
            raise ValueError(f"there is a process {shown!r} already; restart() begins its program anew")
        made = SimProcess(self, shown, host, functools.partial(program, *args))
        self.processes.append(made)
        return made

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Has something happen some seconds from now: `cluster.at(0.5, process.kill)`. It must not wait."""

        def run() -> None:
            action()

        self.simulation.at(self.simulation.time + seconds, run)

    def run(self, limit: float = 3600.0, check: bool = True) -> None:
        """Runs until all programs have come to their end, or were killed.

        Arguments:
            limit: virtual seconds.
            check: whether an error that a program has raised is raised here; else it is in `SimProcess.error`.

        Raises:
            SimulationError: they did not come to an end; it says what each waits for.
            BaseException: what a program has raised: the first in order of `start`.
        """
        end = self.simulation.time + limit
        self.run_until(lambda: not any(process.alive for process in self.processes), end - self.simulation.time)
        for process in self.processes:
            if check and process.error is not None:
                raise process.error

    def run_until(self, condition: Callable[[], bool], limit: float = 3600.0) -> None:
        """Runs until a condition holds, which is looked at between two steps. Raises SimulationError as `run` does."""
        end = self.simulation.time + limit
        self.simulation.at(end, lambda: None)
        self.simulation.run_until(lambda: condition() or self.simulation.time >= end)
        if not condition():
            raise SimulationError(
                f"seed {self.simulation.seed}: it did not come true in {limit:g} virtual seconds; "
                f"{self.simulation.waits()}"
            )

    def cut(self, *sides: SimProcess | str | list[SimProcess]) -> None:
        """Cuts sides off from each other: processes, lists of them, or hosts by name. What they send waits, as TCP
        would have it; after `silence` seconds each takes the others for lost.
        """
        for a, b in self._pairs(*sides):
            self._cuts.add(frozenset((a.name, b.name)))
            for one, other in itertools.product(a.sessions, b.sessions):
                self.network.cut(one.worker.record.endpoints[0], other.worker.record.endpoints[0])
            self._listen(a, b, lambda a=a, b=b: frozenset((a.name, b.name)) in self._cuts)  # type: ignore[misc]

    def heal(self, *sides: SimProcess | str | list[SimProcess]) -> None:
        """Lets sides reach each other again; without any, all."""
        for a, b in self._pairs(*sides) if sides else list(itertools.combinations(self.processes, 2)):
            self._cuts.discard(frozenset((a.name, b.name)))
            for one, other in itertools.product(a.sessions, b.sessions):
                self.network.heal(one.worker.record.endpoints[0], other.worker.record.endpoints[0])

    # -- inside

    def _pairs(self, *sides: SimProcess | str | list[SimProcess]) -> list[tuple[SimProcess, SimProcess]]:
        groups = []
        for side in sides:
            if isinstance(side, str):
                groups.append([process for process in self.processes if process.host == side])
            else:
                groups.append([side] if isinstance(side, SimProcess) else side)
        return [pair for a, b in itertools.combinations(groups, 2) for pair in itertools.product(a, b)]

    def _make(self, of: SimProcess, name: str, rank: int, options: RpcBackendOptions, role: str, index: int) -> Session:
        number = next(self._numbers)
        address = f"sim://{of.host}/{of.name}.{number}"
        transport = SimTransport(self.network, address, self.silence or 0.0)
        # A boot of its own, so that nobody looks for its process among the real ones.
        record = Record(rank, name, number, (address,), of.host, f"sim-{number}", 10_000 + number, role, index)
        worker = Worker(
            record, transport, self.simulation, threads=options.num_worker_threads, timeout=options.rpc_timeout
        )
        store = self._stores.setdefault(options.init_method, SimStore())
        session = Session(worker, cast("SealedStore", store), options)
        session.inquiries.start()
        of.sessions.append(session)
        for other in self.processes:
            if frozenset((of.name, other.name)) in self._cuts:
                for one in other.sessions:
                    self.network.cut(address, one.worker.record.endpoints[0])
        return session

    def _die(self, address: str) -> None:
        for process in self.processes:
            if any(session.worker.record.endpoints[0] == address for session in process.sessions):
                process.kill()

    def _noticed(self, dead: SimProcess, session: Session) -> None:
        """Has others notice the death of a process."""
        for other in self.processes:
            if other is dead:
                continue
            delay, news = self.simulation.random.random() * _NOTICE_SECONDS, News.REFUSED
            if other.host == dead.host:
                news = News.ENDED
            elif frozenset((other.name, dead.name)) in self._cuts:
                if self.silence is None:
                    continue
                delay, news = self.silence * LIFE, News.CUT
            self._in(delay, other, session.worker.record, news)

    def _listen(self, a: SimProcess, b: SimProcess, still: Callable[[], bool], both: bool = True) -> None:
        """Has those who hear nothing of each other notice, where that goes on."""
        if self.silence is None:
            return
        records = [(a, session.worker.record) for session in b.sessions]
        if both:
            records += [(b, session.worker.record) for session in a.sessions]
        for who, record in records:
            self._in(self.silence * LIFE, who, record, News.CUT, still)

    def _in(
        self, seconds: float, who: SimProcess, record: Record, news: str, still: Callable[[], bool] = lambda: True
    ) -> None:
        """Has a process's transports tell news of a worker, some seconds from now."""

        def tell() -> None:
            if not still() or not who.alive:
                return
            if who._paused:
                self._in(_AGAIN_SECONDS, who, record, news, still)
                return
            for session in who.sessions:
                for number, peer in list(session.worker.peers.items()):
                    if peer.record.incarnation == record.incarnation and session.worker.open:
                        session.worker.transport.told(number, news)

        self.simulation.at(self.simulation.time + seconds, tell)


@contextlib.contextmanager
def _virtual_time(simulation: Simulation) -> Iterator[None]:
    """Has the functions of `time` tell the virtual time to threads of the simulation."""
    real = {name: getattr(time, name) for name in ("sleep", "monotonic", "perf_counter", "time")}
    interval = sys.getswitchinterval()

    def sleep(seconds: float) -> None:
        if simulation.here.task is None:
            real["sleep"](seconds)
        else:
            simulation.block(max(0.0, seconds), "the end of its sleep")

    def tells(name: str, offset: float) -> Callable[[], float]:
        def tell() -> float:
            if simulation.here.task is None:
                told: float = real[name]()
                return told
            return offset + simulation.time

        return tell

    fakes = {"sleep": sleep, "monotonic": tells("monotonic", 0.0), "perf_counter": tells("perf_counter", 0.0)}
    fakes["time"] = tells("time", _EPOCH)
    for name, fake in fakes.items():
        setattr(time, name, fake)
    try:
        yield
    finally:
        for name, one in real.items():
            setattr(time, name, one)
        sys.setswitchinterval(interval)  # which those that were killed did not do
