"""Whether this process may open as many files as a world of some size takes: ZeroMQ ends a process that runs out."""

from __future__ import annotations

import logging
import os

from actorrpc.errors import RendezvousError

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

log = logging.getLogger("actorrpc")
_OWN = 32
"""What a worker takes for itself, about."""
_EACH = 6
"""What each peer takes that it talks to, at most: a connection each way, the mailboxes of a socket and of the two that
tell of its connection, the watch on its process. One of another host has no such watch; a direct way takes three.
"""


def check_descriptors(who: str, rank: int, world_size: int) -> None:
    """Warns where all peers together would take more files than this process may open.

    Arguments:
        who: this worker, in words.
        rank: its rank; rank 0 talks to all in any case.
        world_size: how many workers there will be; 0 where nobody knows.

    Raises:
        RendezvousError: this is rank 0, which could not even let all others join.
    """
    text = shortage(who, world_size)
    if text is None:
        return
    if rank == 0:
        raise RendezvousError(text)
    log.warning("%s; if it talks to too many peers, ZeroMQ will end the process", text)


def shortage(who: str, world_size: int) -> str | None:
    """Says in words that a process may not open as many files as a world of some size takes; None where it may, or
    where nobody knows. Arguments: see `check_descriptors`.
    """
    if world_size < 2 or not hasattr(resource, "getrlimit"):
        return None
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = _open_now()
    needed = there + _OWN + _EACH * (world_size - 1)
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    ceiling = f", beyond the present ceiling of {most}" if most != resource.RLIM_INFINITY and most < needed else ""
    return (
        f"{who} may open {limit} files (RLIMIT_NOFILE), of which {there} are open; a world of {world_size} workers "
        f"takes up to {needed}, {_EACH} for each peer. Raise the limit before the start (ulimit -n {needed}{ceiling})"
    )


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return 3
