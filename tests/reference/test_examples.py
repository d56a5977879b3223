"""The API reference's examples, typed in our own words: each is run as it is told there, and gives what it prints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import actorrpc as rpc
from actorrpc import RRef
from tests.reference import scripted
from tests.worlds import run_processes, run_world

Program = Callable[[], Any]


def _free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def nothing_more(rank: int) -> dict[str, Any]:
    return {}


def by_the_environment(
    work: Program, more: Callable[[int], dict[str, Any]] = nothing_more, names: tuple[str, ...] = ("worker0", "worker1")
) -> Any:
    """Runs an example as the reference has it, with `init_rpc` and `shutdown` written out.

    Arguments:
        work: the part of rank 0.
        more: makes, on each rank, what else `init_rpc` is given.
        names: the workers' names, by rank.

    Returns what `work` returned.
    """

    def program(rank: int, port: str) -> Any:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        rpc.init_rpc(names[rank], rank=rank, world_size=len(names), **more(rank))
        result = work() if rank == 0 else None
        rpc.shutdown()
        return result

    outcomes = run_processes(program, len(names), args=(_free_port(),))
    for outcome in outcomes:
        assert outcome.returned, outcome.stderr
        assert not outcome.traceback, outcome.traceback
        assert outcome.problems == []
        assert outcome.stderr == ""
    return outcomes[0].value


def on_worker_0(work: Program, size: int = 2) -> Any:
    """Runs an example whose `init_rpc` and `shutdown` the reference leaves out; returns what `work` returned."""
    return run_world(lambda rank: work() if rank == 0 else None, size)[0]


def printed(value: Any) -> str:
    return str(value)


# -- rpc_sync


def test_rpc_sync_example() -> None:
    def work() -> str:
        return printed(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))

    assert by_the_environment(work) == "tensor([4., 4.])"


def test_rpc_sync_example_of_a_scripted_function() -> None:
    def work() -> str:
        return printed(rpc.rpc_sync("worker1", scripted.script_add, args=(torch.ones(2), 3)))

    assert by_the_environment(work) == "tensor([4., 4.])"


# -- rpc_async


def test_rpc_async_example() -> None:
    def work() -> str:
        sum_ = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 3))
        least = rpc.rpc_async("worker1", min, args=(1, 2))
        return printed(sum_.wait() + least.wait())

    assert by_the_environment(work) == "tensor([5., 5.])"


def test_rpc_async_example_of_a_scripted_function() -> None:
    def work() -> str:
        return printed(rpc.rpc_async("worker1", scripted.script_add, args=(torch.ones(2), 3)).wait())

    assert by_the_environment(work) == "tensor([4., 4.])"


# -- remote


def test_remote_example() -> None:
    def work() -> str:
        one = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        two = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        return printed(one.to_here() + two.to_here())

    assert by_the_environment(work) == "tensor([6., 6.])"


def test_remote_example_of_a_scripted_function() -> None:
    def work() -> str:
        return printed(rpc.remote("worker1", scripted.script_add, args=(torch.ones(2), 3)).to_here())

    assert by_the_environment(work) == "tensor([4., 4.])"


# -- get_worker_info, shutdown, init_rpc


def test_get_worker_info_gives_an_id_and_a_name_that_calls_take() -> None:
    def work() -> Any:
        other, me = rpc.get_worker_info("worker1"), rpc.get_worker_info()
        assert isinstance(other, rpc.WorkerInfo)
        results = (
            rpc.rpc_sync(other, min, args=(1, 2)),
            rpc.rpc_async(other, min, args=(1, 2)).wait(),
            rpc.remote(other, min, args=(1, 2)).to_here(),
        )
        return (other.id, other.name), (me.id, me.name), results

    assert by_the_environment(work) == ((1, "worker1"), (0, "worker0"), (1, 1, 1))


def test_shutdown_example() -> None:
    def work() -> str:
        return printed(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)))

    assert by_the_environment(work) == "tensor([2.])"


def test_options_example() -> None:
    """Its workers are called 1 and 2. The options' defaults and checks are tried elsewhere."""

    def more(rank: int) -> dict[str, Any]:
        return {"rpc_backend_options": rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=20)}

    def work() -> Any:
        return rpc.get_rpc_timeout(), rpc.rpc_sync("worker2", rpc.get_rpc_timeout)

    assert by_the_environment(work, more, ("worker1", "worker2")) == (20, 20)


def add_two(x: torch.Tensor, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, (x + y).to("cpu")


def test_device_map_example_with_the_device_that_every_machine_has() -> None:
    """Its maps between GPUs are made, and refused where there are none, in tests of their own."""

    def more(rank: int) -> dict[str, Any]:
        if rank == 1:
            return {}
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, device_maps={"worker1": {"cpu": "cpu"}})
        options.set_device_map("worker1", {"cpu": "cpu"})
        return {"backend": rpc.BackendType.TENSORPIPE, "rpc_backend_options": options}

    def work() -> list[str]:
        return [printed(result) for result in rpc.rpc_sync("worker1", add_two, args=(torch.ones(2).to("cpu"), 1))]

    assert by_the_environment(work, more) == ["tensor([2., 2.])"] * 2


