"""Limits on what is under way: how much a worker may have sent that its peers have not come to yet.

RULE LM1 (windows). A worker keeps a *window* for each peer, and one for each actor there (or object, or the executor):
how many calls are not answered, how many tells have not begun, and the bytes of both that have not begun. Who finds one
full waits in its queue, first come first served. A window is one sender's: who floods an actor is in nobody else's way.
RULE LM2 (credit). The answer of a request gives its place back. For tells, and for the bytes of large requests, the
callee notes their numbers as they begin, and sends them in batches: when many have come together, when the sender says
that it waits for room (WANT), or a second later. What the sender counts is marked in its header (`Flag.COUNTED`).
RULE LM3 (never stuck). Control messages and answers are not counted. A call whose thread waits for the answer at once
(`rpc_sync`) is not either: there are no more of these than threads. A finalizer does not wait, since it may run in the
midst of anything. A message larger than a window goes alone. A handler does not serve its actor's mailbox while it
waits for room, as a chain's messages would overtake each other. But when its window has stood still for a while, it may
be what the others wait for: then it admits its own chain's messages, as in any wait (RULE MB2), and when handlers
elsewhere wait for this worker, it is let through.
RULE LM4 (who gets room). First come, first served; but a turn that admits others may be below one that waits for room
as well, and cannot go on before it. So while such a turn waits, room is kept for nobody: all are woken, and who can run
takes it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from actorrpc.errors import ActorRPCError, BackpressureError, BackpressureTimeoutError
from actorrpc.runtime.awaiting import NO_TURN
from actorrpc.runtime.completion import Waiter, describe
from actorrpc.runtime.credit import BATCH, BATCH_BYTES, numbers_in
from actorrpc.runtime.handling import NO_CONTEXT, here, may_wait, no_wait
from actorrpc.runtime.lanes import Lane
from actorrpc.runtime.windows import MOST_PATIENCE, Place, Room, Window
from actorrpc.wire.envelope import HEADER_SIZE, Flag, Kind, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.windows import Counted
    from actorrpc.runtime.worker import Worker
    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
DEFAULT_CALLS: Final = 40_000
DEFAULT_BYTES: Final = 128 * 2**20
SHARE: Final = 4
"""Of what a peer may have under way, an actor there may have this part, unless its class says otherwise."""
_NEVER = float("inf")
_OWN_AT_MOST: Final = 65536
_GONE_TOGETHER: Final = 64


class Limits:
    """What one worker may send.

    Arguments:
        worker: whose.

    Attributes:
        counted: what was sent and takes up room, by number.
        most_message: bytes that a message may have; None for any.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Reentrant: the collector may run a finalizer of the user's, which tells, in the midst of what it guards.
        self._door = threading.RLock()
        self._calls, self._bytes = DEFAULT_CALLS, DEFAULT_BYTES
        self.most_message: int | None = None
        self.counted: dict[int, Counted] = {}
        self._gone: deque[int] = deque()
        """Numbers of messages that were answered, and still count as under way; see `answered`."""
        self._peers: dict[int, Window] = {}
        self._actors: dict[Place, Window] = {}
        self._own: dict[Place, tuple[int | None, int | None]] = {}
        self._full: set[Window] = set()
        """Windows that are waited for."""
        self._asked: dict[int, tuple[int, int, bool]] = {}
        """By peer, what it was asked for: batches of how many calls and bytes, and whether for a handler."""
        worker.members.watchers.append(self._lost)

    def set(self, calls: int, size: int) -> None:
        """Sets how many calls and bytes may be under way to each peer."""
        self._calls, self._bytes = calls, size

    def learn(self, place: Place, calls: int | None, size: int | None) -> None:
        """Learns the limits that an actor's class sets."""
        ready: list[Room] = []
        with self._door:
            if len(self._own) >= _OWN_AT_MOST:  # of actors long gone, say; they are told again, or have the usual ones
                del self._own[next(iter(self._own))]
            self._own[place] = calls, size
            window = self._actors.get(place)
            if window is not None:
                window.most_calls, window.most_bytes = self._limits_of(place)
                window.give_back(0, 0, window.moved, ready)
                self._tidy(window)
        self._let_go(ready)

    def _limits_of(self, place: Place) -> tuple[int, int]:
        calls, size = self._own.get(place, (None, None))
        return (
            max(1, self._calls // SHARE) if calls is None else calls,
            max(1, self._bytes // SHARE) if size is None else size,
        )

    def admit(
        self, to: int, target: tuple[int, int], number: int, frames: Sequence[Frame], tell: bool,
        deadline: float | None, what: object,
    ) -> int:  # fmt: skip
        """Counts a message that is about to be sent; waits until there is room for it. Returns how many requests are
        under way to the peer, about, and this one; 0 where that is not known.

        Arguments:
            to, target: whom it is for.
            number: its own, under which `answered` takes it out again.
            frames: its payload.
            tell: whether it will not be answered.
            deadline: when to give up.
            what: what is called, for errors.

        Raises:
            BackpressureTimeoutError: there was no room in time.
            BackpressureError: there is no room, and the thread is not to wait (`no_wait`).
        """
        size = HEADER_SIZE + (len(frames[0]) if len(frames) == 1 else size_of(frames))
        place = to, *target
        with self._door:
            actor, peer = self._actors.get(place), self._peers.get(to)
            if not (  # written out, since this is called for every message
                actor is None or peer is None or actor.waiting or peer.waiting
                or actor.calls >= actor.most_calls or actor.bytes + size > actor.most_bytes
                or peer.calls >= peer.most_calls or peer.bytes + size > peer.most_bytes
            ):  # fmt: skip
                actor.calls += 1  # twice `Window.add`
                actor.bytes += size
                peer.calls += 1
                peer.bytes += size
                peer.tells += tell
                self.counted[number] = size, tell, actor, peer
                return max(1, peer.calls - peer.tells - len(self._gone))
        return self._admit_slowly(place, number, size, tell, deadline, what)

    def _admit_slowly(
        self, place: Place, number: int, size: int, tell: bool, deadline: float | None, what: object
    ) -> int:
        woken: list[Room] = []
        try:
            with self._door:
                if not self._worker.open:
                    return 0  # as whoever sends will be told
                self._take_out_gone(woken)
                to, actor = place[0], self._actors.get(place)
                if actor is None:
                    actor = self._actors[place] = Window(to, place, *self._limits_of(place))
                peer = self._peers.get(to)
                if peer is None:
                    peer = self._peers[to] = Window(to, None, self._calls, self._bytes)
                free = actor.open and peer.open and actor.fits(size) and peer.fits(size)
                if free or not may_wait():
                    actor.add(size)
                    peer.add(size)
                    peer.tells += tell
                    self.counted[number] = size, tell, actor, peer
                    return max(1, peer.calls - peer.tells - len(self._gone))
                room = self._queue(actor, size, what, woken)
        finally:
            self._let_go(woken)
        if not self._enter(actor, room, deadline, what):
            return 0
        try:
            woken = []
            try:
                with self._door:
                    room = self._queue(peer, size, what, woken)
            finally:
                self._let_go(woken)
            entered = self._enter(peer, room, deadline, what)
        except BaseException:
            self._give_back(actor, size)
            raise
        if entered:
            with self._door:
                peer.tells += tell
                self.counted[number] = size, tell, actor, peer
        return 0

    def _queue(self, window: Window, size: int, what: object, woken: list[Room]) -> Room:
        """Takes a place in a window's queue, or room at once; adds who is to be woken to `woken`. Under the door."""
        room = Room(size, window.stuck)
        if window.open and window.fits(size):
            window.add(size)
            room.done = room.granted = True
        elif no_wait.get():
            self._tidy(window)
            raise BackpressureError(f"{describe(what)} was not sent: {self._state(window)}")
        elif here.handling is not None and here.handling.turn is NO_TURN:
            self._tidy(window)
            raise BackpressureError(
                f"{describe(what)} was not sent, since a wait for room would block the worker's loop, and with it all "
                f"its coroutines: `await` earlier answers, or `await asyncio.to_thread(...)` what is to wait. "
                f"{self._state(window)}"
            )
        else:
            if not window.waiting:
                window.moved = self._worker.clock.now()
            window.queue(room)
            self._full.add(window)
            self._take_out_gone(woken)  # what was noted before anybody could see that this one waits
        return room

    def _enter(self, window: Window, room: Room, deadline: float | None, what: object) -> bool:
        """Waits for room that was queued for; returns False where its peer was lost, so that none is needed."""
        if room.done:
            return room.granted
        worker, begun = self._worker, self._worker.clock.now()
        self._ask(window.to)
        try:
            while True:
                until = deadline
                if room.in_handler:
                    turn = worker.clock.now() + window.patience
                    until = turn if deadline is None else min(turn, deadline)
                if room.racing:
                    woken = worker.wait(room, until)
                else:
                    waiter = Waiter(worker.clock.gate())
                    woken = room.done or worker.crew.wait(room, until, waiter, for_room=True)
                with self._door:
                    if room.granted or room not in window.waiting:
                        return room.granted
                    now = worker.clock.now()
                    if woken and window.fits(room.size):
                        self._enter_beside(window, room)
                        return True
                    if deadline is not None and now >= deadline:
                        raise BackpressureTimeoutError(
                            f"{describe(what)} was not sent: it waited {now - begun:.3g} s for room; "
                            f"{self._state(window)}"
                        )
                    stands_still = room.in_handler and not woken and now - window.moved >= window.patience
                    if stands_still and window.stuck and worker.credit.keeps_handlers_waiting:
                        self._enter_beside(window, room)
                        window.moved, window.patience = now, min(MOST_PATIENCE, window.patience * 1.25)
                        return True
                    window.stuck = window.stuck or stands_still
                    if woken or (stands_still and not room.racing):
                        window.leave(room)
                        room = Room(room.size, window.stuck)
                        window.queue(room)
        except BaseException:
            ready: list[Room] = []
            with self._door:
                now = worker.clock.now()
                if room.granted:
                    window.give_back(1, room.size, now, ready)
                elif room in window.waiting:
                    window.leave(room)
                    window.give_back(0, 0, window.moved, ready)
                self._tidy(window)
            self._let_go(ready)
            raise

    def _enter_beside(self, window: Window, room: Room) -> None:
        """Takes room for one who waits. Under the door."""
        window.leave(room)
        window.add(room.size)
        if not window.waiting:
            self._full.discard(window)

    def _state(self, window: Window) -> str:
        peer = self._worker.peers.get(window.to)
        where = str(peer.record) if peer is not None else f"rank {window.to}"
        return window.state(where if window.place is None else f"this actor or object on {where}")

    def _ask(self, to: int) -> None:
        """Tells a peer that room is waited for, unless it knows: it does until it gives some."""
        with self._door:
            full = [window for window in self._full if window.to == to]
            if not full:
                return
            calls = max(1, min(BATCH, *(window.most_calls // 8 for window in full)))
            size = max(1, min(BATCH_BYTES, *(window.most_bytes // 8 for window in full)))
            in_handler = any(room.in_handler for window in full for room in window.waiting)
            if self._asked.get(to) == (calls, size, in_handler):
                return
            self._asked[to] = calls, size, in_handler
        out = (Kind.WANT, Flag.CONTROL, calls, int(in_handler), size, 0, NO_CONTEXT, _NEVER)
        try:
            self._worker.emit(to, out, (b"",))
        except ActorRPCError as e:  # it is lost, which those who wait hear of soon
            log.debug("%s: rank %d could not be asked for room: %s", self._worker.record.name, to, e)

    def answered(self, number: int) -> None:
        """Takes a message out that was answered, or could not be sent. Under leadership, too.

        It is only noted, without the lock, for which the leader and those who send would keep each other waiting; many
        are taken out at once, or all that there are when somebody needs the room.
        """
        self._gone.append(number)
        if self._full or len(self._gone) >= _GONE_TOGETHER:
            ready: list[Room] = []
            with self._door:
                self._take_out_gone(ready)
            self._let_go(ready)

    def _take_out_gone(self, ready: list[Room]) -> None:
        """Takes out what was answered; adds who is to be woken to `ready`. Under the door, under which nobody is woken:
        that takes the locks of mailboxes, whose holders may be in a finalizer that tells.
        """
        gone, counted, now = self._gone, self.counted, self._worker.clock.now()
        while gone:
            found = counted.pop(gone.popleft(), None)
            if found is not None:
                self._take_out(found, 1, now, ready)

    def credit(self, caller: int, frames: Sequence[Frame]) -> None:
        """Takes note of what has begun on a peer. Under leadership."""
        self.note(caller, numbers_in(frames))

    def note(self, peer: int, numbers: Sequence[int]) -> None:
        """Takes note of the numbers of what has begun on a peer."""
        ready: list[Room] = []
        with self._door:
            self._asked.pop(peer, None)
            self._take_out_gone(ready)
            now = self._worker.clock.now()
            for number in numbers:
                counted = self.counted.get(number)
                if counted is None or counted[3].to != peer:
                    continue
                _, tell, actor, window = counted
                if tell:
                    del self.counted[number]
                    self._take_out(counted, 1, now, ready)
                else:  # it counts as a call until it is answered
                    self._take_out(counted, 0, now, ready)
                    self.counted[number] = 0, tell, actor, window
            more = any(window.to == peer for window in self._full)
        self._let_go(ready)
        if more:
            self._worker.crew.submit((Lane.CONTROL, self._ask, peer))

    def _take_out(self, counted: Counted, calls: int, now: float, ready: list[Room]) -> None:
        size, tell, actor, peer = counted
        actor.give_back(calls, size, now, ready)
        peer.give_back(calls, size, now, ready)
        if tell:
            peer.tells -= calls
        if not actor.calls:
            self._tidy(actor)
        if self._full:
            self._full -= {window for window in (actor, peer) if not window.waiting}

    def _tidy(self, window: Window) -> None:
        """Forgets the window of an actor of which nothing is under way."""
        if not window.waiting:
            self._full.discard(window)
            if window.place is not None and not window.calls:
                self._actors.pop(window.place, None)

    def _give_back(self, actor: Window, size: int) -> None:
        ready: list[Room] = []
        with self._door:
            actor.give_back(1, size, self._worker.clock.now(), ready)
            self._tidy(actor)
        self._let_go(ready)

    def _let_go(self, ready: list[Room]) -> None:
        for room in dict.fromkeys(ready):  # those who race are woken by each that is given back
            self._worker.complete(room)

    def _lost(self, peer: Peer) -> None:
        """Forgets a peer that is gone; those who wait for it go on, and find that out."""
        number = peer.record.id
        with self._door:
            mine = [w for p, w in self._actors.items() if p[0] == number]
            window = self._peers.pop(number, None)
            if window is not None:
                mine.append(window)
            self._actors = {p: w for p, w in self._actors.items() if p[0] != number}
            self._own = {p: own for p, own in self._own.items() if p[0] != number}
            self.counted = {n: c for n, c in self.counted.items() if c[3] is not window}
            self._asked.pop(number, None)
            rooms = self._empty(mine)
        self._let_go(rooms)

    def _empty(self, windows: Sequence[Window]) -> list[Room]:
        rooms = [room for window in windows for room in window.waiting]
        for window in windows:
            window.waiting.clear()
            window.racing = 0
            self._full.discard(window)
        return rooms

    def close(self) -> None:
        """Has all go on who wait for room, to find that the worker is closed."""
        with self._door:
            rooms = self._empty([*self._actors.values(), *self._peers.values()])
        self._let_go(rooms)

    def full(self) -> list[str]:
        """Says of the windows that are waited for how full they are."""
        with self._door:
            return [self._state(window) for window in self._full]

    def statistics(self) -> dict[str, int]:
        """Returns counts: messages that take up room, windows to peers and to actors, threads that wait for room."""
        ready: list[Room] = []
        with self._door:
            self._take_out_gone(ready)
            windows = [*self._peers.values(), *self._actors.values()]
            held_up = sum(len(window.waiting) for window in windows)
            size = sum(window.bytes for window in self._peers.values())
        self._let_go(ready)
        return {"counted": len(self.counted), "windows": len(windows), "held_up": held_up, "bytes": size}
