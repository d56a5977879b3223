"""A standing world of three, of which each test must leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.autograd.common import nothing_left
from tests.worlds import Pairs, World


@pytest.fixture(scope="module")
def _trios() -> Iterator[Pairs]:
    trios = Pairs({"rpc_timeout": 20}, size=3)
    yield trios
    trios.close()


@pytest.fixture
def trio(_trios: Pairs) -> Iterator[World]:
    """A standing world of three, which must still work, and hold no context, after the test."""
    with _trios.lend() as world:
        yield world
        world.everywhere(nothing_left)
