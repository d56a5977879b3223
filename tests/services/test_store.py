"""Torch's real stores, at free ports of the loopback and in files."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from actorrpc.errors import RendezvousError
from actorrpc.services import places
from actorrpc.services.store import HintStore
from tests.worlds import stop

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def read_until(store: HintStore, hint: bytes, seconds: float = 20.0) -> None:
    deadline = soon(seconds)
    while (got := store.read(deadline)) != hint:
        assert time.monotonic() < deadline, f"still {got!r}"
        time.sleep(0.02)


@pytest.fixture
def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def make() -> Iterator[Callable[..., HintStore]]:
    made: list[HintStore] = []

    def start(url: str, rank: int, clock_slice: float = 0.3) -> HintStore:
        made.append(HintStore(url, rank, clock_slice=clock_slice))
        return made[-1]

    yield start
    for store in made:
        store.close()


Make = Callable[..., HintStore]


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Python processes, which say "ready" on their standard output."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *args: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(body), *map(str, args)],
            env={**os.environ, "PYTHONPATH": root, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", (line, process.communicate(timeout=20))
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


Child = Callable[..., "subprocess.Popen[str]"]

SERVE = """
import sys, time
from actorrpc.services.store import HintStore
store = HintStore(sys.argv[1], 0)
store.publish(sys.argv[2].encode(), time.monotonic() + 20)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("query", ["", "?rank=0&world_size=2&use_libuv=0"])
def test_a_hint_left_before_is_found(make: Make, port: int, query: str) -> None:
    url = f"tcp://127.0.0.1:{port}{query}"
    make(url, 0).publish(b"\x00\xff hint", soon())
    assert make(url, 1).read(soon()) == b"\x00\xff hint"


