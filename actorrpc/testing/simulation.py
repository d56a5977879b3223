"""A scheduler for threads that run one at a time: who runs next is drawn from a seed, time passes when nobody can run.

The threads are real ones, so the code under test needs no change; but each holds a baton while it runs, and gives it
up only where it blocks: in the clock's gates, in a transport or in a join. What happens in between is one step.
"""

from __future__ import annotations

import contextvars
import gc
import hashlib
import heapq
import random
import threading
from typing import TYPE_CHECKING

from actorrpc.runtime.handling import no_wait

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP_SECONDS = 20e-6
"""The longest time that one step is drawn to take, on the virtual clock."""
_REAL_SECONDS = 30.0
_COLLECT_CHANCE = 0.005
"""How often a step begins with a look of the collector's, which has no say of its own: it would follow no seed."""


class SimulationError(AssertionError):
    """The simulated world cannot go on: nobody can run and nothing is under way, or a step does not end."""


class _Over(BaseException):
    """Ends a thread of a simulation that is over."""


class Task:
    """A thread of the simulation."""

    def __init__(self, simulation: Simulation, run: Callable[[], None], name: str, owner: object) -> None:
        self._simulation, self._run, self.name, self.owner = simulation, run, name, owner
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ready = True
        self.done = False
        self.timer = 0
        """Counts blocks, so that the timer of an earlier one is known to be void."""
        self.waiting_for = ""
        self.error: BaseException | None = None
        self.joiners: list[Task] = []
        self._context = contextvars.copy_context()  # so that whom it works for is known to it
        self._context.run(no_wait.set, False)  # that is another thread's own
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self.baton.acquire()
        self._simulation.here.task = self
        run = self._run
        del self._run  # timers may know this task long after its end; what it held goes now
        try:
            if not self._simulation.over:
                self._context.run(run)
        except _Over:
            pass
        except BaseException as e:
            self.error = e
        finally:
            del run, self._context
            self.done = True
            for joiner in self.joiners:
                joiner.ready = True
            self._simulation.back.release()

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        if not self.done:
            me = self._simulation.here.task
            assert me is not None, "only a thread of the simulation can join one"
            self.joiners.append(me)
            self._simulation.block(timeout, f"the end of {self.name}")

    def is_alive(self) -> bool:
        """Returns whether it still runs."""
        return not self.done


class _Here(threading.local):
    task: Task | None = None


class Simulation:
    """A virtual clock and its threads. It is a `runtime.clock.Clock`.

    Arguments:
        seed: decides the order of everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed, self.time, self.steps = seed, 0.0, 0
        self.over = False
        self.here = _Here()
        self.back = threading.Lock()
        self.back.acquire()
        self._tasks: list[Task] = []
        self._frozen: set[object] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._collect = False
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def trace(self) -> str:
        """What tells one course of events from another: who took which step when. The same seed has the same."""
        return self._trace.hexdigest()

    # -- the clock

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.time

    def gate(self) -> SimGate:
        """Makes a closed gate."""
        return SimGate(self)

    def start(self, run: Callable[[], None], name: str) -> Task:
        """Starts a thread; it belongs to whom the present thread belongs to."""
        me = self.here.task
        return self.spawn(run, name, me.owner if me is not None else None)

    # -- for transports and worlds

    def spawn(self, run: Callable[[], None], name: str, owner: object) -> Task:
        """Starts a thread that belongs to `owner`, with whom it can be frozen."""
        task = Task(self, run, name, owner)
        self._tasks.append(task)
        return task

    def at(self, time: float, run: Callable[[], None]) -> None:
        """Has something happen at a time; it must not block."""
        self._made += 1
        heapq.heappush(self._events, (time, self._made, run))

    def freeze(self, owner: object) -> None:
        """Lets the threads of an owner never run again, as if its process were dead."""
        self._frozen.add(owner)

    def thaw(self, owner: object) -> None:
        """Lets the threads of a frozen owner run again."""
        self._frozen.discard(owner)

    def block(self, timeout: float | None, what: str) -> None:
        """Gives the baton up until somebody makes the present thread ready, or `timeout` seconds have passed."""
        me = self.here.task
        assert me is not None, "only a thread of the simulation can wait in it"
        me.ready, me.waiting_for = False, what
        me.timer += 1
        if timeout is not None:
            turn = me.timer
            self.at(self.time + timeout, lambda: self._expire(me, turn))
        self.back.release()
        me.baton.acquire()
        if self.over:
            raise _Over
        if self._collect:
            self._collect = False
            gc.collect(1)

    @staticmethod
    def _expire(task: Task, turn: int) -> None:
        if task.timer == turn:
            task.ready = True

    # -- running

    def run_until(self, done: Callable[[], bool]) -> None:
        """Runs the world until `done()`, on the caller's thread, which is not one of the simulation's.

        Raises:
            SimulationError: nobody can run and nothing is under way.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run_until(done)
        finally:
            if collects:
                gc.enable()

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            while self._events and self._events[0][0] <= self.time:
                heapq.heappop(self._events)[2]()
            ready = [t for t in self._tasks if t.ready and not t.done and t.owner not in self._frozen]
            if ready:
                self._step(ready[self.random.randrange(len(ready))])
            elif self._events:
                self.time = max(self.time, self._events[0][0])
            else:
                raise SimulationError(
                    f"seed {self.seed}: the world stands still after {self.steps} steps: {self.waits()}"
                )

    def waits(self) -> str:
        """Says what each thread waits for."""
        return "; ".join(f"{t.name} waits for {t.waiting_for}" for t in self._tasks if not t.done)

    def _step(self, task: Task) -> None:
        self.steps += 1
        self._trace.update(f"{task.name} {self.time!r}\n".encode())
        self._collect = self.random.random() < _COLLECT_CHANCE
        task.baton.release()
        if not self.back.acquire(timeout=_REAL_SECONDS):
            raise SimulationError(
                f"seed {self.seed}: a step of {task.name} did not end: it waits outside of the simulation"
            )
        self.time += self.random.random() * _STEP_SECONDS
        if task.done:
            self._tasks.remove(task)

    def end(self) -> None:
        """Ends all threads that are left."""
        self.over = True
        while self._tasks:  # some may be born meanwhile
            task = self._tasks.pop()
            while not task.done:
                task.baton.release()
                if not self.back.acquire(timeout=_REAL_SECONDS):
                    raise SimulationError(f"seed {self.seed}: {task.name} does not end")
            task.thread.join(_REAL_SECONDS)
        self._events.clear()


class SimGate:
    """A gate of the virtual clock."""

    __slots__ = ("_open", "_simulation", "_task")

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._open = simulation, False
        self._task: Task | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """See `runtime.clock.Gate`."""
        if not self._open:
            self._task = self._simulation.here.task
            self._simulation.block(timeout, "a gate")
            self._task = None
        was, self._open = self._open, False
        return was

    def open(self) -> None:
        """See `runtime.clock.Gate`."""
        self._open = True
        task = self._task
        if task is not None:
            task.ready = True
