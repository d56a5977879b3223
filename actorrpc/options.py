"""What `init_rpc` can be told, beside name, rank and world size."""

from __future__ import annotations

import os

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_TIMEOUT = 300.0
DEFAULT_SWITCH_INTERVAL = 2e-4
UNSET_RPC_TIMEOUT = -1.0


class RpcBackendOptions:
    """Options of a worker.

    Arguments:
        rpc_timeout: seconds that a call gets which names no limit of its own; 0 for ever. Default 60.
        init_method: where the workers meet: `env://` (the default: MASTER_ADDR and MASTER_PORT), `tcp://host:port` or
            `file:///path`.
        num_worker_threads: how many handlers may run at once; one that waits for a call does not count. Default 16.
        init_timeout: seconds that `init_rpc` waits for all workers. Default 300, or ACTORRPC_INIT_TIMEOUT.
        switch_interval: what `sys.setswitchinterval` is set to while the worker is up, in seconds, so that calls are
            answered while the main thread computes in Python; None leaves it alone. Default 0.0002.
        report_leaks: whether a graceful shutdown lists, in a warning of the logger "actorrpc", the references that are
            still held then, and where each was made. Default False, or ACTORRPC_REPORT_LEAKS=1.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        init_timeout: float | None = None,
        switch_interval: float | None = DEFAULT_SWITCH_INTERVAL,
        report_leaks: bool | None = None,
    ) -> None:
        if rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be 0 (never) or seconds above it, not {rpc_timeout}")
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, not {num_worker_threads}")
        if init_timeout is None:
            init_timeout = float(os.environ.get("ACTORRPC_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT))
        if init_timeout <= 0:
            raise ValueError(f"init_timeout must be seconds above 0, not {init_timeout}")
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method
        self.num_worker_threads = num_worker_threads
        self.init_timeout = init_timeout
        self.switch_interval = switch_interval
        self.report_leaks = os.environ.get("ACTORRPC_REPORT_LEAKS") == "1" if report_leaks is None else report_leaks

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"
