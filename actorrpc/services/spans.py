"""What the spans of calls are called in traces: as torch calls them, `rpc_sync#f(a -> b)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from actorrpc.runtime.completion import describe

if TYPE_CHECKING:
    from actorrpc.runtime.worker import Worker

_find_builtin: Any = torch.jit._builtins._find_builtin
_PREFIXES = {"remote": "rpc_remote"}


def name_of(what: object) -> str:
    """Returns what a function is called in a trace: operators by torch's names, scripted functions by full ones."""
    if isinstance(what, torch.jit.ScriptFunction):
        return str(what.qualified_name)
    builtin = _find_builtin(what) if callable(what) else None
    return str(builtin or describe(what))


def key_of(verb: str, name: str, worker: Worker, to: int, caller: int | None = None) -> str:
    """Returns what the span of a call is named.

    Arguments:
        verb: "rpc_sync" and so on.
        name: the function's, as `name_of` has it.
        worker: who asks.
        to: the callee's worker id.
        caller: the caller's; None: the worker's own.
    """
    sender = worker.record.name if caller is None else peer_name(worker, caller)
    if name == "to_here":
        return f"to_here#({sender})->({peer_name(worker, to)})"
    return f"{_PREFIXES.get(verb, verb)}#{name}({sender} -> {peer_name(worker, to)})"


def peer_name(worker: Worker, number: int) -> str:
    """Returns a worker's name; its number where it is not known."""
    peer = worker.peers.get(number)
    return peer.record.name if peer is not None else f"rank {number}"
