"""The crew without a worker: what Ctrl-C leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.runtime.crew import Crew


def test_ctrl_c_in_a_wait_for_leadership_leaves_nobody_asking_for_it() -> None:
    def interrupted(_: float | None = None) -> bool:
        raise KeyboardInterrupt

    transport: Any = SimpleNamespace(wake=lambda: None)
    clock: Any = SimpleNamespace(gate=lambda: SimpleNamespace(wait=interrupted))
    crew = Crew("a", transport, clock, lambda _: None, 1)
    assert crew._lead.acquire(False)
    with pytest.raises(KeyboardInterrupt):
        crew.lead_once(lambda: None)
    assert not crew._guest
    assert not crew._asked
