"""The reference's names take what they take there: the same parameters in the same order, with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer

CALL = "to, func, args=None, kwargs=None, timeout=-1.0"
PIPE = (
    "*, num_worker_threads=16, rpc_timeout=60.0, init_method='env://', device_maps=None, devices=None, "
    "_transports=None, _channels=None"
)

REFERENCE: list[tuple[Callable[..., Any], str]] = [
    (rpc.init_rpc, "name, backend=None, rank=-1, world_size=None, rpc_backend_options=None"),
    (rpc.rpc_sync, CALL),
    (rpc.rpc_async, CALL),
    (rpc.remote, CALL),
    (rpc.get_worker_info, "worker_name=None"),
    (rpc.shutdown, "graceful=True, timeout=0"),
    (rpc.functions.async_execution, "fn"),
    (rpc.TensorPipeRpcBackendOptions, PIPE),
    (rpc.TensorPipeRpcBackendOptions.set_device_map, "self, to, device_map"),
    (rpc.TensorPipeRpcBackendOptions.set_devices, "self, devices"),
    (rpc.RRef, "value, type_hint=None"),
    (rpc.RRef.backward, "self, dist_autograd_ctx_id=-1, retain_graph=False"),
    (rpc.RRef.confirmed_by_owner, "self"),
    (rpc.RRef.is_owner, "self"),
    (rpc.RRef.local_value, "self"),
    (rpc.RRef.owner, "self"),
    (rpc.RRef.owner_name, "self"),
    (rpc.RRef.remote, "self, timeout=-1.0"),
    (rpc.RRef.rpc_async, "self, timeout=-1.0"),
    (rpc.RRef.rpc_sync, "self, timeout=-1.0"),
    (rpc.RRef.to_here, "self, timeout=-1.0"),
    (RemoteModule, "remote_device, module_cls, args=None, kwargs=None"),
    (RemoteModule.get_module_rref, "self"),
    (RemoteModule.remote_parameters, "self, recurse=True"),
    (autograd.backward, "context_id, roots, retain_graph=False"),
    (autograd.context, ""),
    (autograd.get_gradients, "context_id"),
    (DistributedOptimizer, "optimizer_class, params_rref, *args, **kwargs"),
    (DistributedOptimizer.step, "self, context_id"),
    (rpc.register_backend, "backend_name, construct_rpc_backend_options_handler, init_backend_handler"),
]


def shape(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    return parameter.name, parameter.kind, parameter.default


@pytest.mark.parametrize("function, wanted", REFERENCE, ids=lambda x: getattr(x, "__qualname__", ""))
def test_a_function_takes_what_it_takes_in_the_reference(function: Callable[..., Any], wanted: str) -> None:
    theirs = inspect.signature(eval(f"lambda {wanted}: None")).parameters
    ours = inspect.signature(function).parameters
    more = [p for p in ours.values() if p.name not in theirs and p.kind is p.KEYWORD_ONLY]
    assert all(p.default is not p.empty for p in more)
    assert [shape(p) for p in ours.values() if p not in more] == [shape(p) for p in theirs.values()]
