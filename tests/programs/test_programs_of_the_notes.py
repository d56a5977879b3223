"""The programs of this folder, run by torchrun as a user would, with all that each of their processes prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(program: str, processes: int, folder: Path) -> list[list[str]]:
    """Runs a program under torchrun; returns the lines that each rank printed, the calls that it received last.

    A handler prints beside the main program, so that the place of its lines among the others is not known.
    """
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # lines stay whole
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *("--redirects", "1", "--log-dir", str(folder), str(HERE / program)),
        ],
        cwd=ROOT,
        env=buffered,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.terminate()  # by which torchrun ends its workers; killed, it would leave them behind
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, err
    assert "Traceback" not in err
    printed = []
    for rank in range(processes):
        (log,) = folder.glob(f"*/attempt_0/{rank}/stdout.log")
        printed.append(sorted(log.read_text().splitlines(), key=lambda line: "received a call" in line))
    return printed


CALLER = [
    "--- Worker 0 sending RPC calls ---",
    "Worker 0 received sync result from Worker 1: 30",
    "Worker 0 is doing other work while waiting for async result...",
    "Worker 0 received async result from Worker 1: 70",
]
WAITS = "--- Worker 1 is waiting for RPC calls ---"


def test_the_demo_of_two_processes_prints_its_results(tmp_path: Path) -> None:
    assert run("torch_distributed_rpc_demo.py", 2, tmp_path) == [
        ["Worker 0 is ready.", *CALLER],
        [
            "Worker 1 is ready.",
            WAITS,
            "Worker worker_1 received a call with a=10, b=20",
            "Worker worker_1 received a call with a=30, b=40",
        ],
    ]


def begin(rank: int, group: bool) -> list[str]:
    """What both of the longer programs print while they begin."""
    return [
        f"rank {rank} start init_rpc..., dist.is_initialized={group}",
        f"rank {rank} have done init_rpc",
        f"Worker {rank} is ready.",
    ]


def same_master(printed: list[list[str]]) -> None:
    """Takes off every rank's first line, which names the address, and fails if they differ."""
    first = {lines.pop(0) for lines in printed}
    assert len(first) == 1
    assert first.pop().startswith("master addr: ")


@pytest.mark.slow
def test_group_and_rpc_meet_at_the_same_address(tmp_path: Path) -> None:
    printed = run("one_address_for_both.py", 2, tmp_path)
    same_master(printed)
    assert printed == [
        [*begin(0, True), "Worker 0 received sync result from Worker 1: 30"],
        [*begin(1, True), WAITS, "Worker worker_1 received a call with a=10, b=20"],
    ]


@pytest.mark.slow
def test_the_rpc_world_may_be_larger_than_the_group(tmp_path: Path) -> None:
    printed = run("world_larger_than_the_group.py", 4, tmp_path)
    same_master(printed)
    group = [
        [f"rank {rank} start init_process_group...", f"rank {rank} have done init_process_group", str(dist)]
        for rank in range(2)
    ]
    assert printed == [
        [*group[0], *begin(0, True), *CALLER],
        [
            *(*group[1], *begin(1, True), WAITS),
            "Worker worker_1 received a call with a=10, b=20",
            "Worker worker_1 received a call with a=30, b=40",
        ],
        [*begin(2, False), WAITS, "Worker worker_2 received a call with a=10, b=20"],
        [*begin(3, False), "--- Worker 3 sending RPC calls ---", "Worker 3 received sync result from Worker 2: 30"],
    ]
