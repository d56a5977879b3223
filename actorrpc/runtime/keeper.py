"""The keeper: the one thread that looks after time. Deadlines, free leadership, standstill, dead peers, finalizers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.crew import TICK
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.vacancy import NAP

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.clock import Thread
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_FOREVER = float("inf")
_QUIET_TICKS = 20
_CALM_TICKS = 3
_AFTER_ERROR_SECONDS = 0.2


class Keeper:
    """Looks after a worker's time.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._gate = worker.clock.gate()
        self._thread: Thread | None = None
        self._stopping = False
        self._passed = 1
        self._calm = 0
        self.due = _FOREVER
        """When the next deadline is looked at; calls with an earlier one say so through `schedule`."""
        self._timers: list[tuple[float, Callable[[], None]]] = []
        """The keeper's own; it takes in what is new when something falls due."""
        self._new_timers: deque[tuple[float, Callable[[], None]]] = deque()
        # Who has other locks may wait for it. So nothing is done under it in which a finalizer of the user's may run,
        # for that may wait for those.
        self._due_door = threading.RLock()
        self.dropped: deque[Any] = deque()
        """What finalizers leave here, without a lock; `bury` is called for it in the control lane."""
        self.bury: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts to look."""
        self._worker.crew.alarm = self._gate.open
        self._worker.crew.active = True
        self._thread = self._worker.clock.start(self._run, f"{self._worker.record.name}-keeper")

    def schedule(self, deadline: float) -> None:
        """Says that something falls due earlier than was known."""
        with self._due_door:
            if deadline < self.due:
                self.due = deadline
        self._gate.open()

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Runs something short in the control lane, some seconds from now."""
        at = self._worker.clock.now() + seconds
        self._new_timers.append((at, run))
        self.schedule(at)

    def drop(self, what: Any) -> None:
        """Takes something from a finalizer: appends and opens a gate, neither of which takes a lock."""
        if self._stopping:  # nobody would take it from here any more
            return
        self.dropped.append(what)
        if not self._worker.crew.active:  # else it looks within a tick, and takes several together
            self._gate.open()

    def rouse(self) -> None:
        """Has it look around now."""
        self._gate.open()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._gate.open()
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        quiet = 0
        while not self._stopping:
            try:
                quiet = self._round(quiet)
            except Exception:  # nobody would look after time any more
                log.exception("%s: the keeper met an error", self._worker)
                self._gate.wait(_AFTER_ERROR_SECONDS)

    def _round(self, quiet: int) -> int:
        """Looks after everything once. Takes and returns for how many rounds there was nothing to look after."""
        worker, crew, now = self._worker, self._worker.crew, self._worker.clock.now
        time = now()
        if time >= self.due:
            self._expire(time)
        if self.dropped and self.bury is not None:
            crew.submit((Lane.CONTROL, self._bury, None))
        doubts = worker.doubts
        if doubts.open:
            doubts.look(time)
        loose = worker.calls.loose_ends
        worker.calls.settle_soon()
        rest = crew.tick(time, self._passed)
        quiet = 0 if rest or loose or doubts.open else quiet + self._passed
        if quiet < _QUIET_TICKS:
            self._nap(1 if loose or doubts.open else rest or NAP)
            return quiet
        crew.active = False
        if crew.needs_keeper or worker.calls.loose_ends or doubts.open or self.dropped:  # just before this
            crew.active = True
            return 0
        self._gate.wait(self._pause(now()))
        crew.active = True
        self._passed, self._calm = 1, 0
        return _QUIET_TICKS - 2

    def _nap(self, ticks: int) -> None:
        """Waits for the next tick, or for some, where all was calm for a while and nobody asks for one before.

        In a tight loop of calls each tick takes the GIL, and often a core, from those who call.
        """
        crew, now = self._worker.crew, self._worker.clock.now
        self._calm = self._calm + 1 if ticks > 1 else 0
        nap, began = self._calm >= _CALM_TICKS, now()
        if nap:
            crew.napping = True
            nap = not (crew.hurried or self._worker.calls.loose_ends)  # just before this
        self._gate.wait(max(0.0, min(TICK * ticks, self.due - began)) if nap else TICK)
        if nap and not crew.napping:
            self._calm = 0  # somebody could not wait
        crew.napping = False
        self._passed = max(1, round((now() - began) / TICK))

    def _pause(self, time: float) -> float | None:
        pause = self.due - time
        return None if pause == _FOREVER else max(0.0, pause)

    def _bury(self, _: object) -> None:
        if self.bury is not None:
            self.bury()

    def _expire(self, time: float) -> None:
        worker = self._worker
        with self._due_door:
            self.due = _FOREVER  # calls that are sent, and timers that are set, from here on say so themselves
        timers = self._timers
        while self._new_timers:
            timers.append(self._new_timers.popleft())
        ready = [run for at, run in timers if at <= time]
        self._timers = [(at, run) for at, run in timers if at > time]
        due = min((at for at, _ in self._timers), default=_FOREVER)
        for run in ready:
            worker.crew.submit((Lane.CONTROL, _call, run))
        self.schedule(min(due, worker.calls.expire_due(time)))


def _call(run: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        log.exception("a timer failed")
