"""The stand-in reaches the processes that a program starts, however it was put in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.joining import free_port

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
{first}
import os, sys
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def where():
    return rpc.rpc_sync.__module__.split(".")[0]


def run(rank, address):
    rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
        init_method=address))
    if rank == 0:
        print(where(), rpc.rpc_sync("w1", where))
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""
INSTALLS = "import actorrpc.compat\nactorrpc.compat.install()"
"""A program that asks for the stand-in itself: its children import actorrpc before torch."""
RUN = ("-m", "actorrpc", "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("first,how", [(INSTALLS, ()), ("", RUN), ("import actorrpc", RUN)])
def test_children_have_it_whatever_they_import_first(
    first: str, how: tuple[str, ...], method: str, tmp_path: Path
) -> None:
    _check(first, how, method, tmp_path)


def test_a_program_that_installs_it_may_spawn(tmp_path: Path) -> None:
    _check(INSTALLS, (), "spawn", tmp_path)


def test_a_sitecustomize_of_the_users_own_is_run_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'ran'\n")
    child = "import os, sys; print(os.environ['MINE'], 'torch' in sys.modules)"
    program = f"""
import subprocess, sys
import actorrpc.compat
actorrpc.compat.install()
print(subprocess.check_output([sys.executable, "-c", {child!r}], text=True))
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("MINE", None)
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert said.stdout.split() == ["ran", "False"], said.stderr


def _check(first: str, how: tuple[str, ...], method: str, folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(first=first))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *how, str(program), f"tcp://127.0.0.1:{free_port()}", method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout == "actorrpc actorrpc\n", done.stderr
