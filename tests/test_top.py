"""`actorrpc top`: finding a world, what is shown of it, how it ends."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.commands import check, exporter, main, top, watching, worlds
from actorrpc.commands.exporter import buckets_of, place_of
from actorrpc.commands.failing import CommandError
from actorrpc.commands.watching import SORTS, Snapshot, Watcher, lines_of
from actorrpc.services.figures import BOUNDS, ActorLoad, Rates, WorkerFigures, WorldFigures
from actorrpc.wire.folders import HeldFolder, held
from tests.joining import add, free_port, options
from tests.worlds import World, stop, until

# -- what is shown


def figures(rank: int, name: str = "", **more: Any) -> WorkerFigures:
    base: dict[str, Any] = {
        "name": name or f"observer:{rank}", "role": "observer", "index": rank, "rank": rank, "host": "node17",
        "pid": 4000 + rank, "incarnation": 7, "at": 1.0, "uptime": 100.0 * rank, "served": 0, "sent": 0, "bytes_in": 0,
        "bytes_out": 0, "times": (), "seconds": 0.0, "pending": 0, "running": 0, "queued": 0, "waiting": 0, "actors": 1,
        "memory": 300_000_000,
    }  # fmt: skip
    return WorkerFigures(**{**base, **more})


def crowd(number: int, **more: Any) -> Snapshot:
    workers = [
        figures(rank, waiting=rank, loads=(ActorLoad(f"Observer 'observer:{rank}'", rank, 1),))
        for rank in range(number)
    ]
    found = {w.name: Rates(10.0 * (number - w.rank), 1234567.0, 1e6, 1e9, 0.001, None) for w in workers}
    return Snapshot(0.0, WorldFigures(workers, more.get("silent", {}), more.get("lost", {})), found)


@pytest.mark.parametrize("width", [30, 60, 80, 120, 250])
@pytest.mark.parametrize("height", [8, 24, 40])
def test_a_screen_of_any_size_holds_what_is_shown(width: int, height: int) -> None:
    shot = crowd(50, silent={"agent:0": "it is stopped " * 20}, lost={f"x:{n}": "it died" for n in range(20)})
    lines = lines_of(shot, "tcp://node17:29500", width, height, foot="the end")
    assert len(lines) <= height
    assert all(len(line.text) <= width for line in lines)
    assert "lost" in [line.kind for line in lines]
    assert height < 10 or any(line.text.startswith("observer:0") for line in lines)
    assert any(line.kind == "head" for line in lines)
    assert lines[-1].text == "the end"


def test_a_wide_screen_shows_all_columns_and_a_narrow_one_the_most_important() -> None:
    heads = [
        next(line.text.split() for line in lines_of(crowd(3), "x", width) if line.kind == "head")
        for width in (200, 80, 40)
    ]
    assert heads[0] == [
        "worker", "host", "pid", "up", "calls/s", "sent/s", "p50", "p99", "waiting", "running", "open", "in/s", "out/s",
        "memory",
    ]  # fmt: skip
    assert {"calls/s", "p50", "p99", "waiting", "memory"} <= set(heads[1])
    assert heads[2] == ["worker", "calls/s", "p99", "waiting"]


def test_a_large_world_is_cut_and_says_so() -> None:
    texts = [line.text for line in lines_of(crowd(100), "x", 80, 24)]
    assert any(re.fullmatch(r"and \d+ more", text) for text in texts)
    assert any("busiest actors" in text for text in texts)


def test_troubles_come_first() -> None:
    shot = crowd(3, silent={"agent:0": "no answer"}, lost={"agent:1": "it was killed"})
    kinds = [line.kind for line in lines_of(shot, "x", 80)]
    assert kinds.index("lost") < kinds.index("silent") < kinds.index("head")
    assert "3 workers (3 observer), 1 silent, 1 lost" in lines_of(shot, "x", 80)[1].text


@pytest.mark.parametrize("sort", SORTS)
def test_workers_are_sorted_as_asked(sort: str) -> None:
    order = [line.text.split()[0] for line in lines_of(crowd(4), "x", 80, sort=sort) if line.text[:9] == "observer:"]
    back = sort == "waiting"
    assert order == [f"observer:{n}" for n in (reversed(range(4)) if back else range(4))]


def test_the_page_on_watching_has_every_column_and_figure_and_metric() -> None:
    page = (Path(__file__).parent.parent / "docs" / "watching.md").read_text()
    columns = {column.title for column in watching._COLUMNS} - {"worker", "host", "pid", "up"}
    table = page[page.index("| column |") : page.index("Below the workers are")]
    assert all(re.search(rf"^\| .*{title}", table, re.MULTILINE) for title in columns)
    told = set(crowd(1).as_json("x")["workers"][0]) - {"seconds"}
    assert [name for name in told if f"`{name}`" not in page] == []
    metrics = [f"`{name}_total`" for name, _, _ in exporter._COUNTERS] + [
        f"`{name}`" for name, _, _ in exporter._GAUGES
    ]
    assert [name for name in metrics if name not in page] == []
    lines = re.findall(r"^actorrpc ((?:top|check)[^#|\n]*)", page, re.MULTILINE)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for command in (top, check):
        command.declare(commands)
    assert len(lines) >= 6
    for line in lines:
        parser.parse_args(line.split())


# -- which world


@pytest.mark.parametrize(
    "address,method",
    [
        ("node17:29500", "tcp://node17:29500"),
        ("[::1]:29500", "tcp://[::1]:29500"),
        ("tcp://node17:29500", "tcp://node17:29500"),
        ("file:///tmp/x", "file:///tmp/x"),
        ("/", "file:///"),
    ],
)
def test_an_address_may_be_written_as_people_do(address: str, method: str) -> None:
    assert worlds.method_of(address) == method


@pytest.mark.parametrize("address", ["node17", "node17:", "a b:1", "/nowhere/at/all", "node17:29500x"])
def test_what_is_no_address_is_refused_with_what_is_one(address: str) -> None:
    with pytest.raises(CommandError, match="HOST:PORT"):
        worlds.method_of(address)


def test_a_file_that_is_gone_is_named_as_such() -> None:
    with pytest.raises(CommandError, match="no file /nowhere/at/all: its world has ended"):
        worlds.method_of("/nowhere/at/all")


def test_a_world_that_was_launched_here_is_found_and_of_several_one_is_to_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    one, two, other = HeldFolder(), HeldFolder(), HeldFolder()
    try:
        mine = [one.path, two.path, other.path]
        assert set(mine) <= set(held())
        for folder in mine[:2]:
            Path(folder, "store").touch()
        monkeypatch.setattr("actorrpc.wire.folders.held", lambda: [one.path, other.path])
        assert worlds.find(None) == f"file://{one.path}/store"
        monkeypatch.setattr("actorrpc.wire.folders.held", lambda: mine)
        with pytest.raises(CommandError, match="2 worlds were launched") as caught:
            worlds.find(None)
        a, b = (rf"file://{re.escape(f.path)}/store \(begun \d\d:\d\d:\d\d\)" for f in (one, two))
        assert re.search(rf"\(the newest is first\): {a}, {b}", str(caught.value))
        monkeypatch.setattr("actorrpc.wire.folders.held", list)
        with pytest.raises(CommandError, match="no world was launched"):
            worlds.find(None)
        monkeypatch.setenv("MASTER_ADDR", "node17")
        monkeypatch.setenv("MASTER_PORT", "29500")
        assert worlds.find(None) == "env://"
    finally:
        for held_folder in (one, two, other):
            held_folder.close()
    assert not set(mine) & set(held())


# -- a world that runs


def come(rank: int, method: str, **more: Any) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(method, **more))


def begin(world: World, method: str, **more: Any) -> None:
    for rank in (0, 1):
        world.start(rank, lambda rank=rank: come(rank, method, **more))
    world.result(0)
    world.result(1)


def ran(*line: str) -> tuple[int, str, str]:
    """Runs the command; returns its exit code, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["top", *line])
    return code, out.getvalue(), err.getvalue()


