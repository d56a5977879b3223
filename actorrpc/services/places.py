"""Where a hint can be left: torch's store at a port, or in a file. ``store`` says when, here is how.

Seen with torch 2.13, and the reason for the shape of this file:

- A ``TCPStore`` client whose server has died writes a C++ stack to stderr when next used, and one that finds nobody
  complains there as well. So no client is kept: each look probes the port in Python, connects anew (3 ms) and asks.
  This also finds a server that was started again.
- A ``FileStore``'s constructor holds the GIL while it waits for the file's lock, and never comes back from a file
  that is no store. So both are looked at first.
- A ``FileStore`` made for a world of n deletes the file when nobody has it open any more and n have closed it; made
  without a size (-1), never.
- A server asks the resolver for the name of each who connects, one after the other, with 5 s for a lost answer. It
  listens by IPv6, where nobody knows ``::ffff:127.0.0.1``; so on loopback it is given a socket of IPv4 (``_listener``).
  A client asks for such a name as well; see ``resolver``.
- ``wait_for_workers`` counts in the store, where a process group on the same port counts too. So it is off.

Everything here may block, and runs in an attempt that can be given up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit
from urllib.request import url2pathname

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its stubs' exports

from actorrpc.errors import RendezvousError
from actorrpc.services.resolver import asking_once

PAUSE = 0.05  # seconds between two looks

_KEY = "actorrpc/hint"
_PORT_PATIENCE = 3.0  # seconds in which a port held by an ending process may become free
_FILE_MAGIC = b"\x09\x00\x00\x00refcount/"  # a FileStore's first record; its first writer writes it under the lock


class TcpPlace:
    """A store at a port: torch's server in rank 0's process, or in torchrun's agent."""

    def __init__(self, address: str, host: str, port: int, *, hosts: bool, use_libuv: bool) -> None:
        self.address = address
        self.host: str | None = host
        self._name = host
        self._port = port
        self._hosts = hosts
        self._use_libuv = use_libuv
        self._server: Store | None = None
        self._is_closed = False

    def publish(self, hint: bytes, deadline: float) -> None:
        if not self._hosts:
            self._client().set(_KEY, hint)  # type: ignore[arg-type]  # bytes are taken; the stub says str
            return
        if self._server is None:
            server = self._serve(deadline)
            if self._is_closed:  # while this attempt, given up by its caller, went on
                return
            self._server = server
        self._server.set(_KEY, hint)  # type: ignore[arg-type]  # bytes are taken; the stub says str

    def read(self) -> bytes | None:
        return _value(self._server or self._client())

    def close(self) -> None:
        self._is_closed = True
        self._server = None

    def _client(self) -> TCPStore:
        """A new connection, after a probe that is silent where nobody is there."""
        found = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        problem: OSError | None = None
        for _, _, _, _, where in found:
            try:
                socket.create_connection((str(where[0]), self._port), timeout=1.0).close()
            except OSError as exc:
                problem = problem or exc
                continue
            # By number: by name torch tries addresses that nobody listens at, and says so on stderr.
            with asking_once():
                return TCPStore(str(where[0]), self._port, None, False, timedelta(seconds=2), wait_for_workers=False)
        raise problem or OSError(f"{self._name} has no address")

    def _serve(self, deadline: float) -> TCPStore:
        """Host the server, or share the one that a process group of this process has at the port."""
        patience = min(deadline, time.monotonic() + _PORT_PATIENCE)
        is_ours = _is_served_here(self._port)
        while not is_ours and (problem := why_unbindable(self._port)) is not None:
            if time.monotonic() >= patience:
                raise RendezvousError(
                    f"rank 0 cannot host the store at {self.address}: port {self._port} of this machine "
                    f"({socket.gethostname()}) is taken by another program, or by another worker of rank 0 "
                    f"({problem}). Choose another port (MASTER_PORT, or the one in init_method) for all ranks, or end "
                    f"that program (`ss -ltnp sport = :{self._port}` names it).",
                    address=self.address,
                )
            time.sleep(PAUSE)
        # The server listens on all interfaces; its own client uses the loopback, which always works.
        listener = None if is_ours else _listener(self._name, self._port)
        with asking_once():
            return TCPStore(
                "127.0.0.1",
                self._port,
                None,
                True,
                timedelta(seconds=5),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=self._use_libuv,
                master_listen_fd=listener,
            )


