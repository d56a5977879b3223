"""Autograd contexts under the private names of `torch.distributed.autograd`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from actorrpc import autograd
from actorrpc.autograd import context
from actorrpc.errors import ActorRPCError, RemoteTraceback
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.services import contexts
from actorrpc.services.autograd import Autograd
from actorrpc.session import current

if TYPE_CHECKING:
    from actorrpc.services.contexts import Context


_RANK = re.compile(r"\(rank (\d+),")


class SendFunction(NamedTuple):
    """A message with recorded tensors that left, as torch shows its node of the graph.

    Attributes:
        next_functions: the nodes that the tensors come from.
    """

    next_functions: tuple[tuple[Any, int], ...]


class DistAutogradContext:
    """A context as this worker knows it. What `_send_functions` and `_recv_functions` count are messages with recorded
    tensors; there are no nodes of torch's C++ behind them.
    """

    def __init__(self, part: Context) -> None:
        self._part = part

    def _context_id(self) -> int:
        return self._part.id

    def _send_functions(self) -> dict[int, SendFunction]:
        found: dict[int, SendFunction] = {}
        with self._part.lock:
            node = self._part.token.grad_fn
        while node is not None and node.next_functions:  # each message is recorded behind the one before it
            sent = getattr(node, "sent", None)
            before, *tensors = node.next_functions
            if sent is not None:
                found[sent.number] = SendFunction(tuple(tensors))
            node = before[0]
        return dict(sorted(found.items()))

    def _recv_functions(self) -> dict[int, Any]:
        return dict(enumerate(sorted(self._part.received)))

    def _known_worker_ids(self) -> set[int]:
        with self._part.lock:
            return self._part.touched | {peer for peer, came in self._part.last.items() if not came}


def _service() -> Autograd:
    found: Autograd = current().worker.services[Autograd]
    return found


def _current_context() -> DistAutogradContext:
    """Returns the context of the present thread.

    Raises:
        RuntimeError: it is in none.
    """
    if here.context == NO_CONTEXT:
        raise RuntimeError("Current thread doesn't have a valid autograd context: it works outside of all")
    return _retrieve_context(here.context)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Returns a context that this worker has a part in.

    Raises:
        RuntimeError: there is none of this id.
    """
    return DistAutogradContext(_service().contexts.get(context_id))


def _is_valid_context(context_id: int) -> None:
    """Raises RuntimeError where this worker has no part in a context of this id."""
    _service().contexts.get(context_id)


def _new_context() -> DistAutogradContext:
    """Begins a context of the present thread, to be ended by `_release_context`. Raises as `context` does."""
    return _retrieve_context(context().__enter__())


def _release_context(context_id: int) -> None:
    """Ends a context, here and on the workers that it has reached.

    Raises:
        RuntimeError: there is none of this id.
    """
    _is_valid_context(context_id)
    if here.context == context_id:
        here.context = NO_CONTEXT
    _service().end(context_id)


def _get_max_id() -> int:
    """Returns the largest id that a context begun here can have."""
    return contexts.largest_of(current().worker.id)


def backward(context_id: int, roots: Any, retain_graph: bool = False) -> None:
    """`actorrpc.autograd.backward`, but what a node or hook raises is a RuntimeError here, as in torch, which says on
    which worker; its cause is the node's own exception.
    """
    try:
        autograd.backward(context_id, roots, retain_graph)
    except (ActorRPCError, TypeError):
        raise
    except Exception as e:
        remote = e.__cause__
        if not isinstance(remote, RemoteTraceback):
            if isinstance(e, RuntimeError):
                raise
            raise RuntimeError(f"Error on Node {current().worker.id}: {e}") from e
        found = _RANK.search(remote.text)
        raise RuntimeError(f"Error on Node {found.group(1) if found else -1}: {e}") from e
