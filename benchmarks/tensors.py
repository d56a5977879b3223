"""What large tensors cost, beside ``torch.distributed.rpc``: ``python -m benchmarks.tensors``."""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.pairs import OURS, TORCH, Lane, Plan, compare
from benchmarks.rows import Result, Row, results_of, run_command
from benchmarks.traffic import copying, traffic

LARGE = [f"{way} {size}" for size in ("1M", "16M", "128M") for way in ("send", "echo")]


def _row(key: str, aim: float, least: float, group: str, suffix: str) -> Row:
    way, size = key.split()
    title = f"{'send' if way == 'send' else 'send and echo'} {size[:-1]} {size[-1]}iB{suffix}"
    return Row(key, title, "GB/s", aim, least, rate=True, group=group)


SAME_HOST = [
    _row("send 64K", 3, 1.5, "send 64K", ""),
    *(_row(key, 2.5, 1.3, "large, same host", "") for key in LARGE),
]
BY_TCP = [_row(key, 1, 0.7, "large, by tcp", ", by tcp") for key in LARGE]
COPY = Lane("copy", copying, size=1, share=0.3)
LIMITS = {"copy": "of a warm copy"}


def _section(rows: list[Row], tcp: bool, plan: Plan) -> list[Result]:
    lanes = [Lane("torch", traffic, TORCH, tcp=tcp), Lane("ours", traffic, OURS, tcp=tcp), COPY]
    samples = compare(lanes, [row.key for row in rows], plan, "bytes, by tcp" if tcp else "bytes")
    found = results_of(rows, samples, LIMITS)
    return [replace(x, row=replace(x.row, key=f"{x.row.key} tcp")) for x in found] if tcp else found


def bandwidths(plan: Plan) -> list[Result]:
    """How many GB/s large tensors travel with between processes of one host: by what is best there, and by tcp."""
    return [*_section(SAME_HOST, False, plan), *_section(BY_TCP, True, plan)]


def main(arguments: list[str] | None = None) -> int:
    return run_command("benchmarks.tensors", "What large tensors cost.", bandwidths, arguments)


if __name__ == "__main__":
    from benchmarks.tensors import main as main_by_name

    sys.exit(main_by_name())
