"""The same world under every launcher that is installed here: torchrun, mpirun, srun, and RANK by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.joining import free_port
from tests.launch.slurm import cluster
from tests.launch.slurm import why_not as why_no_slurm

ROOT = Path(__file__).parents[2]
WORLD = ["tests.launch.playing:Agent", "observer=tests.launch.playing:Observer*2"]
LOOK = "[('observer:0', 7), ('observer:1', 7)]\n"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=3"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def command(*arguments: str) -> list[str]:
    return ["-m", "actorrpc", "launch", *WORLD, *arguments]


def environment(**more: str) -> dict[str, str]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ran(*line: str, **more: str) -> tuple[int, str, str]:
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # launchers then end what they have started
        _, err = process.communicate(timeout=60)
        pytest.fail(f"{line[0]} did not come to an end:\n{err}")
    return process.returncode, out, err


def open_mpi() -> str:
    return _mpirun("Open MPI", "mpirun.openmpi")


def mpich() -> str:
    return _mpirun("HYDRA", "mpirun.mpich")


def _mpirun(kind: str, name: str) -> str:
    """Finds the mpirun of this kind; where two are installed, Debian has them under names of their own."""
    for found in filter(None, (shutil.which(name), shutil.which("mpirun"))):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        if kind.lower() in said.lower():
            return found
    pytest.skip(f"no mpirun of {kind}'s is installed")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """What `srun` needs in its environment to find a SLURM of two nodes, which lasts as long as these tests."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with cluster() as environment:
        yield environment


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("does, code", [("look", 0), ("fail", 1)])
def test_workers_started_by_hand_are_one_world(does: str, code: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    line = [sys.executable, *command("--set", "observer.seed=7", "--set", f"agent.does={does}")]
    started = [
        subprocess.Popen(
            line, cwd=ROOT, env=environment(**place, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=20)
    assert started[0].returncode == code, said
    assert [out for out, _ in said] == [LOOK if code == 0 else "", "", ""]
    if code:
        last = said[0][1].splitlines()[-1]
        assert last.startswith("actorrpc launch: agent:0 (rank 0) raised "), said[0][1]
        assert "no luck" in last
    else:
        assert [process.returncode for process in started] == [0, 0, 0], said


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_under_torchrun() -> None:
    code, out, err = ran(
        sys.executable, *TORCHRUN, f"--master-port={free_port()}", *command("--set", "observer.seed=7")
    )
    assert (code, out) == (0, LOOK), err


RESTARTED = """
import os, signal
import actorrpc as rpc

ROUND = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Other(rpc.Actor):
    def fall(self):
        if ROUND < 2 and self.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.name, ROUND

class Driver(rpc.Actor):
    def main(self):
        return self.world.other.rpc_sync(timeout=60).fall()

if __name__ == "__main__":
    value = rpc.launch(driver=Driver, other=rpc.Role(Other, 2))
    if value is not None:
        print(value)
"""


@pytest.mark.parametrize("restarts, code", [(2, 0), (1, 1)])
def test_a_world_under_torchrun_comes_again_after_a_member_has_died(restarts: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(RESTARTED)
    found, out, err = ran(
        sys.executable, *TORCHRUN, f"--max-restarts={restarts}", f"--master-port={free_port()}",
        str(tmp_path / "again.py"),
    )  # fmt: skip
    assert found == code, err
    assert out == ("[('other:0', 2), ('other:1', 2)]\n" if code == 0 else "")
    assert err.count("failed (exitcode: -9) local_rank: 2") == 2, err


def test_two_agents_of_torchrun_start_their_workers_again_together(tmp_path: Path) -> None:
    """As on two hosts: the agent whose workers are all well is told only by the other one."""
    (tmp_path / "again.py").write_text(
        RESTARTED.replace("ROUND < 2", "not FOLDER.exists()")
        .replace("os.kill(", "FOLDER.touch() or os.kill(")
        .replace("ROUND = ", f"from pathlib import Path\nFOLDER = Path({str(tmp_path / 'fallen')!r})\nROUND = ")
        .replace("return self.name, ROUND", "return self.name")
    )
    place = f"127.0.0.1:{free_port()}"
    line = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-id=artest", f"--rdzv-endpoint={place}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            [*line, f"--nproc-per-node={n}", str(tmp_path / "again.py")], cwd=ROOT, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n in (1, 2)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            children = psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else []
            agent.terminate()
            agent.communicate(timeout=60)
            psutil.wait_procs(children, timeout=10)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(out for out, _ in said).count("['other:0', 'other:1']") == 1, said


# --- MPI --------------------------------------------------------------------------------------------------------------


def test_under_open_mpis_mpirun() -> None:
    code, out, err = ran(open_mpi(), "--oversubscribe", "-n", "3", sys.executable, *command("--set", "observer.seed=7"))
    assert (code, out) == (0, LOOK), err


def test_under_mpichs_mpirun() -> None:
    port = str(free_port())
    code, out, err = ran(mpich(), "-n", "3", sys.executable, *command("--set", "observer.seed=7"), MASTER_PORT=port)
    assert (code, out) == (0, LOOK), err


def test_one_mpirun_of_two_programs_is_one_world() -> None:
    """Roles that need other arguments of mpirun's: cores that are bound, environments, hosts."""
    one = [sys.executable, *command("--set", "observer.seed=7")]
    code, out, err = ran(open_mpi(), "--oversubscribe", "-n", "1", *one, ":", "-n", "2", "-x", "A=1", *one)
    assert (code, out) == (0, LOOK), err


def test_a_member_that_dies_under_mpirun_ends_all_and_is_named() -> None:
    code, out, err = ran(open_mpi(), "--oversubscribe", "-n", "3", sys.executable, *command("--set", "agent.does=fall"))
    assert (code != 0, out) == (True, ""), err
    assert "signal 9" in err


def test_more_processes_than_workers_are_one_line_each_under_mpirun() -> None:
    code, out, err = ran(open_mpi(), "--oversubscribe", "-n", "4", sys.executable, *command())
    assert (code, out) == (1, ""), err
    assert "actorrpc launch: the roles make 3 workers, but mpirun started 4 processes" in err
    assert "Traceback" not in err


# --- SLURM ------------------------------------------------------------------------------------------------------------


def test_under_srun(slurm: dict[str, str]) -> None:
    code, out, err = ran("srun", "-N1", "-n3", sys.executable, *command("--set", "observer.seed=7"), **slurm)
    assert (code, out) == (0, LOOK), err


def test_under_srun_on_two_nodes(slurm: dict[str, str]) -> None:
    line = ["srun", "-N2", "-n3", sys.executable, *command("--set", "observer.seed=7")]
    code, out, err = ran(*line, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **slurm)
    assert (code, out) == (0, LOOK), err


def test_in_a_batch_script_without_srun_all_are_started_there(tmp_path: Path, slurm: dict[str, str]) -> None:
    arguments = " ".join(f"'{word}'" for word in command("--set", "observer.seed=7"))
    script = tmp_path / "script.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -n 3 -o {tmp_path}/out -e {tmp_path}/err\n{sys.executable} {arguments}\n")
    code, _, err = ran("sbatch", "--wait", str(script), **slurm)
    assert code == 0, err + (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text() == LOOK


def test_a_member_that_dies_under_srun_ends_all(slurm: dict[str, str]) -> None:
    code, out, err = ran("srun", "-K", "-N1", "-n3", sys.executable, *command("--set", "agent.does=fall"), **slurm)
    assert (code != 0, out) == (True, ""), err
    assert "Killed" in err
