"""The program that both libraries run for the rows of calls and tensors, and the machine's limits beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
import zmq

from benchmarks.pairs import OURS, Measures, bandwidth, latency, rate, rpc_world

if TYPE_CHECKING:
    from benchmarks.pairs import Lane

IN_FLIGHT = 5000
OBJECTS = 1000
"""How many calls, and objects, a burst makes."""
SIZES = {"64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24, "128M": 1 << 27}
TO = "w1"


# What is called.


def noop() -> None:
    pass


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def sink(value: torch.Tensor) -> None:
    pass


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def bump(self) -> int:
        self.count += 1
        return self.count


_finished = False


def finish() -> None:
    global _finished
    _finished = True


# The program that both libraries run.


@contextlib.contextmanager
def traffic(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Gives the measures of all rows of calls and tensors."""
    with rpc_world(lane, rank, port) as rpc:
        yield measures_of(rpc, lane.library) if rank == 0 else {}


def measures_of(rpc: Any, library: str) -> dict[str, Any]:
    """Returns the measures by their keys."""
    small, ten = torch.ones(2, 2), torch.arange(10.0)
    counter = rpc.remote(TO, Counter)
    actor = counter  # torch has no actors; a reference's method is what comes closest
    if library == OURS:
        from benchmarks.actors import CounterActor

        actor = CounterActor.spawn(TO)

    def calls(number: int) -> int:
        for future in [rpc.rpc_async(TO, noop) for _ in range(number)]:
            future.wait()
        return number

    def objects(number: int) -> int:
        references = [rpc.remote(TO, Counter) for _ in range(number)]
        for reference in references:
            reference._get_future().wait()
        return number

    found = {
        "noop": latency(lambda: rpc.rpc_sync(TO, noop)),
        "builtin": latency(lambda: rpc.rpc_sync(TO, torch.add, args=(small, 1))),
        "echo": latency(lambda: rpc.rpc_sync(TO, echo, args=(ten,))),
        "method": latency(lambda: counter.rpc_sync().bump()),
        "actor": latency(lambda: actor.rpc_sync().bump()),
        "to_here": latency(lambda: rpc.remote(TO, noop).to_here()),
        "pipelined": rate(lambda: calls(IN_FLIGHT), lambda: calls(100)),
        "objects": rate(lambda: objects(OBJECTS), lambda: objects(50)),
    }
    for name, size in SIZES.items():
        found[f"send {name}"] = _moving(lambda x: rpc.rpc_sync(TO, sink, args=(x,)), size, 1)
        found[f"echo {name}"] = _moving(lambda x: rpc.rpc_sync(TO, echo, args=(x,)), size, 2)
    return found


def _moving(call: Callable[[torch.Tensor], object], size: int, ways: int) -> Callable[[float], float]:
    def measure(seconds: float) -> float:
        tensor = torch.ones(size // 4)
        return bandwidth(lambda: call(tensor), size * ways)(seconds)

    return measure


@contextlib.contextmanager
def busy(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """As `traffic`, with a callee whose main thread runs Python all the time."""
    with rpc_world(lane, rank, port) as rpc:
        if rank == 0:
            yield {"busy": latency(lambda: rpc.rpc_sync(TO, noop), 1)}
            rpc.rpc_sync(TO, finish)
            return
        while not _finished:
            sum(range(100))
        yield {}


# The machine's limits.


@contextlib.contextmanager
def ping_pong(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """A bare DEALER and a bare ROUTER of ZeroMQ, by tcp or by ipc (`lane.tcp`), without a library on top."""
    endpoint, payload = f"tcp://127.0.0.1:{port}" if lane.tcp else f"ipc://@actorrpc-benchmarks-{port}", b"x" * 100
    with zmq.Context() as context:
        if rank == 0:
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 1000
                dealer.connect(endpoint)

                def ping() -> None:
                    dealer.send(payload)
                    dealer.recv()

                yield {"*": latency(ping)}
                dealer.send(b"")
            return
        with context.socket(zmq.ROUTER) as router:
            router.bind(endpoint)
            while True:
                sender, data = router.recv_multipart()
                if not data:
                    break
                router.send_multipart([sender, data])
        yield {}


@contextlib.contextmanager
def copying(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Copies of memory that is warm: both sides have been touched before."""
    torch.set_num_threads(1)

    def copy(size: int) -> Callable[[float], float]:
        def measure(seconds: float) -> float:
            source, target = torch.ones(size // 4), torch.zeros(size // 4)
            return bandwidth(lambda: target.copy_(source), size)(seconds)

        return measure

    yield {f"{way} {name}": copy(size) for name, size in SIZES.items() for way in ("send", "echo")}


def elapsed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
