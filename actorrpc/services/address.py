"""Which address a worker listens at, and tells the others."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

from actorrpc.errors import RendezvousError

_LOOPBACK = "127.0.0.1"
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's, so that the way to them is the default route."""


def local_address(master: str | None) -> str:
    """Picks the address to bind and to tell the others.

    ACTORRPC_ADDRESS where that is set, loopback for a local world, else that of the interface that reaches rank 0.

    Arguments:
        master: rank 0's host as all workers were given it; None where they meet in a file.

    Raises:
        RendezvousError: rank 0's host is not known here, or not to be reached.
    """
    if given := os.environ.get("ACTORRPC_ADDRESS"):
        return given.strip("[]")
    if master is None:
        return _LOOPBACK
    master = master.strip("[]")
    try:
        address = _source_address(master)
    except OSError as e:
        raise RendezvousError(f"no way to rank 0's host {master!r}: {e}; is MASTER_ADDR right?") from e
    if not _is_loopback(address) or _means_this_host(master):
        return address
    # Many a host takes its own name for 127.0.1.1, which to all others is no way to it.
    for far in _FAR_AWAY:
        try:
            return _source_address(far)
        except OSError:  # no such way: a host without a network, perhaps
            continue
    return address


def _source_address(host: str) -> str:
    """Returns this host's address on the way to another host. Raises OSError where there is none."""
    problem: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing; it only asks for the route
                return str(probe.getsockname()[0]).split("%")[0]
        except OSError as e:  # IPv6 that is known by name and has no route, say
            problem = problem or e
    raise problem or OSError(f"{host} has no address")


def _means_this_host(master: str) -> bool:
    """Whether an address that is loopback here says that all workers are on this host."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):  # torchrun's, which names its host
        return True
    return _is_loopback(master) or master == "localhost" or master.startswith("localhost.")


def _is_loopback(host: str) -> bool:
    try:
        return bool(ip_address(host).is_loopback)
    except ValueError:  # a name
        return False