def test_a_hint_left_later_is_found_without_noise(make: Make, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"tcp://localhost:{port}"
    reader, writer = make(url, 1), make(url, 0)
    assert reader.read(soon()) is None  # nobody there
    writer.publish(b"one", soon())
    assert reader.read(soon()) == b"one"
    writer.publish(b"two", soon())
    assert reader.read(soon()) == b"two"
    writer.close()
    assert reader.read(soon()) is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost"])
def test_hosts_may_be_names_and_literals_of_both_kinds(
    make: Make, port: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    writer = make("env://", 0)
    writer.publish(b"h", soon())
    for url in ("env://", f"tcp://{host}:{port}"):
        reader = make(url, 1)
        assert reader.read(soon()) == b"h"
        assert reader.master_host == host.strip("[]")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(missing)
    with pytest.raises(RendezvousError, match=missing):
        HintStore("env://", 0)


@pytest.mark.parametrize(
    "url", ["tcp://localhost", "tcp://localhost:x", "tcp://:80", "tcp://a:70000", "file://", "http://a:1", "localhost"]
)
def test_a_bad_address_is_told(url: str) -> None:
    with pytest.raises(RendezvousError, match=url):
        HintStore(url, 0)


def test_a_reader_gives_up_at_its_deadline_and_says_where_it_looked(make: Make, port: int) -> None:
    reader = make(f"tcp://127.0.0.1:{port}", 3)
    start = time.monotonic()
    assert reader.read(start + 0.7) is None
    assert reader.read(start + 60) is None  # by now 0.6 s have passed
    with pytest.raises(RendezvousError, match=rf"rank 3 waited .* at tcp://127.0.0.1:{port}, but rank 0 ") as e:
        reader.read(start + 0.7)
    assert 0.6 <= e.value.waited < 10
    assert "refused" in str(e.value)


def test_a_mute_server_does_not_hold_a_reader(make: Make, port: int) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", port))
        mute.listen()
        reader = make(f"tcp://127.0.0.1:{port}", 1)
        start = time.monotonic()
        for _ in range(3):
            assert reader.read(start + 60) is None
        assert time.monotonic() - start < 10
        with pytest.raises(RendezvousError, match="does not answer"):
            reader.read(time.monotonic())
        attempts = [t for t in threading.enumerate() if t.name == "actorrpc-store"]
        assert len(attempts) == 1
    # the listening socket is closed, so the kernel resets the connection and the attempt ends
    attempts[0].join(10)
    assert not attempts[0].is_alive()


def test_a_port_that_another_program_has_is_told(
    make: Make, port: int, child: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    child(
        """
        import socket, sys, time
        s = socket.socket(); s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen()
        print("ready", flush=True); time.sleep(60)
        """,
        port,
    )
    start = time.monotonic()
    said = rf"port {port} of this machine .* is taken by another program, or by another worker of rank 0"
    with pytest.raises(RendezvousError, match=said):
        make(f"tcp://127.0.0.1:{port}", 0).publish(b"h", soon())
    assert time.monotonic() - start < 15
    assert capfd.readouterr().err == ""


def test_a_server_started_again_at_the_same_port_is_found(make: Make, port: int, child: Child) -> None:
    url = f"tcp://127.0.0.1:{port}"
    old = child(SERVE, url, "old")
    reader = make(url, 1)
    assert reader.read(soon()) == b"old"
    old.kill()
    old.wait(20)
    child(SERVE, url, "new")
    read_until(reader, b"new")


def test_a_stopped_server_does_not_hold_a_reader_and_its_successor_is_found(
    make: Make, port: int, child: Child
) -> None:
    url = f"tcp://127.0.0.1:{port}"
    old = child(SERVE, url, "old")
    reader = make(url, 1)
    stop(old.pid)
    assert reader.read(soon()) is None
    old.kill()
    old.wait(20)
    child(SERVE, url, "new")
    read_until(reader, b"new")


@pytest.mark.parametrize("group_first", [True, False])
def test_a_process_group_shares_the_port(
    make: Make, port: int, group_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    url = f"tcp://127.0.0.1:{port}"

    def group() -> None:
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1, timeout=timedelta(seconds=20))

    try:
        if group_first:
            group()
        writer = make(url, 0)
        writer.publish(b"h", soon())
        if not group_first:
            assert not dist.is_initialized()
            group()
        assert make(url, 1).read(soon()) == b"h"
        dist.barrier()
        writer.close()
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


GROUP = """
import sys, time
import torch.distributed as dist
from datetime import timedelta
from actorrpc.services.store import HintStore
url, rank, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def group():
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=30))
def hint():
    global store
    store = HintStore(url, rank)
    if rank == 0:
        store.publish(b"h", time.monotonic() + 30)
    else:
        while store.read(time.monotonic() + 30) != b"h": pass
for step in ((group, hint) if order == "group" else (hint, group)): step()
dist.barrier()
print("ready", flush=True)
dist.barrier()
store.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["tcp", "file"])
@pytest.mark.parametrize("order", ["group", "hint"])
def test_two_processes_with_a_group_at_the_same_address(
    child: Child, port: int, order: str, kind: str, tmp_path: Path
) -> None:
    url = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/store"
    one: list[subprocess.Popen[str]] = []
    thread = threading.Thread(target=lambda: one.append(child(GROUP, url, 1, order)))
    thread.start()
    zero = child(GROUP, url, 0, order)
    thread.join(60)
    for process in (zero, *one):
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
    assert len(one) == 1


def listening(table: str, port: int) -> bool:
    lines = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    return any(line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port for line in lines)


@linux_only
def test_a_store_on_loopback_listens_by_ipv4_so_that_it_need_not_ask_for_names(make: Make, port: int) -> None:
    """Torch's server asks the resolver for the name of each who connects, one after the other."""
    make(f"tcp://127.0.0.1:{port}", 0).publish(b"hint", soon())
    assert listening("tcp", port)
    assert not listening("tcp6", port)
    read_until(make(f"tcp://127.0.0.1:{port}", 1), b"hint")


@pytest.mark.parametrize("found", [["::1", "127.0.0.1"], ["10.0.0.1"], ["fd00::1"]])
def test_a_store_that_may_be_reached_otherwise_listens_as_torch_has_it(
    monkeypatch: pytest.MonkeyPatch, port: int, found: list[str]
) -> None:
    answers = [(socket.AF_UNSPEC, socket.SOCK_STREAM, 0, "", (address, port)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert places._listener("somewhere", port) is None


def test_under_torchrun_the_agents_store_is_used(make: Make, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    writer = make("env://", 0)
    with pytest.raises(RendezvousError, match="refused"):  # it is the agent's to host
        writer.publish(b"h", soon(0.5))
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    writer.publish(b"h", soon())
    assert make(f"tcp://localhost:{port}", 1).read(soon()) == b"h"
    del agent


def test_under_torchrun_another_port_is_hosted_by_rank_0(
    make: Make, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    url = f"tcp://127.0.0.1:{port}"
    make(url, 0).publish(b"h", soon())
    assert make(url, 1).read(soon()) == b"h"


@pytest.mark.parametrize("form", ["file://{0}", "file:{0}", "file://{0}?rank=1&world_size=4", "relative"])
def test_a_file_carries_the_hint_and_is_removed_by_rank_0(
    make: Make, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "store"
    url = "file:store" if form == "relative" else form.format(path)
    reader, writer = make(url, 1), make(url, 0)
    assert reader.read(soon()) is None
    assert not path.exists()
    writer.publish(b"\x00one", soon())
    assert reader.read(soon()) == b"\x00one"
    writer.publish(b"two", soon())
    assert reader.read(soon()) == b"two"
    assert reader.master_host is None
    reader.close()
    assert path.exists()
    assert make(url, 2).read(soon()) == b"two"
    gc.collect()
    make_closed = make(url, 3)
    make_closed.close()
    writer.close()
    assert path.exists()  # rank 2 still has it


def test_the_last_one_to_close_a_file_removes_it_if_it_is_rank_0(make: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    writer, reader = make(url, 0), make(url, 1)
    writer.publish(b"h", soon())
    assert reader.read(soon()) == b"h"
    reader.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_killed_run_gives_the_old_hint_and_then_the_new_one(
    make: Make, tmp_path: Path, child: Child
) -> None:
    url = f"file://{tmp_path}/store"
    old = child(SERVE, url, "old")
    old.kill()
    old.wait(20)
    reader = make(url, 1)
    assert reader.read(soon()) == b"old"
    make(url, 0).publish(b"new", soon())
    assert reader.read(soon()) == b"new"


def test_a_file_removed_by_hand_is_followed(make: Make, tmp_path: Path, child: Child) -> None:
    path = tmp_path / "store"
    old = child(SERVE, f"file://{path}", "an old hint, longer than the new one")
    reader = make(f"file://{path}", 1)
    assert reader.read(soon()) is not None
    old.kill()
    path.unlink()
    assert reader.read(soon()) is None
    make(f"file://{path}", 0).publish(b"new", soon())
    read_until(reader, b"new")


def test_a_file_replaced_by_one_of_the_same_size_is_followed(make: Make, tmp_path: Path) -> None:
    """As where a world follows another at the same file: the file system may give the new one the old one's number."""
    path = tmp_path / "store"
    make(f"file://{path}", 0).publish(b"hint 0", soon())
    reader = make(f"file://{path}", 1)
    for i in range(8):
        read_until(reader, b"hint %d" % i, 5)
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data.replace(b"hint %d" % i, b"hint %d" % (i + 1)))


def test_a_file_that_is_no_store_or_has_no_folder_is_told(make: Make, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("This is a text, and not a store of torch's at all.")
    for rank in (0, 1):
        store = make(f"file://{tmp_path}/text", rank)
        with pytest.raises(RendezvousError, match="not a store"):
            store.publish(b"h", soon()) if rank == 0 else store.read(soon())
    with pytest.raises(RendezvousError, match=r"the folder .* does not exist"):
        make(f"file://{tmp_path}/none/store", 0).publish(b"h", soon())


@linux_only
def test_a_locked_file_does_not_hold_a_reader(make: Make, tmp_path: Path, child: Child) -> None:
    url = f"file://{tmp_path}/store"
    make(url, 0).publish(b"h", soon())
    locker = child(
        """
        import fcntl, sys, time
        f = open(sys.argv[1], "r+b"); fcntl.flock(f, fcntl.LOCK_EX); print("ready", flush=True); time.sleep(60)
        """,
        tmp_path / "store",
    )
    reader = make(url, 1)
    assert reader.read(soon()) is None
    locker.kill()
    read_until(reader, b"h")


@linux_only
@pytest.mark.parametrize("mute", [False, True])
def test_ctrl_c_ends_a_read(child: Child, port: int, mute: bool) -> None:
    with socket.socket() as server:
        if mute:
            server.bind(("127.0.0.1", port))
            server.listen()
        process = child(
            """
            import sys, time
            from actorrpc.services.store import HintStore
            store = HintStore(sys.argv[1], 1, clock_slice=30)
            print("ready", flush=True)
            store.read(time.monotonic() + 60)
            """,
            f"tcp://127.0.0.1:{port}",
        )
        time.sleep(0.3)  # into the wait
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - start < 5
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("KeyboardInterrupt")


@linux_only
def test_ten_rounds_leave_no_thread_and_no_descriptor(port: int, tmp_path: Path) -> None:
    def round_of(url: str) -> None:
        writer, reader = HintStore(url, 0), HintStore(url, 1)
        writer.publish(b"h", soon())
        assert reader.read(soon()) == b"h"
        reader.close()
        writer.close()
        writer.close()
        with pytest.raises(RendezvousError, match="closed"):
            reader.read(soon())

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    urls = [f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/store"]
    for url in urls:
        round_of(url)
    before = held()
    for _ in range(10):
        for url in urls:
            round_of(url)
    deadline = soon(5)
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() <= before
