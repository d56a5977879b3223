"""What calls cost, beside ``torch.distributed.rpc``: ``python -m benchmarks.calls``."""

from __future__ import annotations

import sys

from benchmarks.pairs import OURS, TORCH, Lane, Plan, compare
from benchmarks.rows import Result, Row, result_of, results_of, run_command
from benchmarks.traffic import IN_FLIGHT, busy, ping_pong, traffic

LATENCIES = [
    Row("noop", "rpc_sync(noop)", aim=2, least=1.3),
    Row("builtin", "rpc_sync(torch.add), 2x2 tensor", aim=1.8, least=1.2),
    Row("echo", "rpc_sync(echo), 10-element tensor", aim=2.2, least=1.4),
    Row("method", "rref.rpc_sync().method()", aim=2.2, least=1.4, group="methods"),
    Row("actor", "actor.rpc_sync().method(); torch: rref", aim=2.2, least=1.4, group="methods"),
    Row("to_here", "remote(noop).to_here()", aim=1.8, least=1.1),
]
RATES = [
    Row("pipelined", f"rpc_async(noop), {IN_FLIGHT:,} in flight", "calls/s", 3.5, 2, rate=True),
    Row("objects", "remote(), objects made", "1/s", 3, 2, rate=True),
]
BUSY = [Row("busy", "rpc_sync while callee's main runs Python", aim=8, least=4)]
TOKEN = [
    Row("noop", "with a token: rpc_sync(noop)"),
    Row("echo", "with a token: echo, 10 elements"),
    Row("method", "with a token: rref's method"),
    Row("pipelined", f"with a token: rpc_async, {IN_FLIGHT:,}", "calls/s", rate=True),
    Row("send 1M", "with a token: send 1 MiB", "GB/s", rate=True),
    Row("echo 16M", "with a token: send and echo 16 MiB", "GB/s", rate=True),
]

LANES = [Lane("torch", traffic, TORCH), Lane("ours", traffic, OURS)]
BARE = [Lane("ipc", ping_pong, share=0.4), Lane("tcp", ping_pong, tcp=True, share=0.4)]
LIMITS = {"ipc": "x bare ipc", "tcp": "x tcp"}


def latencies(plan: Plan) -> list[Result]:
    """What single calls take, beside a bare ping-pong of ZeroMQ as well."""
    samples = compare([*LANES, *BARE], [row.key for row in LATENCIES], plan, "calls")
    return results_of(LATENCIES, samples, LIMITS)


def throughput(plan: Plan) -> list[Result]:
    """How many calls and objects a second there are."""
    return results_of(RATES, compare(LANES, [row.key for row in RATES], plan, "throughput"))


def while_busy(plan: Plan) -> list[Result]:
    """What a call takes while the callee's main thread runs Python."""
    lanes = [Lane("torch", busy, TORCH), Lane("ours", busy, OURS)]
    return results_of(BUSY, compare([*lanes, *BARE], ["busy"], plan, "busy"), LIMITS)


def with_token(plan: Plan) -> list[Result]:
    """What a token costs: all is encrypted then. Torch has no counterpart; beside it stands a world without one."""
    lanes = [Lane("ours", traffic, OURS, token=True), Lane("without", traffic, OURS)]
    samples = compare(lanes, [row.key for row in TOKEN], plan, "token")
    return results_of(TOKEN, samples, {"without": "of the same without a token"})


def all_of_them(plan: Plan) -> list[Result]:
    """Calls and rates in one set of worlds a round."""
    rows = [*LATENCIES, *RATES]
    samples = compare([*LANES, *BARE], [row.key for row in LATENCIES], plan, "calls")
    samples |= compare(LANES, [row.key for row in RATES], plan, "throughput")
    limited = results_of(LATENCIES, samples, LIMITS)
    return [*limited, *(result_of(row, samples[row.key]) for row in rows[len(limited) :])]


def main(arguments: list[str] | None = None) -> int:
    return run_command("benchmarks.calls", "What calls cost.", all_of_them, arguments)


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.calls import main as main_by_name

    sys.exit(main_by_name())
