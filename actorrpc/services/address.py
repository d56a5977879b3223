"""Which address a worker listens at, and tells the others."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from actorrpc.errors import RendezvousError

_LOOPBACK = "127.0.0.1"
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's, so that the way to them is the default route."""
_SIOCGIFADDR = 0x8915
_IPV6_OF_THIS_HOST = Path("/proc/net/if_inet6")


def local_address(master: str | None, given: str | None = None) -> str:
    """Picks the address to bind and to tell the others.

    What was given, or else ACTORRPC_ADDRESS, where that is set; loopback for a local world; else that of the interface
    that reaches rank 0.

    Arguments:
        master: rank 0's host as all workers were given it; None where they meet in a file.
        given: an address of this host, in brackets or not, the name of an interface of it, or a name that means it.

    Raises:
        RendezvousError: rank 0's host is not known here, or not to be reached; or what was given is not this host's.
    """
    if given := given or os.environ.get("ACTORRPC_ADDRESS"):
        return _own_address(given)
    if master is None:
        return _LOOPBACK
    master = master.strip("[]")
    try:
        address = _source_address(master)
    except OSError as e:
        raise RendezvousError(f"no way to rank 0's host {master!r}: {e}; is MASTER_ADDR right?") from e
    if not is_loopback(address) or _means_this_host(master):
        return address
    # Many a host takes its own name for 127.0.1.1, which to all others is no way to it.
    for far in _FAR_AWAY:
        try:
            return _source_address(far)
        except OSError:  # no such way: a host without a network, perhaps
            continue
    return address


def is_loopback(host: str) -> bool:
    """Returns whether an address cannot be reached from other hosts; a name says nothing."""
    try:
        return bool(ip_address(host).is_loopback)
    except ValueError:  # a name
        return False


def _own_address(given: str) -> str:
    literal = given.strip("[]")
    try:
        if ip_address(literal).is_unspecified:
            raise RendezvousError(
                f"a worker cannot listen at {literal}, since it tells the others one address to reach it at: give one "
                f"address of this host, or the name of an interface"
            )
        return literal
    except ValueError:  # a name
        pass
    if given in (name for _, name in socket.if_nameindex()):
        return _address_of_interface(given)
    try:
        for family, kind, _, _, address in socket.getaddrinfo(given, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)  # only addresses of this host can be bound
                return str(address[0])
        problem = "it means another host"
    except OSError as e:
        problem = str(e)
    raise RendezvousError(
        f"{given!r} is no address, interface or name of this host ({problem}); its interfaces are "
        f"{', '.join(name for _, name in socket.if_nameindex())}"
    )


def _address_of_interface(name: str) -> str:
    """Returns an interface's address: of several the first of IPv4, or else one of IPv6 that needs no scope.

    ZeroMQ takes names of interfaces too, but not with IPv6, and then does not say which address it took.
    """
    if sys.platform != "linux":
        raise RendezvousError(f"an interface can be given by its name ({name!r}) on Linux only; give its address")
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError):
        for line in _IPV6_OF_THIS_HOST.read_text().splitlines():
            digits, *_, owner = line.split()
            address = IPv6Address(bytes.fromhex(digits))
            if owner == name and not address.is_link_local:
                return str(address)
    raise RendezvousError(f"the interface {name!r} has no address that other hosts could use; is it up?")


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
    return is_loopback(master) or master == "localhost" or master.startswith("localhost.")
