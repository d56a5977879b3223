"""`actorrpc trace`: records a running world into one file for a viewer."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from actorrpc.commands.failing import CommandError
from actorrpc.commands.worlds import ADDRESSES, add_arguments, enter, one_line

if TYPE_CHECKING:
    from actorrpc.commands.declaring import Commands

EXAMPLES = f"""examples:
  actorrpc trace                                   the world that was launched on this host
  actorrpc trace node17:29500 --seconds 2          one whose workers meet there
  actorrpc trace node17:29500 --out mine.json --token-file token.txt

{ADDRESSES}
Ctrl-C ends the recording before its time, and what was recorded until then is written.
Open the file at https://ui.perfetto.dev (it stays on your computer), or in Chrome at chrome://tracing.
"""


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "trace",
        help="record a running world into one file for a trace viewer",
        description="Attaches to a running world, records for some seconds what all of its workers do (calls, and\n"
        "torch's operators), and writes one file in Chrome's trace format.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--seconds", type=_seconds, default=5.0, metavar="N", help="how long to record (default: 5)")
    parser.add_argument(
        "--out", default="trace.json.gz", metavar="FILE",
        help="the file, written over; packed if its name ends with .gz (default: trace.json.gz)",
    )  # fmt: skip
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Records, and says where the file is."""
    from actorrpc.errors import ActorRPCError
    from actorrpc.profiler import profile_others

    try:
        with enter(options, "trace"):
            with profile_others(options.out, options.seconds) as profile:
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(options.seconds)
    except OSError as e:
        raise CommandError(f"{options.out!r} cannot be written: {e.strerror or e}") from e
    except (ActorRPCError, ValueError) as e:
        raise CommandError(one_line(e)) from e
    where, *more = str(profile).splitlines()
    for line in more:
        print(line, file=sys.stderr)
    print(where)
    return 0 if profile.workers else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise argparse.ArgumentTypeError(f"seconds above 0 and below a day, not {text}")
    return seconds
