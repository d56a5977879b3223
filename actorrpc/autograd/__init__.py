"""Backward passes that span workers; the names of `torch.distributed.autograd`.

    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

Tensors that require grad are recorded in whatever is sent while a thread is in a context: arguments and results of
calls, `to_here`, proxies, actors' methods, and of calls that those make. Gradients go to the context on the worker of
each leaf, not to `.grad`. `check` compares a step over several workers with the same step in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.autograd.checking import check
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.services.autograd import Autograd
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch

__all__ = ["backward", "check", "context", "get_gradients", "waiting"]


class context:
    """A context of the present thread: what is sent inside of it is recorded, and forgotten everywhere at its end.

    `with context() as context_id:` gives its id, which is unique in the world.

    Raises:
        RuntimeError: the thread is in a context already; they do not nest.
        NotAMemberError: this process is in no world.
    """

    def __enter__(self) -> int:
        if here.context != NO_CONTEXT:
            raise RuntimeError(
                f"Already have an autograd context id for this thread: {here.context}; contexts do not nest"
            )
        self._service = _service()
        self._id = here.context = self._service.contexts.begin().id
        return self._id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here.context = NO_CONTEXT
        self._service.end(self._id)


def backward(context_id: int, roots: Sequence[torch.Tensor] | torch.Tensor, retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of some scalars, over all workers that took part in them, into the context.

    Arguments:
        context_id: the context's id.
        roots: scalar tensors of this worker that require grad, or a single one.
        retain_graph: keeps the graph for another pass over it. Default: it is freed on all workers.

    Raises:
        RuntimeError: there is no such context here; there are no roots, or one does not require grad or is no scalar;
            or the graph was freed by an earlier pass.
        RPCTimeoutError: a worker waited longer than its `rpc_timeout` for another; the error says for what.
        WorkerLostError: a worker that took part is gone.
        BaseException: what a node or hook raised on whatever worker, with its remote traceback as the cause.
    """
    _service().backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context holds for leaves of this worker.

    Arguments:
        context_id: the context's id.

    Returns a dict from each leaf to its gradient; a leaf that nothing reached is not in it.

    Raises:
        RuntimeError: there is no such context here.
    """
    return _service().gradients(context_id)


def waiting() -> list[str]:
    """Says what the backward passes that have a part on this worker wait for: tensors of what shape, from which worker,
    and for how long they have. One text a pass; none for a pass that computes.

    Ask another worker with `rpc_sync(name, dist_autograd.waiting)`.
    """
    return _service().waits()


def _service() -> Autograd:
    found: Autograd = current().worker.services[Autograd]
    return found
