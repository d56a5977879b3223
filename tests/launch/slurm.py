"""A SLURM of a test's own: munge, a controller and two nodes on this machine, in a folder; ended by process id."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.joining import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
_PATIENCE = 60.0
_NODES = ("node01", "node02")
_CONF = """\
ClusterName=one
SlurmctldHost=localhost
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
NodeName=node01 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=8 State=UNKNOWN
NodeName=node02 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=node01,node02 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Says why there can be none here; "" where there can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "SLURM's daemons are started by root only"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"SLURM is not installed ({', '.join(missing)})" if missing else ""


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Runs one; gives the environment in which `srun` finds it.

    Raises:
        RuntimeError: a daemon has ended, or the nodes were not idle in time; with what its log says.
    """
    # Not pytest's folder: munge refuses a socket below one that others may write to, and paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        (folder / "munge").mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        conf = folder / "slurm.conf"
        conf.write_text(_CONF.format(folder=folder, controller=free_port(), first=free_port(), second=free_port()))
        environment = {"SLURM_CONF": str(conf)}

        def start(*line: str) -> None:
            with (folder / f"{line[0]}.out").open("ab") as out:
                found = shutil.which(line[0])
                assert found is not None
                daemons.append(
                    subprocess.Popen([found, *line[1:]], stdout=out, stderr=out, env={**os.environ, **environment})
                )

        munge = folder / "munge"
        start(
            "munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        _await(folder, daemons, (munge / "socket").exists)
        start("slurmctld", "-D", "-f", str(conf))
        for node in _NODES:
            (folder / f"spool-{node}").mkdir()
            start("slurmd", "-D", "-N", node, "-f", str(conf))

        def idle() -> bool:
            said = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, timeout=30, check=False,
                env={**os.environ, **environment},
            )  # fmt: skip
            return said.stdout.split() == ["idle"] * len(_NODES)

        _await(folder, daemons, idle)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _await(folder: Path, daemons: list[subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not ready():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > end:
            said = "\n".join(
                f"{path.name}: {path.read_text()[-2000:]}"
                for path in sorted([*folder.glob("*.out"), *folder.glob("*.log")])
            )
            raise RuntimeError(f"SLURM did not begin in {_PATIENCE:.0f} s; ended: {ended}\n{said}")
        time.sleep(0.2)
