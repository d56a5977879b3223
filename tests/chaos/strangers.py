"""Those who do not belong to the world: without its token, or with broken messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import zmq

import actorrpc as rpc
from actorrpc import session
from actorrpc.wire import envelope
from actorrpc.wire.envelope import HEADER_SIZE
from tests import attacks
from tests.attacks import bring, direct_door, doors, forged, reach, throw
from tests.chaos.load import append, counted, lines, tables
from tests.chaos.table import Tally, cases, row
from tests.joining import options
from tests.worlds import World, no_references, until

TOKEN = "correct horse battery staple"
PLAIN: Any = [
    attacks.nothing, attacks.keys_of_its_own, attacks.another_token, attacks.another_client, attacks.plain_password,
]  # fmt: skip
_GROWTH = 100 << 20


def rate(seconds: float) -> float:
    """Calls rank 1 for so long; returns how many times a second."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        assert rpc.rpc_sync(1, abs, args=(-1,)) == 1
        count += 1
    return count / (time.monotonic() - began)


def rate_until(end: str) -> float:
    """Calls rank 1 until there is a file; returns how many times a second."""
    began, count = time.monotonic(), 0
    while not os.path.exists(end):
        assert rpc.rpc_sync(1, abs, args=(-1,)) == 1
        count += 1
    return count / (time.monotonic() - began)


