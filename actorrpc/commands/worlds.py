"""How commands find a world that runs, and get into it."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.commands.failing import CommandError

if TYPE_CHECKING:
    import argparse

    from actorrpc.attaching import Attached

JOIN_SECONDS = 10.0
"""What joining may take, and leaving."""
ADDRESSES = """where is the world?
  HOST:PORT is where its workers meet: MASTER_ADDR and MASTER_PORT of the job, or the init_method of its options
  (tcp://HOST:PORT or file:///PATH). A world that was launched on this host need not be named.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which world is meant."""
    parser.add_argument(
        "address", metavar="ADDRESS", nargs="?", help="HOST:PORT, or an init_method; default: the world launched here"
    )
    add_token(parser)


def add_token(parser: argparse.ArgumentParser) -> None:
    """Adds where the token comes from."""
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the world's token; default: that in ACTORRPC_TOKEN, or none"
    )


def token_of(options: argparse.Namespace) -> str | None:
    """Returns the world's token, if there is one."""
    path = options.token_file
    if path is None:
        return os.environ.get("ACTORRPC_TOKEN") or None
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise CommandError(f"there is no token to be had from {path}: {e}") from None
    if not token:
        raise CommandError(f"there is no token in {path}: it is empty")
    return token


def method_of(address: str) -> str:
    """Returns the init_method that an address means.

    Raises:
        CommandError: it means none.
    """
    if re.match(r"(tcp|file|env)://", address):
        return address
    if re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/]+):\d{1,5}", address):
        return f"tcp://{address}"
    if os.path.exists(address):
        return f"file://{os.path.abspath(address)}"
    if "/" in address:
        raise CommandError(f"there is no file {address}: its world has ended, or meets elsewhere, at a HOST:PORT, say")
    raise CommandError(f"{address!r} is no address: HOST:PORT, tcp://HOST:PORT or file:///PATH are")


def find(address: str | None) -> str:
    """Returns the init_method of the world that is meant: the one at an address, or the only one launched here.

    Raises:
        CommandError: there is none, or more than one.
    """
    if address is not None:
        return method_of(address)
    from actorrpc.wire.folders import held

    found = [f"file://{folder}/store" for folder in held() if os.path.exists(f"{folder}/store")]
    if len(found) == 1:
        return found[0]
    if found:
        which = ", ".join(f"{address} (begun {_begun(address)})" for address in found)
        raise CommandError(f"{len(found)} worlds were launched on this host; name one (the newest is first): {which}")
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return "env://"
    raise CommandError("no world was launched on this host by this user; name one by its HOST:PORT")


def _begun(address: str) -> str:
    """Returns when a world was launched: its address says nothing to users, and what they start they remember."""
    try:
        since = os.stat(address.removeprefix("file://").removesuffix("store") + "lock").st_mtime
    except OSError:  # it has ended meanwhile
        return "?"
    return time.strftime("%H:%M:%S", time.localtime(since))


def enter(options: argparse.Namespace, name: str) -> Attached:
    """Attaches to the world that is meant.

    Arguments:
        options: of the command line, with those of `add_arguments`.
        name: what the guest is called, about.

    Raises:
        CommandError: that cannot be.
    """
    from actorrpc.attaching import attach
    from actorrpc.errors import ActorRPCError

    logging.getLogger("actorrpc").addHandler(logging.NullHandler())  # what it says would go across the screen
    method, token = find(options.address), token_of(options)
    guest = f"{name}-{os.getpid()}-{os.urandom(2).hex()}"
    try:
        return attach(method, token, name=guest, timeout=JOIN_SECONDS)
    except (ActorRPCError, ValueError, OSError) as e:
        raise CommandError(f"the world at {method} cannot be reached: {one_line(e)}") from None


def one_line(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
