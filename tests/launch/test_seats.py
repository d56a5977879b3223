"""Who this process is, by what launchers put into its environment. The tables were taken from real ones, cut short."""

from __future__ import annotations

import pytest

from actorrpc.launching.seats import Seat, first_host, seat_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,2,3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07,09]", "SLURM_NODELIST": "node[01-09]", "SLURM_CPU_BIND_LIST": "0x3",
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "1436680193",
}  # fmt: skip
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
HAND = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
Environment = dict[str, str]


def without(environment: Environment, *names: str) -> Environment:
    return {name: value for name, value in environment.items() if name not in names}


def found(environment: Environment) -> Seat:
    seat = seat_of(environment)
    assert seat is not None
    return seat


@pytest.mark.parametrize(
    "environment, rank, size, method, here",
    [
        pytest.param(TORCHRUN, 3, 5, "env://", (2, 3, 4), id="torchrun"),
        pytest.param(SRUN, 2, 4, "tcp://node07:22341", (0, 2, 3), id="srun"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, 2, 4, "tcp://127.0.0.1:22341", (0, 2, 3), id="one node"),
        pytest.param(without(SRUN, "SLURM_STEP_NODELIST"), 2, 4, "tcp://node01:22341", (0, 2, 3), id="job's nodes"),
        pytest.param({**SRUN, "MASTER_ADDR": "node9"}, 2, 4, "tcp://node9:22341", (0, 2, 3), id="srun, other host"),
        pytest.param({**SRUN, "MASTER_PORT": "7"}, 2, 4, "tcp://node07:7", (0, 2, 3), id="srun, other port"),
        pytest.param(without(SRUN, "SLURM_GTIDS"), 2, 4, "tcp://node07:22341", None, id="srun, neighbours unknown"),
        pytest.param({**SRUN, "SLURM_GTIDS": "0,1"}, 2, 4, "tcp://node07:22341", None, id="srun, others' ranks"),
        pytest.param({**SRUN, "SLURM_GTIDS": "2,4"}, 2, 4, "tcp://node07:22341", None, id="srun, too high a rank"),
        pytest.param(OPEN_MPI, 1, 3, "tcp://127.0.0.1:26709", (0, 1, 2), id="Open MPI"),
        pytest.param(without(OPEN_MPI, "PMIX_NAMESPACE"), 1, 3, "tcp://127.0.0.1:29500", (0, 1, 2), id="no namespace"),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "5"},
            1, 3, "tcp://[fd00::1]:5", (0, 1), id="Open MPI, several hosts",
        ),
        pytest.param(MPICH, 2, 4, "tcp://127.0.0.1:29500", (0, 1, 2, 3), id="MPICH"),
        pytest.param(HAND, 1, 3, "env://", None, id="by hand"),
        pytest.param({**HAND, "MASTER_ADDR": "localhost"}, 1, 3, "env://", (0, 1, 2), id="by hand on one host"),
        pytest.param({**HAND, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 1, 3, "env://", (1, 2), id="by hand, local"),
        pytest.param({**HAND, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 1, 3, "env://", None, id="not in a row"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "0"}, 3, 5, "env://", None, id="not in a row, beyond the end"),
    ],
)  # fmt: skip
def test_a_launchers_process_knows_its_seat(
    environment: Environment, rank: int, size: int, method: str, here: tuple[int, ...] | None
) -> None:
    seat = found(environment)
    assert (seat.rank, seat.world_size, seat.init_method, seat.here) == (rank, size, method, here)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"MASTER_ADDR": "node1", "MASTER_PORT": "1"}, id="an address alone"),
        pytest.param(BATCH_SCRIPT, id="in a batch script of SLURM's"),
        pytest.param({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, id="srun -n 1"),
        pytest.param({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, id="1"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, id="mpirun -n 1"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, id="by hand, alone"),
    ],
)
def test_who_has_been_started_alone_starts_the_others(environment: Environment) -> None:
    assert seat_of(environment) is None


