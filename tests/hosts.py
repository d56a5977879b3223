"""Several hosts on one: network namespaces with a switch between them, for processes of `worlds.World`.

    with Hosts(3) as hosts, World(3, join=False, strict=False) as world:
        for rank in range(3):
            world.on(rank, hosts.enter, rank)      # the process, and all its later threads, are on that host now
        hosts.cut(0, 1)                            # nothing passes between them; nobody is told so
        hosts.heal(0, 1)

Needs root and iproute2; `why_not()` says what is missing. Nothing is made in the namespace of the tests themselves, and
all that is made goes when the block ends; what a killed run has left is cleared away by the next one.

A host has an address of its own, 10.77.0.<rank + 1>, a name, another boot id than the others, and a folder for `ipc`
sockets that the others cannot see. They share process ids and files, which the tests use to look on.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

_NEW_NAMES, _NEW_MOUNTS, _NEW_NET = 0x04000000, 0x00020000, 0x40000000
_PREFIX = "artest"
_numbers = itertools.count(1)
_NOWHERE = "02:00:00:00:00:99"
"""A hardware address that nobody has: what is sent there is lost without a word."""


def ip(*args: object, tool: str = "ip", check: bool = True) -> str:
    """Runs `ip`; returns what it says."""
    done = subprocess.run(
        [tool, *map(str, args)], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
    )
    if check and done.returncode:
        raise RuntimeError(f"{tool} {' '.join(map(str, args))}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str:
    """Says why there can be no such hosts here; "" where there can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (the command ip)"
    try:
        with Hosts(2) as hosts:
            hosts.cut(0, 1)
    except (RuntimeError, OSError, subprocess.SubprocessError) as e:
        return f"no network namespaces to be had here: {e}"
    return ""


@functools.cache
def why_no_slow_links() -> str:
    """Says why links cannot be throttled here; "" where they can."""
    if why_not():
        return why_not()
    if shutil.which("tc") is None:
        return "slow links need iproute2's command tc"
    try:
        with Hosts(2) as hosts:
            hosts.throttle(0, 100.0)
    except RuntimeError as e:
        return f"slow links need the kernel's module sch_tbf: {e}"
    return ""


def needs_hosts() -> None:
    """Skips a test where there can be no such hosts."""
    if why_not():
        pytest.skip(why_not())


def needs_slow_links() -> None:
    """Skips a test where links cannot be throttled."""
    if why_no_slow_links():
        pytest.skip(why_no_slow_links())


