"""What docs/tracing.md and docs/logging.md show runs as they say."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torch_run

from tests.worlds import World

torchrun_arguments: Any = torch_run.parse_args
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _levels_stay() -> Any:
    loggers = [logging.getLogger(name) for name in ("actorrpc", "actorrpc.failures")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


for _page in ("tracing.md", "logging.md"):
    for _block in re.findall(r"^```python\n(.*?)^```", (DOCS / _page).read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(_block, _page, "exec"), globals())  # here, so that the processes find it by name


def run(name: str, *args: Any) -> tuple[Any, str]:
    """Runs a function of the pages; returns its result, and what was printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        value = globals()[name](*args)
    return value, printed.getvalue()


def test_the_code_of_the_pages_does_what_they_say(tmp_path: Path) -> None:
    path = f"{tmp_path}/trace.json"
    with World(2, timeout=60) as world:
        _, printed = world.on(0, run, "record", path)
        assert f"{path}: 2 workers; open it at" in printed
        names = {event["name"] for event in json.loads(Path(path).read_text())["traceEvents"]}
        assert "rpc_sync#forward(worker0 -> worker1)" in names
        assert "torch::distributed::autograd::backward" in names
        table, _ = world.on(0, run, "look")
        head, *lines = table.splitlines()
        assert head.split() == ["call", "total", "us", "write", "queue", "wire", "wait", "run", "read"]
        assert len(lines) == 2
        assert all(line.startswith("rpc_sync#aten::add(worker0 -> worker1) ") for line in lines)
        _, printed = world.on(0, run, "listen")
        assert re.fullmatch(r"\[worker1 \S+ \d+\] a line from afar\n", printed)


def test_torchrun_takes_its_lines_as_the_page_says() -> None:
    lines = re.findall(r"^    torchrun (.*)$", (DOCS / "logging.md").read_text(), re.MULTILINE)
    assert len(lines) == 2
    assert lines[-1].endswith(" --logs")
    for line in lines:
        _, _, ours = line.partition("launch")
        found = torchrun_arguments(shlex.split(line))
        assert (found.training_script, found.tee) == ("actorrpc", "3")
        assert found.training_script_args == shlex.split(f"launch{ours}")


def test_the_picture_of_the_page_is_there() -> None:
    for picture in re.findall(r"\]\((assets/\S+)\)", (DOCS / "tracing.md").read_text()):
        assert (DOCS / picture).read_bytes().startswith(b"\x89PNG")
