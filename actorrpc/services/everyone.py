"""Doing something on every worker of a world, and on those who join while it lasts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorRPCError
from actorrpc.runtime.peers import Standing
from actorrpc.services.ids import EXECUTOR
from actorrpc.wire.envelope import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.clock import Thread
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.peers import Record
    from actorrpc.runtime.worker import Worker

_LOOK_SECONDS = 0.05


def ask(worker: Worker, to: int, function: Callable[..., Any], *args: Any, timeout: float) -> Call:
    """Has a function called on a worker, as house-keeping. Returns the call; raises as `Worker.request` does."""
    return worker.request(to, EXECUTOR, (function, args, {}), timeout, function, flags=Flag.CONTROL)


class Everyone:
    """Calls a function on all workers, and on each that joins later; guests are left out.

    Arguments:
        worker: who asks.
        function, args: what to call there.
        took: called with the record of each, what the call returned, and whether it joined later; in the thread that
            makes this, and in one of its own.
        failed: likewise, with the error.
        own: whether this worker is one of them.
        timeout: seconds that each gets.
    """

    def __init__(
        self,
        worker: Worker,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        took: Callable[[Record, Any, bool], None],
        failed: Callable[[Record, Exception, bool], None],
        *,
        own: bool = True,
        timeout: float,
    ) -> None:
        self._worker, self._function, self._args, self._timeout = worker, function, args, timeout
        self._took, self._failed = took, failed
        self._asked: set[int] = set() if own else {worker.id}
        self._gate, self._over = worker.clock.gate(), False
        self._door = threading.Lock()
        self._go_round(False)
        self._thread: Thread = worker.clock.start(self._look, f"{worker.record.name}-everyone")

    def _go_round(self, later: bool) -> None:
        worker, calls = self._worker, []
        for number, peer in sorted(worker.peers.items()):
            guest = peer.record.guest and number != worker.id
            if number in self._asked or guest or peer.standing is not Standing.MEMBER:
                continue
            self._asked.add(number)
            try:
                calls.append((peer.record, ask(worker, number, self._function, *self._args, timeout=self._timeout)))
            except ActorRPCError as e:
                self._failed(peer.record, e, later)
        for record, call in calls:
            try:
                value = worker.wait_result(call)
            except Exception as e:
                self._failed(record, e, later)
            else:
                self._took(record, value, later)

    def _look(self) -> None:
        while not self._over and self._worker.open:
            self._gate.wait(_LOOK_SECONDS)
            with self._door:
                if not self._over:
                    self._go_round(True)

    def stop(self) -> None:
        """Asks nobody any more; waits for those who are just being asked."""
        self._over = True
        self._gate.open()
        with self._door:
            pass
        self._thread.join(self._timeout)
