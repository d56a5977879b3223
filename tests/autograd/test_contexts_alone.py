"""The contexts without a worker: finalizers that send in the midst of what is done with them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.runtime.peers import Standing
from actorrpc.services.contexts import Context, Contexts


def test_a_finalizer_may_send_in_a_context_as_another_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = SimpleNamespace(id=0, peers={1: SimpleNamespace(standing=Standing.MEMBER)})
    contexts = Contexts(worker, Any, lambda _: None)  # type: ignore[arg-type]
    plain, other = Context.renew, 1 << 48 | 7
    made: dict[int, Any] = {}

    def renew(context: Context) -> None:
        monkeypatch.undo()
        made[0] = contexts.sending(other, 1)
        plain(context)

    def join() -> None:
        made[1] = contexts.join(other)

    monkeypatch.setattr(Context, "renew", renew)
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "a thread waits for itself"
    assert made[0]._context is made[1]
    assert made[1].touched == {1}
    assert contexts.find(other) is made[1]
