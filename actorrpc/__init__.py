"""Remote calls, references and role-based actors for PyTorch programs, over ZeroMQ.

`import actorrpc as rpc` gives the names of `torch.distributed.rpc`, and `Actor`, `Role` and `launch` beside them.
"""

from actorrpc import autograd, functions, optim
from actorrpc.actor import Actor
from actorrpc.errors import (
    ActorGoneError,
    ActorRPCError,
    DeserializationError,
    GroupError,
    MemberDiedError,
    NotAMemberError,
    RemoteError,
    RendezvousError,
    RPCTimeoutError,
    SerializationError,
    StaleGradientsError,
    UnknownNameError,
    WorkerLostError,
)
from actorrpc.group import Group, GroupFuture
from actorrpc.launch import launch
from actorrpc.options import RpcBackendOptions
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
from actorrpc.rref import RRef
from actorrpc.runtime.futures import Future
from actorrpc.workers import WorkerInfo
from actorrpc.world import World

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorGoneError",
    "ActorRPCError",
    "DeserializationError",
    "Future",
    "Group",
    "GroupError",
    "GroupFuture",
    "MemberDiedError",
    "NotAMemberError",
    "RPCTimeoutError",
    "RRef",
    "RemoteError",
    "RendezvousError",
    "Role",
    "RpcBackendOptions",
    "SerializationError",
    "StaleGradientsError",
    "UnknownNameError",
    "WorkerInfo",
    "WorkerLostError",
    "World",
    "_set_rpc_timeout",
    "autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "launch",
    "optim",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
