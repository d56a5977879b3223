"""What is put around a worker's functions, and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorrpc.services.taps import Taps


class Thing:
    def __init__(self) -> None:
        self.own: Callable[[str], str] = lambda text: f"own {text}"

    def say(self, text: str) -> str:
        return f"plain {text}"


def around(name: str) -> Callable[..., str]:
    def call(plain: Callable[..., str], *args: Any) -> str:
        return f"{name}({plain(*args)})"

    return call


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name,plain", [("say", "plain x"), ("own", "own x")])
def test_layers_come_and_go_in_any_order(name: str, plain: str, order: tuple[int, int]) -> None:
    thing, taps = Thing(), Taps()
    before = dict(vars(thing))
    away = [taps.put(thing, name, around("a")), taps.put(thing, name, around("b"))]
    assert getattr(thing, name)("x") == f"b(a({plain}))"
    away[order[0]]()
    assert getattr(thing, name)("x") == f"{'ba'[order[0]]}({plain})"
    away[order[1]]()
    assert vars(thing) == before
    assert getattr(thing, name)("x") == plain
