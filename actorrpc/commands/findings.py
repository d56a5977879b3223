"""What `actorrpc check` looks at on the host where it runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from actorrpc.errors import RendezvousError
from actorrpc.services.address import is_loopback, local_address
from actorrpc.services.descriptors import shortage
from actorrpc.services.places import why_unbindable
from actorrpc.version import VERSION

SHARED_MEMORY = Path("/dev/shm")
_SHARED_BYTES = 256 * 2**20
"""What /dev/shm should have free. Containers get 64 MiB unless told otherwise, which one batch of images fills."""
_PROBE_BYTES = 16 * 2**20
_USUAL_SIZE = 64
"""How large a world is assumed to be, where nobody says so."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: which, in a word or two.
        ok: whether it is as it should be.
        text: what was found.
        mend: what to do, where it is not.
    """

    what: str
    ok: bool
    text: str
    mend: str = ""


def local_findings(
    host: str | None, port: int | None, rank: int | None, size: int | None, token: str | None
) -> list[Finding]:
    """Looks at this host.

    Arguments:
        host, port: where the workers are to meet; None: only this host counts.
        rank, size: this worker's rank, and how many there will be; None: nobody says so.
        token: the world's token; None: it has none.
    """
    found = [_name(), _address(host), _port(host, port, rank)]
    found += [_versions(token), _token(token), _descriptors(size), _temporary(), *_shared_memory()]
    return found


def versions() -> dict[str, str]:
    """Returns what should be the same on all hosts."""
    import zmq

    return {
        "actorrpc": VERSION,
        "torch": importlib.metadata.version("torch").split("+")[0],
        "pyzmq": importlib.metadata.version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def interfaces() -> dict[str, str]:
    """Returns this host's interfaces, by name, and their addresses, where these can be found out."""
    found = {}
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else []:
        with contextlib.suppress(RendezvousError, OSError):
            found[name] = local_address(None, name)
    return found


def _name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as e:
        return Finding(
            "name", False, f"this host's own name, {name}, has no address here: {e.strerror or e}",
            f"add a line such as '127.0.1.1 {name}' to /etc/hosts",
        )  # fmt: skip
    return Finding("name", True, f"{name} is {', '.join(addresses)}")


def _address(host: str | None) -> Finding:
    known = interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in known.items()) or "none that can be listed"
    try:
        own = local_address(host)
    except RendezvousError as e:
        return Finding(
            "address", False, f"no address to listen at: {e}",
            f"check the name of rank 0's host and ACTORRPC_ADDRESS; the interfaces here are: {listed}",
        )  # fmt: skip
    if host is None:
        return Finding("interfaces", True, listed)
    name = next((name for name, address in known.items() if address == own), "an interface without a name here")
    if is_loopback(own) and not is_loopback(host) and not host.startswith("localhost"):
        return Finding(
            "address", False, f"workers here would listen at {own}, which no other host reaches",
            f"set ACTORRPC_ADDRESS to an interface that does; there are: {listed}",
        )  # fmt: skip
    text = f"workers here listen at {own} ({name}), the way to rank 0's host {host}"
    if is_loopback(own):
        text += "; all workers must be on this host"
    return Finding("address", True, text)


def _port(host: str | None, port: int | None, rank: int | None) -> Finding:
    if host is None or port is None or (rank is not None and rank > 0):
        return _any_port(host)
    if not _is_own(host):
        if rank is None:
            return _any_port(host)
        return Finding(
            "port",
            False,
            f"rank 0 is here, and {host} is another host",
            "run rank 0 there, or give an address of this host",
        )
    problem = why_unbindable(port)
    if problem is not None:
        return Finding(
            "port", False, f"port {port} cannot be opened: {problem}",
            f"choose another MASTER_PORT for all, or end the program that has it (ss -ltnp sport = :{port})",
        )  # fmt: skip
    return Finding("port", True, f"port {port} is free for the rendezvous")


def _any_port(host: str | None) -> Finding:
    try:
        with listener(host) as door:
            where = door.getsockname()
        return Finding("port", True, f"ports can be opened at {where[0]}")
    except (OSError, RendezvousError) as e:
        return Finding(
            "port", False, f"no port can be opened here: {e}", "set ACTORRPC_ADDRESS to an address of this host"
        )


def listener(host: str | None) -> socket.socket:
    """Opens a port where a worker would listen. Raises OSError or RendezvousError where that cannot be."""
    own = local_address(host)
    return socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET, backlog=128)


def _is_own(host: str) -> bool:
    """Returns whether a name or address means this host."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)  # only addresses of this host can be bound
                return True
    return False


def _versions(token: str | None) -> Finding:
    import zmq

    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    if token is not None and not zmq.has("curve"):
        return Finding(
            "versions", False, f"{text}; this libzmq was built without CURVE, which a token needs",
            "install pyzmq from its wheels",
        )  # fmt: skip
    return Finding("versions", True, text)


def _token(token: str | None) -> Finding:
    if token is None:
        return Finding("token", True, "none: whoever reaches a worker's port can run code there")
    return Finding("token", True, "there is one (not shown)")


def _descriptors(size: int | None) -> Finding:
    try:
        import resource
    except ImportError:  # Windows
        return Finding("descriptors", True, "this system has no limit that matters")
    assumed = size or _USUAL_SIZE
    text = shortage("a process here", assumed)
    if text is not None:
        told, _, mend = text.partition(". ")
        return Finding("descriptors", False, told, mend[:1].lower() + mend[1:])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shown = "any number of" if limit == resource.RLIM_INFINITY else f"{limit}"
    return Finding("descriptors", True, f"{shown} files may be open, enough for {assumed} workers")


def _shared_memory() -> list[Finding]:
    if sys.platform != "linux":
        return [Finding("shared memory", True, "not used on this system: tensors travel through sockets")]
    found = []
    try:
        fd = os.memfd_create("actorrpc-check")
        try:
            os.ftruncate(fd, _PROBE_BYTES)
            with mmap.mmap(fd, _PROBE_BYTES) as memory:
                memory[-1] = 1
        finally:
            os.close(fd)
        found.append(Finding("shared memory", True, "memfd_create works: large tensors within a host are not copied"))
    except (OSError, ValueError) as e:
        found.append(
            Finding(
                "shared memory",
                False,
                f"memfd_create does not work: {e}; large tensors within a host will be slow",
                "allow memfd_create in the container's seccomp profile, and look at its limit of memory",
            )
        )
    mend = "mount it: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory"
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as e:
        found.append(
            Finding("/dev/shm", False, f"there is none ({e.strerror}); torch's DataLoader workers need it", mend)
        )
        return found
    text = f"{free // 2**20} MiB are free"
    if free < _SHARED_BYTES:
        found.append(Finding("/dev/shm", False, f"{text}; torch's DataLoader workers die when it is full", mend))
    else:
        found.append(Finding("/dev/shm", True, text))
    return found


def _temporary() -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix="actorrpc-check-") as folder:
            return Finding("temporary files", True, f"can be made in {Path(folder).parent}")
    except OSError as e:
        return Finding("temporary files", False, f"none can be made: {e}", "set TMPDIR to a folder to write to")
