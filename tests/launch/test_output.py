"""What a launched world's workers write, shown by who launched it. Real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from multiprocessing import connection, get_context
from pathlib import Path

import pytest

import actorrpc as rpc
from actorrpc.launching.output import Output
from tests.worlds import until

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import logging, os, signal, subprocess, sys, time
import actorrpc as rpc

class Observer(rpc.Actor):
    def speak(self, n):
        for i in range(n):
            print("line", i)
        print("an error", file=sys.stderr)
        logging.getLogger("mine").warning("a warning")
        os.write(1, b"of C code\\n")
        subprocess.run(["echo", "of a child"])
        assert not sys.stdout.isatty()

    def die(self):
        print("last words")
        print("without an end", end="")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

class Driver(rpc.Actor):
    def main(self):
        print("the driver begins")
        self.world.observer[0].rpc_sync().speak(3)
        if sys.argv[1] == "die":
            self.world.observer[0].rpc_sync().die()
        if sys.argv[1] == "flood":
            self.world.observer[0].rpc_sync().speak(5000)
        return "the result"

if __name__ == "__main__":
    print(rpc.launch(logs=sys.argv[1] != "plain", driver=Driver, observer=Observer))
"""


def run(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(program), how], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def said_by(name: str, text: str) -> list[str]:
    return re.findall(rf"^\[{name} \S+ \d+\] (.*)$", text, re.MULTILINE)


def test_all_that_a_worker_wrote_until_it_was_killed_comes_in_order_with_its_name_in_front(tmp_path: Path) -> None:
    done = run(tmp_path, "die")
    assert done.returncode != 0
    assert said_by("driver:0", done.stdout)[0] == "the driver begins"
    expected = ["line 0", "line 1", "line 2", "an error", "a warning", "of C code", "of a child", "last words"]
    assert said_by("observer:0", done.stdout) == [*expected, "without an end"]
    assert 'member "observer:0"' in done.stderr


@pytest.mark.slow
def test_what_launch_returns_comes_after_what_workers_wrote(tmp_path: Path) -> None:
    done = run(tmp_path, "fine")
    assert done.returncode == 0, done.stderr
    assert len(said_by("observer:0", done.stdout)) == 7
    assert done.stdout.endswith("the result\n")
    assert done.stderr == ""


@pytest.mark.slow
def test_without_logs_workers_have_the_launchers_own_streams(tmp_path: Path) -> None:
    done = run(tmp_path, "plain")
    assert "an error\n" in done.stderr
    assert "of C code\n" in done.stdout
    assert "[" not in done.stdout


@pytest.mark.slow
def test_a_flood_is_thinned_out_and_that_is_said(tmp_path: Path) -> None:
    said = said_by("observer:0", run(tmp_path, "flood").stdout)
    left_out = sum(int(line.split()[1]) for line in said if "lines left out" in line)
    shown = [line for line in said if "lines left out" not in line]
    assert left_out > 1000
    assert len(shown) + left_out == 5004 + 7


def test_logs_is_no_role() -> None:
    with pytest.raises(TypeError, match="no role can have this name"):
        rpc.launch(driver=print, logs=rpc.Role(None, 2))  # type: ignore[arg-type]


# -- the parent's part alone


def pipes() -> tuple[connection.Connection, connection.Connection]:
    return get_context("spawn").Pipe(duplex=False)


def test_a_line_without_an_end_is_shown_after_a_while() -> None:
    shown: list[str] = []
    output = Output(show=shown.append)
    reader, writer = pipes()
    try:
        output.add("a:0", 7, reader)
        os.write(writer.fileno(), b"(Pdb) ")
        until(lambda: shown)
        assert shown[0].endswith(" 7] (Pdb) \n")
    finally:
        output.close()
        writer.close()


def test_the_end_does_not_wait_for_one_who_keeps_a_pipe_open() -> None:
    shown: list[str] = []
    output = Output(show=shown.append)
    reader, writer = pipes()
    output.add("a:0", 7, reader)
    os.write(writer.fileno(), b"one\ntw\xff\no")
    began = time.monotonic()
    output.close()
    output.close()
    assert time.monotonic() - began < 10
    writer.close()
    text = "".join(shown)
    assert [line.split("] ")[1] for line in text.splitlines()] == ["one", "tw\ufffd", "o"]


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    output = Output(show=broken)
    reader, writer = pipes()
    output.add("a:0", 7, reader)
    for _ in range(3):
        os.write(writer.fileno(), b"line\n")
    output.close()
    writer.close()
    assert not output._thread.is_alive()
