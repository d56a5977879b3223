"""What programs, and torch's tests, count of a worker: references, contexts, calls."""

from __future__ import annotations

from actorrpc.compat.agent import _get_current_rpc_agent
from actorrpc.services.autograd import Autograd
from actorrpc.services.objects import Objects
from actorrpc.session import current


def _rref_context_get_debug_info() -> dict[str, str]:
    """Returns, as texts: objects of this worker that others hold (`num_owner_rrefs`), and by how many references
    (`num_forks`); references of this worker of whose creation the owner has not told (`num_pending_users`), and others'
    waits for objects of this one (`num_pending_futures`).

    Raises:
        NotAMemberError: this process is in no world.
    """
    objects: Objects = current().worker.services[Objects]
    counts = {**objects.statistics(), **objects.pending()}
    return {
        "num_owner_rrefs": str(counts["owned"]),
        "num_forks": str(counts["forks"]),
        "num_pending_users": str(counts["unconfirmed"]),
        "num_pending_futures": str(counts["unmade"]),
    }


def _autograd_get_debug_info() -> dict[str, str]:
    """Returns the numbers of backward passes that run and of contexts, as texts."""
    service: Autograd = current().worker.services[Autograd]
    known = service.contexts.all()
    return {
        "num_current_backward_passes": str(sum(running.runs for part in known for running in part.passes.values())),
        "num_autograd_contexts": str(len(known)),
    }


def _get_debug_info() -> dict[str, str]:
    """Returns all counts of this worker: of references, of its agent and of autograd."""
    agent: dict[str, str] = _get_current_rpc_agent().get_debug_info()
    return {**_rref_context_get_debug_info(), **agent, **_autograd_get_debug_info()}
