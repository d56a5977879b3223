"""One run of torch's engine for a pass: where it begins, how nodes know the pass, where the gradients of leaves go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from actorrpc.services.leaves import Survey, first_nodes, given, graph_task
from actorrpc.services.recording import OWN_NODES, SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

    from actorrpc.services.leaves import Leaves
    from actorrpc.services.passes import Pass

_run: Any = torch.autograd.Variable._execution_engine.run_backward


def run(
    by: Pass,
    leaves: Leaves,
    roots: Sequence[torch.Tensor],
    token: torch.Tensor | None,
    known: Sequence[tuple[GradientEdge, torch.Tensor]],
    retain: bool,
    apart: bool,
) -> None:
    """Runs the engine; what the leaves get is in the pass's `grads` afterwards.

    Arguments:
        by: the pass.
        leaves: the worker's.
        roots: scalars to begin at.
        token: the last token, to begin at too; None where it need not.
        known: other places to begin at, with the gradients there.
        retain: whether the graph is kept.
        apart: whether the engine has other threads for a part of the graph.

    Raises:
        BaseException: what a node or hook raised.
    """
    outputs: tuple[Any, ...] = tuple(roots)
    seeds = tuple(map(torch.ones_like, roots))
    firsts = first_nodes(roots)
    graph = Survey(firsts)
    if token is not None:
        outputs, seeds = (*outputs, token), (*seeds, SEED)
        if token.grad_fn not in graph.seen:  # else it has its turn after those
            graph.add((token.grad_fn,))
            firsts.add(token.grad_fn)
    if known:
        edges, grads = zip(*known, strict=True)
        outputs, seeds = outputs + edges, seeds + grads
        more = {edge.node for edge in edges}
        graph.add(more)
        firsts |= more
    if not outputs:
        return
    ends = leaves.unseen(graph) if firsts.isdisjoint(graph.leaves) else None
    ties: list[Any] = []
    if token is not None and not (roots or known or apart):
        leaves.entering.found = by
    elif ends is None or not OWN_NODES.isdisjoint(graph.kinds):

        def tie(_: Any) -> None:
            by.tie(graph_task())

        ties = [node.register_prehook(tie) for node in firsts]  # before the hooks on leaves, which may be among them
    kept = leaves.hold(graph.leaves) if ends is None else []
    # What torch.autograd.backward does, but for its checks, which are made; given gradients, it imports sympy.
    try:
        if ends is None:
            torch.autograd.graph._engine_run_backward(
                outputs, seeds, retain, False, (), allow_unreachable=True, accumulate_grad=True
            )
        else:
            found = _run(outputs, seeds, retain, False, tuple(ends), allow_unreachable=True, accumulate_grad=False)
            by.grads = given(ends, found)
    finally:
        for one in ties:
            one.remove()
        leaves.entering.found = None
        if kept:
            leaves.release(by, kept)
        leaves.running.pop(by.task, None)
