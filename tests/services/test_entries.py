"""An object's place, without a worker: what waits for the object is let in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actorrpc.services.handles import Entry


def test_what_waits_is_let_in_in_order_and_without_the_lock_which_a_finalizer_may_want() -> None:
    """Who has the crew's lock, or a mailbox's, may be in a finalizer of the user's that tells the object something."""
    under: list[bool] = []
    let_in: list[Any] = []

    def submit(job: Any) -> None:
        under.append(entry._door._is_owned())
        let_in.append(job[2].number)
        if job[2].number == 1:
            assert entry.accept(message(3)) is None  # behind the other one

    def complete(what: Any) -> None:
        under.append(entry._door._is_owned())
        what.done = True

    def message(number: int) -> Any:
        return SimpleNamespace(flags=0, cell=None, number=number)

    crew = SimpleNamespace(submit=submit)
    worker = SimpleNamespace(crew=crew, complete=complete, perform=None)
    service: Any = SimpleNamespace(worker=worker, mailbox_for=None)
    entry: Any = Entry(service, (0, 1))
    assert entry.accept(message(1)) is None
    assert entry.accept(message(2)) is None
    entry.fill("an object")
    assert let_in == [1, 2, 3]
    assert not any(under)
    assert entry.ready.done
    assert entry.accept(message(4)) is not None
