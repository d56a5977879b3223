"""Standing in for `torch.distributed.rpc`: programs written for it run on actorrpc, unchanged.

    import actorrpc.compat

    actorrpc.compat.install()          # before the program's own imports
    import torch.distributed.rpc as rpc

or, without a line, `python -m actorrpc run main.py`. `install` patches torch's modules in place. The names that torch
keeps private and programs use all the same are here, too: `_wait_all`, `_all_gather` and so on.
"""

from actorrpc.compat.agent import Agent, _get_current_rpc_agent, _is_current_rpc_agent_set, enable_gil_profiling
from actorrpc.compat.calls import _thread_local_var, _use_rpc_pickler, _wait_all
from actorrpc.compat.contexts import (
    DistAutogradContext,
    _current_context,
    _get_max_id,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
)
from actorrpc.compat.gather import _all_gather, _barrier, _wait_all_workers
from actorrpc.compat.patches import install, is_installed
from actorrpc.compat.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule
from actorrpc.compat.statistics import _get_debug_info, _rref_context_get_debug_info

__all__ = [
    "_REMOTE_MODULE_PICKLED_ATTRIBUTES",
    "Agent",
    "DistAutogradContext",
    "_RemoteModule",
    "_all_gather",
    "_barrier",
    "_current_context",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_get_max_id",
    "_is_current_rpc_agent_set",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "_rref_context_get_debug_info",
    "_thread_local_var",
    "_use_rpc_pickler",
    "_wait_all",
    "_wait_all_workers",
    "enable_gil_profiling",
    "install",
    "is_installed",
]
