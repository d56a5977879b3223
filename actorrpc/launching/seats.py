"""Which worker of a world this process is, where a launcher has started all of them.

Launchers tell their processes by variables of the environment. Here they become a `Seat`: a rank, and the place where
the ranks meet. Nothing here but `seat_of` decides whether a process starts others or takes a seat of its own.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALONE = "127.0.0.1"
_PORTS = range(20000, 30000)
"""Where ports that follow from a job's number lie: below those that systems give to connections."""
_PORT = 29500
"""Where nothing tells one job from another; torchrun's own."""


@dataclass(frozen=True)
class Seat:
    """What a launcher has started this process for.

    Attributes:
        launcher: its name, and the variables that told so.
        rank, world_size: which worker this is, and of how many.
        init_method: where they meet.
        here: the ranks on this host, in the order of their local ranks; None: not known.
        bound: whether the launcher has given the processes of this host different cores.
        own_devices: whether it has given each one GPUs of its own.
    """

    launcher: str
    rank: int
    world_size: int
    init_method: str
    here: tuple[int, ...] | None = None
    bound: bool = False
    own_devices: bool = False

    @property
    def name(self) -> str:
        """The launcher's name alone."""
        return self.launcher.split(" (")[0]


def seat_of(environment: Mapping[str, str]) -> Seat | None:
    """Finds out which worker this process is.

    torchrun's variables go before all others, and MPI's before SLURM's: these may be started by those. A launcher that
    has started one process only has given no seat: it is left to that process to start the others.

    Arguments:
        environment: the variables, as in `os.environ`.

    Returns None where nobody but this process is to start the world.

    Raises:
        ValueError: two launchers say different things, or a variable is missing or wrong; it says what to set.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        found: list[Seat | None] = [_of_torchrun(environment)]
    else:
        found = [_of_open_mpi(environment), _of_pmi(environment)]
        if found == [None, None]:
            found = [_of_slurm(environment)]
        found.append(_by_hand(environment))
    seats = [seat for seat in found if seat is not None and seat.world_size > 1]
    for seat in seats[1:]:
        if (seat.rank, seat.world_size) != (seats[0].rank, seats[0].world_size):
            raise ValueError(
                f"this process would be rank {seats[0].rank} of {seats[0].world_size} by {seats[0].launcher}, but rank "
                f"{seat.rank} of {seat.world_size} by {seat.launcher}: unset the variables of one of them"
            )
    return seats[-1] if seats else None


def first_host(nodes: str) -> str:
    """Returns the first name of a list of hosts as SLURM writes it: of "node[01-04,9],login", "node01"."""
    first = re.match(r"(?:\[[^\]]+\]|[^,\[\]])+", nodes)
    if first is None:
        raise ValueError(f"SLURM's list of nodes {nodes!r} names none; set MASTER_ADDR to rank 0's host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


# -- the launchers


def _of_torchrun(environment: Mapping[str, str]) -> Seat:
    launcher = "torchrun (RANK, WORLD_SIZE)"
    rank, size = _rank_and_size(environment, "RANK", "WORLD_SIZE")
    here = _neighbours(environment, rank, size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Seat(launcher, rank, size, "env://", here)


def _of_open_mpi(environment: Mapping[str, str]) -> Seat | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    launcher = "mpirun (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"
    rank, size = _rank_and_size(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    here = _neighbours(environment, rank, size, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environment.get("PMIX_NAMESPACE")
    bound = "1" in (environment.get("OMPI_MCA_orte_bound_at_launch"), environment.get("PRTE_MCA_prte_bound_at_launch"))
    method = _place_of_mpi(environment, size, here, _port(zlib.crc32(job.encode())) if job else _PORT)
    return Seat(launcher, rank, size, method, here, bound)


def _of_pmi(environment: Mapping[str, str]) -> Seat | None:
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    launcher = "mpirun (PMI_RANK, PMI_SIZE)"
    rank, size = _rank_and_size(environment, "PMI_RANK", "PMI_SIZE")
    here = _neighbours(environment, rank, size, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return Seat(launcher, rank, size, _place_of_mpi(environment, size, here, _PORT), here)


def _place_of_mpi(environment: Mapping[str, str], size: int, here: tuple[int, ...] | None, port: int) -> str:
    if environment.get("MASTER_ADDR") or size == 1 or (here is not None and len(here) == size):
        return _place(environment, _ALONE, port)
    raise ValueError(
        "mpirun does not say where rank 0 is: set MASTER_ADDR to its host for all processes, and MASTER_PORT to a free "
        "port there (Open MPI: -x MASTER_ADDR=host -x MASTER_PORT=29500; MPICH: -genv MASTER_ADDR host ...)"
    )


def _of_slurm(environment: Mapping[str, str]) -> Seat | None:
    # In a batch script, which is no task, there is a SLURM_PROCID as well; what srun starts has a step.
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    launcher = "srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"
    rank, size = _rank_and_size(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    tasks = environment.get("SLURM_GTIDS", "")
    here = tuple(map(int, tasks.split(","))) if re.fullmatch(r"\d+(,\d+)*", tasks) else None
    if here is not None and (rank not in here or max(here) >= size):  # of another step: a shell within one has its own
        here = None
    if environment.get("SLURM_STEP_NUM_NODES") == "1" or environment.get("MASTER_ADDR"):
        host = _ALONE
    else:
        host = first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    # Steps of one job may run beside each other.
    numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    devices, there = environment.get("CUDA_VISIBLE_DEVICES", ""), environment.get("SLURM_GPUS_ON_NODE", "")
    return Seat(
        launcher,
        rank,
        size,
        _place(environment, host, _port(10 * job + step)),
        here,
        bound="," in environment.get("SLURM_CPU_BIND_LIST", ""),  # one mask is for all tasks of the host
        own_devices=bool(devices and there) and str(len(devices.split(","))) != there,
    )


def _by_hand(environment: Mapping[str, str]) -> Seat | None:
    names = "RANK", "WORLD_SIZE"
    given = [name for name in names if name in environment]
    if not given:
        return None
    if len(given) == 1:
        (other,) = set(names) - set(given)
        raise ValueError(
            f"{given[0]}={environment[given[0]]} is set and {other} is not: set both, and MASTER_ADDR and MASTER_PORT, "
            f"where each worker is started by hand; or unset {given[0]}, and all are started here"
        )
    rank, size = _rank_and_size(environment, *names)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if size > 1 and missing:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} say that this is one of {size} workers, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: the host of rank 0 and a free port there, for all alike"
        )
    if "LOCAL_RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        here = _neighbours(environment, rank, size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    else:
        here = tuple(range(size)) if size > 1 and _is_loopback(environment["MASTER_ADDR"]) else None
    return Seat("hand (RANK, WORLD_SIZE)", rank, size, "env://", here)


# -- variables


def _rank_and_size(environment: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if size < 1:
        raise ValueError(f"{size_name}={size}: there is at least one worker; unset it if this process is to start all")
    if rank >= size:
        raise ValueError(f"{rank_name}={rank} is no rank of {size_name}={size}: ranks go from 0 to {size - 1}")
    return rank, size


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, {'but is not set' if text is None else f'not {text!r}'}")
    return int(text)


def _neighbours(
    environment: Mapping[str, str], rank: int, size: int, rank_name: str, size_name: str
) -> tuple[int, ...] | None:
    """The ranks of a host, which these launchers give one after the other (Open MPI unless it maps by node)."""
    if rank_name not in environment or size_name not in environment:
        return None
    local_rank, local_size = _rank_and_size(environment, rank_name, size_name)
    first = rank - local_rank
    return tuple(range(first, first + local_size)) if 0 <= first <= size - local_size else None


def _place(environment: Mapping[str, str], host: str, port: int) -> str:
    """The place at this host and port, unless MASTER_ADDR and MASTER_PORT say others."""
    host = environment.get("MASTER_ADDR") or host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{host}:{environment.get('MASTER_PORT') or port}"


def _port(number: int) -> int:
    return _PORTS[number % len(_PORTS)]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