# -- async_execution


@rpc.functions.async_execution
def async_add_chained(to: str, x: torch.Tensor, y: int, z: int) -> Any:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + z)


def test_async_execution_example_of_a_chained_function() -> None:
    def work() -> str:
        return printed(rpc.rpc_sync("worker1", async_add_chained, args=("worker2", torch.ones(2), 1, 1)))

    assert on_worker_0(work, 3) == "tensor([3., 3.])"


def test_async_execution_example_of_a_compiled_function_under_the_stand_in() -> None:
    program = Path(__file__).with_name("compiled_async_add.py")
    command = [sys.executable, "-m", "actorrpc", "run", "--quiet", str(program)]
    env = {**os.environ, "PYTHONPATH": str(program.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["tensor([2., 2.])", "True"]


class AsyncExecutionClass:
    @staticmethod
    @rpc.functions.async_execution
    def static_async_add(to: str, x: torch.Tensor, y: int, z: int) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + z)

    @classmethod
    @rpc.functions.async_execution
    def class_async_add(cls, to: str, x: torch.Tensor, y: int, z: int) -> Any:
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: result.set_result(done.wait() + z))
        return result

    @rpc.functions.async_execution
    def bound_async_add(self, to: str, x: torch.Tensor, y: int, z: int) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + z)


def test_async_execution_example_of_static_and_class_methods() -> None:
    def work() -> list[str]:
        arguments = ("worker2", torch.ones(2), 1, 2)
        return [
            printed(rpc.rpc_sync("worker1", AsyncExecutionClass.static_async_add, args=arguments)),
            printed(rpc.rpc_sync("worker1", AsyncExecutionClass.class_async_add, args=arguments)),
        ]

    assert on_worker_0(work, 3) == ["tensor([4., 4.])"] * 2


def test_async_execution_example_of_a_references_proxies() -> None:
    def work() -> list[str]:
        arguments = ("worker2", torch.ones(2), 1, 2)
        results = [
            rpc.remote("worker1", AsyncExecutionClass).rpc_sync().static_async_add(*arguments),
            rpc.remote("worker1", AsyncExecutionClass).rpc_async().static_async_add(*arguments).wait(),
            rpc.remote("worker1", AsyncExecutionClass).remote().static_async_add(*arguments).to_here(),
        ]
        return [printed(result) for result in results]

    assert on_worker_0(work, 3) == ["tensor([4., 4.])"] * 3


# -- RRef


def test_rref_example_1_made_by_remote() -> None:
    def work() -> str:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        return printed(rref.to_here())

    assert on_worker_0(work) == "tensor([4., 4.])"


def test_rref_example_2_made_of_a_local_object() -> None:
    def work() -> Any:
        x = torch.zeros(2, 2)
        rref = RRef(x)
        return rref.is_owner(), rref.owner_name(), rref.local_value() is x, rref.to_here() is x

    assert on_worker_0(work) == (True, "worker0", True, True)


def plus_one(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here() + 1


def test_rref_example_3_shared_with_another_worker() -> None:
    def work() -> str:
        rref = RRef(torch.zeros(2, 2))
        return printed(rpc.rpc_sync("worker1", plus_one, args=(rref,)).tolist())

    assert on_worker_0(work) == "[[1.0, 1.0], [1.0, 1.0]]"


def run(rref: RRef[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


def test_rref_remote_example() -> None:
    def work() -> list[str]:
        rref = rpc.remote("worker1", torch.add, args=(torch.zeros(2, 2), 1))
        return [
            printed(rref.remote().size().to_here()),
            printed(rref.remote().view(1, 4).to_here()),
            printed(rpc.remote(rref.owner(), run, args=(rref, "view", (1, 4), {})).to_here()),  # what it is the same as
        ]

    assert on_worker_0(work) == ["torch.Size([2, 2])", *["tensor([[1., 1., 1., 1.]])"] * 2]


def test_rref_rpc_async_example() -> None:
    def work() -> list[str]:
        rref = rpc.remote("worker1", torch.add, args=(torch.zeros(2, 2), 1))
        return [
            printed(rref.rpc_async().size().wait()),
            printed(rref.rpc_async().view(1, 4).wait()),
            printed(rpc.rpc_async(rref.owner(), run, args=(rref, "view", (1, 4), {})).wait()),
        ]

    assert on_worker_0(work) == ["torch.Size([2, 2])", *["tensor([[1., 1., 1., 1.]])"] * 2]


def test_rref_rpc_sync_example() -> None:
    def work() -> list[str]:
        rref = rpc.remote("worker1", torch.add, args=(torch.zeros(2, 2), 1))
        return [
            printed(rref.rpc_sync().size()),
            printed(rref.rpc_sync().view(1, 4)),
            printed(rpc.rpc_sync(rref.owner(), run, args=(rref, "view", (1, 4), {}))),
        ]

    assert on_worker_0(work) == ["torch.Size([2, 2])", *["tensor([[1., 1., 1., 1.]])"] * 2]
