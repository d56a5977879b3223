"""What docs/finding-out.md shows runs as it says."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import actorrpc as rpc
from tests.joining import options
from tests.worlds import World

PAGE = Path(__file__).parent.parent / "docs" / "finding-out.md"
_both = threading.Barrier(2)


def arrive() -> None:
    """Returns when two have come."""
    _both.wait(30)


for _block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
    exec(compile(_block, str(PAGE), "exec"), globals())  # here, so that the processes find it by name


def run(name: str, *args: Any) -> Any:
    return globals()[name](*args)


def test_the_code_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    with World(2, options={"deadlock_after": 0.3}, timeout=60) as world:
        text = world.on(0, run, "show")
        assert text.startswith("2 workers answered")
        assert "who waits for whom:" in text
        members = world.on(0, run, "collide")
        assert sorted(member.split("'")[1].split("/")[0] for member in members) == ["worker0", "worker1"]
        world.on(0, run, "record", path)
    assert run("again", path) == [1, 3, 6]


def come(rank: int, address: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options(address))


def test_a_notebook_looks_in_as_the_page_says(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/meet"
    with World(3, join=False, timeout=60) as world:
        for rank in (0, 1):
            world.on(rank, come, rank, address)
        assert world.on(2, run, "look", address) == (["w0", "w1"], 1)
        for rank in (1, 0):
            world.on(rank, rpc.shutdown, False)
