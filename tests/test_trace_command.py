"""`actorrpc trace`: a running world recorded from outside. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import actorrpc as rpc
from actorrpc.commands import main
from tests.joining import options
from tests.worlds import World

TOKEN = "only for this test"


def come(rank: int, method: str, size: int | None) -> None:
    chosen = options(method, security_token=TOKEN)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=chosen)


def call_until(flag: str) -> None:
    end = time.monotonic() + 100
    while not Path(flag).exists() and time.monotonic() < end:
        rpc.rpc_sync("w1", abs, args=(-1,))
        time.sleep(0.005)


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "ACTORRPC_TOKEN"}
    return subprocess.run(
        [sys.executable, "-m", "actorrpc", "trace", *arguments],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("size", [None, 2])
def test_a_running_world_is_recorded_by_a_guest(tmp_path: Path, size: int | None) -> None:
    method, flag, secret, out = (f"{tmp_path}/{name}" for name in ("meet", "flag", "token", "trace.json"))
    Path(secret).write_text(TOKEN + "\n")
    with World(2, join=False, timeout=110) as world:
        for rank in (0, 1):
            world.start(rank, come, rank, f"file://{method}", size)
        for rank in (0, 1):
            world.result(rank)
        world.start(0, call_until, flag)
        done = trace(f"file://{method}", "--seconds", "0.5", "--out", out, "--token-file", secret)
        Path(flag).touch()
        world.result(0)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}: 2 workers; open it at https://ui.perfetto.dev or chrome://tracing\n"
        data = json.loads(Path(out).read_text())
        assert data["otherData"]["workers"] == ["w0", "w1"]
        rows = {e["pid"] for e in data["traceEvents"] if e["name"] == "rpc_sync#abs(w0 -> w1)" and e["ph"] == "X"}
        assert rows == {1, 2}
        for rank in (1, 0):
            world.start(rank, rpc.shutdown, False)
        for rank in (1, 0):
            world.result(rank)


def test_ctrl_c_ends_the_recording_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    method, out = f"file://{tmp_path}/meet", f"{tmp_path}/trace.json"
    interrupted = SimpleNamespace(sleep=lambda seconds: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr("actorrpc.commands.trace.time", interrupted)
    monkeypatch.setenv("ACTORRPC_TOKEN", TOKEN)
    with World(2, join=False, timeout=110) as world:
        for rank in (0, 1):
            world.start(rank, come, rank, method, None)
        for rank in (0, 1):
            world.result(rank)
        assert main(["trace", method, "--seconds", "600", "--out", out]) == 0
        for rank in (1, 0):
            world.start(rank, rpc.shutdown, False)
        for rank in (1, 0):
            world.result(rank)
    assert capsys.readouterr().out.startswith(f"{out}: 2 workers")
    assert json.loads(Path(out).read_text())["otherData"]["workers"] == ["w0", "w1"]


def test_where_there_is_no_world_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "tcp://nonsense", "--out", f"{tmp_path}/t"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("actorrpc trace: ")
    assert error.count("\n") == 1


def test_without_an_address_the_world_that_was_launched_here_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("actorrpc.wire.folders.held", list)
    assert main(["trace", "--out", f"{tmp_path}/t"]) == 1
    assert capsys.readouterr().err.startswith("actorrpc trace: no world was launched on this host")


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "tcp://localhost:1", "--token-file", f"{tmp_path}/nothing"]) == 1
    assert f"there is no token to be had from {tmp_path}/nothing" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "1e9"])
def test_seconds_that_make_no_sense_are_a_wrong_command_line(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "tcp://localhost:1", f"--seconds={seconds}"])
    assert ended.value.code == 2
    assert "usage: actorrpc trace" in capsys.readouterr().err
