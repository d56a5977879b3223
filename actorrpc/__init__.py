"""Remote calls, references and role-based actors for PyTorch programs, over ZeroMQ.

`import actorrpc as rpc` gives the names of `torch.distributed.rpc`, and `Actor`, `Role` and `launch` beside them.
"""

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
from actorrpc.launch import launch
from actorrpc.logs import forward_logs
from actorrpc.named import Named, named
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
from actorrpc.streams import Stream, stream
from actorrpc.version import VERSION
from actorrpc.workers import WorkerInfo
from actorrpc.world import ActorInfo, World, role

__version__ = VERSION

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
    "shutdown",
    "stream",
]
