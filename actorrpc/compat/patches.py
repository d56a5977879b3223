"""`install`: what torch's functions and classes become, in torch's own modules.

The modules stay, so that whoever has imported one sees the change; what was imported *out of* one before is found in
torch's other modules (TorchScript compares RRef by identity, DistributedDataParallel looks for it), and is not looked
for in anybody else's: hence `install` comes before a program's own imports.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from actorrpc import autograd, backends, functions, optim, options, rpc, rref, workers
from actorrpc.compat import (
    agent,
    calls,
    children,
    contexts,
    failures,
    futures,
    gather,
    groups,
    profiler,
    remote_module,
    scripted,
    statistics,
)

_installed = False

_AUTOGRAD: dict[str, Any] = {
    name: getattr(contexts, name)
    for name in (
        "DistAutogradContext", "_current_context", "_get_max_id", "_is_valid_context", "_new_context",
        "_release_context", "_retrieve_context",
    )
} | {
    "_get_debug_info": statistics._autograd_get_debug_info,
    "backward": contexts.backward,
    "context": autograd.context,
    "get_gradients": autograd.get_gradients,
}  # fmt: skip

_RPC: dict[str, Any] = {
    "PyRRef": rref.PyRRef,
    "RRef": rref.RRef,
    "RpcAgent": agent.Agent,
    "RpcBackendOptions": options.RpcBackendOptions,
    "TensorPipeAgent": agent.Agent,
    "TensorPipeRpcBackendOptions": options.TensorPipeRpcBackendOptions,
    "WorkerInfo": workers.WorkerInfo,
    "_get_current_rpc_agent": agent._get_current_rpc_agent,
    "_get_debug_info": statistics._get_debug_info,
    "_init_rpc_backend": agent._init_rpc_backend,
    "_is_current_rpc_agent_set": agent._is_current_rpc_agent_set,
    "_rref_context_get_debug_info": statistics._rref_context_get_debug_info,
    "_set_rpc_timeout": rpc._set_rpc_timeout,
    "enable_gil_profiling": agent.enable_gil_profiling,
    "get_rpc_timeout": rpc.get_rpc_timeout,
    "init_rpc": agent.init_rpc,
}

_API: dict[str, Any] = {
    "_all_gather": gather._all_gather,
    "_barrier": gather._barrier,
    "_thread_local_var": calls._thread_local_var,
    "_wait_all": calls._wait_all,
    "_wait_all_workers": gather._wait_all_workers,
    "get_worker_info": rpc.get_worker_info,
    "remote": calls.remote,
    "rpc_async": calls.rpc_async,
    "rpc_sync": calls.rpc_sync,
    "shutdown": gather.shutdown,
}

_BACKENDS: dict[str, Any] = {
    name: getattr(backends, name)
    for name in (
        "BackendType", "BackendValue", "backend_registered", "construct_rpc_backend_options", "init_backend",
        "register_backend",
    )
}  # fmt: skip

_TABLE: dict[str, dict[str, Any]] = {
    "torch.distributed.autograd": _AUTOGRAD,
    "torch.distributed.rpc": _RPC | _API | {"BackendType": backends.BackendType},
    "torch.distributed.rpc.api": _API | {name: _RPC[name] for name in ("PyRRef", "RRef", "WorkerInfo")},
    "torch.distributed.rpc.backend_registry": _BACKENDS,
    "torch.distributed.rpc.functions": {"async_execution": functions.async_execution},
    "torch.distributed.rpc.options": {"TensorPipeRpcBackendOptions": options.TensorPipeRpcBackendOptions},
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": optim.DistributedOptimizer},
    "torch.distributed.nn.api.remote_module": {
        name: getattr(remote_module, name) for name in ("RemoteModule", "_RemoteModule")
    },
    "torch.futures": {name: getattr(futures, name) for name in ("collect_all", "wait_all")},
}
"""By module and name: what stands there afterwards. Other modules of torch that have the same object get it, too."""


def is_installed() -> bool:
    """Returns whether `install` has been called in this process."""
    return _installed


def install() -> None:
    """Puts actorrpc in the place of `torch.distributed.rpc`, `.autograd`, `.optim.DistributedOptimizer` and
    `.nn.RemoteModule`, in this process and in the Python processes that it starts from now on.

    To be called before the program's own imports, and before `init_rpc`. There is no way back within a process. A
    second call does nothing.

    Raises:
        RuntimeError: torch's own RPC is in use already.
    """
    global _installed
    if _installed:
        return
    if torch._C._distributed_rpc._is_current_rpc_agent_set():
        raise RuntimeError("torch.distributed.rpc is in use in this process already; install comes before init_rpc")
    replaced: dict[int, tuple[object, object]] = {}
    modules = [(importlib.import_module(name), names) for name, names in _TABLE.items()]  # all, before one is changed
    for module, names in modules:
        for name, new in names.items():
            old = getattr(module, name, None)
            if isinstance(old, type) or callable(old):
                replaced[id(old)] = old, new
            setattr(module, name, new)
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "torch":
            for name, value in list(vars(module).items()):
                old, new = replaced.get(id(value), (None, None))
                if value is old and old is not None:
                    setattr(module, name, new)
    # Torch's own pickler asks for it, which programs may call.
    setattr(rref.RRef, "_serialize", rref.RRef.__reduce__)  # noqa: B010
    profiler.install()
    scripted.install()
    groups.install()
    failures.show()
    failures.be_runtime_errors()
    children.install()
    _installed = True