class Hosts:
    """Hosts in namespaces, all on one switch. Use it as a context manager.

    Arguments:
        n: how many.
        second: whether each has a second interface, on a switch of its own: 10.88.0.<rank + 1>.
    """

    def __init__(self, n: int, second: bool = False) -> None:
        self.size, self._second = n, second
        self._tag = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._made: list[str] = []

    def __enter__(self) -> Hosts:
        _clear_away()
        try:
            self._namespace(self._switch)
            for net in self._nets:
                ip("-n", self._switch, "link", "add", f"br{net}", "type", "bridge", "stp_state", 0, "forward_delay", 0)
                ip("-n", self._switch, "link", "set", f"br{net}", "up")
            for rank in range(self.size):
                self._namespace(self.name(rank))
                ip("-n", self.name(rank), "link", "set", "lo", "up")
                for number, net in enumerate(self._nets):
                    self._cable(rank, number, net)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._made):
            ip("netns", "del", name, check=False)
        self._made = []

    @property
    def _switch(self) -> str:
        return f"{self._tag}-switch"

    @property
    def _nets(self) -> list[int]:
        return [77, 88] if self._second else [77]

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)

    def _cable(self, rank: int, number: int, net: int) -> None:
        name, here, there = self.name(rank), f"eth{number}", f"p{net}-{rank}"
        ip("-n", name, "link", "add", here, "type", "veth", "peer", "name", there)
        ip("-n", name, "link", "set", there, "netns", self._switch)
        ip("-n", name, "addr", "add", f"{self.address(rank, net)}/24", "dev", here)
        ip("-n", name, "link", "set", here, "address", _hardware(rank, net), "up")
        ip("-n", self._switch, "link", "set", there, "master", f"br{net}", "up")
        for other in range(self.size):
            if other != rank:
                self._neighbour(rank, other, net, _hardware(other, net))

    def _neighbour(self, rank: int, other: int, net: int, hardware: str) -> None:
        ip(
            "-n", self.name(rank), "neigh", "replace", self.address(other, net), "lladdr", hardware, "nud", "permanent",
            "dev", f"eth{self._nets.index(net)}",
        )  # fmt: skip

    # -- for tests

    def name(self, rank: int) -> str:
        """Returns the name of a host's namespace."""
        return f"{self._tag}-{rank}"

    @staticmethod
    def address(rank: int, net: int = 77) -> str:
        """Returns a host's address."""
        return f"10.{net}.0.{rank + 1}"

    def cut(self, *ranks: int, net: int | None = None) -> None:
        """Has nothing pass between any two of these hosts; who sends is not told so."""
        for rank in ranks:
            for other in ranks:
                for one in [net] if net is not None else self._nets:
                    if rank != other:
                        self._neighbour(rank, other, one, _NOWHERE)

    def isolate(self, rank: int) -> None:
        """Cuts a host off from all others."""
        for other in range(self.size):
            if other != rank:
                self.cut(rank, other)

    def heal(self, *ranks: int) -> None:
        """Has all pass again; without ranks, everywhere."""
        chosen = ranks or tuple(range(self.size))
        for rank in chosen:
            for other in chosen:
                for net in self._nets:
                    if rank != other:
                        self._neighbour(rank, other, net, _hardware(other, net))

    def throttle(self, rank: int, megabytes: float) -> None:
        """Bounds what a host can send, in megabytes a second.

        Raises:
            RuntimeError: the kernel lacks the module for it.
        """
        bits = f"{int(megabytes * 8000)}kbit"
        ip(
            "-n", self.name(rank), "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", bits, "burst", "64kb",
            "latency", "300ms", tool="tc",
        )  # fmt: skip

    def misroute(self, rank: int, other: int) -> None:
        """Has a host send what is for another one to a gateway that is not there."""
        name, gateway = self.name(rank), "10.77.0.250"
        ip("-n", name, "neigh", "replace", gateway, "lladdr", _NOWHERE, "nud", "permanent", "dev", "eth0")
        ip("-n", name, "route", "add", f"{self.address(other)}/32", "via", gateway, "dev", "eth0")

    def route(self, rank: int, other: int) -> None:
        """Takes `misroute` back."""
        ip("-n", self.name(rank), "route", "del", f"{self.address(other)}/32")

    @property
    def enter(self) -> Any:
        """A function that takes a rank and moves the process that runs it to that host, before it joins a world.

        Processes that it then starts are on that host as well.
        """
        return functools.partial(_enter, self._tag)

    @property
    def method(self) -> str:
        """Where the hosts' workers meet: rank 0's address."""
        return f"tcp://{self.address(0)}:29577"


def _enter(tag: str, rank: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: Any) -> None:
        if getattr(libc, name)(*args):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    with open(f"/var/run/netns/{tag}-{rank}") as namespace:
        call("setns", namespace.fileno(), _NEW_NET)
    call("unshare", _NEW_NAMES | _NEW_MOUNTS)
    socket.sethostname(f"host{rank}")
    call("mount", b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE: mounts from here on are seen here alone
    private = Path(tempfile.gettempdir(), "own")
    private.mkdir(exist_ok=True)
    call("mount", b"none", str(private).encode(), b"tmpfs", 0, None)
    tempfile.tempdir = os.environ["TMPDIR"] = str(private)
    boot = Path("/proc/sys/kernel/random/boot_id")
    (private / "boot").write_text(f"{boot.read_text().strip()}-host{rank}\n")
    call("mount", str(private / "boot").encode(), str(boot).encode(), None, 0x1000, None)  # MS_BIND


def _hardware(rank: int, net: int) -> str:
    return f"02:00:00:00:{net:02x}:{rank + 1:02x}"


def _clear_away() -> None:
    """Removes namespaces of runs that are no more."""
    for line in ip("netns", "list", check=False).splitlines():
        name = line.split()[0] if line.split() else ""
        if name.startswith(_PREFIX):
            pid = name.removeprefix(_PREFIX).split("-")[0]
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
                ip("netns", "del", name, check=False)
