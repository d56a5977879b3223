"""A world of workers within one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any, cast

from actorrpc import rpc
from actorrpc.roles import parts_of, play
from actorrpc.runtime.peers import Record
from actorrpc.runtime.worker import Worker
from actorrpc.services import rendezvous
from actorrpc.services.roster import ELASTIC, Hello
from actorrpc.session import Session, chosen
from actorrpc.testing.cluster import SimStore
from actorrpc.testing.network import Network, SimTransport
from actorrpc.testing.simulation import Simulation
from actorrpc.wire import envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from actorrpc.roles import Part, Role
    from actorrpc.services.store import HintStore
    from actorrpc.testing.faults import Faults

_JOIN_SECONDS = 60.0


class SimWorld:
    """Workers "w0", "w1", ... over a simulated network and a virtual clock.

    Arguments:
        size: how many.
        seed: decides the order of all steps and the time that messages take.
        threads: how many handlers each may run at once.
        timeout: seconds, on the virtual clock, that a call gets which names none.
        parts: what they are, in a world of roles; see `of_roles`.
        elastic: whether nobody is there at first; see `member`.
        faults: what messages come to harm by. A rule that kills has the others notice at once, as `kill` does.
        deadlock_after: as in RpcBackendOptions; 0: deadlocks are not looked for, and the world stands still.
    """

    def __init__(
        self, size: int, seed: int, *, threads: int = 4, timeout: float = 60.0, parts: Sequence[Part] = (),
        elastic: bool = False, faults: Faults | None = None, deadlock_after: float = 0.0,
    ) -> None:  # fmt: skip
        self._deadlock_after = deadlock_after
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation, faults, self._die)
        self._parts, self._threads, self._timeout = list(parts), threads, timeout
        self._store = SimStore()
        self._incarnations = itertools.count(size + 1)
        named = [(p.name, p.role, p.index) for p in parts] or [(f"w{i}", "", 0) for i in range(size)]
        records = [
            Record(i, name, i + 1, (f"sim://{i}",), "sim", "sim", 0, role, index)
            for i, (name, role, index) in enumerate(named)
        ]
        self.sessions: list[Session] = []
        for record in [] if elastic else records:
            self.sessions.append(self._made(record))
        for session in self.sessions:
            session.worker.members.admit(records)
        self.dead: set[int] = set()
        """The ranks that were killed."""

    def _made(self, record: Record) -> Session:
        transport = SimTransport(self.network, record.endpoints[0])
        worker = Worker(record, transport, self.simulation, threads=self._threads, timeout=self._timeout)
        session = Session(worker)
        rpc.install(session)
        session.deadlocks.start(self._deadlock_after)
        return session

    @contextlib.contextmanager
    def member(self, rank: int, name: str = "") -> Iterator[Session]:
        """In a program, in an elastic world: a new worker joins for the block, as "w0" and so on, and leaves after it.

        Raises as `init_rpc` and `shutdown` do.
        """
        number = next(self._incarnations)
        record = Record(rank, name or f"w{rank}", number, (f"sim://{rank}.{number}",), "sim", "sim", 0)
        session = self._made(record)
        try:
            come = rendezvous.join if rank else rendezvous.found
            hello = Hello(record, ELASTIC, envelope.PROTOCOL)
            with chosen(session):
                session.worker.start()
                come(session.worker, cast("HintStore", self._store), hello, self.simulation.now() + _JOIN_SECONDS)
                yield session
                session.depart(0)
        finally:
            session.leave(linger=0.0)

    def __enter__(self) -> Self:
        self._on_each(lambda session: session.worker.start())
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._on_each(lambda session: session.close(0.0))
        finally:
            self.simulation.end()

    def run(self, *programs: Callable[[], Any] | None) -> list[Any]:
        """Runs programs, the first one on rank 0 and so on (None: nothing there), until all have returned.

        Returns what they returned.

        Raises:
            BaseException: what the first of them that raised did.
            SimulationError: the world stands still.
        """
        results: list[Any] = [None] * len(programs)

        def playing(rank: int, program: Callable[[], Any]) -> Callable[[], None]:
            def play() -> None:
                with chosen(self.sessions[rank]) if self.sessions else contextlib.nullcontext():
                    results[rank] = program()

            return play

        self._run([(rank, playing(rank, program)) for rank, program in enumerate(programs) if program is not None])
        return results

    @classmethod
    def of_roles(cls, seed: int, *, threads: int = 4, **roles: Role | Callable[..., Any] | None) -> SimWorld:
        """Makes a world of roles, as `launch` does; `play` runs it."""
        parts = parts_of(roles)
        return cls(len(parts), seed, threads=threads, parts=parts)

    def play(self) -> Any:
        """Has all workers play their parts; returns what the driver's `main` returned. Raises as `run` does."""
        return self.run(
            *(functools.partial(play, session, part) for session, part in zip(self.sessions, self._parts, strict=True))
        )[0]

    def settle(self, seconds: float = 1.0) -> None:
        """Lets time pass, so that what is under way comes to its end."""
        end = self.simulation.time + seconds
        self.simulation.at(end, lambda: None)
        self.simulation.run_until(lambda: self.simulation.time >= end)

    def kill(self, rank: int, noticed_after: float = 0.01) -> None:
        """Has a worker die; the others notice it some time later."""
        self.dead.add(rank)
        self.simulation.freeze(rank)
        self.sessions[rank].worker.transport.close()
        for session in self.sessions:
            if session.worker.id not in self.dead:
                worker = session.worker
                notice = functools.partial(worker.members.lose, rank, "it was killed")
                self.simulation.at(self.simulation.time + noticed_after, notice)

    def cut(self, a: int, b: int) -> None:
        """Cuts two ranks off from each other: what they send waits, until `heal`, or until they are lost."""
        self.network.cut(self._address(a), self._address(b))

    def heal(self, a: int, b: int) -> None:
        """Lets two ranks reach each other again."""
        self.network.heal(self._address(a), self._address(b))

    def _address(self, rank: int) -> str:
        return self.sessions[rank].worker.record.endpoints[0]

    def _die(self, address: str) -> None:
        self.kill(next(rank for rank in range(len(self.sessions)) if self._address(rank) == address))

    def _on_each(self, run: Callable[[Session], None]) -> None:
        living = [(rank, session) for rank, session in enumerate(self.sessions) if rank not in self.dead]
        self._run([(rank, functools.partial(_run_as, session, run)) for rank, session in living])

    def _run(self, programs: list[tuple[int, Callable[[], None]]]) -> None:
        tasks = [self.simulation.spawn(program, f"program-{rank}", rank) for rank, program in programs]
        self.simulation.run_until(lambda: all(t.done or t.owner in self.dead for t in tasks))
        for task in tasks:
            if task.error is not None:
                raise task.error


def _run_as(session: Session, run: Callable[[Session], None]) -> None:
    with chosen(session):
        run(session)