def test_a_script_gets_the_figures_of_a_world_of_fixed_size(trio: World, method: str) -> None:
    begin(trio, method)
    trio.on(0, lambda: [rpc.rpc_sync("w1", add, args=(1, 2)) for _ in range(5)] and None)
    code, out, err = trio.on(2, ran, method, "--once", "--json", "--interval", "0.2")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["address"] == method
    assert (told["silent"], told["lost"]) == ({}, {})
    w0, w1 = told["workers"]
    assert (w0["name"], w0["sent"], w1["name"], w1["served"]) == ("w0", 5, "w1", 5)
    assert w1["pid"] == trio.pid(1)
    assert set(w1["rates"]) == {"served", "sent", "bytes_in", "bytes_out", "p50", "p99"}
    assert w1["memory"] > 2**20
    for rank in (0, 1):  # and the world ends as if nobody had looked
        trio.start(rank, rpc.shutdown, True, 20.0)
    trio.result(0)
    trio.result(1)


def test_a_person_gets_a_table(trio: World, method: str) -> None:
    begin(trio, method)
    code, out, _ = trio.on(2, ran, method, "--once", "--interval", "0.2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["worker", "w0", "w1"]


def attach_and_watch(method: str) -> None:
    session = rpc.attach(method)._session
    session.worker.services[Watcher] = Watcher(session, 0.5)


def looked() -> tuple[list[str], dict[str, str]]:
    watcher: Watcher = rpc.session.current().worker.services[Watcher]
    world = watcher.look().world
    return [figures.name for figures in world.workers], world.silent


def test_a_worker_that_is_stopped_is_shown_as_silent_and_a_dead_one_as_lost() -> None:
    with World(3, join=False, timeout=60, strict=False) as world:
        method = f"file://{world.folder}/top"
        begin(world, method)
        world.on(2, attach_and_watch, method)
        assert world.on(2, looked) == (["w0", "w1"], {})
        stop(world.pid(1))
        workers, silent = world.on(2, looked)
        os.kill(world.pid(1), signal.SIGCONT)
        assert workers == ["w0"]
        assert "500 ms" in silent["w1"]
        assert world.on(2, looked) == (["w0", "w1"], {})
        world.on(2, rpc.shutdown)
        world.kill(1)
        until(lambda: not world.on(0, lambda: rpc.session.current().worker.peers[1].standing.value == "member"))
        code, out, _ = world.on(2, ran, method, "--once", "--json", "--interval", "0.1")
        assert code == 0
        assert "its process" in json.loads(out)["lost"]["w1"]
        assert "w1 is lost" in world.on(2, ran, method, "--once", "--interval", "0.1")[1]
        world.on(0, rpc.shutdown, False)


def test_the_token_may_come_from_a_file(trio: World, method: str, tmp_path: Path) -> None:
    begin(trio, method, security_token="secret")
    right, wrong, empty = tmp_path / "right", tmp_path / "wrong", tmp_path / "empty"
    right.write_text("secret\n")
    wrong.write_text("other")
    empty.touch()
    code, out, _ = trio.on(2, ran, method, "--once", "--interval", "0.1", "--token-file", str(right))
    assert (code, "w1" in out) == (0, True)
    code, _, err = trio.on(2, ran, method, "--once", "--token-file", str(wrong))
    assert code == 1
    assert "token" in err
    assert "other" not in err.replace("another", "")
    assert err.count("\n") == 1
    assert "it is empty" in ran(method, "--once", "--token-file", str(empty))[2]
    assert "no token to be had" in ran(method, "--once", "--token-file", str(tmp_path / "nowhere"))[2]


def ran_hastily(*line: str) -> tuple[int, str, str]:
    seconds, worlds.JOIN_SECONDS = worlds.JOIN_SECONDS, 1.0
    try:
        return ran(*line)
    finally:
        worlds.JOIN_SECONDS = seconds


def test_a_world_that_is_not_there_is_one_line_and_exit_code_1(trio: World, tmp_path: Path) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    code, out, err = trio.on(2, ran_hastily, method, "--once")
    assert (code, out) == (1, "")
    assert err.startswith(f"actorrpc top: the world at {method} cannot be reached: ")
    assert err.count("\n") == 1


def test_the_live_view_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = ran("node17:29500")
    assert (code, "needs a terminal; --once" in err) == (1, True)
    monkeypatch.setitem(sys.modules, "rich", None)
    code, _, err = ran("node17:29500")
    assert (code, "pip install 'actorrpc[top]'" in err) == (1, True)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    code, _, err = ran("node17:29500", "--prometheus", "9464")
    assert (code, "pip install 'actorrpc[prometheus]'" in err) == (1, True)


@pytest.mark.parametrize("line", [["--interval", "0"], ["--once", "--prometheus", "1"], ["--sort", "x"]])
def test_a_wrong_option_exits_with_2(line: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ran("node17:29500", *line)
    assert ended.value.code == 2


def test_json_is_for_one_look() -> None:
    code, out, err = ran("node17:29500", "--json")
    assert (code, out, err) == (2, "", "actorrpc top: --json needs --once\n")


def read_screen(command: list[str]) -> tuple[subprocess.Popen[bytes], list[bytes], threading.Thread]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 1 << 16):
                seen.append(data)
        os.close(ours)

    thread = threading.Thread(target=read)
    thread.start()
    return process, seen, thread


@pytest.mark.parametrize("how", ["the world ends", "rank 0 dies", "Ctrl-C"])
@pytest.mark.slow
def test_the_live_view_shows_the_world_until_its_end(how: str) -> None:
    with World(2, join=False, timeout=60, strict=False) as world:
        method = f"file://{world.folder}/top"
        begin(world, method)
        process, seen, thread = read_screen([sys.executable, "-m", "actorrpc", "top", method, "--interval", "0.2"])
        try:
            until(lambda: b"w1" in b"".join(seen), 60.0, "no screen was drawn")
            if how == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            elif how == "rank 0 dies":
                world.kill(0)
            for rank in (0, 1):
                if how == "the world ends":
                    world.start(rank, rpc.shutdown, True, 20.0)
            code = process.wait(30)
        finally:
            process.kill()
            thread.join(10)
        last = b"".join(seen).decode().rstrip().splitlines()[-1]
        if how == "the world ends":
            world.results()
            assert (code, last.endswith("has ended")) == (0, True)
        elif how == "rank 0 dies":
            assert code == 1
            assert re.search(r"has ended: worker \"w0\".* was lost", last)
            world.on(1, rpc.shutdown, False)
        else:
            assert code == 0
            for rank in (0, 1):
                world.start(rank, rpc.shutdown, True, 20.0)
            world.results()


# -- Prometheus


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Returns the samples of a scrape, by name and worker; what has more labels is added up."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket") or sample.labels["le"] == "+Inf":
                key = sample.name, sample.labels.get("worker", "")
                found[key] = found.get(key, 0) + sample.value
    return found