@pytest.mark.parametrize(
    "environment, name",
    [
        pytest.param({**TORCHRUN, **SRUN}, "torchrun", id="torchrun started by srun"),
        pytest.param({**TORCHRUN, **OPEN_MPI}, "torchrun", id="torchrun started by mpirun"),
        pytest.param({**SRUN, **OPEN_MPI}, "mpirun", id="mpirun in a job of SLURM's"),
        pytest.param({**BATCH_SCRIPT, **HAND}, "hand", id="by hand in a batch script"),
        pytest.param({**HAND, **OPEN_MPI}, "hand", id="both the same"),
        pytest.param({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, "mpirun", id="alone by hand"),
    ],
)
def test_of_launchers_within_each_other_the_inner_one_counts(environment: Environment, name: str) -> None:
    assert found(environment).name == name


@pytest.mark.parametrize(
    "environment, words",
    [
        (
            {**OPEN_MPI, **HAND, "RANK": "0"},
            r"rank 1 of 3 by mpirun \(OMPI_COMM_WORLD_RANK.*rank 0 of 3 by hand \(RANK",
        ),
        ({**SRUN, **HAND}, r"rank 2 of 4 by srun \(SLURM_PROCID.*rank 1 of 3 by hand.*unset the variables of one"),
        ({**OPEN_MPI, **MPICH}, r"rank 1 of 3 by mpirun \(OMPI_COMM_WORLD_RANK.*rank 2 of 4 by mpirun \(PMI_RANK"),
        ({"RANK": "1"}, r"RANK=1 is set and WORLD_SIZE is not: set both.*or unset RANK"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 is set and RANK is not"),
        (without(HAND, "MASTER_PORT"), r"one of 3 workers, but MASTER_PORT is not set"),
        (without(HAND, "MASTER_PORT", "MASTER_ADDR"), r"MASTER_ADDR and MASTER_PORT are not set: the host of rank 0"),
        ({**HAND, "RANK": "3"}, r"RANK=3 is no rank of WORLD_SIZE=3: ranks go from 0 to 2"),
        ({**HAND, "WORLD_SIZE": "0"}, r"WORLD_SIZE=0: there is at least one worker"),
        ({**HAND, "RANK": "one"}, r"RANK must be a whole number, not 'one'"),
        (without(TORCHRUN, "RANK"), r"RANK must be a whole number, but is not set"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), r"OMPI_COMM_WORLD_SIZE must be a whole number, but is not set"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            r"does not say where rank 0 is: set MASTER_ADDR.*-x MASTER_ADDR",
        ),
        (
            {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            r"does not say where rank 0 is: set MASTER_ADDR.*-genv MASTER_ADDR",
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, r"names none; set MASTER_ADDR"),
    ],
)
def test_variables_that_are_wrong_or_contradict_each_other_are_an_error_that_says_what_to_do(
    environment: Environment, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        seat_of(environment)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node7", "node7"),
        ("node7,node1", "node7"),
        ("node[01-04,9],login", "node01"),
        ("node[9,01-04]", "node9"),
        ("rack[1-2]n[08-12]", "rack1n08"),
        ("a-b[3-4]-ib.example.org,c", "a-b3-ib.example.org"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ports_of_jobs_differ_and_lie_where_systems_give_none() -> None:
    ports = set()
    for job in (1, 2, 999, 100_000, 12_345_678):
        for step in range(3):
            seat = found({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            ports.add(int(seat.init_method.rpartition(":")[2]))
    assert len(ports) == 15
    assert all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    "environment, bound",
    [
        (SRUN, False),  # one mask, for all tasks of the host
        ({**SRUN, "SLURM_CPU_BIND_LIST": "0x1,0x2,0x4"}, True),
        (without(SRUN, "SLURM_CPU_BIND_LIST"), False),
        (OPEN_MPI, False),
        ({**OPEN_MPI, "OMPI_MCA_orte_bound_at_launch": "1"}, True),
        (TORCHRUN, False),
    ],
)
def test_it_is_known_whether_the_launcher_has_bound_its_processes_to_cores(
    environment: Environment, bound: bool
) -> None:
    assert found(environment).bound is bound


@pytest.mark.parametrize(
    "visible, there, own",
    [("0,1,2,3", "4", False), ("2", "4", True), ("0", "1", False), ("", "4", False), ("0", "", False)],
)
def test_it_is_known_whether_slurm_has_given_each_task_its_own_gpus(visible: str, there: str, own: bool) -> None:
    assert found({**SRUN, "CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": there}).own_devices is own
