"""Exchanges among all workers, as torch's `_all_gather`: what fails at one member ends at all of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.compat import gather
from actorrpc.session import current
from tests.worlds import run_world


class Slow:
    """Takes long to be read."""

    def __reduce__(self) -> Any:
        return _slowly, ()


def _slowly() -> Slow:
    time.sleep(3)
    return Slow()


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def said(value: Any, timeout: float = -1.0) -> str:
    """Takes part; returns what was raised."""
    with pytest.raises(RuntimeError) as caught:
        gather._all_gather(value, timeout=timeout)
    return f"{type(caught.value).__name__}: {caught.value}"


def works_again(rank: int) -> None:
    rpc._set_rpc_timeout(20)
    # Calls that a member gave up may be read yet, and answered then.
    assert gather._all_gather(rank, timeout=20) == {f"worker{n}": n for n in range(3)}
    assert not gather._exchanges(current()).open


def test_what_takes_too_long_to_give_ends_the_exchange_at_all_members() -> None:
    def program(rank: int) -> str:
        rpc._set_rpc_timeout(1.0)
        text = said(Slow() if rank == 1 else rank)
        works_again(rank)
        return text

    leader, slow, other = run_world(program, 3, timeout=60)
    assert "worker1 timed out in _all_gather after 1.00 seconds" in leader
    assert slow.startswith("RPCTimeoutError")
    assert "worker0 timed out in _all_gather after 1.00 seconds: worker1 timed out" in other


@pytest.mark.parametrize("who, late", [(0, None), (2, None), (2, 1)])
def test_what_cannot_be_sent_ends_the_exchange_at_all_members(who: int, late: int | None) -> None:
    def program(rank: int) -> str:
        if rank == late:
            time.sleep(1)  # The others have ended it by then, and it is told why all the same.
        text = said(Unsendable() if rank == who else rank)
        works_again(rank)
        return text

    texts = run_world(program, 3, timeout=60)
    assert all("not this one" in text for text in texts), texts
    assert all(f"worker{who} " in text for rank, text in enumerate(texts) if rank != who)


def test_who_comes_after_the_end_of_an_exchange_is_told_so_and_nothing_stays() -> None:
    def program(rank: int) -> str:
        if rank == 2:
            time.sleep(3)
        text = said(rank, timeout=1.0)
        rpc._set_rpc_timeout(20)
        if rank == 0:
            time.sleep(4)  # so that all have come
        assert not gather._exchanges(current()).open
        return text

    leader, other, late = run_world(program, 3, timeout=60)
    assert "worker2 timed out in _all_gather after 1.00 seconds" in leader
    assert "timed out in _all_gather after 1.00 seconds" in other
    assert "is over, and 'worker2' came too late" in late or "timed out" in late
