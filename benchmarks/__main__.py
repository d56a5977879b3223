"""The whole table beside ``torch.distributed.rpc``, in one run: ``python -m benchmarks``; see docs/performance.md."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks import broadcast, calls, cartpole, memory, peers, start, tensors, train
from benchmarks.pairs import is_failure, prepare, say
from benchmarks.rows import parser_for, plan_of, report

if TYPE_CHECKING:
    from benchmarks.rows import Result, Section

SECTIONS: dict[str, Section] = {
    "calls": calls.latencies,
    "throughput": calls.throughput,
    "bytes": tensors.bandwidths,
    "train": train.steps,
    "cartpole": cartpole.cartpole,
    "busy": calls.while_busy,
    "init": start.init,
    "token": calls.with_token,
    "broadcast": broadcast.broadcast,
    "memory": memory.memory,
    "peers": peers.peers,
}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_for("benchmarks", "The whole table beside torch.distributed.rpc.")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION",
        help=f"measure this section, may be given again; there are {', '.join(SECTIONS)}",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    plan = plan_of(parser, options)
    prepare()
    results: list[Result] = []
    failed: list[str] = []
    for name in options.only or SECTIONS:
        try:
            found = SECTIONS[name](plan)
        except SystemExit as error:  # the others have taken minutes, and are not to be lost
            if not is_failure(error):
                raise
            failed.append(f"section {name} failed: {error}")
            say(failed[-1])
            continue
        for result in found:
            result.section = name
        results += found
    code = report(results, plan, options.json)
    for complaint in failed:
        say(complaint)
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
