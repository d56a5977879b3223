"""A network between the processes of a test: relays of TCP on loopback, which can be slow, or cut off from each other.

Every rank of a world advertises the port of a relay, and has the host of a name of its own, so that the others take it
for a worker of another host. `come` is for the processes, `Network` for the test.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from actorrpc import session
from actorrpc.wire import folders
from actorrpc.wire.zeromq import ZmqTransport
from tests.worlds import Plan, World, join

_CHUNK = 65536


def come(rank: int, plan: Plan, port: int, host: str = "") -> None:
    """Joins a world by way of a relay, as if from a host of its own, or from one that is named."""
    with pytest.MonkeyPatch.context() as patch:
        listen: Any = ZmqTransport._listen

        def listening(self: ZmqTransport, address: str) -> None:
            listen(self, address)
            Path(plan.folder, f"port-{rank}").write_text(self._endpoints[-1].rsplit(":", 1)[1])
            self._endpoints = [f"tcp://127.0.0.1:{port}"]

        patch.setattr(ZmqTransport, "_listen", listening)
        patch.setattr(folders, "AVAILABLE", False)
        patch.setattr(session, "_boot", lambda: host or f"host {rank}")
        join(rank, plan)


class Network:
    """Relays to the ranks of a world, whose processes are there but have not joined yet.

    Arguments:
        world: with `join=False`.
        rate: how many bytes a second each connection takes; 0: as many as there are.
    """

    def __init__(self, world: World, rate: float = 0.0) -> None:
        self._world, self._rate = world, rate
        self._cut: set[int] = set()
        self._clear = threading.Condition()
        self._over = False
        self._sockets: list[socket.socket] = []
        self._inward: list[tuple[int, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(world.size)]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        for rank in range(world.size):
            self._start(self._accept, rank)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        with self._clear:
            self._over = True
            self._clear.notify_all()
        for one in (*self._listeners, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
        for one in (*self._listeners, *self._sockets):
            one.close()

    def join(self, **hosts: str) -> None:
        """Has all ranks join; `hosts`: of ranks ("r1") that are to have the same one."""
        for rank in range(self._world.size):
            self._world.start(rank, come, rank, self._world.plan, self.ports[rank], hosts.get(f"r{rank}", ""))
        self._world.results()

    def cut(self, rank: int) -> None:
        """Lets nothing through to a rank or from it; connections stand as they are."""
        with self._clear:
            self._cut.add(rank)

    def heal(self, rank: int) -> None:
        """Lets everything through again, what was under way too."""
        with self._clear:
            self._cut.discard(rank)
            self._clear.notify_all()

    def break_all(self) -> None:
        """Ends all connections, and what is on its way in them."""
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def add(self, rank: int, data: bytes) -> None:
        """Adds bytes to what is on its way to a rank in all its connections, as if they had been sent."""
        for to, one in list(self._inward):
            if to == rank:
                with contextlib.suppress(OSError):
                    one.sendall(data)

    # -- inside

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, rank: int) -> None:
        while True:
            try:
                client, (_, port) = self._listeners[rank].accept()
            except OSError:
                return
            self._sockets.append(client)
            self._start(self._connect, client, port, rank)

    def _connect(self, client: socket.socket, port: int, rank: int) -> None:
        ends = {rank, self._rank_at(port)}
        if not self._wait(ends):
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._real(rank)))
        except OSError:
            client.close()
            return
        self._sockets.append(server)
        self._inward.append((rank, server))
        for source, target in ((client, server), (server, client)):
            self._start(self._carry, source, target, ends)

    def _real(self, rank: int) -> int:
        return int(Path(self._world.folder, f"port-{rank}").read_text())

    def _rank_at(self, port: int) -> int:
        """Returns the rank whose process has a local port."""
        for rank in range(self._world.size):
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(self._world.pid(rank)).net_connections("tcp")
                if any(c.laddr[1:2] == (port,) and c.raddr for c in connections):
                    return rank
        return -1

    def _wait(self, ends: set[int]) -> bool:
        with self._clear:
            self._clear.wait_for(lambda: self._over or not ends & self._cut)
        return not self._over

    def _carry(self, source: socket.socket, target: socket.socket, ends: set[int]) -> None:
        try:
            while self._wait(ends):
                data = source.recv(_CHUNK)
                if not data or not self._wait(ends):
                    break
                target.sendall(data)
                if self._rate:
                    time.sleep(len(data) / self._rate)
        except OSError:
            pass
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def descriptors() -> int:
    """Returns how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
