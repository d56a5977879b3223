"""Remote calls, references and role-based actors for PyTorch programs, over ZeroMQ.

`import actorrpc as rpc` gives the names of `torch.distributed.rpc`, and `Actor`, `Role` and `launch` beside them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from actorrpc.version import VERSION

if TYPE_CHECKING:
    from actorrpc import autograd, debug, functions, nn, optim, profiler
    from actorrpc.actor import Actor, forget_actor, get_actor
    from actorrpc.attaching import Attached, attach
    from actorrpc.backends import (
        BackendType,
        BackendValue,
        backend_registered,
        construct_rpc_backend_options,
        init_backend,
        register_backend,
    )
    from actorrpc.current import CurrentCall, current_call, no_wait
    from actorrpc.errors import (
        ActorGoneError,
        ActorRPCError,
        AuthenticationError,
        BackpressureError,
        BlockingWaitError,
        CancelledError,
        CheckpointError,
        DeadlockError,
        DeserializationError,
        DeviceMapError,
        GradientMismatchError,
        GroupError,
        InvalidNameError,
        MemberDiedError,
        MessageTooLargeError,
        NotAMemberError,
        RemoteError,
        RendezvousError,
        RPCTimeoutError,
        SerializationError,
        StaleGradientsError,
        UnknownNameError,
        WorkerLostError,
    )
    from actorrpc.functions import batched
    from actorrpc.group import Group, GroupFuture
    from actorrpc.group_streams import GroupStream
    from actorrpc.launching import launch
    from actorrpc.logs import forward_logs
    from actorrpc.naming import Named, named
    from actorrpc.options import ProcessGroupRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
    from actorrpc.reducers import register_reducer
    from actorrpc.roles import Role
    from actorrpc.rpc import (
        _set_rpc_timeout,
        get_rpc_timeout,
        get_worker_info,
        init_rpc,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )
    from actorrpc.rref import PyRRef, RRef
    from actorrpc.runtime.futures import Future
    from actorrpc.sharing import shared
    from actorrpc.streams import Stream, stream
    from actorrpc.workers import WorkerInfo
    from actorrpc.world import ActorInfo, World, role

__version__ = VERSION

_NAMES = {
    "actor": ("Actor", "forget_actor", "get_actor"),
    "attaching": ("Attached", "attach"),
    "backends": (
        "BackendType",
        "BackendValue",
        "backend_registered",
        "construct_rpc_backend_options",
        "init_backend",
        "register_backend",
    ),
    "current": ("CurrentCall", "current_call", "no_wait"),
    "errors": (
        "ActorGoneError",
        "ActorRPCError",
        "AuthenticationError",
        "BackpressureError",
        "BlockingWaitError",
        "CancelledError",
        "CheckpointError",
        "DeadlockError",
        "DeserializationError",
        "DeviceMapError",
        "GradientMismatchError",
        "GroupError",
        "InvalidNameError",
        "MemberDiedError",
        "MessageTooLargeError",
        "NotAMemberError",
        "RemoteError",
        "RendezvousError",
        "RPCTimeoutError",
        "SerializationError",
        "StaleGradientsError",
        "UnknownNameError",
        "WorkerLostError",
    ),
    "functions": ("batched",),
    "group": ("Group", "GroupFuture"),
    "group_streams": ("GroupStream",),
    "launching": ("launch",),
    "logs": ("forward_logs",),
    "naming": ("Named", "named"),
    "options": ("ProcessGroupRpcBackendOptions", "RpcBackendOptions", "TensorPipeRpcBackendOptions"),
    "reducers": ("register_reducer",),
    "roles": ("Role",),
    "rpc": (
        "_set_rpc_timeout",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    ),
    "rref": ("PyRRef", "RRef"),
    "runtime.futures": ("Future",),
    "sharing": ("shared",),
    "streams": ("Stream", "stream"),
    "workers": ("WorkerInfo",),
    "world": ("ActorInfo", "World", "role"),
}
"""Which module has which public names. A name is fetched when it is first asked for, so that a program, or a command,
which only names the package, waits for none of it. The block above tells type checkers the same; a test compares."""

_ROOMS = frozenset(("autograd", "debug", "functions", "nn", "optim", "profiler"))
"""Modules that are public as they are."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Actor",
    "ActorGoneError",
    "ActorInfo",
    "ActorRPCError",
    "Attached",
    "AuthenticationError",
    "BackendType",
    "BackendValue",
    "BackpressureError",
    "BlockingWaitError",
    "CancelledError",
    "CheckpointError",
    "CurrentCall",
    "DeadlockError",
    "DeserializationError",
    "DeviceMapError",
    "Future",
    "GradientMismatchError",
    "Group",
    "GroupError",
    "GroupFuture",
    "GroupStream",
    "InvalidNameError",
    "MemberDiedError",
    "MessageTooLargeError",
    "Named",
    "NotAMemberError",
    "ProcessGroupRpcBackendOptions",
    "PyRRef",
    "RPCTimeoutError",
    "RRef",
    "RemoteError",
    "RendezvousError",
    "Role",
    "RpcBackendOptions",
    "SerializationError",
    "StaleGradientsError",
    "Stream",
    "TensorPipeRpcBackendOptions",
    "UnknownNameError",
    "WorkerInfo",
    "WorkerLostError",
    "World",
    "_set_rpc_timeout",
    "attach",
    "autograd",
    "backend_registered",
    "batched",
    "construct_rpc_backend_options",
    "current_call",
    "debug",
    "forget_actor",
    "forward_logs",
    "functions",
    "get_actor",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "launch",
    "named",
    "nn",
    "no_wait",
    "optim",
    "profiler",
    "register_backend",
    "register_reducer",
    "remote",
    "role",
    "rpc_async",
    "rpc_sync",
    "shared",
    "shutdown",
    "stream",
]


if not TYPE_CHECKING:  # type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"actorrpc.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'actorrpc' has no attribute {name!r}")
        if _HOMES[name] == "backends":
            importlib.import_module("actorrpc.rpc")  # which registers this package's own backend
        value = globals()[name] = getattr(importlib.import_module(f"actorrpc.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
