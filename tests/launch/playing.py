"""Roles for `actorrpc launch`, which finds them by their names."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import zmq

import actorrpc as rpc
from actorrpc import session


class Observer(rpc.Actor):
    """Says what it is, or dies."""

    def __init__(self, seed: int = 0, **more: Any) -> None:
        self.seed, self.more = seed, more

    def look(self) -> Any:
        return self.name, self.seed

    def where(self) -> tuple[str, str]:
        return self.name, socket.gethostname()

    def rest(self) -> dict[str, Any]:
        return self.more

    def has_token(self) -> bool:
        transport: Any = session.current().worker.transport
        return bool(transport._inbox.MECHANISM == zmq.CURVE)

    def fail(self) -> None:
        raise ValueError(f"no luck\nfor {self.name}")

    def fall(self) -> None:
        if self.index:
            os.kill(os.getpid(), signal.SIGKILL)


class Agent(rpc.Actor):
    """Has the observers do something, and returns what they say."""

    def __init__(self, does: str = "look") -> None:
        self.does = does

    def main(self) -> Any:
        return None if self.does == "nothing" else getattr(self.world.observer.rpc_sync(timeout=60), self.does)()

    class Inner(rpc.Actor):
        """A class in a class."""

        def main(self) -> str:
            return self.name


def drive(word: str = "") -> str:
    """A function as a role."""
    return f"{word}{rpc.rpc_sync('server:0', abs, args=(-3,))}"
