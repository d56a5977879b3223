"""`actorrpc check`: what it finds on a host, and of several together."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from actorrpc.commands import findings, main, meeting
from actorrpc.commands.findings import Finding, local_findings
from actorrpc.commands.meeting import meet
from tests.hosts import Hosts, needs_hosts
from tests.joining import free_port
from tests.worlds import World, until

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACTORRPC_TOKEN", "ACTORRPC_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def ran(*line: str) -> tuple[int, str, str]:
    """Runs the command; returns its exit code, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", *line])
    return code, out.getvalue(), err.getvalue()


def local(what: str, **more: Any) -> Finding:
    """Returns one of the findings of this host."""
    given: dict[str, Any] = {"host": LOOPBACK, "port": free_port(), "rank": None, "size": None, "token": None, **more}
    (found,) = [finding for finding in local_findings(**given) if finding.what == what]
    return found


# -- one host


def test_a_host_alone_is_looked_at_line_by_line() -> None:
    code, out, err = ran()
    lines = out.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert err == ""
    assert code == bool(wrong)
    whats = {"name", "interfaces", "port", "versions", "token", "descriptors", "temporary", "shared"}
    assert whats <= {line.split()[1] for line in lines[:-1] if not line.startswith(" ")}


def test_a_port_that_is_taken_is_wrong_and_the_way_out_is_told() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = local("port", port=port)
        assert not found.ok
        assert f"port {port} cannot be opened" in found.text
        assert "MASTER_PORT" in found.mend
        code, out, _ = ran(f"{LOOPBACK}:{port}")
        assert code == 1
        assert re.search(rf"^WRONG  port .*{port}", out, re.MULTILINE)
        assert "to mend it: choose another" in out
        assert local("port", port=port, rank=1, size=2).ok  # it is rank 0's
    assert local("port", port=port).ok


def test_rank_0_must_be_where_the_address_is() -> None:
    found = local("port", host="192.0.2.1", rank=0, size=2)
    assert not found.ok
    assert "192.0.2.1 is another host" in found.text


def test_a_host_without_a_way_to_rank_0_is_wrong() -> None:
    found = local("address", host="no-such-host.invalid")
    assert not found.ok
    assert "MASTER_ADDR" in found.text
    assert "the interfaces here are: " in found.mend


def test_an_address_that_is_not_this_hosts_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_ADDRESS", "no-such-interface")
    assert not local("address").ok
    monkeypatch.setenv("ACTORRPC_ADDRESS", LOOPBACK)
    found = local("address", host="192.0.2.1")
    assert not found.ok
    assert "no other host reaches" in found.text


def test_a_name_that_nobody_knows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = local("name")
    assert not found.ok
    assert "/etc/hosts" in found.mend


def test_a_low_limit_of_descriptors_is_wrong() -> None:
    def low() -> tuple[bool, str, str, bool]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        found = local("descriptors", size=100)
        return found.ok, found.text, found.mend, local("descriptors", size=2).ok

    with World(1, join=False) as world:
        ok, text, mend, few = world.on(0, low)
    assert not ok
    assert "may open 200 files" in text
    assert re.search(r"ulimit -n \d{3}", mend)
    assert few


def test_a_host_without_shared_memory_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings, "SHARED_MEMORY", tmp_path / "nowhere")
    found = local("/dev/shm")
    assert not found.ok
    assert "--shm-size" in found.mend
    monkeypatch.setattr(findings, "SHARED_MEMORY", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64 * 2**20))
    found = local("/dev/shm")
    assert not found.ok
    assert found.text.startswith("64 MiB are free")


def test_a_system_that_refuses_shared_memory_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert not local("shared memory").ok


def test_a_token_is_not_shown_and_needs_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_TOKEN", "very-secret")
    _, out, _ = ran()
    assert "there is one (not shown)" in out
    assert "very-secret" not in out
    assert local("versions", token="x").ok
    monkeypatch.setattr(zmq, "has", lambda what: False)
    assert not local("versions", token="x").ok
    assert local("versions").ok


