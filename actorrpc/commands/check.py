"""`actorrpc check`: whether a host, or several together, are fit for a world."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from actorrpc.commands.failing import CommandError
from actorrpc.commands.worlds import add_token, method_of, token_of

if TYPE_CHECKING:
    from actorrpc.commands.declaring import Commands
    from actorrpc.commands.findings import Finding

EXAMPLES = """examples:
  actorrpc check                                      this host alone
  actorrpc check node0:29500                          and its way to rank 0's host
  actorrpc check node0:29500 --rank 2 --world-size 4  on every host, with its rank: they meet, and compare
  srun bash -c 'actorrpc check node0:29500 --rank $SLURM_PROCID --world-size $SLURM_NTASKS'

Run it before the job, where the job will run, as the same user and with the same environment: nothing else may have
the port. It prints a line for each thing that it looked at: "ok", or "WRONG" and how to mend it.

exit code: 0 when all is well, 1 when something is wrong.
"""
_LONGEST_WAIT = 86_400.0


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "check",
        help="see whether hosts are fit for a world, before a long run",
        description="Looks at names, ports, interfaces, versions, the token, limits of descriptors and shared memory.\n"
        "Started with a rank on several hosts, it also compares them: who is there, whether each reaches every\n"
        "other one, versions, token and clocks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="where the workers are to meet (rank 0's host)")
    parser.add_argument("--rank", type=int, metavar="R", help="this worker's rank; needs --world-size")
    parser.add_argument("--world-size", type=int, metavar="N", help="how many workers there are")
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long ranks wait for each other; default 60"
    )
    add_token(parser)
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Looks, prints what was found, and says whether all is well."""
    from actorrpc.commands.findings import local_findings

    host, port = _place(options)
    rank, size, token = options.rank, options.world_size, token_of(options)
    found = local_findings(host, port, rank, size, token)
    for finding in found:
        _show(finding)
    if rank is not None and host is not None and port is not None:
        from actorrpc.commands.meeting import meet

        blocked = rank == 0 and next(finding for finding in found if finding.what == "port")
        if not blocked or blocked.ok:
            print(f"rank {rank} waits up to {options.wait:g} s for the other ranks at {host}:{port}", flush=True)
            together = meet(host, port, rank, size, token, options.wait)
            for finding in together:
                _show(finding)
            found += together
    wrong = sum(not finding.ok for finding in found)
    print(f"{wrong} of {len(found)} things are wrong" if wrong else f"all {len(found)} things are well")
    return 1 if wrong else 0


def _place(options: argparse.Namespace) -> tuple[str | None, int | None]:
    """Checks the options; returns the host and port of the address."""
    rank, size = options.rank, options.world_size
    if rank is not None and (options.address is None or size is None):
        raise CommandError("--rank needs HOST:PORT and --world-size: where the ranks meet, and how many", 2)
    if size is not None and size < 1:
        raise CommandError(f"--world-size {size}: a world has at least one worker", 2)
    if rank is not None and not 0 <= rank < size:
        raise CommandError(f"--rank {rank} is outside of a world of {size}: ranks are 0 to {size - 1}", 2)
    if not 0 < options.wait <= _LONGEST_WAIT:
        raise CommandError(f"--wait {options.wait:g}: seconds above 0, and at most a day", 2)
    if options.address is None:
        return None, None
    method = method_of(options.address)
    try:
        url = urlsplit(method)
        host, port = url.hostname, url.port
    except ValueError as e:
        raise CommandError(f"{options.address!r} is no HOST:PORT: {e}", 2) from None
    if url.scheme != "tcp" or not host or port is None:
        raise CommandError(f"{options.address!r} is no HOST:PORT; workers that meet in a file are on one host", 2)
    if port == 0:
        raise CommandError(f"{options.address!r}: port 0 means any, and the ranks would not find each other", 2)
    return host, port


def _show(finding: Finding) -> None:
    print(f"{'ok' if finding.ok else 'WRONG':<7}{finding.what:<16}{finding.text}", flush=True)
    if finding.mend:
        print(f"{'':<23}to mend it: {finding.mend}", flush=True)
