"""The command line itself: its commands, how it fails, what it exits with."""

from __future__ import annotations

import subprocess
import sys

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
