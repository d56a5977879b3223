"""What a call costs, beside ``torch.distributed.rpc``: ``python -m benchmarks.calls``.

Both libraries run the same program, in turn, each time in a fresh pair of processes; only the imported module differs.
The order changes from round to round, and the median of the rounds counts, because machines drift.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq

from benchmarks.pairs import WARM_UP, Figures, Row, median_us, medians, run_both, run_pair

CALLS = 2000
IN_FLIGHT = 5000
BURSTS = 3  # of so many calls; their median counts

ROWS = [
    Row("noop", "rpc_sync(noop)", "us"),
    Row("builtin", "rpc_sync(torch.add), 2x2 tensor", "us"),
    Row("echo", "rpc_sync(echo), 10-element tensor", "us"),
    Row("method", "rref.rpc_sync().method()", "us"),
    Row("to_here", "remote(noop).to_here()", "us"),
    Row("pipelined", f"rpc_async(noop), {IN_FLIGHT:,} in flight", "calls/s"),
]

# What --check asks for.
MOST_TIME = ("noop", 0.85)
LEAST_RATE = ("pipelined", 1.6)


# What is called.


def noop() -> None:
    pass


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def bump(self) -> int:
        self.count += 1
        return self.count


# The program that both libraries run.


def calls_per_second(start: Callable[[], Any]) -> float:
    for future in [start() for _ in range(WARM_UP)]:
        future.wait()
    rates = []
    for _ in range(BURSTS):
        begun = time.perf_counter()
        for future in [start() for _ in range(IN_FLIGHT)]:
            future.wait()
        rates.append(IN_FLIGHT / (time.perf_counter() - begun))
    return statistics.median(rates)


def caller(rpc: Any) -> Figures:
    to = "callee"
    small, ten = torch.ones(2, 2), torch.arange(10.0)
    counter = rpc.remote(to, Counter)
    return {
        "noop": median_us(lambda: rpc.rpc_sync(to, noop), CALLS),
        "builtin": median_us(lambda: rpc.rpc_sync(to, torch.add, args=(small, 1)), CALLS),
        "echo": median_us(lambda: rpc.rpc_sync(to, echo, args=(ten,)), CALLS),
        "method": median_us(lambda: counter.rpc_sync().bump(), CALLS),
        "to_here": median_us(lambda: rpc.remote(to, noop).to_here(), CALLS),
        "pipelined": calls_per_second(lambda: rpc.rpc_async(to, noop)),
    }


def run_rank(library: str, rank: int, port: int) -> Figures:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's shutdown warns of torch's own code
    rpc: Any = importlib.import_module(library)
    rpc.init_rpc(("caller", "callee")[rank], rank=rank, world_size=2)
    figures = caller(rpc) if rank == 0 else {}
    rpc.shutdown()  # the callee serves in here
    return figures


# The reference below both: frames over loopback TCP, without a library on top.


def run_zmq(_library: str, rank: int, port: int) -> Figures:
    payload = b"x" * 100
    with zmq.Context() as context:
        if rank == 0:
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(f"tcp://127.0.0.1:{port}")

                def ping() -> None:
                    dealer.send(payload)
                    dealer.recv()

                return {"pyzmq": median_us(ping, CALLS)}
        with context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{port}")
            for _ in range(WARM_UP + CALLS):
                router.send_multipart(router.recv_multipart())
            return {}


# Rounds, table, verdict.


def table(theirs: Figures, ours: Figures, pyzmq: float, names: tuple[str, str]) -> str:
    lines = [f"{'median of the rounds':36}{'unit':>9}{names[0]:>24}{names[1]:>24}{'times ahead':>13}"]
    for row in ROWS:
        a, b = theirs[row.key], ours[row.key]
        lines.append(f"{row.title:36}{row.unit:>9}{a:24,.0f}{b:24,.0f}{row.ahead(a, b):13.2f}")
    lines.append(f"{'for reference: bare pyzmq ping-pong':36}{'us':>9}{pyzmq:24,.0f}")
    return "\n".join(lines)


def complaints(theirs: Figures, ours: Figures) -> list[str]:
    found = []
    key, most = MOST_TIME
    if ours[key] > most * theirs[key]:
        found.append(f"{key} takes {ours[key] / theirs[key]:.2f} of torch's time, at most {most} is wanted")
    key, least = LEAST_RATE
    if ours[key] < least * theirs[key]:
        found.append(f"{key} runs at {ours[key] / theirs[key]:.2f} times torch's rate, at least {least} is wanted")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description="What a call costs.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each library runs (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's figures there")
    parser.add_argument("--check", action="store_true", help="fail unless actorrpc is as far ahead as it should be")
    parser.add_argument("--theirs", default="torch.distributed.rpc", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--ours", default="actorrpc", metavar="MODULE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")

    theirs: list[Figures] = []
    ours: list[Figures] = []
    bare: list[Figures] = []
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
        run_both(i, run_rank, [(theirs, options.theirs), (ours, options.ours)])
        bare.append(run_pair(run_zmq, "pyzmq"))

    a, b, pyzmq = medians(theirs), medians(ours), medians(bare)["pyzmq"]
    print(table(a, b, pyzmq, (options.theirs, options.ours)))
    if options.json:
        record = {
            "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
            "versions": {"torch": torch.__version__, "pyzmq": zmq.__version__, "zeromq": zmq.zmq_version()},
            "median": {"theirs": a, "ours": b, "pyzmq": pyzmq},
            "ahead": {row.key: row.ahead(a[row.key], b[row.key]) for row in ROWS},
            "rounds": {"theirs": theirs, "ours": ours, "pyzmq": bare},
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    found = complaints(a, b) if options.check else []
    for complaint in found:
        print(complaint, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.calls import main as main_by_name

    sys.exit(main_by_name())
