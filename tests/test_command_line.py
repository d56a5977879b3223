"""The command line itself: its commands, how it fails, what it exits with."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import actorrpc as rpc
from actorrpc.commands import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert name in capsys.readouterr().out


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in COMMANDS), text


@pytest.mark.parametrize("line", [["dance"], ["run"], ["version", "--loud"]])
def test_a_wrong_command_line_exits_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert "usage: actorrpc" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert all(f"\n    {name} " in err for name in COMMANDS), err


def test_the_version_is_had_by_the_usual_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"actorrpc {rpc.__version__}\n"


def test_a_command_that_cannot_exits_with_1_and_says_why_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nowhere.py"]) == 1
    assert capsys.readouterr().err == ("actorrpc run: there is no file 'nowhere.py'; -m runs a module by its name\n")


def test_version_names_what_it_stands_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "version"], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["actorrpc", "Python", "torch", "pyzmq", "cloudpickle", "numpy", "libzmq"]


@pytest.mark.parametrize("line", [["version"], ["check"]])
def test_a_reader_that_has_had_enough_is_no_error_with_a_traceback(line: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "actorrpc", *line], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full on this system")
@pytest.mark.parametrize(
    "line, unbuffered",
    [
        (["version"], ""),
        (["version"], "1"),
        (["check"], ""),
        (["top", "--help"], ""),  # unbuffered, argparse would write it by itself, and not say that it cannot
        (["--version"], ""),
        (["launch", "os:getpid"], ""),
    ],
)
def test_output_that_cannot_be_written_is_said_in_one_line(line: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "actorrpc", *line], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    named = "actorrpc" if line[0].startswith("--") else f"actorrpc {line[0]}"
    assert done.stderr == f"{named}: what it prints cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_another_error_of_the_system_is_not_taken_for_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "something")

    monkeypatch.setattr("actorrpc.commands.version.runs", fail)
    with pytest.raises(FileNotFoundError):
        main(["version"])


@pytest.mark.parametrize(
    "line, said",
    [
        (
            ["run", "-m", "no_such_module.at_all"],
            "there is no module 'no_such_module'; the current folder is looked in",
        ),
        (["run", "-m", ".x"], "there is no module ''; the current folder is looked in"),
        (["run", "tests/data"], "'tests/data' is a folder without a __main__.py"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    line: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests/data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main(line) == 1
    assert capsys.readouterr().err == f"actorrpc run: {said}\n"


def test_comparing_is_not_for_one_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("print(1)")
    monkeypatch.setenv("RANK", "0")
    assert main(["run", "--compare", f"{tmp_path}/program.py"]) == 2
    assert capsys.readouterr().err.startswith("actorrpc run: --compare starts the whole program by itself")


def test_a_program_is_given_all_that_follows_its_name(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv[1:])")
    given = ["--", "--quiet", "-m", "--", "x"]
    for before in ([], ["--"]):
        line = [sys.executable, "-m", "actorrpc", "run", "--quiet", *before, f"{tmp_path}/program.py", *given]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        assert done.stdout == f"{given}\n"


@pytest.mark.parametrize("line", [["top", "--interval", "soon"], ["trace", "--seconds", "soon"]])
def test_seconds_that_are_no_number_are_told_without_names_of_ours(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "soon" in text
    assert "_seconds" not in text


INTERRUPTED_AT_NUMPY = """
import importlib.abc, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy" and self in sys.meta_path:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from actorrpc.commands import main
sys.exit(main(["launch", "driver=builtins:print"]))
"""


def test_ctrl_c_counts_while_torch_is_imported() -> None:
    """Torch's C code imports numpy, and goes on without it whatever that raises."""
    line = [sys.executable, "-c", INTERRUPTED_AT_NUMPY]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr


def test_a_value_that_the_terminal_has_no_characters_for_is_printed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "snow.py").write_text(
        "import os\n\n\ndef man():\n    os.write(1, b'\\xe2\\x98\\x83\\n')\n    return chr(0x2603)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "launch", "--logs", "snow:man"], stdout=subprocess.PIPE, text=True,
        timeout=60, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    logged, value = done.stdout.splitlines()
    assert logged.endswith("] \\u2603")
    assert value == "\\u2603"
