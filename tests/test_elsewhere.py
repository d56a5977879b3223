"""Systems that lack what Linux has: macOS (no memfd, epoll, pidfd, eventfd, /proc) and Windows (nor fork, ipc, fcntl).

The tests take these away from a process and its children (tests/elsewhere.py). It is no run on those systems; it shows
that nothing here needs what they lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elsewhere import LACKS, VARIABLE

ROOT = Path(__file__).parent.parent
PROGRAM = """
import os
import tests.elsewhere
import torch
import actorrpc as rpc
from actorrpc import autograd

class Part(rpc.Actor):
    def __init__(self):
        self.weight = torch.ones(3, requires_grad=True)

    def times(self, x):
        return self.weight * x

    def echo(self, what):
        return what

    def fail(self):
        raise LookupError("as it was raised")

    def items(self):
        yield from range(5)

    def lacks(self):
        lacks = tests.elsewhere.LACKS[os.environ[tests.elsewhere.VARIABLE]]
        return [name for module, name in lacks if hasattr(module, name)]

    def leave(self):
        os._exit(3)

class Main(rpc.Actor):
    def main(self):
        first, second = self.world.part
        assert first.rpc_sync().lacks() == []
        big = torch.arange(4_000_000.0)
        for _ in range(5):
            assert torch.equal(first.rpc_sync().echo(big), big)
        assert sum(future.wait() for future in [first.rpc_async().echo(i) for i in range(500)]) == 124750
        assert list(first.stream().items()) == [0, 1, 2, 3, 4]
        with autograd.context() as context_id:
            x = torch.ones(3, requires_grad=True)
            loss = second.rpc_sync().times(first.rpc_sync().times(x)).sum()
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[x].tolist() == [1, 1, 1]
        ref = rpc.remote("part:1", torch.ones, args=(2,))
        assert rpc.rpc_sync("part:0", torch.add, args=(ref.to_here(), 1)).tolist() == [2, 2]
        try:
            first.rpc_sync().fail()
        except LookupError as error:
            print("raised", error)
        return "all of it"

if __name__ == "__main__":
    print(rpc.launch(main=Main, part=rpc.Role(Part, 2)))
"""
LOST = PROGRAM.replace(
    '        return "all of it"',
    """        try:
            first.rpc_sync(timeout=60).leave()
        except rpc.WorkerLostError as error:
            print("lost", error.worker)
            raise""",
)


def run(system: str, program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program)
    env = {**os.environ, VARIABLE: system, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("system", [pytest.param("macos", marks=pytest.mark.slow), "windows"])
def test_a_world_does_all_of_it_without_what_another_system_lacks(system: str, tmp_path: Path) -> None:
    done = run(system, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["raised as it was raised", "all of it"]


@pytest.mark.slow
@pytest.mark.parametrize("system", LACKS)
def test_a_lost_worker_is_noticed_without_what_another_system_lacks(system: str, tmp_path: Path) -> None:
    done = run(system, LOST, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "lost part:0" in done.stdout
    assert "MemberDiedError: " in done.stderr
    assert "part:0" in done.stderr