class FilePlace:
    """A store in a file that all ranks see.

    Torch counts in the file who has it open. Whoever ``deletes`` removes it at ``close`` if nobody else has it open;
    where the count is wrong (somebody was killed) it stays, and the next run writes over its hint.
    """

    host: str | None = None

    def __init__(self, address: str, path: Path, *, deletes: bool) -> None:
        self.address = address
        self._size = 1 if deletes else -1
        self._path = path
        self._store: FileStore | None = None
        self._is_closed = False
        self._mark = -1  # a descriptor of the file that the store began with: while it is open, no other has its inode

    def publish(self, hint: bytes, deadline: float) -> None:
        if not self._path.parent.is_dir():
            raise RendezvousError(
                f"{self.address}: the folder {self._path.parent} does not exist here", address=self.address
            )
        self._open().set(_KEY, hint)  # type: ignore[arg-type]  # bytes are taken; the stub says str

    def read(self) -> bytes | None:
        if not self._path.exists():  # torch would wait for it, or make it
            raise FileNotFoundError(errno.ENOENT, "the file is not there yet", str(self._path))
        return _value(self._open())

    def close(self) -> None:
        self._is_closed = True
        if self._store is not None:
            with contextlib.suppress(OSError, RendezvousError):
                self._await_lock(time.monotonic() + 1.0)  # closing writes, and would wait for it with the GIL
        self._store = None
        self._unmark()

    def _open(self) -> FileStore:
        """The store; a new one where the file was replaced, since torch reads on from where it was."""
        self._await_lock(time.monotonic() + 5.0)
        if self._store is None or not self._is_marked():
            if self._is_closed:  # while this attempt, given up by its caller, went on
                raise RendezvousError("this place was closed", address=self.address)
            self._unmark()
            self._mark = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            self._store = FileStore(str(self._path), self._size)
            self._store.set_timeout(timedelta(seconds=2))
        return self._store

    def _is_marked(self) -> bool:
        """Whether the file is still the one that the store began with."""
        try:
            return os.path.samestat(os.fstat(self._mark), self._path.stat())
        except OSError:
            return False

    def _unmark(self) -> None:
        mark, self._mark = self._mark, -1
        if mark >= 0:
            os.close(mark)

    def _await_lock(self, deadline: float) -> None:
        """Return when nobody holds the file's lock, and the file is a store; OSError, RendezvousError otherwise."""
        try:
            import fcntl
        except ImportError:  # on Windows
            return
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"another process holds the lock of {self._path}") from None
                    time.sleep(0.005)
            head = file.read(len(_FILE_MAGIC))
            fcntl.flock(file, fcntl.LOCK_UN)
        if head and head != _FILE_MAGIC:
            raise RendezvousError(
                f"{self.address}: the file is there and is not a store of torch's. Name another file, or remove it.",
                address=self.address,
            )


def _value(store: Store) -> bytes | None:
    return bytes(store.get(_KEY)) if store.check([_KEY]) else None


# --- addresses --------------------------------------------------------------------------------------------------------


def parse_place(init_method: str, rank: int) -> TcpPlace | FilePlace:
    url = urlsplit(init_method)
    if url.scheme == "file":
        return FilePlace(init_method, _file_path(init_method, url), deletes=rank == 0)
    if url.scheme == "env":
        host, port_text = _environment("MASTER_ADDR"), _environment("MASTER_PORT")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        port = int(port_text) if port_text.isdecimal() else -1
        address = f"env:// (MASTER_ADDR={host} MASTER_PORT={port_text})"
    elif url.scheme == "tcp":
        try:
            host, port = url.hostname or "", -1 if url.port is None else url.port
        except ValueError:
            host, port = "", -1
        address = init_method
    else:
        raise RendezvousError(
            f'init_method "{init_method}" is none of env://, tcp://host:port, file:///path', address=init_method
        )
    if not host or not 0 <= port < 2**16:
        raise RendezvousError(f"{address} needs a host and a port from 0 to 65535", address=init_method)
    libuv = parse_qs(url.query).get("use_libuv", [os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1")])
    # torchrun's agent serves MASTER_PORT and no other: at another port torch itself would look for an agent in vain.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and str(port) == os.environ.get("MASTER_PORT")
    return TcpPlace(address, host, port, hosts=rank == 0 and not is_agents, use_libuv=libuv[-1] == "1")


def _environment(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise RendezvousError(
            f"init_method env:// needs the environment variable {variable}, which is not set. Set it (torchrun and "
            "launch do), or give init_method tcp://host:port or file:///path.",
            address="env://",
        )
    return value


def _file_path(init_method: str, url: SplitResult) -> Path:
    """The path as torch reads it: what follows the host, also without one (``file:relative``)."""
    path = url2pathname(url.netloc + url.path) if sys.platform == "win32" else url.path
    if not path:
        raise RendezvousError(f'init_method "{init_method}" has no path: file:///path', address=init_method)
    return Path(path)


def why_unbindable(port: int) -> str | None:
    """Why no server can listen at the port, None if one can: asked first, because torch answers on stderr."""
    problem = None
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if os.name == "posix":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                probe.bind((everywhere, port))
                probe.listen(1)
                return None
        except OSError as exc:
            problem = exc.strerror or str(exc)
    return problem


def _listener(name: str, port: int) -> int | None:
    """A socket for a server on loopback, whose clients ``/etc/hosts`` has a name for; None where it is not for IPv4."""
    try:
        found = {str(where[0]) for _, _, _, _, where in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
        if port == 0 or os.name != "posix" or not all(address.startswith("127.") for address in found):
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("0.0.0.0", port))
            listening.listen(2048)
            return listening.detach()  # the server's from now on
    except OSError:  # torch says it better
        return None


def _is_served_here(port: int) -> bool:
    """Whether this very process may listen at the port already (a process group's store, which ours can share).

    Linux says which listening sockets are ours; elsewhere torch is asked, at the price of its words on stderr.
    """
    if port == 0 or sys.platform != "linux":
        return port != 0
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{fields[9]}]")
    ours = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return bool(listening & ours)
