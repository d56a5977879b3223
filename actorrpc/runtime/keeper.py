"""The keeper: the one thread that looks after time. Deadlines, free leadership, standstill, dead peers, finalizers."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actorrpc.runtime.crew import TICK
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.peers import Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.clock import Thread
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_FOREVER = float("inf")
_QUIET_TICKS = 20
_WATCH_SECONDS = 0.2
_LAST_WORDS_SECONDS = 0.1
"""What ZeroMQ's thread gets to take in what an ended process sent; then the leader must have seen the inbox empty."""
_LAST_WORDS_LIMIT = 5.0


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
        self.due = _FOREVER
        """When the next deadline is looked at; calls with an earlier one say so through `schedule`."""
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._timers_door = threading.RLock()
        self.dropped: deque[Any] = deque()
        """What finalizers leave here, without a lock; `bury` is called for it in the control lane."""
        self.bury: Callable[[], None] | None = None
        self._looked = 0.0
        self._pidfds: dict[int, int] = {}
        self._ended: dict[int, _End] = {}
        """Peers whose process has ended, and whose last messages may still be on their way through this one."""
        self._poll = select.poll() if hasattr(select, "poll") else None

    def start(self) -> None:
        """Starts to look."""
        self._worker.crew.alarm = self._gate.open
        self._worker.crew.active = True
        self._thread = self._worker.clock.start(self._run, f"{self._worker.record.name}-keeper")

    def schedule(self, deadline: float) -> None:
        """Says that something falls due earlier than was known."""
        with self._timers_door:
            self.due = min(self.due, deadline)
        self._gate.open()

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Runs something short in the control lane, some seconds from now."""
        at = self._worker.clock.now() + seconds
        with self._timers_door:
            self._timers.append((at, run))
        self.schedule(at)

    def drop(self, what: Any) -> None:
        """Takes something from a finalizer: appends and opens a gate, neither of which takes a lock."""
        if self._stopping:  # nobody would take it from here any more
            return
        first = not self.dropped
        self.dropped.append(what)
        if first:
            self._gate.open()

    def watch(self, peer: Peer) -> None:
        """Watches the process of a peer on this host, so that its death is known at once.

        A closed connection would not tell: a child that the peer forked keeps it open.
        """
        record = peer.record
        mine = self._worker.record
        if not hasattr(os, "pidfd_open") or self._poll is None or record.boot != mine.boot or record.pid == mine.pid:
            return
        if record.id in self._pidfds:
            return
        try:
            fd = os.pidfd_open(record.pid)
        except OSError as e:
            if not isinstance(e, ProcessLookupError):  # no descriptor to be had, say: not the peer's fault
                log.warning("%s: the process of %s cannot be watched: %s", self._worker.record.name, record, e)
                return
            self._ended[record.id] = _End(self._worker.clock.now())
            self._gate.open()
            return
        with self._timers_door:  # a job of the crew may dial somebody while this thread is being ended
            if self._stopping or record.id in self._pidfds:
                os.close(fd)
                return
            self._pidfds[record.id] = fd
            self._poll.register(fd, select.POLLIN)
        self._gate.open()

    def unwatch(self, number: int) -> None:
        """Stops watching a peer."""
        self._ended.pop(number, None)
        fd = self._pidfds.pop(number, None)
        if fd is not None and self._poll is not None:
            self._poll.unregister(fd)
            os.close(fd)

    def stop(self) -> None:
        """Ends the thread."""
        with self._timers_door:
            self._stopping = True
        self._gate.open()
        if self._thread is not None:
            self._thread.join(2.0)
        for number in list(self._pidfds):
            self.unwatch(number)

    def _run(self) -> None:
        quiet = 0
        while not self._stopping:
            try:
                quiet = self._round(quiet)
            except Exception:  # nobody would look after time any more
                log.exception("%s: the keeper met an error", self._worker)
                self._gate.wait(_WATCH_SECONDS)

    def _round(self, quiet: int) -> int:
        """Looks after everything once. Takes and returns for how many rounds there was nothing to look after."""
        worker, crew, now = self._worker, self._worker.crew, self._worker.clock.now
        time = now()
        if time >= self.due:
            self._expire(time)
        if self.dropped and self.bury is not None:
            crew.submit((Lane.CONTROL, self._bury, None))
        if self._pidfds and time - self._looked >= _WATCH_SECONDS:
            self._looked = time
            self._look(time)
        if self._ended:
            self._hear_out(time)
        worker.calls.settle_soon()
        quiet = 0 if crew.tick(time) or self._ended else quiet + 1
        if quiet < _QUIET_TICKS:
            self._gate.wait(TICK)
            return quiet
        crew.active = False
        if crew.needs_keeper or worker.calls.loose_ends:  # somebody had need of it just before the line above
            crew.active = True
            return 0
        self._gate.wait(self._pause(now()))
        crew.active = True
        return _QUIET_TICKS - 2

    def _pause(self, time: float) -> float | None:
        pause = self.due - time
        if self._pidfds:
            pause = min(pause, _WATCH_SECONDS)
        return None if pause == _FOREVER else max(0.0, pause)

    def _bury(self, _: object) -> None:
        if self.bury is not None:
            self.bury()

    def _expire(self, time: float) -> None:
        worker = self._worker
        with self._timers_door:
            self.due = _FOREVER  # calls that are sent from here on say so themselves
            ready = [run for at, run in self._timers if at <= time]
            self._timers = [(at, run) for at, run in self._timers if at > time]
            due = min((at for at, _ in self._timers), default=_FOREVER)
        for run in ready:
            worker.crew.submit((Lane.CONTROL, _call, run))
        self.schedule(min(due, worker.calls.expire_due(time)))

    def _look(self, time: float) -> None:
        assert self._poll is not None
        ended = {fd for fd, _ in self._poll.poll(0)}
        for number, fd in list(self._pidfds.items()):
            if self._worker.peers[number].standing is not Standing.MEMBER:  # it said goodbye, and its process goes on
                self.unwatch(number)
            elif fd in ended and number not in self._ended:
                self._ended[number] = _End(time)

    def _hear_out(self, time: float) -> None:
        """Takes ended peers for lost once what they sent is in: an answer, a goodbye, the end of the world."""
        transport = self._worker.transport
        for number, end in list(self._ended.items()):
            if end.emptied is None:
                if time - end.at < _LAST_WORDS_SECONDS:
                    continue
                end.emptied = transport.emptied
                transport.wake()  # a leader who sleeps goes round once
            elif transport.emptied != end.emptied or time - end.at > _LAST_WORDS_LIMIT:
                self.unwatch(number)
                peer = self._worker.peers.get(number)
                if peer is not None and peer.standing is Standing.MEMBER:
                    self._worker.members.lose(number, f"its process {peer.record.pid} has ended")


@dataclass
class _End:
    """When the end of a peer's process was noticed, and how often the inbox had been empty a little later."""

    at: float
    emptied: int | None = None


def _call(run: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        log.exception("a timer failed")
