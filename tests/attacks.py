"""What strangers do at a worker's door: raw sockets, raw ZeroMQ, a man in the middle, a store that lies.

All of them know everything about the world but its token: the messages that they bring are ones that a worker of it
would act on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from actorrpc import session
from actorrpc.runtime.peers import Record
from actorrpc.services.ids import EXECUTOR
from actorrpc.services.store import HintStore
from actorrpc.wire import envelope
from actorrpc.wire.codec import Codec
from actorrpc.wire.curve import Keys
from actorrpc.wire.envelope import Header, Kind
from tests.worlds import World

SIGNATURE = b"\xff" + bytes(7) + b"\1\x7f"
_NEVER = float("inf")


def forged(world: World, mark: Path, sender: int = 1) -> list[bytes]:
    """Returns the frames of a message to rank 0, as from another rank, that makes a folder where it is acted on."""

    def write() -> list[bytes]:
        worker = session.current().worker
        peer = worker.peers[sender]
        frames, _ = worker.write((os.mkdir, (str(mark),), {}), 0, -1)
        header = Header(
            Kind.TELL, 0, sender, peer.record.incarnation, 7, peer.seen + 1, *EXECUTOR, sender << 40 | 99, -1, _NEVER
        )
        return [envelope.pack(header) + bytes(frames[0]), *map(bytes, frames[1:])]

    made: list[bytes] = world.on(0, write)
    return made


def doors(world: World, rank: int = 0) -> list[str]:
    """Where a rank listens with ZeroMQ. (A direct way is the same user's only, and there is none with a token.)"""
    found: list[str] = world.on(rank, lambda: list(session.current().worker.transport.endpoints))
    return [endpoint for endpoint in found if not endpoint.startswith("unix://")]


def direct_door(world: World, rank: int = 0) -> str:
    """Where a rank listens for this user's other processes without ZeroMQ; "" where it does not."""
    found: list[str] = world.on(rank, lambda: list(session.current().worker.transport.endpoints))
    return next((endpoint for endpoint in found if endpoint.startswith("unix://")), "")


# -- ZeroMQ


_keys_of = functools.cache(Keys.of)  # it takes its time


def nothing(way: zmq.Socket[bytes], token: str) -> None:
    """A peer without CURVE."""


def keys_of_its_own(way: zmq.Socket[bytes], token: str) -> None:
    """A peer with CURVE, and nothing of the world's."""
    Keys.of_nobody().show(way)


def another_token(way: zmq.Socket[bytes], token: str) -> None:
    """A peer with another token."""
    Keys(b"of another token".ljust(32)).show(way)


def another_client(way: zmq.Socket[bytes], token: str) -> None:
    """A peer that knows the key of the world's servers, but has another one than its clients."""
    _keys_of(token).show(way)
    secret = z85.encode(os.urandom(32))
    way.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    way.setsockopt(zmq.CURVE_SECRETKEY, secret)


def plain_password(way: zmq.Socket[bytes], token: str) -> None:
    """A peer with another of ZeroMQ's mechanisms."""
    way.setsockopt(zmq.PLAIN_USERNAME, b"admin")
    way.setsockopt(zmq.PLAIN_PASSWORD, b"admin")


def bring(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    frames: Sequence[bytes],
    prepare: Callable[[zmq.Socket[bytes], str], None],
    token: str,
    seconds: float = 2.0,
) -> str:
    """Brings a message by ZeroMQ; returns what became of the handshake: "in", "turned away", or "" for no answer."""
    way = context.socket(zmq.DEALER)
    way.setsockopt(zmq.LINGER, 0)
    prepare(way, token)
    news = way.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    try:
        way.connect(endpoint)
        with contextlib.suppress(zmq.Again):  # turned away already
            way.send_multipart(list(frames), zmq.NOBLOCK)
        if not news.poll(int(seconds * 1000)):
            return ""
        event = struct.unpack("<H", news.recv_multipart()[0][:2])[0]
        return "in" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else "turned away"
    finally:
        way.disable_monitor()
        news.close(0)
        way.close(2000 if prepare is nothing else 0)


# -- bytes


def greeting(mechanism: bytes) -> bytes:
    """Returns the greeting of version 3 of ZeroMQ's protocol."""
    return SIGNATURE + b"\3\0" + mechanism.ljust(20, b"\0") + bytes(32)


def framed(frames: Sequence[bytes]) -> bytes:
    """Returns a message as versions 2 and 3 of ZeroMQ's protocol write it."""
    out = b""
    for i, frame in enumerate(frames):
        out += bytes([(i < len(frames) - 1) | 2]) + struct.pack(">Q", len(frame)) + frame
    return out


def ready(kind: bytes = b"DEALER") -> bytes:
    """Returns the command with which a peer without security says that it is ready."""
    fields = b"".join(
        bytes([len(n)]) + n + struct.pack(">I", len(v)) + v
        for n, v in ((b"Socket-Type", kind), (b"Identity", os.urandom(8)))
    )
    command = b"\5READY" + fields
    return bytes([4, len(command)]) + command


def without_security(frames: Sequence[bytes]) -> list[bytes]:
    """All that a peer of version 3 without security would send; the second part after the other side's READY."""
    return [greeting(b"NULL") + ready(), framed(frames)]


def as_version_2(frames: Sequence[bytes]) -> list[bytes]:
    """All that a peer of version 2, which knew no security, would send."""
    return [SIGNATURE + b"\1\5" + b"\0\x08" + os.urandom(8) + framed(frames)]


def as_version_1(frames: Sequence[bytes]) -> list[bytes]:
    """All that a peer of version 1 would send."""
    out = b"\x09\0" + os.urandom(8)
    for i, frame in enumerate(frames):
        out += b"\xff" + struct.pack(">Q", len(frame) + 1) + bytes([i < len(frames) - 1]) + frame
    return [out]


def garbled(frames: Sequence[bytes], chance: random.Random) -> bytes:
    """What a peer would send, changed, cut or made up."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    data = bytearray(
        b"".join(chance.choice((without_security, as_version_2, as_version_1))(frames))
        if kind < 4
        else greeting(b"CURVE") + b"\4\xc8\5HELLO\1\0" + chance.randbytes(192) + framed(frames)
    )
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data)) if kind == 3 else None])


def streamed(frames: Sequence[bytes]) -> bytes:
    """Returns a message as it travels along a direct way."""
    if len(frames) == 1:
        return struct.pack("<I", len(frames[0])) + frames[0]
    sizes = struct.pack(f"<I{len(frames)}Q", 1 << 31 | len(frames), *map(len, frames))
    return sizes + b"".join(frames)


def reach(endpoint: str) -> socket.socket:
    """Connects a raw socket to where a worker listens."""
    scheme, _, path = endpoint.partition("://")
    if scheme in ("ipc", "unix"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(path)
        return raw
    host, _, port = endpoint[6:].rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5)


def throw(endpoint: str, *parts: bytes, wait: bool = True) -> bytes:
    """Sends bytes to where a worker listens; returns what it said until it hung up, or for a quarter of a second.

    Before a second part it waits for as long until the other side says that it is ready.
    """
    said = b""
    with contextlib.suppress(OSError), reach(endpoint) as raw:
        raw.settimeout(0.25)
        for i, part in enumerate(parts):
            raw.sendall(part)
            with contextlib.suppress(TimeoutError):
                while wait and not (i < len(parts) - 1 and b"READY" in said) and (heard := raw.recv(4096)):
                    said += heard
    return said


# -- in the middle


class Middle:
    """Stands between those who dial it and a worker's door, on loopback. It records, and may change what passes.

    Arguments:
        door: where it leads to.
        change: given how many bytes have passed towards the door on this connection, and the next ones, returns what
            to pass instead.
    """

    def __init__(self, door: str, change: Callable[[int, bytes], bytes] = lambda _, data: data) -> None:
        self.door, self.change = door, change
        self.taken: list[bytes] = []
        """What was sent towards the door, by connection."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._carry, args=(near,), daemon=True))
                self._threads[-1].start()

    def _carry(self, near: socket.socket) -> None:
        number = len(self.taken)
        self.taken.append(b"")
        with contextlib.suppress(OSError), near, reach(self.door) as far:
            while not self._over.is_set():
                for source in select.select([near, far], [], [], 0.05)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is near:
                        passed = self.change(len(self.taken[number]), data)
                        self.taken[number] += data
                        far.sendall(passed)
                    else:
                        near.sendall(data)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()


# -- at the store


class Impostor:
    """Poses as rank 0: leaves a hint in the store, lets in whoever comes to a worker, and sends it a message.

    Arguments:
        method: the file where the world meets.
        mark: a folder that the message has its reader make.
        keys: what it has for its own door and its hint; None for nothing.
        hint: what to leave instead of a hint to itself.
    """

    def __init__(self, method: str, mark: Path, keys: Keys | None = None, hint: bytes | None = None) -> None:
        self.heard: list[list[bytes]] = []
        self._mark, self._over = mark, threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = self._context.socket(zmq.ROUTER)
        self._door.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._door.setsockopt(zmq.CURVE_SERVER, 1)  # and let anybody in
            self._door.setsockopt(zmq.CURVE_SECRETKEY, keys._server[1])
        self._door.bind("tcp://127.0.0.1:*")
        self.endpoint = self._door.getsockopt_string(zmq.LAST_ENDPOINT)
        own = json.dumps({"session": "s", "endpoints": [self.endpoint]}).encode()
        self._store = HintStore(method, 0)
        self._store.publish(hint or (own if keys is None else keys.seal(own)), time.monotonic() + 10)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._door.poll(50):
                _, *frames = self._door.recv_multipart()
                self.heard.append(frames)
                data = envelope.read_greeting(frames)
                if data is not None:
                    self._answer(json.loads(data)["record"])

    def _answer(self, record: dict[str, Any]) -> None:
        """Says that the world is complete, with us as rank 0, and then what a rank 0 might."""
        me = Record(0, "w0", 5, (self.endpoint,), "here", "no boot of this host", 1)
        verdict = {"session": "s", "members": [me.to_json(), record], "devices": {}}
        frames = Codec().dumps((os.mkdir, (str(self._mark),), {}), None)
        header = Header(Kind.TELL, 0, 0, 5, 7, 1, *EXECUTOR, 99, -1, _NEVER)
        for endpoint in record["endpoints"][-1:]:
            way = self._context.socket(zmq.DEALER)
            way.setsockopt(zmq.LINGER, 1000)
            way.connect(endpoint)
            way.send_multipart(envelope.greeting(json.dumps(verdict).encode()))
            way.send_multipart([envelope.pack(header) + bytes(frames[0]), *map(bytes, frames[1:])])
            way.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)
        self._door.close(0)
        self._context.term()
        self._store.close()


@contextlib.contextmanager
def closing(thing: Any) -> Iterator[Any]:
    """As in contextlib, for a test that says what it makes in one line."""
    try:
        yield thing
    finally:
        thing.close()
