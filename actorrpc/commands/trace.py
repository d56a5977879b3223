"""`actorrpc trace`: records a running world into one file for a viewer."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.commands.failing import CommandError

if TYPE_CHECKING:
    from actorrpc.commands.declaring import Commands

EXAMPLES = """examples:
  actorrpc trace tcp://host0:29500 --seconds 5 --out trace.json.gz
  ACTORRPC_TOKEN=... actorrpc trace tcp://host0:29500
  actorrpc trace tcp://host0:29500 --token-file token.txt

Open the file at https://ui.perfetto.dev (it stays on your computer), or in Chrome at chrome://tracing.
The world is to be an elastic one: its workers call init_rpc without world_size.
"""


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "trace",
        help="record a running world into one file for a trace viewer",
        description="Attaches to a running world, records what all of its workers do for some seconds, calls and "
        "torch's operators, and writes one file in Chrome's trace format.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="ADDRESS", help="where its workers meet: their init_method")
    parser.add_argument("--seconds", type=_seconds, default=5.0, metavar="N", help="how long to record (default: 5)")
    parser.add_argument(
        "--out", default="trace.json.gz", metavar="FILE",
        help="the file, written over; packed if its name ends with .gz (default: trace.json.gz)",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the world's token; default: ACTORRPC_TOKEN, or none"
    )
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Records, and says where the file is."""
    from actorrpc.attaching import attach
    from actorrpc.errors import ActorRPCError
    from actorrpc.profiler import profile_others

    token = _token(options.token_file)
    try:
        with attach(options.address, token):
            with profile_others(options.out, options.seconds) as profile:
                time.sleep(options.seconds)
    except OSError as e:
        raise CommandError(f"{options.out!r} cannot be written: {e.strerror or e}") from e
    except (ActorRPCError, ValueError) as e:
        raise CommandError(" ".join(str(e).split())) from e
    where, *more = str(profile).splitlines()
    for line in more:
        print(line, file=sys.stderr)
    print(where)
    return 0 if profile.workers else 1


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as e:
        raise CommandError(f"the token file {path!r} cannot be read: {e.strerror or e}") from e


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86_400:
        raise argparse.ArgumentTypeError(f"seconds above 0 and below a day, not {text}")
    return seconds