def can_scrape(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(scraped(port))
    return False


def test_prometheus_scrapes_the_same_figures_until_the_world_ends(trio: World, method: str) -> None:
    begin(trio, method)
    port = free_port()
    trio.start(2, ran, method, "--prometheus", str(port))
    until(lambda: can_scrape(port), 30.0, "nothing is served")
    trio.on(0, lambda: [rpc.rpc_sync("w1", add, args=(1, 2)) for _ in range(7)] and None)
    time.sleep(0.6)  # an answer that young would do for the next scrape, too
    found = scraped(port)
    assert found["actorrpc_worker_up", "w0"] == found["actorrpc_worker_up", "w1"] == 1
    assert found["actorrpc_workers_lost", ""] == 0
    assert found["actorrpc_calls_served_total", "w1"] == found["actorrpc_calls_sent_total", "w0"] == 7
    assert found["actorrpc_call_seconds_count", "w1"] == found["actorrpc_call_seconds_bucket", "w1"] == 7
    assert 0 < found["actorrpc_call_seconds_sum", "w1"] < 60
    assert found["actorrpc_received_bytes_total", "w1"] > 7 * 64
    assert found["actorrpc_resident_memory_bytes", "w0"] > 2**20
    for rank in (0, 1):
        trio.start(rank, rpc.shutdown, True, 20.0)
    code, out, err = trio.results()[2]
    assert (code, err) == (0, "")
    assert [line.split()[-1] for line in out.splitlines()] == [f"http://127.0.0.1:{port}/metrics", "ended"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)


def test_a_port_that_is_taken_is_one_line(trio: World, method: str) -> None:
    begin(trio, method)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = trio.on(2, ran, method, "--prometheus", str(taken.getsockname()[1]))
    assert (code, err.count("\n")) == (1, 1)
    assert "give another port" in err


@pytest.mark.parametrize(
    "text,place",
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:9464", ("0.0.0.0", 9464)), ("[::1]:1", ("::1", 1))],
)
def test_the_endpoint_is_on_loopback_unless_told_otherwise(text: str, place: tuple[str, int]) -> None:
    assert place_of(text) == place


@pytest.mark.parametrize("text", ["", "x", "host:", "host:99999"])
def test_a_wrong_place_for_the_endpoint_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="PORT"):
        place_of(text)