@pytest.mark.parametrize(
    "line",
    [
        ["--rank", "0"],
        ["node0:1", "--rank", "0"],
        ["node0:1", "--rank", "2", "--world-size", "2"],
        ["node0:1", "--world-size", "0"],
        ["node0:1", "--wait", "0"],
        ["node0:1", "--wait", "inf"],
        ["node0:0"],
        ["file:///tmp/x"],
        ["node0:99999"],
    ],
)
def test_what_makes_no_sense_exits_with_2(line: list[str]) -> None:
    code, out, err = ran(*line)
    assert (code, out, err.count("\n")) == (2, "", 1)


# -- several


def all_of(port: int, size: int, ranks: dict[int, str | None], seconds: float = 20.0) -> dict[int, dict[str, Finding]]:
    """Has ranks meet, each in a thread, with its token; returns what each has found, by what it is about."""
    found: dict[int, dict[str, Finding]] = {}

    def one(rank: int, token: str | None) -> None:
        found[rank] = {f.what: f for f in meet(LOOPBACK, port, rank, size, token, seconds)}

    threads = [threading.Thread(target=one, args=item) for item in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_who_meet_find_the_same_and_all_is_well() -> None:
    found = all_of(free_port(), 3, dict.fromkeys(range(3), "secret"))
    assert found[0] == found[1] == found[2]
    assert all(finding.ok for finding in found[0].values()), found[0]
    assert list(found[0]) == ["workers", "same versions", "same token", "clocks", "ways"]
    assert "all 3 came, from 1 host" in found[0]["workers"].text


def test_a_world_of_one_need_not_wait() -> None:
    assert all(finding.ok for finding in all_of(free_port(), 1, {0: None})[0].values())


@pytest.mark.parametrize(
    "tokens,text",
    [
        (("a", "a", "b"), "these ranks have another one than rank 0: 2"),
        ((None, "a", "a"), "these ranks have none: 0"),
        (("a", None, "a"), "these ranks have none: 1"),
    ],
)
def test_tokens_that_differ_are_wrong(tokens: tuple[str | None, ...], text: str) -> None:
    found = all_of(free_port(), 3, dict(enumerate(tokens)))
    assert found[0] == found[1] == found[2]
    assert not found[1]["same token"].ok
    assert text in found[1]["same token"].text
    assert found[1]["workers"].ok


def test_a_token_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = meeting._Line.send

    def spy(self: meeting._Line, what: Any) -> None:
        sent.append(repr(what).encode())
        send(self, what)

    monkeypatch.setattr(meeting._Line, "send", spy)
    proofs = []
    for _ in range(2):
        assert all_of(free_port(), 2, {0: "secret", 1: "secret"})[0]["same token"].ok
        proofs.append(re.findall(rb"'proof': '(\w+)'", b"".join(sent))[-1])
    assert b"secret" not in b"".join(sent)
    assert proofs[0] != proofs[1]  # so that nobody who has listened can answer the next time


def test_who_did_not_come_is_named_in_time_and_the_others_are_compared() -> None:
    began = time.monotonic()
    found = all_of(free_port(), 5, {0: "a", 2: "b"}, seconds=1.5)
    assert time.monotonic() - began < 30
    assert found[0] == found[2]
    assert "ranks 1, 3, 4 did not come within 1.5 s" in found[0]["workers"].text
    assert not found[0]["same token"].ok


def test_without_rank_0_the_others_say_so_in_time() -> None:
    port = free_port()
    found = all_of(port, 3, {1: None}, seconds=0.5)
    assert f"nobody answers at {LOOPBACK}:{port} within 0.5 s" in found[1]["rank 0"].text


def test_a_rank_that_is_taken_is_refused_and_keeps_nobody_else_out() -> None:
    port = free_port()
    results: list[list[Finding]] = []
    threads = [
        threading.Thread(target=lambda rank=rank: results.append(meet(LOOPBACK, port, rank, 3, None, 3.0)))
        for rank in (0, 1, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    texts = [finding.text for found in results for finding in found]
    assert sum("rank 1 is taken by a worker on host" in text for text in texts) == 1
    assert sum("rank 2 did not come" in text for text in texts) == 2


def test_another_world_size_is_refused() -> None:
    port = free_port()
    host = threading.Thread(target=meet, args=(LOOPBACK, port, 0, 2, None, 3.0))
    host.start()
    (found,) = meet(LOOPBACK, port, 1, 3, None, 3.0)
    host.join(30)
    assert "rank 0 was given --world-size 2, and this worker 3" in found.text


def connected(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection((LOOPBACK, port), 1.0)
    return None


def test_strangers_at_the_port_are_no_trouble() -> None:
    port = free_port()
    results: list[list[Finding]] = []
    host = threading.Thread(target=lambda: results.append(meet(LOOPBACK, port, 0, 2, None, 15.0)))
    host.start()
    idle: list[socket.socket] = []
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b'{"mark": 1}\n', b"\x00\xff\n", b'{"rank": "x"}\n', b""):
        sock = until(lambda: connected(port))
        sock.sendall(data)
        idle.append(sock)
    found = meet(LOOPBACK, port, 1, 2, None, 15.0)
    host.join(60)
    for sock in idle:
        sock.close()
    assert results == [found]
    assert all(finding.ok for finding in found)


def test_something_else_at_the_port_is_told() -> None:
    def say() -> None:
        sock, _ = other.accept()
        with sock:
            sock.sendall(b"hello\n")
            sock.recv(1 << 16)

    with socket.create_server((LOOPBACK, 0)) as other:
        answer = threading.Thread(target=say)
        answer.start()
        (found,) = meet(LOOPBACK, other.getsockname()[1], 1, 2, None, 5.0)
        answer.join(10)
    assert not found.ok
    assert "is no check" in found.text


def with_rank(change: Callable[[dict[str, Any]], None], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one rank say something else of itself."""
    true = meeting._self

    def told(own: int, size: int, door: socket.socket) -> dict[str, Any]:
        found = true(own, size, door)
        if own == rank:
            change(found)
        return found

    monkeypatch.setattr(meeting, "_self", told)


def test_versions_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rank(lambda told: told["versions"].update(torch="2.9.0"), 1, monkeypatch)
    found = all_of(free_port(), 3, dict.fromkeys(range(3)))[2]["same versions"]
    assert not found.ok
    assert "2.9.0 on ranks 1" in found.text


def test_a_port_that_others_do_not_reach_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = free_port()
    with_rank(lambda told: told.update(listens=[LOOPBACK, nobody]), 1, monkeypatch)
    found = all_of(free_port(), 3, dict.fromkeys(range(3)))[0]["ways"]
    assert not found.ok
    for rank in (0, 2):
        assert re.search(rf"rank {rank} \(host \S+\) does not reach rank 1 \(host \S+\) at {LOOPBACK}", found.text)


def test_a_clock_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    send = meeting._Line.send

    def late(self: meeting._Line, what: Any) -> None:
        send(self, {**what, "time": what["time"] + 90} if "time" in what else what)

    monkeypatch.setattr(meeting._Line, "send", late)
    found = all_of(free_port(), 2, dict.fromkeys(range(2)))[0]["clocks"]
    assert not found.ok
    assert re.search(r"rank 1 \(host \S+\) is \+(89|90)\.\d\d s from rank 0", found.text)
    assert "NTP" in found.mend


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    needs_hosts()
    with Hosts(3) as made:
        yield made


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hosts are namespaces")
def test_hosts_meet_and_one_that_two_others_cannot_see_each_other_is_found(hosts: Hosts) -> None:
    with World(3, join=False, strict=False, timeout=60) as world:
        for rank in range(3):
            world.on(rank, hosts.enter, rank)
        address = f"{hosts.address(0)}:29611"

        def start(**cut: Any) -> list[tuple[int, str, str]]:
            for rank in range(3):
                world.start(rank, ran, address, "--rank", str(rank), "--world-size", "3", "--wait", "15")
            return world.results()

        for rank, (_, out, _) in enumerate(start()):
            assert re.search(r"^ok     workers  +all 3 came, from 3 hosts", out, re.MULTILINE), out
            assert re.search(r"^ok     ways", out, re.MULTILINE), out
            assert f"workers here listen at {hosts.address(rank)} (eth0)" in out
        hosts.cut(1, 2)
        for code, out, _ in start():
            assert code == 1
            assert re.search(
                r"^WRONG  ways  +rank 1 \(host host1\) does not reach rank 2 \(host host2\)", out, re.MULTILINE
            ), out
        hosts.isolate(2)
        outs = start()
        assert "rank 2 did not come within 15 s" in outs[0][1]
        assert f"nobody answers at {address}" in outs[2][1]
