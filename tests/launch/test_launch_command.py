"""`actorrpc launch`: what its command line says, and what it prints and exits with."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actorrpc import Role
from actorrpc.commands import launch as command
from actorrpc.commands import main
from tests.launch.playing import Agent, Observer, drive

ROOT = Path(__file__).parents[2]
HERE = "tests.launch.playing"
TWO = f"observer={HERE}:Observer*2"


def roles_of(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    command.declare(parser.add_subparsers())
    return command._roles(parser.parse_args(["launch", *arguments]))


def role(*arguments: str) -> Role:
    found = roles_of(f"{HERE}:Observer", *arguments)["observer"]
    assert isinstance(found, Role)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("actorrpc launch: ")
    return line.removeprefix("actorrpc launch: ")


# --- what it says -----------------------------------------------------------------------------------------------------


def test_roles_are_named_by_the_user_or_by_their_class() -> None:
    found = roles_of(
        f"{HERE}:Agent", f"watcher={HERE}:Observer*3", f"{HERE}:drive", f"{HERE}:Agent.Inner", "server=None*2"
    )
    assert [(name, each.what, each.count) for name, each in found.items()] == [
        ("agent", Agent, 1), ("watcher", Observer, 3), ("drive", drive, 1), ("inner", Agent.Inner, 1),
        ("server", None, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("'3'", "3"),
        ("a/b", "a/b"),
        ("[1, 2]", [1, 2]),
        ("None", None),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_an_argument_is_a_literal_or_a_string(text: str, value: Any) -> None:
    assert role("--set", f"observer.seed={text}").kwargs == {"seed": value}


def test_options_of_roles_reach_them() -> None:
    found = role(
        "--restarts", "observer=3", "--cpus", "observer=2", "--devices", "observer=0,2-4", "--set", "observer.backoff=2"
    )
    assert (found.restarts, found.cpus, found.devices, found.backoff) == (3, 2, (0, 2, 3, 4), 2.0)
    assert role("--cpus", "observer=1-1").cpus == (1,)


def test_a_role_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "Agent") == "'Agent' is no role: write MODULE:CLASS, ROLE=MODULE:CLASS*N or ROLE=None"
    assert "is no role" in refused(capsys, "None")
    assert "is no role" in refused(capsys, f"{HERE}:Agent*many")
    assert "at least one worker" in refused(capsys, f"{HERE}:Agent*0")
    assert f"module {HERE!r} has no 'Nobody'" in refused(capsys, f"{HERE}:Nobody")
    assert "a role is an Actor class, a function or None" in refused(capsys, f"{HERE}:session")
    assert "drives the world" in refused(capsys, f"{HERE}:Observer")
    said = refused(capsys, f"{HERE}:Agent", f"{HERE}:Agent")
    assert said == f"two roles are called 'agent': give one of them another name, agent2={HERE}:Agent"


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "artest_broken.py").write_text("1 / 0\n")
    assert "No module named 'artest_nowhere'" in refused(capsys, "artest_nowhere:Agent")
    assert refused(capsys, "counting.py:Agent") == "'counting.py' is a file: name the module, 'counting'"
    assert main(["launch", "artest_broken:Agent"]) == 1
    err = capsys.readouterr().err
    assert 'artest_broken.py", line 1' in err
    assert "'artest_broken' raised ZeroDivisionError when it was imported: division by zero" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--set", "seed=1"], "--set takes ROLE.NAME=VALUE, not 'seed=1'"),
        (["--set", "nobody.seed=1"], "there is no role 'nobody', but agent, observer"),
        (["--set", "observer.seed=1", "--set", "observer.seed=2"], "seed of the role 'observer' is given twice"),
        (
            ["--restarts", "observer=1", "--set", "observer.restarts=2"],
            "restarts of the role 'observer' is given twice",
        ),
        (["--set", "agent.rate=1"], "the arguments of Role do not fit Agent"),
        (["--restarts", "3"], "--restarts takes ROLE=N, not '3'"),
        (["--restarts", "observer=often"], "--restarts observer=often: 'often' is no whole number"),
        (["--cpus", "observer=3-1"], "3-1 is no range: the lower number comes first"),
        (["--devices", "observer=0-999999999"], "0-999999999 is no range"),
        (["--cpus", "observer=1-"], "'1-' is neither a number nor a list like 0,1 or 4-7"),
        (["--cpus", "observer=0"], "cannot do without cpus"),
        (["--cpus", "observer=100000"], "the roles ask for 200000 cpus"),
        (["--token-file", "/nowhere/token"], "there is no token to be had from /nowhere/token"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, f"{HERE}:Agent", TWO, *arguments)


def test_an_empty_token_is_no_world_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("\n")
    said = refused(capsys, f"{HERE}:Agent", "--token-file", str(tmp_path / "token"))
    assert said == f"there is no token in {tmp_path / 'token'}: it is empty"


def test_seats_that_contradict_each_other_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE is not: set both" in refused(capsys, f"{HERE}:Agent", TWO)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert refused(capsys, f"{HERE}:Agent", TWO) == "the roles make 3 workers, but hand started 2 processes"


# --- what it does -----------------------------------------------------------------------------------------------------


def test_what_main_returned_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", f"{HERE}:Agent", TWO, "--set", "observer.seed=4"]) == 0
    assert capsys.readouterr().out == "[('observer:0', 4), ('observer:1', 4)]\n"


@pytest.mark.slow
def test_none_is_not_printed_and_functions_and_servers_are_roles_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", f"{HERE}:Agent", TWO, "--set", "agent.does=nothing"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["launch", f"{HERE}:drive", "server=None", "--set", "drive.word=three: "]) == 0
    assert capsys.readouterr().out == "three: 3\n"


@pytest.mark.slow
def test_with_logs_each_line_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import actorrpc as rpc\n\nclass Agent(rpc.Actor):\n    def main(self):\n"
        "        print('begun')\n        return 7\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "launch", "program:Agent", "--logs"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[agent:0 \S+ \d+\] begun\n7\n", done.stdout)


@pytest.mark.slow
def test_the_token_of_a_file_is_the_worlds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("open sesame\n")
    arguments = ["launch", f"{HERE}:Agent", TWO, "--set", "agent.does=has_token"]
    assert main([*arguments, "--token-file", str(tmp_path / "token")]) == 0
    assert main(arguments) == 0
    assert capsys.readouterr().out == "[True, True]\n[False, False]\n"


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", f"{HERE}:Agent", TWO, "--set", "agent.does=fall"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('actorrpc launch: member "observer:1" (pid ')
    assert "died: was killed by SIGKILL" in last


@pytest.mark.slow
def test_a_program_of_the_current_folder_is_found_and_its_error_has_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import actorrpc as rpc\n\nclass Agent(rpc.Actor):\n    def main(self):\n        raise ValueError('no luck')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "launch", "program:Agent"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("Traceback") == 1
    assert "in main\n    raise ValueError('no luck')\nValueError: no luck\nactorrpc launch: member" in done.stderr
    assert done.stderr.endswith("died: raised ValueError: no luck\n")
