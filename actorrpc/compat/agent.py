"""What programs ask of torch's agent, the object behind its functions."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import torch

from actorrpc import rpc
from actorrpc.backends import BackendType
from actorrpc.options import RpcBackendOptions
from actorrpc.process import foreign
from actorrpc.rpc import get_worker_info
from actorrpc.session import Session, current, is_available
from actorrpc.workers import WorkerInfo, info_of, present

_gil_profiling = False
_GIL_PROBE_SECONDS = 1e-3


class Agent:
    """A view of this process's membership, under the names of torch's `TensorPipeAgent`.

    It is taken from `_get_current_rpc_agent()`, and works until `shutdown`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def is_static_group(self) -> bool:
        """Whether the number of workers was given, and stays."""
        return self._session.elastic is None

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Returns the WorkerInfo of a worker by its name or rank; default: this one's own."""
        return get_worker_info(worker)  # type: ignore[arg-type]

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns the WorkerInfos of all workers, by rank; in an elastic world, of those who are there."""
        return [info_of(record) for record in present(self._session.worker)]

    def get_debug_info(self) -> dict[str, str]:
        """Returns counts, as texts, under torch's names."""
        counts = self._session.worker.statistics()
        info = {
            "agent.num_pending_requests": counts["pending"],
            "agent.thread_pool_size": self._session.options.num_worker_threads,
            "agent.num_idle_threads": max(0, self._session.options.num_worker_threads - counts["running"]),
            "agent.client_active_calls": counts["pending"],
            "agent.server_active_calls": counts["running"],
            "agent.server_active_async_calls": 0,
        }
        shown = {name: str(value) for name, value in info.items()}
        if _gil_profiling:
            shown["agent.gil_average_wait_time_us"] = str(_gil_wait_us())
        return shown

    def get_metrics(self) -> dict[str, str]:
        """Returns the same as `get_debug_info`."""
        return self.get_debug_info()

    def _get_device_map(self, worker: WorkerInfo) -> dict[Any, Any]:
        maps = getattr(self._session.options, "device_maps", {})
        return dict(maps.get(worker.name, {}))

    def _get_backend_options(self) -> RpcBackendOptions:
        return self._session.options

    def __repr__(self) -> str:
        return f"<agent of {self._session.worker}, {BackendType.TENSORPIPE} of actorrpc>"


def _get_current_rpc_agent() -> Any:
    """Returns the agent of this process: an `Agent`, or that of the program's own backend.

    Raises:
        NotAMemberError: this process is in no world.
    """
    other = foreign()
    return Agent(current()) if other is None or is_available() else other.agent


def _is_current_rpc_agent_set() -> bool:
    """Returns whether this process has an agent."""
    return is_available() or foreign() is not None


def enable_gil_profiling(flag: bool) -> None:
    """Has `get_debug_info` of agents tell how long a thread of this process waits for the interpreter, from now on."""
    global _gil_profiling
    _gil_profiling = flag


def _gil_wait_us() -> float:
    """Returns by how much a short sleep is too long, in microseconds: the interpreter is waited for at its end."""
    begun = time.perf_counter()
    time.sleep(_GIL_PROBE_SECONDS)
    return max(0.0, time.perf_counter() - begun - _GIL_PROBE_SECONDS) * 1e6


@functools.wraps(rpc.init_rpc)
def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    with contextlib.suppress(TypeError, ValueError):  # which init_rpc raises, and tells the others
        number, _ = rpc._numbers(rank, world_size, "")
        # First: an event of a profile that begins before and ends afterwards would have two node ids.
        torch._C._distributed_rpc._set_profiler_node_id(number)
    rpc.init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _init_rpc_backend(
    backend: BackendType = BackendType.TENSORPIPE,
    store: object = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Joins a world as `init_rpc` does; `store` is not used, workers meet as the options say."""
    init_rpc(name, backend, rank, world_size, rpc_backend_options)
