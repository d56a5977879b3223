"""How a thread waits: while an actor's handler does, its mailbox is served (RULES MB2, MB3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.errors import NotAMemberError
from actorrpc.runtime.cells import MailboxCell
from actorrpc.runtime.completion import Completion, Waiter
from actorrpc.runtime.handling import here

if TYPE_CHECKING:
    from actorrpc.runtime.crew import Crew
    from actorrpc.runtime.worker import Worker


class Patience:
    """The waiting of a worker's threads.

    Arguments:
        worker: whose.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def wait(self, what: Completion, deadline: float | None, *, lead: bool = True) -> bool:
        """Blocks until something is done, at most until `deadline`; returns whether it is.

        In an actor's handler the mailbox is served meanwhile (RULES MB2, MB3).

        Raises:
            NotAMemberError: this is a child that was forked, to which nothing comes.
        """
        worker, handling = self._worker, here.handling
        if worker.forked:
            raise NotAMemberError(
                f"this process was forked from {worker} and is no worker itself: what it waits for comes to that one"
            )
        if handling is None or handling.turn is None:
            return what.done or worker.crew.wait(what, deadline, Waiter(worker.clock.gate()), lead=lead)
        mailbox, turn = handling.mailbox, handling.turn
        assert mailbox is not None
        if what.done and not len(mailbox):
            return True
        waiter = Waiter(worker.clock.gate())
        waiter.mailbox, waiter.turn = mailbox, turn
        MailboxCell.start(mailbox.suspend(turn, what.number if what.done else None))
        try:
            done = what.done or worker.crew.wait(what, deadline, waiter, lead=lead)
            back = _Return(worker.crew)
            ready = mailbox.resume(turn, what.number if done else 0, back)
            if turn in ready:
                ready.remove(turn)
                turn.gate = None
                MailboxCell.start(ready)
            else:
                MailboxCell.start(ready)
                worker.crew.wait(back, None, Waiter(worker.clock.gate()))
        except BaseException:
            mailbox.force(turn)
            raise
        return done


class _Return(Completion):
    """The gate of a turn that waits to go on, for a thread that waits like any other."""

    __slots__ = ("_crew",)

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew = crew

    def open(self) -> None:
        self._crew.done(self, 0)

    def wait(self, timeout: float | None = None) -> bool:
        raise NotImplementedError("threads wait for it through the crew")