@row("strangers", "raw sockets and raw ZeroMQ without the token", 1_000, 100_000, "tries", seeded=False)
def strangers(tally: Tally, tries: int) -> None:
    """Six in ten bring bytes, the others messages by ZeroMQ, at both doors of a worker that calls all the while."""
    parts = {"bytes": tries * 6 // 10, "zeromq": tries - tries * 6 // 10}
    with World(2, options={"security_token": TOKEN}, timeout=3000) as world:
        mark, end = Path(world.folder, "mark"), Path(world.folder, "end")
        frames, where = forged(world, mark), doors(world)
        process = psutil.Process(world.pid(0))
        before = world.on(0, rate, 2.0 if tries < 10_000 else 10.0)
        memory, descriptors = process.memory_info().rss, process.num_fds()
        world.start(0, rate_until, str(end))
        chance, context = random.Random(7), zmq.Context()
        outcomes = {"in": 0, "turned away": 0, "": 0}
        for i in range(parts["bytes"]):
            throw(where[i % 2], attacks.garbled(frames, chance), wait=False)
        for i in range(parts["zeromq"]):
            outcomes[bring(context, where[i % 2], frames, PLAIN[i // 2 % len(PLAIN)], TOKEN)] += 1
        end.touch()
        during = world.result(0)
        context.term()
        tally.tried += tries
        grown = process.memory_info().rss - memory
        if outcomes["in"] or mark.exists():
            tally.is_lost(f"{outcomes['in']} got in; a handler was reached: {mark.exists()}")
        until(lambda: process.num_fds() <= descriptors + 20, 60)
        if grown >= _GROWTH:
            tally.is_lost(f"memory grew by {grown >> 20} MiB")
        tally.note(
            f"{parts['bytes']} of bytes, {parts['zeromq']} of ZeroMQ ({outcomes['turned away']} turned away, "
            f"{outcomes['']} unanswered): 0 reached a handler; {before:.0f} calls/s undisturbed, "
            f"{during:.0f} meanwhile (ratio {during / before:.2f}), {grown >> 20} MiB more memory"
        )


# -- broken messages


class Recorder:
    """A transport that keeps what it sends."""

    kept: list[list[bytes]] = []  # noqa: RUF012  the process's

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name.startswith("_") else setattr(self._inner, name, value)

    def send(self, peer: int, frames: Sequence[Any], hold: bool = False, lasting: bool = True) -> None:
        if peer == 0 and len(self.kept) < 500:
            self.kept.append([bytes(memoryview(frame).cast("B")) for frame in frames])
        self._inner.send(peer, frames, hold, lasting)


class Box:
    """An object to refer to."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def traffic(path: str) -> list[list[bytes]]:
    """Makes calls of all kinds to rank 0, and returns the messages that they were.

    No function goes by value: bytecode with bits turned is another program, which may do anything.
    """
    import torch

    from actorrpc import autograd as dist_autograd

    for n in range(3):
        rpc.rpc_sync(0, counted, args=(path, f"recorded {n}"))
        rpc.rpc_async(0, counted, args=(path, f"recorded too {n}")).wait()
        rpc.rpc_sync(0, torch.add, args=(torch.ones(3, 4), torch.ones(30_000)[:4]))
        rpc.rpc_sync(0, len, args=({"a": [1, 2.0, None], "b": bytes(3000)},))
        ref = rpc.remote(0, Box, args=(torch.ones(20_000),))
        ref.rpc_sync().get()
        rpc.rpc_sync(0, _value_of, args=(ref,))
        ref.tell().get()
        with contextlib.suppress(ZeroDivisionError):
            rpc.rpc_sync(0, divmod, args=(1, 0))
        with dist_autograd.context() as context:
            leaf = torch.ones(3, requires_grad=True)
            dist_autograd.backward(context, [rpc.rpc_sync(0, torch.mul, args=(leaf, 2)).sum()])
        del ref
    return list(Recorder.kept)


def _value_of(ref: Any) -> int:
    return len(ref.local_value().value)


def mutated(recorded: Sequence[Sequence[bytes]], chance: random.Random) -> list[bytes]:
    """Returns a recorded message with bits turned, parts cut, doubled, swapped or made up; or one made up wholly."""
    kind = chance.randrange(10)
    if kind == 0:
        return [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 4))]
    if kind == 1:
        return [b"b\1" + chance.randbytes(chance.randrange(60))]  # like a bundle
    if kind == 2:
        words = chance.choice([b"{}", b"[]", b'{"session": 5}', chance.randbytes(50)])
        return [bytes(frame) for frame in envelope.greeting(words)]
    frames = [bytearray(frame) for frame in chance.choice(recorded)]
    for _ in range(chance.randrange(1, 5)):
        frame = chance.choice(frames)
        if not frame:
            continue
        where, how = chance.randrange(len(frame)), chance.randrange(6)
        if how < 3:
            frame[where] ^= 1 << chance.randrange(8)
        elif how == 3:
            frame[where] = chance.choice((0, 255, 127, 128))
        elif how == 4:
            del frame[where : where + chance.randrange(1, 20)]
        else:
            frame[where:where] = frame[: chance.randrange(20)]
    if chance.random() < 0.1:
        frames.insert(chance.randrange(len(frames) + 1), bytearray(chance.randbytes(chance.randrange(100))))
    if len(frames) > 1 and chance.random() < 0.1:
        chance.shuffle(frames)
    return [bytes(frame) for frame in frames]


def send_mutated(count: int, seed: str, recorded: list[list[bytes]]) -> int:
    """As a member, sends rank 0 broken messages under numbers that are right; returns how many were sent."""
    worker, chance = session.current().worker, random.Random(seed)
    peer, sent = worker.peers[0], 0
    for _ in range(count):
        frames = mutated(recorded, chance)
        with peer.lock:
            if len(frames[0]) >= HEADER_SIZE:
                whole = bytearray(frames[0])
                peer.sent += 1
                _put(whole, "caller", worker.id)
                _put(whole, "incarnation", worker.record.incarnation)
                _put(whole, "sequence", peer.sent)
                whole[:2] = envelope.MARK
                frames[0] = bytes(whole)
            try:
                worker.transport.send(0, frames)
            except KeyError:
                break
        sent += 1
        if sent % 100 == 0:
            time.sleep(0.01)
    return sent


_PLACES = {"caller": (4, 4), "incarnation": (8, 8), "sequence": (24, 8)}


def _put(frame: bytearray, name: str, value: int) -> None:
    at, size = _PLACES[name]
    frame[at : at + size] = value.to_bytes(size, "little")


class _Watched:
    """What a worker's process has, so that growth can be seen."""

    def __init__(self, world: World, rank: int) -> None:
        self._process = psutil.Process(world.pid(rank))
        self._memory, self._descriptors = self._process.memory_info().rss, self._process.num_fds()

    def check(self, tally: Tally) -> None:
        grown = self._process.memory_info().rss - self._memory
        if grown >= _GROWTH:
            tally.is_lost(f"memory grew by {grown >> 20} MiB")
        try:
            until(lambda: self._process.num_fds() <= self._descriptors + 20, 60)
        except AssertionError:
            tally.is_lost(f"{self._process.num_fds() - self._descriptors} descriptors more")


def _join_recorded(world: World) -> None:
    from tests.chaos.load import join_wrapped

    for rank in range(3):
        world.start(rank, join_wrapped, rank, world.plan, Recorder)
    world.results()


@row("fuzz", "broken messages, no token", 3_000, 100_000, "frames", seeded=False)
def fuzz(tally: Tally, count: int) -> None:
    """Half of them from a member, which has its numbers right, so that they are looked into; half from strangers, by
    ZeroMQ and, where there is one, at the door of direct ways.
    """
    numbered = directly = 0
    for part in itertools.count():
        left = count - tally.tried
        if left <= 0:
            tally.note(f"{numbered} of a member's messages were taken for ones of this protocol, and looked into")
            tally.note(f"{directly} came to the door of direct ways")
            return
        with World(3, join=False, strict=False, check=False, timeout=600) as world:
            _join_recorded(world)
            path = f"{world.folder}/runs"
            recorded = world.on(1, traffic, path)
            watched, tcp = _Watched(world, 0), doors(world)[-1]
            chance, batch = random.Random(f"fuzz {part}"), min(left, 20_000)
            seen = world.on(0, _seen_of, 1)
            tally.tried += max(1, world.on(1, send_mutated, batch - batch // 2, f"member {part}", recorded))
            with contextlib.suppress(AssertionError):  # it may be lost by then, for what it has sent
                until(lambda w=world: w.on(0, _seen_of, 1) == w.on(1, _sent_to, 0), 60)  # type: ignore[misc]
            _answers(tally, world, 2)
            numbered += world.on(0, _seen_of, 1) - seen
            door = direct_door(world)
            to_door = batch // 4 if door else 0
            with zmq.Context() as context, context.socket(zmq.DEALER) as way:
                way.setsockopt(zmq.LINGER, 30_000)
                way.setsockopt(zmq.SNDHWM, 0)
                way.connect(tcp)
                for n in range(batch // 2 - to_door):
                    way.send_multipart(mutated(recorded, chance))
                    if n % 500 == 0:
                        _answers(tally, world, 2)
            for n in range(0, to_door, 10):
                _throw_directly(door, [mutated(recorded, chance) for _ in range(min(10, to_door - n))], chance)
                if n % 500 == 0:
                    _answers(tally, world, 2)
            directly += to_door
            tally.tried += batch // 2
            _answers(tally, world, 2)
            watched.check(tally)
            world.kill(1)  # and with it all that it may have made there
            until(lambda w=world: w.on(0, _has_lost, 1), 30)  # type: ignore[misc]
            for rank in (0, 2):
                try:
                    world.on(rank, no_references, 20.0)
                except Exception as e:
                    tally.is_lost(f"rank {rank} after the end of the fuzzer: {e}")
            left_over: dict[str, int] = {}
            for _ in range(100):  # a last job may just be waiting for its thread
                left_over = {name: n for name, n in world.on(0, tables).items() if n}
                if not left_over:
                    break
                time.sleep(0.1)
            if left_over:
                tally.is_lost(f"tables are not empty afterwards: {left_over}")
            _answers(tally, world, 2)
            world.on(0, rpc.shutdown, False)
            world.on(2, rpc.shutdown, False)


def _throw_directly(door: str, messages: Sequence[Sequence[bytes]], chance: random.Random) -> None:
    """Brings messages along one direct way; some of them in a stream with a byte changed, or cut short."""
    data = bytearray(b"".join(map(attacks.streamed, messages)))
    kind = chance.randrange(4)
    if kind == 0:
        data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == 1:
        data[chance.randrange(4)] ^= 1 << chance.randrange(8)  # of the first word, which says what follows
    elif kind == 2:
        del data[chance.randrange(len(data)) :]
    with contextlib.suppress(OSError), reach(door) as raw:  # it may be hung up on in the midst of it
        raw.settimeout(10)
        raw.sendall(data)


def _seen_of(rank: int) -> int:
    return session.current().worker.peers[rank].seen


def _sent_to(rank: int) -> int:
    return session.current().worker.peers[rank].sent


def _has_lost(rank: int) -> bool:
    try:
        rpc.rpc_sync(rank, abs, args=(-1,), timeout=10)
    except rpc.WorkerLostError:
        return True
    return False


def _answers(tally: Tally, world: World, rank: int) -> None:
    """Sees whether rank 0 and another one answer each other."""
    for a, b in ((rank, 0), (0, rank)):
        value = world.on(a, _call_well, b)
        if value != 7:
            tally.is_hung(f"rank {a} called rank {b}: {value}")


def _call_well(rank: int) -> Any:
    try:
        return rpc.rpc_sync(rank, abs, args=(-7,), timeout=30)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


@row("fuzz-token", "broken messages, to a world with a token", 3_000, 100_000, "frames", seeded=False)
def fuzz_with_token(tally: Tally, count: int) -> None:
    """As peers without security bring them, ten a connection; in clear they would be acted on."""
    with World(2, options={"security_token": TOKEN}, timeout=600) as world, tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        recorded = [forged(world, mark), *_recorded_elsewhere()]
        watched, where, chance = _Watched(world, 0), doors(world), random.Random("fuzz with a token")
        while tally.tried < count:
            batch = min(10, count - tally.tried)
            messages = [recorded[0], *(mutated(recorded, chance) for _ in range(batch - 1))]
            opening = chance.choice((attacks.without_security, attacks.as_version_2, attacks.as_version_1))
            data = b"".join([*opening(recorded[0]), *map(attacks.framed, messages)])
            with contextlib.suppress(OSError), reach(where[chance.randrange(2)]) as raw:
                raw.settimeout(0.5)
                raw.sendall(data)
                with contextlib.suppress(TimeoutError):
                    while raw.recv(4096):
                        pass
                raw.shutdown(socket.SHUT_RDWR)
            tally.tried += batch
        if mark.exists():
            tally.is_lost("a handler was reached")
        _answers(tally, world, 1)
        watched.check(tally)


def _recorded_elsewhere() -> list[list[bytes]]:
    """Traffic of a world without a token."""
    with World(3, join=False, check=False) as world:
        _join_recorded(world)
        recorded: list[list[bytes]] = world.on(1, traffic, f"{world.folder}/runs")
        return recorded


# -- workers with another token


@cases("token", "a worker with another token, or with none", 2, 10)
def token(tally: Tally, chance: random.Random) -> None:
    tokens = [TOKEN, chance.choice(["another", None])]
    if chance.random() < 0.5:
        tokens.reverse()
    with World(2, join=False, strict=False, check=False, timeout=90) as world:
        path = f"{world.folder}/said"
        for rank in range(2):
            world.start(rank, _come, rank, f"file://{world.folder}/place", tokens[rank], path)
        began = time.monotonic()
        world.results()
        said = {line.split(" ", 1)[0]: line.split(" ", 3) for line in lines(path)}
        for who in "01":
            _, kind, at, text = said.get(who, ["", "nothing", "0", ""])
            if kind in ("AuthenticationError", "RendezvousError") and "token" in text:
                tally.noticed.append(float(at) - began)
            else:
                tally.is_lost(f"rank {who} with tokens {tokens}: {kind} {text}")


def _come(rank: int, method: str, token: str | None, path: str) -> None:
    try:
        rpc.init_rpc(
            f"w{rank}", rank=rank, world_size=2,
            rpc_backend_options=options(method, security_token=token, init_timeout=10.0),
        )  # fmt: skip
        kind, text = "joined", ""
    except Exception as e:
        kind, text = type(e).__name__, " ".join(str(e).split())
    append(path, f"{rank} {kind} {time.monotonic()} {text}")
    rpc.shutdown(graceful=False)
