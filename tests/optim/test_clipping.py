"""Clipping by the norm over all owners."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer, clip_grad_norm_
from tests.optim.programs import inputs, loss_of, losses, parameter, place, same, values
from tests.worlds import World, inside

SHAPES = [(3, 4), (5,), (2, 3), ()]


def clip(max_norm: float, norm_type: float) -> None:
    refs = [place(i, on, *shape) for i, (on, shape) in enumerate(zip([1, 0, 1, 1], SHAPES, strict=True))]
    here = [parameter(i, *shape) for i, shape in enumerate(SHAPES)]
    xs = inputs(0, SHAPES)
    ours, theirs = DistributedOptimizer(torch.optim.SGD, refs, lr=1.0), torch.optim.SGD(here, lr=1.0)
    for param, x in zip(here[:3], xs[:3], strict=True):  # the last one gets no gradient
        loss_of(param, x).backward()  # type: ignore[no-untyped-call]
    right = torch.nn.utils.clip_grad_norm_(here, max_norm, norm_type)
    theirs.step()
    with autograd.context() as context_id:
        autograd.backward(context_id, losses(refs[:3], xs[:3]))
        total = clip_grad_norm_(context_id, refs, max_norm, norm_type)
        ours.step(context_id)
    assert torch.equal(total, right)
    assert same(values(refs), here)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_norm_over_all_owners_is_clipped_as_in_one_process(pair: World, max_norm: float, norm_type: float) -> None:
    pair.on(0, clip, max_norm, norm_type)


class Table:
    def __init__(self, sparse: bool) -> None:
        self.weight, self.sparse = parameter(7, 10, 3), sparse

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, self.weight, sparse=self.sparse)

    def rref(self) -> Any:
        return rpc.RRef(self.weight)


@inside
def test_sparse_gradients_count_and_are_clipped_as_dense_ones_are() -> None:
    found = []
    for sparse in (True, False):
        table = rpc.remote(1, Table, args=(sparse,))
        ref = table.rpc_sync().rref()
        optimizer = DistributedOptimizer(torch.optim.SGD, [ref], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [table.rpc_sync().forward(torch.tensor([1, 3, 3])).square().sum()])
            total = clip_grad_norm_(context_id, [ref], 0.5)
            optimizer.step(context_id)
        found.append((total, ref.to_here().detach()))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0] > 0.5


@inside
def test_what_cannot_be_clipped_is_said() -> None:
    ref = place(0, 1, 3)
    with autograd.context() as context_id:
        assert clip_grad_norm_(context_id, [ref], 1.0) == 0
        autograd.backward(context_id, losses([ref], [torch.full((3,), math.inf)]))
        with pytest.raises(RuntimeError, match="is inf, which cannot be clipped"):
            clip_grad_norm_(context_id, [ref], 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=f"autograd context with id: {context_id}"):
        clip_grad_norm_(context_id, [ref], 1.0)
    with autograd.context() as context_id, pytest.raises(ValueError, match="params_rref is empty"):
        clip_grad_norm_(context_id, [], 1.0)
