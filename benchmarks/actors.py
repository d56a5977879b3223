"""The actors that are measured; apart, so that torch's processes need not import the library."""

from __future__ import annotations

from typing import Any

import actorrpc as rpc


class CounterActor(rpc.Actor):
    """Counts calls."""

    def __init__(self) -> None:
        self.count = 0

    def bump(self) -> int:
        self.count += 1
        return self.count


class Player(rpc.Actor):
    """Takes weights."""

    def load(self, weights: Any) -> None:
        self.weights = weights