def test_the_histogram_adds_up() -> None:
    counts = [0] * (len(BOUNDS) + 1)
    counts[0], counts[5], counts[-1] = 1, 2, 3
    found = dict(buckets_of(tuple(counts)))
    assert found["1e-05"] == 1
    assert found["+Inf"] == 6
    values = list(found.values())
    assert values == sorted(values)
    assert values[-2] == 3


def resources(pid: int) -> tuple[int, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_scrapes_over_a_minute_leave_nothing_behind(trio: World, method: str) -> None:
    begin(trio, method)
    port = free_port()
    trio.start(2, ran, method, "--prometheus", str(port))
    until(lambda: can_scrape(port), 30.0, "nothing is served")
    for _ in range(50):  # what is made once
        scraped(port)
    before = [resources(trio.pid(rank)) for rank in range(3)]
    end, scrapes = time.monotonic() + 60, 0
    while time.monotonic() < end:
        scraped(port)
        scrapes += 1
        time.sleep(0.02)
    after = [resources(trio.pid(rank)) for rank in range(3)]
    for (files, memory), (files_then, memory_then) in zip(before, after, strict=True):
        assert files_then <= files + 2, scrapes  # that of a scrape which is just ending
        assert memory_then - memory < 8 * 2**20, scrapes
    for rank in (0, 1):
        trio.start(rank, rpc.shutdown, True, 20.0)
    assert trio.results()[2][0] == 0
