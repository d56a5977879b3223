"""Files that one recording writes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorrpc import claims
from actorrpc.claims import claim, release

needs_locks = pytest.mark.skipif(not claims._CAN_LOCK, reason="this system has no locks")


@needs_locks
def test_a_file_that_is_claimed_keeps_what_is_in_it_until_it_is_released(tmp_path: Path) -> None:
    first = claim(tmp_path / "file")
    first.write(b"all of it")
    first.flush()
    with pytest.raises(FileExistsError, match="another recording is being written to it; wait for its end") as caught:
        claim(tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")
    release(first)
    release(first)
    assert (tmp_path / "file").read_bytes() == b"all of it"
    second = claim(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""
    release(second)


@needs_locks
def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    code = "import os, sys; from actorrpc.claims import claim; file = claim(sys.argv[1]); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, f"{tmp_path}/file"], check=True, timeout=60)
    release(claim(tmp_path / "file"))


@needs_locks
def test_a_released_file_is_free_although_a_forked_child_has_it_open(tmp_path: Path) -> None:
    file = claim(tmp_path / "file")
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.close(write)
        os.read(read, 1)  # until the other end is closed
        os._exit(0)
    try:
        release(file)
        release(claim(tmp_path / "file"))
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)


def test_devices_and_pipes_are_nobodys() -> None:
    first, second = claim(os.devnull), claim(os.devnull)
    release(first)
    release(second)


def test_without_locks_files_are_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_CAN_LOCK", False)
    (tmp_path / "file").write_text("before")
    first, second = claim(tmp_path / "file"), claim(tmp_path / "file")
    release(first)
    release(second)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_that_cannot_be_written_is_an_error_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "nowhere" / "file")
    with pytest.raises(IsADirectoryError):
        claim(tmp_path)
