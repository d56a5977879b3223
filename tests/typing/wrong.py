"""Mistakes that a strict checker finds, each on a line with a mark (test_typing.py)."""

from __future__ import annotations

import actorrpc as rpc


class Counter(rpc.Actor):
    """Counts."""

    def add(self, n: int) -> int:
        """Returns the sum."""
        return n


def mistakes(counter: rpc.RRef[Counter]) -> None:
    """None of these lines is right."""
    counter.rpc_sync().ad(2)  # wrong: no such method
    counter.rpc_sync().add("two")  # wrong: no int
    text: str = counter.rpc_sync().add(2)  # wrong: it returns an int
    name: str = rpc.rpc_sync(1, len, args=("abc",))  # wrong: so does this
    future: rpc.Future[str] = rpc.rpc_async(1, len, args=("abc",))  # wrong: a future of an int
    rpc.rpc_sync(1, len, ("abc",), {}, "soon")  # wrong: no number of seconds
    rpc.rpc_sync(1, 5)  # wrong: nothing to call
    rpc.not_there()  # wrong: no such name
    print(text, name, future)
