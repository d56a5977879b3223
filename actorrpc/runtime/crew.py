"""The threads of a worker: who receives, who runs handlers, who waits.

One thread at a time *leads*: only it receives. THREAD RULES:
- TR1: a leader only routes. It never runs a handler, loads a payload or calls back with leadership in hand, since the
  thread may hold its user's locks and everybody else waits for it.
- TR2: a thread of the pool that leads and receives a request puts leadership down and runs the request itself.
- TR3: a caller leads while it waits, so that a tight loop of calls needs no hand-off. When it receives a request, it
  gives the request to the pool and resigns: somebody who serves is better served by a leader from the pool.
  So does one that has waited for long when something for somebody else comes, who had better lead in the next wait.
- TR4: leadership put down goes to a waiting caller, or lies free until a thread of the pool takes it up; if none does
  within a tick, the keeper sends one, or within four where that was in vain of late (`vacancy`). A tick is a
  millisecond. The keeper does not sleep while leadership is free or moves, but lets ticks out where all is calm.
- TR5: `limit` bounds handlers that run. One that waits through `wait` lends its place. Waits that nobody can see
  (an Event, a lock, a collective) are known by the standstill: when jobs of a lane are queued and none of it has ended
  for 50 ms, its limit grows (`lanes`). The keeper sees to that: whoever queues what cannot run at once wakes it.
- TR6: an answer may be held back, to leave together with others, by a thread of the pool that goes on to receive or to
  run what is queued; it sends what is held before it blocks in anything, and the keeper does so whenever it looks.
- TR7: control jobs run one after the other and never queue behind handlers. They must not block.
- TR8: a job that is put off waits until a thread of the pool has nothing else to do, or for ten ticks: then the keeper
  sends a thread.
- TR9: a call that nobody waits for at once is held back, too, while many are under way to its peer: it leaves with the
  next ones, before a thread waits for anything or a loop for its coroutines', at the end of a job of the pool's that
  held it and has no more messages behind it, or at the next tick. The keeper is woken after something is held: before,
  it might look, see nothing, and sleep.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from actorrpc.runtime.completion import Waiter
from actorrpc.runtime.forked import end_child
from actorrpc.runtime.lanes import Job, Lane, Lanes, Place
from actorrpc.runtime.vacancy import Vacancy
from actorrpc.wire.transport import AT_ONCE, LATER, SOON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.clock import Clock, Gate, Thread
    from actorrpc.runtime.completion import Completion
    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.transport import Transport

log = logging.getLogger("actorrpc")
TICK = 0.001
_PUT_OFF_TICKS = 10
_IDLE_SECONDS, _LONG_WAIT = 2.0, 0.25
_WITH_IT = 32
_get_ident = threading.get_ident


class Crew:
    """The threads of one worker.

    Arguments:
        name: the worker's name, for its threads' names.
        transport: where messages come from.
        clock: makes gates and threads.
        route: takes a message's frames, under leadership; returns a job for it, or None.
        limit: how many handlers may run at once.
    """

    def __init__(
        self, name: str, transport: Transport, clock: Clock, route: Callable[[Sequence[Frame]], Job | None], limit: int
    ) -> None:
        self._name, self._transport, self._clock, self._route = name, transport, clock, route
        self._lanes = Lanes(limit)
        self._lead = threading.Lock()
        self._turns = self._put_off_for = self._made = 0
        self._vacancy = Vacancy(TICK / 5)
        self._waited = 0.0  # when a caller's last wait ended: only those in a tight loop ask the pool for leadership
        self.pool_leads = self._asked = self._guest = False  # the first: whether the leader, if any, is one of the pool
        self._callers: deque[Waiter] = deque()
        # Reentrant: the collector may run a finalizer of the user's, which calls, in the midst of what it guards.
        self._door = threading.RLock()
        self._idle: list[Gate] = []
        self._threads: dict[int, Thread] = {}
        self._place = Place()
        self.stopping = self.forked = False
        self.active = self.napping = False
        """Whether the keeper must tick, and whether it lets some ticks out: `alarm` is called when that is over."""
        self.alarm: Callable[[], None] = lambda: None

    # -- waiting

    def wait(
        self, what: Completion, deadline: float | None, waiter: Waiter, *, lead: bool = True, for_room: bool = False
    ) -> bool:
        """Blocks until something is done.

        Arguments:
            what: what to wait for.
            deadline: when to give up, on the clock; None for never.
            waiter: a fresh one.
            lead: whether this thread may receive while it waits; False for waits that last as long as the world.
            for_room: whether it waits to send: when many do, they keep their places, or all that is queued would begin
                and wait in a thread of its own.

        Returns whether it is done.
        """
        waiter.wake = self._transport.wake
        what.waiters.append(waiter)
        if what.done and waiter.mailbox is not None and waiter.turn is not None:
            waiter.mailbox.arrived(waiter.turn, what.number)  # it came before it could see this waiter
        if self._transport.holding:
            self._transport.flush()
        held = lent = self._place.held
        if for_room and held is not None:
            with self._door:
                lent = self._lanes.hold_up(held)
        if lent is not None:
            self._lend(lent)
        try:
            return self._wait(what, deadline, waiter, lead)
        finally:
            waiter.over = True
            self._waited = self._clock.now()
            if not self._lead.locked():
                self._offer()  # it may have been offered to this thread, which no longer wants it
            what.waiters.remove(waiter)
            if for_room and held is not None:
                with self._door:
                    self._lanes.held_up[held] -= 1
            if lent is not None:
                with self._door:
                    self._lanes.reclaim(lent)
                self._place.held = lent

    def _wait(self, what: Completion, deadline: float | None, waiter: Waiter, lead: bool) -> bool:
        now, timeout = self._clock.now, None
        while not what.done:
            if deadline is not None and (timeout := deadline - now()) <= 0:
                return False
            lead = lead and not self.stopping
            if lead and not waiter.resigned and self._lead.acquire(False):
                self._turns += 1
                waiter.leading = _get_ident()
                try:
                    self._lead_for(what, waiter, deadline)
                finally:
                    waiter.leading = 0
                    self._put_down()
            else:
                if lead and not waiter.resigned:
                    if not waiter.listed:
                        waiter.listed = True
                        self._callers.append(waiter)
                    if self.pool_leads and not self._asked and now() - self._waited < TICK:
                        self._asked = True
                        self._transport.wake()
                    if what.done or not self._lead.locked():
                        continue
                waiter.gate.wait(timeout)
        return True

    def done(self, what: Completion, number: int) -> None:
        """Marks something as done, and wakes those who wait for it."""
        what.number = number
        what.done = True
        if what.waiters:
            for waiter in list(what.waiters):
                if waiter.mailbox is not None and waiter.turn is not None:
                    waiter.mailbox.arrived(waiter.turn, number)
                leading = waiter.leading
                if not leading:
                    waiter.gate.open()
                elif leading != _get_ident():
                    self._transport.wake()

    # -- leading

    def lead_once(self, run: Callable[[], None]) -> None:
        """Runs something short under leadership, when a thread of the pool has put it down."""
        gate, self._guest = self._clock.gate(), True
        try:
            while not self._lead.acquire(False):
                self._asked = True
                self._transport.wake()
                gate.wait(TICK)  # which Ctrl-C may leave
        finally:
            self._guest = self._asked = False
        try:
            self._turns += 1
            run()
        finally:
            self._put_down()

    def _lead_for(self, what: Completion, waiter: Waiter, deadline: float | None) -> None:
        receive, route, now, timeout = self._transport.receive, self._route, self._clock.now, None
        began = now()
        while not what.done and not self.stopping:
            if deadline is not None and (timeout := deadline - now()) <= 0:
                return
            frames = receive(timeout)
            if frames is not None:
                job = route(frames)
                if job is not None and self.submit(job):
                    waiter.resigned = True
                    return
                if not what.done and now() - began > _LONG_WAIT:
                    waiter.resigned = True
                    return
        for _ in range(_WITH_IT):  # this thread may wait for what lies there next
            if self.stopping or not self._transport.crowded or (frames := receive(0)) is None:
                return
            if (job := route(frames)) is not None and self.submit(job):
                return

    def _lead_for_pool(self) -> Job | None:
        """Receives until there is a job that may run at once; returns it with its place taken."""
        receive, route, now = self._transport.receive, self._route, self._clock.now
        began = now() if self._vacancy.taken() else None
        while not self._asked and not self.stopping:
            frames = receive(None)
            if began is not None:
                self._vacancy.served(now() - began, frames is not None)
                began = None
            if frames is None:
                continue
            job = route(frames)
            if job is not None:
                with self._door:
                    if not self._lanes.queues[job[0]] and self._lanes.claim(job[0]):
                        return job
                    self._lanes.queues[job[0]].append(job)
                self.wake_keeper()  # it may be asleep, and all that run may wait unseen (TR5)
        return None

    def _put_down(self) -> bool:
        """Gives leadership up; returns whether a waiting caller was told to take it."""
        self._lead.release()
        return self._offer()

    def _offer(self) -> bool:
        """Sees to it that free leadership is taken up: by a waiting caller (returns True), or by the keeper's care."""
        callers = self._callers
        while callers:
            try:
                waiter = callers.popleft()
            except IndexError:
                break
            waiter.listed = False
            if not (waiter.over or waiter.resigned):
                waiter.gate.open()
                return True
        self.wake_keeper(now=False)
        return False

    # -- the pool

    def submit(self, job: Job) -> bool:
        """Queues a job. Returns whether a thread was sent to run it; if not, one that is busy will."""
        with self._door:
            self._lanes.queues[job[0]].append(job)
            if not self._lanes.free(job[0]):
                self.wake_keeper()
                return False
            gate = self._hand()
        if gate is not None:
            gate.open()
        return True

    def put_off(self, job: Job) -> None:
        """Queues a job that is in no hurry (TR8). Under leadership too."""
        with self._door:
            self._lanes.put_off.append(job)
        self.wake_keeper(now=False)

    def _hand(self) -> Gate | None:
        """Finds an idle thread, whose gate is to be opened, or starts one. Under the door."""
        if self._idle:
            return self._idle.pop()
        if not self.stopping:
            number = self._made = self._made + 1
            self._threads[number] = self._clock.start(lambda: self._work(number), f"{self._name}-hand-{number}")
        return None

    def wake_keeper(self, now: bool = True) -> None:
        """Has the keeper tick for a while; `now`: also where it lets some ticks out."""
        if not self.active or (now and self.napping):
            self.active, self.napping = True, False
            self.alarm()

    def _work(self, number: int) -> None:
        gate = self._clock.gate()
        self._place.hand = True
        while not self.stopping:
            with self._door:
                job = self._lanes.take()
            if job is None and self._lead.acquire(False):
                self._turns += 1
                self.pool_leads = True
                try:
                    job = self._lead_for_pool()
                finally:
                    self.pool_leads = self._asked = False
                    taken = self._put_down()
                if job is None and not (taken or self._guest):
                    continue
            if job is not None:
                self._run(job)
                continue
            if self._transport.holding:
                self._transport.flush()
            with self._door:
                if self._lanes.startable:
                    continue
                if self.stopping:
                    break
                self._idle.append(gate)
            if not gate.wait(_IDLE_SECONDS):
                with self._door:
                    if gate in self._idle:  # else somebody has just taken it out, to send it
                        self._idle.remove(gate)
                        break
        with self._door:
            self._threads.pop(number, None)

    def _run(self, job: Job) -> None:
        lane, run, argument = job
        del job
        self._place.held = lane if lane is not Lane.CONTROL else None
        try:
            run(argument)
        except BaseException:  # of this library's own or a callback's; the thread goes on, or its place would be lost
            log.exception("%s: a job failed", self._name)
        finally:
            if self.forked:
                end_child()
            del argument
            self._place.held = None
            with self._door:
                self._lanes.end(lane)
            if self._place.kept_back:
                self._place.kept_back = False
                if self._transport.holding and not self._transport.crowded:
                    self._transport.flush()

    def _lend(self, lane: int) -> None:
        self._place.held = None
        with self._door:
            gate = self._hand() if self._lanes.lend(lane) else None
        if gate is not None:
            gate.open()

    def may_hold(self) -> int:
        """Whether what the present thread sends may be held back (TR6)."""
        return SOON if self._place.hand and self._transport.crowded else AT_ONCE

    def held_back(self, hold: int) -> None:
        """Has the keeper send what this thread may have held back: within a tick if LATER, else when it next looks."""
        if hold == LATER:
            self._place.kept_back = True
        self.wake_keeper(now=hold == LATER)

    # -- the keeper's part

    def tick(self, now: float, passed: int) -> int:
        """Looks after free leadership and standstill, so many ticks after the last time; returns after how many the
        next one is due, 0 where nothing is to be looked after.
        """
        gates: list[Gate | None] = []
        if soon := self._transport.holding:
            self._transport.flush()
        with self._door:
            free = not self._lead.locked()
            changed, send = self._vacancy.tick(free, self._turns, passed)
            if send:
                gates.append(self._hand())
            self._put_off_for = self._put_off_for + passed if self._lanes.put_off else 0
            if self._put_off_for >= _PUT_OFF_TICKS and self._lanes.free(self._lanes.put_off[0][0]):
                gates.append(self._hand())
            gates += [self._hand() for _ in range(self._lanes.grow(now))]
        for gate in gates:
            if gate is not None:
                gate.open()
        if soon or gates or self._lanes.crowded:
            return 1
        return self._vacancy.rest(free) if free or changed or self._put_off_for else 0

    @property
    def needs_keeper(self) -> bool:
        """Whether leadership is free, answers are held or handlers are queued."""
        return not self._lead.locked() or bool(self._lanes.put_off) or self.hurried

    @property
    def hurried(self) -> bool:
        """Whether the keeper may not let ticks out."""
        return self._transport.holding or self._lanes.crowded

    @property
    def quiet(self) -> bool:
        """Whether no handler runs, waits or is queued."""
        return self._lanes.quiet

    def statistics(self) -> dict[str, int]:
        """Returns counts: threads, running handlers, queued jobs, jobs ended."""
        return {"threads": len(self._threads), **self._lanes.statistics()}

    def stop(self, timeout: float) -> bool:
        """Ends the threads. Returns whether all of them ended within `timeout` seconds; handlers that run may not."""
        with self._door:
            self.stopping = True
            idle, self._idle = self._idle, []
            threads = list(self._threads.values())
        for gate in idle:
            gate.open()
        self._transport.wake()
        end = self._clock.now() + timeout
        for thread in threads:
            while thread.is_alive():
                if (left := end - self._clock.now()) <= 0:
                    return False
                self._transport.wake()  # again and again: the first one may have met a leader who was not yet waiting
                thread.join(min(left, 0.05))
        return True
