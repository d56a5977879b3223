"""Clipping of gradients by their norm over all owners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from actorrpc.optim.owners import ask, checked, tensor_of
from actorrpc.rpc import rpc_async
from actorrpc.services.autograd import Autograd
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actorrpc.rref import RRef


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients that a context has for some parameters, in place, so that their norm over all owners is at
    most `max_norm`; as `torch.nn.utils.clip_grad_norm_` does for one process. Sparse gradients count as dense ones.

    Arguments:
        context_id: the context's id.
        params_rref: references to the parameters; those without a gradient in the context do not count.
        max_norm: what the norm may be.
        norm_type: which norm; infinity for the largest of all.
        error_if_nonfinite: whether a norm that is infinite or not a number is an error.

    Returns the norm before the scaling.

    Raises:
        RuntimeError: there is no such context here; or the norm is not finite and `error_if_nonfinite` was given.
        TypeError, ValueError: `params_rref` holds something else, or nothing.
        BaseException: what an owner raised; the cause names the owner.
    """
    worker = current().worker
    worker.services[Autograd].contexts.get(context_id)
    parts: dict[int, list[tuple[int, RRef[Any]]]] = {}
    for position, ref in enumerate(checked(params_rref, "params_rref")):
        parts.setdefault(ref._handle.owner, []).append((position, ref))

    def on_all(what: str, function: Any, *args: Any) -> list[Any]:
        def sent(owner: int, refs: Sequence[RRef[Any]]) -> Any:
            return lambda: rpc_async(owner, function, args=(context_id, refs, *args)).wait

        return ask(what, [(part[0][1].owner_name(), sent(o, [r for _, r in part])) for o, part in parts.items()])

    norm_type = float(norm_type)
    norms: dict[int, torch.Tensor] = {}
    for part, found in zip(parts.values(), on_all("taking the norm", _norms, norm_type), strict=True):
        norms.update({part[i][0]: norm for i, norm in found.items()})
    if not norms:
        return torch.tensor(0.0)
    # In the order of the references, so that the last bit is that of a run in one process.
    stack = torch.stack([norms[position] for position in sorted(norms)])
    total: torch.Tensor = torch.linalg.vector_norm(stack, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of context {context_id} is {total.item():g}, which "
            f"cannot be clipped; error_if_nonfinite=False lets it pass"
        )
    on_all("clipping", _scale, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    return total


def _grads(context_id: int, refs: Sequence[RRef[Any]]) -> dict[int, torch.Tensor]:
    service: Autograd = current().worker.services[Autograd]
    params = [tensor_of(ref) for ref in refs]
    if service.contexts.find(context_id) is None:
        return {}
    found = service.gradients(context_id)
    return {i: found[param] for i, param in enumerate(params) if param in found}


def _norms(context_id: int, refs: Sequence[RRef[Any]], norm_type: float) -> dict[int, torch.Tensor]:
    def norm(grad: torch.Tensor) -> torch.Tensor:
        dense = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
        found: torch.Tensor = torch.linalg.vector_norm(dense, norm_type)
        return found.cpu()

    return {i: norm(grad) for i, grad in _grads(context_id, refs).items()}


def _scale(context_id: int, refs: Sequence[RRef[Any]], factor: torch.Tensor) -> None:
    for grad in _grads(context_id, refs).values():
        values = grad._values() if grad.layout is torch.sparse_coo else grad
        values.mul_(factor.to(values.device))
