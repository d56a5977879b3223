"""Fixtures for all tests: nothing may be left running."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest

import actorrpc as rpc
from tests.hosts import Hosts, needs_hosts
from tests.worlds import STANDING, Pairs, World

_rounds = itertools.count()


def _servants() -> set[int]:
    """The helper processes of `multiprocessing`, which live as long as the tests."""
    pids = {getattr(forkserver._forkserver, "_forkserver_pid", None)}
    pids.add(getattr(resource_tracker._resource_tracker, "_pid", None))
    return {pid for pid in pids if pid is not None}


def _descendants() -> dict[int, psutil.Process]:
    servants = _servants()
    return {p.pid: p for p in psutil.Process().children(recursive=True) if p.pid not in servants | STANDING}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fails a test that leaves a process behind, and ends that process."""
    before = set(_descendants())
    yield
    after = _descendants()
    left = [process for pid, process in after.items() if pid not in before]
    _, left = psutil.wait_procs(left, timeout=3.0) if left else ([], [])
    texts = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid():
                texts.append(f"{process.pid}: {' '.join(process.cmdline())[:200]} ({process.status()})")
            process.kill()
    assert not texts, "processes are left:\n" + "\n".join(texts)


@pytest.fixture
def meet() -> Iterator[str]:
    """A file to meet at."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"file://{folder}/meet"


@pytest.fixture(scope="module")
def _pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


@pytest.fixture
def pair(_pairs: Pairs) -> Iterator[World]:
    """A standing world of two, which must still work, and hold nothing, after the test."""
    with _pairs.lend() as world:
        yield world


@pytest.fixture(scope="module")
def _standing_trios() -> Iterator[Pairs]:
    trios = Pairs(size=3)
    yield trios
    trios.close()


@pytest.fixture
def standing_trio(_standing_trios: Pairs) -> Iterator[World]:
    """A standing world of three, as `pair` is one of two."""
    with _standing_trios.lend() as world:
        yield world


@pytest.fixture(scope="module")
def _trio() -> Iterator[World]:
    with World(3, join=False, timeout=60) as world:
        yield world


@pytest.fixture
def trio(_trio: World) -> Iterator[World]:
    """Three processes that are in no world yet; what they join they leave at the end."""
    yield _trio
    _trio.everywhere(rpc.shutdown, False)


@pytest.fixture
def method(_trio: World) -> str:
    """Where the three may meet: another place for each test."""
    return f"file://{_trio.folder}/meet-{next(_rounds)}"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts, made of network namespaces; skips the test where there can be none."""
    needs_hosts()
    with Hosts(3) as made:
        yield made
