"""Which address a worker binds and tells the others: loopback never where somebody else may have to reach it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from actorrpc import session
from actorrpc.errors import RendezvousError
from actorrpc.services import address
from actorrpc.services.address import local_address
from actorrpc.wire.zeromq import ZmqTransport

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="uses namespaces")


class Net:
    """A host's view of a network: what names mean there, and which way leads where."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"localhost": ["::1", "127.0.0.1"]}
        self.ways: dict[str, str] = {"127.0.0.1": "127.0.0.1", "127.0.1.1": "127.0.1.1", "::1": "::1"}

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        if host not in self.names and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM, 17, "", (ip, port))
            for ip in self.names.get(host, [host])
        ]

    def socket(self, family: int, kind: int) -> Net.Probe:
        assert kind == socket.SOCK_DGRAM, "the question for a route must send nothing"
        return Net.Probe(self)

    class Probe:
        def __init__(self, net: Net) -> None:
            self.net, self.source = net, ""

        def connect(self, address: tuple[str, int]) -> None:
            if (source := self.net.ways.get(address[0], self.net.ways.get("default", ""))) == "":
                raise OSError(errno.ENETUNREACH, "Network is unreachable")
            self.source = source

        def getsockname(self) -> tuple[str, int]:
            return self.source, 1

        def __enter__(self) -> Net.Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    made = Net()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(socket, "socket", made.socket)
    for variable in ("ACTORRPC_ADDRESS", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_a_world_that_says_localhost_stays_on_loopback(net: Net) -> None:
    net.ways["default"] = "10.0.0.7"
    assert local_address(None) == "127.0.0.1"  # a file to meet at
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("::1") == "::1"
    assert local_address("localhost") == "::1"


def test_the_address_is_the_one_that_reaches_rank_0(net: Net) -> None:
    net.names["master"] = ["10.0.0.1"]
    net.ways |= {"10.0.0.1": "10.0.0.7", "default": "192.168.3.4"}
    assert local_address("master") == "10.0.0.7"
    assert local_address("10.0.0.1") == "10.0.0.7"


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_host_that_takes_its_own_name_for_loopback_does_not_advertise_that(net: Net, own: str) -> None:
    net.names["me"] = [own]
    net.ways["default"] = "10.0.0.7"
    assert local_address("me") == "10.0.0.7"


def test_a_host_without_a_network_stays_on_loopback(net: Net) -> None:
    net.names["me"] = ["127.0.1.1"]
    assert local_address("me") == "127.0.1.1"


def test_torchruns_world_on_one_host_stays_on_loopback(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    net.names["me"] = ["127.0.1.1"]
    net.ways["default"] = "10.0.0.7"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_address("me") == "127.0.1.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_address("me") == "10.0.0.7"


def test_an_address_of_rank_0_without_a_way_does_not_hide_one_that_has_it(net: Net) -> None:
    net.names["master"] = ["2001:db8::5", "10.0.0.1"]
    net.ways["10.0.0.1"] = "10.0.0.7"
    assert local_address("master") == "10.0.0.7"


def test_a_scope_is_left_out(net: Net) -> None:
    net.ways["fe80::9"] = "fe80::1%eth0"
    assert local_address("fe80::9") == "fe80::1"


def test_a_host_that_is_not_known_or_not_reached_is_told(net: Net) -> None:
    with pytest.raises(RendezvousError, match=r"no way to rank 0's host 'nowhere'.*not known.*MASTER_ADDR"):
        local_address("nowhere")
    with pytest.raises(RendezvousError, match=r"no way to rank 0's host '10.9.9.9'.*unreachable"):
        local_address("10.9.9.9")


def test_the_environment_has_the_last_word(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_ADDRESS", "[fd00::2]")
    assert local_address("nowhere") == "fd00::2"
    assert local_address(None) == "fd00::2"


def test_an_address_in_the_options_goes_before_that_of_the_environment(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_ADDRESS", "fd00::2")
    assert local_address("nowhere", "10.0.0.3") == "10.0.0.3"


def test_an_interface_may_be_given_by_its_name() -> None:
    if not os.path.exists("/sys/class/net/lo"):
        pytest.skip("no interface of a known name")
    assert local_address("nowhere", "lo") in ("127.0.0.1", "::1")


def test_an_interface_without_ipv4_gives_its_address_of_ipv6_that_needs_no_scope(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "known").write_text(
        "fe800000000000000000000000000001 02 40 20 80     eth7\n"
        "20010db8000000000000000000000005 03 40 00 80     eth8\n"
        "20010db8000000000000000000000007 02 40 00 80     eth7\n"
    )
    monkeypatch.setattr(address, "_IPV6_OF_THIS_HOST", tmp_path / "known")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth7"), (3, "eth8"), (4, "eth9")])
    assert local_address(None, "eth7") == "2001:db8::7"
    with pytest.raises(RendezvousError, match=r"eth9.*no address that other hosts could use"):
        local_address(None, "eth9")


def test_a_name_that_means_this_host_may_be_given() -> None:
    assert local_address("nowhere", "localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("given", ["0.0.0.0", "[::]"])
def test_an_address_that_is_none_to_be_reached_at_is_refused(given: str) -> None:
    with pytest.raises(RendezvousError, match="one address"):
        local_address(None, given)


def test_what_is_no_address_or_interface_of_this_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    far = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("192.0.2.77", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: far)
    with pytest.raises(RendezvousError, match=r"'far'.*means another host.*interfaces are.*lo"):
        local_address(None, "far")


@pytest.mark.parametrize("token, own", [(None, "10.0.0.7"), ("secret", "10.0.0.7"), (None, "127.0.0.1")])
def test_rank_0_that_others_can_reach_warns_once_where_it_has_no_token(
    token: str | None, own: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import actorrpc as rpc

    def made(address: str, **more: Any) -> Any:
        assert address == own
        return ZmqTransport(**more)

    monkeypatch.setattr(session, "ZmqTransport", made)
    told = rpc.RpcBackendOptions(init_method="tcp://localhost:0", security_token=token, address=own)
    with caplog.at_level("WARNING", "actorrpc"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=told)
        rpc.shutdown()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (token is None and own != "127.0.0.1")
    for line in lines:
        assert "listens at 10.0.0.7 without a security_token" in line
        assert "ACTORRPC_TOKEN" in line


def test_an_address_that_is_not_this_hosts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import actorrpc as rpc

    monkeypatch.setenv("ACTORRPC_ADDRESS", "192.0.2.77")
    with pytest.raises(RendezvousError, match=r"cannot listen at 192.0.2.77.*of this host"):
        rpc.init_rpc(
            "w", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="tcp://localhost:0")
        )
    assert not session.is_available()


# -- in namespaces: what two hosts, and two containers of one host, do


PAIR = """
import logging, os, sys
import actorrpc as rpc
from actorrpc import session

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
rank = int(sys.argv[1])
options = rpc.RpcBackendOptions(init_method=sys.argv[2], init_timeout=25)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
for i in range(20):
    assert rpc.rpc_sync(1 - rank, abs, args=(-i,), timeout=20) == i
rpc.shutdown(timeout=30)
print(os.getpid(), session._boot())
"""
USER = "--user --map-root-user"


def start(flags: str, script: str) -> subprocess.Popen[str]:
    """Starts a script of the shell in namespaces of its own."""
    return subprocess.Popen(
        ["timeout", "60", "unshare", *flags.split(), "sh", "-e", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def needs(flags: str, script: str = "true") -> None:
    """Skips a test where it cannot have such namespaces."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", *flags.split(), "sh", "-e", "-c", script], capture_output=True, check=False, timeout=20
        ).returncode
    ):
        pytest.skip("no namespaces to be had here")


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    return out


CABLE = "mount --bind /dev/null /etc/resolv.conf; ip link set lo up; ip link add vetha type veth peer name vethb"
TWO_HOSTS = """
mount --bind $0/hosts0 /etc/hosts
unshare --net --mount sh -e -c '
    until ip link set vethb up 2>/dev/null; do sleep 0.02; done
    ip link set lo up; ip addr add 10.77.0.2/24 dev vethb; ip route add default dev vethb
    mount --bind $0/hosts1 /etc/hosts
    mount -t tmpfs tmpfs $TMPDIR  # of its own, so that there is no way to sockets of the other one
    exec $PYTHON -c "$PAIR" 1 $URL' $0 > $0/out1 2>&1 & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
ip link set vethb netns $other; ip link set vetha up; ip addr add 10.77.0.1/24 dev vetha; ip route add default dev vetha
$PYTHON -c "$PAIR" 0 $URL || { cat $0/out1; exit 1; }
wait $other || { cat $0/out1; exit 1; }
"""


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("master", ["first", "10.77.0.1"])
def test_two_hosts_meet_though_the_first_takes_its_own_name_for_loopback(master: str, tmp_path: Path) -> None:
    """As the installers of some systems leave it: the host's name means 127.0.1.1 there, and elsewhere what it is."""
    flags = f"{USER} --net --mount"
    needs(flags, CABLE)
    (tmp_path / "hosts0").write_text("127.0.0.1 localhost\n127.0.1.1 first\n")
    (tmp_path / "hosts1").write_text("127.0.0.1 localhost\n10.77.0.1 first\n")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as sockets need
        known = f"PYTHON='{sys.executable}' PAIR='{PAIR}' URL=tcp://{master}:29500 TMPDIR={folder}"
        steps = f"export {known}\n{CABLE}\n{TWO_HOSTS.replace('$0', str(tmp_path))}"
        out = finished(start(flags, steps))
    for rank, text in enumerate((out, (tmp_path / "out1").read_text())):
        said = [line for line in text.splitlines() if "listens at unix://" in line]
        assert len(said) == 1, "the choice is logged once"
        assert f"tcp://10.77.0.{rank + 1}:" in said[0]


@linux_only
@pytest.mark.slow
def test_workers_in_two_containers_of_one_host_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    """Process ids of one are those of strangers, or of nobody, in the other, though both know the same boot."""
    flags = f"{USER} --pid --fork --mount-proc"
    needs(flags)
    run = f"exec {sys.executable} -c '{PAIR}' RANK file://{tmp_path}/meet"
    inside, outside = start(flags, run.replace("RANK", "1")), start(USER, run.replace("RANK", "0"))
    try:
        pid, boot = finished(inside).splitlines()[-1].split()
        _, other = finished(outside).splitlines()[-1].split()
    finally:
        for process in (inside, outside):
            process.kill()
            process.communicate(timeout=20)
    assert int(pid) < 100, "it was in a namespace of its own"
    assert boot != other
    assert boot.rpartition("-")[0] == other.rpartition("-")[0]
