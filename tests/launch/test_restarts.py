"""Members that are started again: the processes, without worlds."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from actorrpc.errors import MemberDiedError
from actorrpc.launching.processes import Member, run
from tests.worlds import until


def live(folder: str, lives: int, how: str, life: int = 0) -> None:
    """Ends badly until it has been started so often."""
    with Path(folder, "lives").open("a") as file:
        file.write(f"{life}\n")
    if life < lives:
        if how == "raise":
            raise ValueError(f"life {life}")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, "done").touch()


def drive(path: str) -> str:
    until(Path(path).exists, seconds=60)
    return "driven"


def wait_for_ever(path: str) -> None:
    until(Path(path).exists, seconds=600)


def fall(life: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lives(folder: Path) -> list[str]:
    return (folder / "lives").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_a_member_that_fails_is_started_again(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    member = Member("worker:0", live, (str(tmp_path), 2, how), restarts=2, backoff=0.6)
    with caplog.at_level(logging.WARNING):
        assert run([Member("driver:0", drive, (str(tmp_path / "done"),)), member]) == "driven"
    assert lives(tmp_path) == ["0", "1", "2"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert 'member "worker:0"' in said[0]
    assert "in 0.6 s: restart 1 of 2" in said[0]
    assert re.search(r"in (1.2|0.6) s: restart 2 of 2", said[1])  # unless the machine is very slow to start it


@pytest.mark.slow
def test_a_member_whose_restarts_are_used_up_ends_all(tmp_path: Path) -> None:
    member = Member("worker:0", live, (str(tmp_path), 9, "raise"), restarts=1, backoff=0.01)
    with pytest.raises(MemberDiedError, match=r"life 1\n\(it had been started again 1 of 1 times\)") as caught:
        run([Member("driver:0", wait_for_ever, (str(tmp_path / "never"),)), member])
    assert caught.value.name == "worker:0"
    assert str(caught.value.__cause__) == "life 1"
    assert lives(tmp_path) == ["0", "1"]


@pytest.mark.slow
def test_a_member_that_has_returned_is_not_started_again(tmp_path: Path) -> None:
    members = [
        Member("driver:0", drive, (str(tmp_path / "over"),)),
        Member("done:0", live, (str(tmp_path), 0, "raise"), restarts=3, backoff=0.01),
        Member("other:0", touch_later, (str(tmp_path), 1), restarts=1, backoff=0.01),
    ]
    assert run(members) == "driven"
    assert lives(tmp_path) == ["0"]


def touch_later(folder: str, lives: int, life: int = 0) -> None:
    until(Path(folder, "done").exists, seconds=60)
    if life < lives:
        raise ValueError("once")
    Path(folder, "over").touch()


@pytest.mark.slow
def test_the_driver_is_not_started_again_and_it_says_so(tmp_path: Path) -> None:
    other = Member("other:0", wait_for_ever, (str(tmp_path / "never"),), restarts=3)
    with pytest.raises(MemberDiedError, match=r"(?s)SIGKILL.*rank 0, is not started again") as caught:
        run([Member("driver:0", fall, restarts=3), other])
    assert caught.value.name == "driver:0"
