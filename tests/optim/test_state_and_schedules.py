"""Checkpoints of a DistributedOptimizer, and torch's schedulers over it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler

import actorrpc as rpc
from actorrpc.optim import DistributedOptimizer
from tests.optim.programs import give_value, inputs, parameter, place, same, step, step_here, values
from tests.worlds import World, inside

if TYPE_CHECKING:
    from pathlib import Path

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
SHAPES = [(2, 3), (3,), (2, 2)]


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]


def make(kind: str, owners: list[int]) -> tuple[list[rpc.RRef[Any]], DistributedOptimizer, Any]:
    refs = [place(i, on, *shape) for i, (on, shape) in enumerate(zip(owners, SHAPES, strict=True))]
    cls, kwargs = KINDS[kind]
    optimizer = DistributedOptimizer(cls, groups(refs), **kwargs)
    return refs, optimizer, lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def first_half(kind: str, path: str) -> None:
    refs, optimizer, scheduler = make(kind, [1, 0, 1])
    for number in range(3):
        step(optimizer, refs, inputs(number, SHAPES))
        scheduler.step()
    kept = {"params": values(refs), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(kept, path)


def second_half(kind: str, path: str, owners: list[int]) -> dict[str, Any]:
    refs, optimizer, scheduler = make(kind, owners)
    kept = torch.load(path)
    for ref, value in zip(refs, kept["params"], strict=True):
        rpc.rpc_sync(ref.owner(), give_value, args=(ref, value))
    scheduler.load_state_dict(kept["scheduler"])
    optimizer.load_state_dict(kept["optimizer"])
    for number in range(3, 6):
        step(optimizer, refs, inputs(number, SHAPES))
        scheduler.step()
    return {"params": values(refs), "optimizer": optimizer.state_dict(), "lrs": scheduler.get_last_lr()}


def uninterrupted(kind: str) -> dict[str, Any]:
    here = [parameter(i, *shape) for i, shape in enumerate(SHAPES)]
    cls, kwargs = KINDS[kind]
    optimizer = cls(groups(here), **kwargs)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for number in range(6):
        step_here(optimizer, here, inputs(number, SHAPES))
        scheduler.step()
    return {"params": here, "optimizer": optimizer.state_dict(), "lrs": scheduler.get_last_lr()}


@pytest.mark.parametrize("kind,owners", [("SGD", [1, 0, 1]), ("Adam", [0, 1, 1]), ("Adagrad", [1, 0, 1])])
def test_training_goes_on_from_a_file_in_another_world_as_if_it_had_not_been_interrupted(
    tmp_path: Path, kind: str, owners: list[int]
) -> None:
    path = str(tmp_path / "kept")
    with World(2) as world:
        world.on(0, first_half, kind, path)
    with World(2) as world:  # for Adam with its parameters on other workers than before
        resumed = world.on(0, second_half, kind, path, owners)
    assert same(resumed, uninterrupted(kind))


@inside
def test_a_state_of_one_process_can_be_loaded_and_the_other_way_round() -> None:
    here = [parameter(0, 3), parameter(1, 3)]
    refs = [place(0, 1, 3), place(1, 0, 3)]
    theirs, ours = torch.optim.Adam(here, lr=0.1), DistributedOptimizer(torch.optim.Adam, refs, lr=0.5)
    xs = inputs(0, [(3,)] * 2)
    step_here(theirs, here, xs)
    step(ours, refs, xs)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.1
    assert same(ours.state_dict(), theirs.state_dict())
    step(ours, refs, xs)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state[here[0]]["step"] == 2


@inside
def test_a_state_of_another_optimizer_is_refused() -> None:
    one = DistributedOptimizer(torch.optim.SGD, [place(0, 1, 3)], lr=0.1)
    two = DistributedOptimizer(torch.optim.SGD, [place(0, 1, 3), place(1, 0, 3)], lr=0.1)
    with pytest.raises(ValueError, match=r"have \[1\] parameters, those of this one \[2\]"):
        two.load_state_dict(one.state_dict())


@inside
def test_an_option_that_was_changed_and_not_yet_used_is_saved() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [place(0, 1, 3)], lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.7
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.7


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def schedule(name: str, kind: str) -> None:
    warnings.simplefilter("error", UserWarning)  # "scheduler.step() before optimizer.step()"
    cls, kwargs = KINDS[kind]
    refs = [place(i, on, *shape) for i, (on, shape) in enumerate(zip([1, 0, 1], SHAPES, strict=True))]
    here = [parameter(i, *shape) for i, shape in enumerate(SHAPES)]
    ours, theirs = DistributedOptimizer(cls, groups(refs), **kwargs), cls(groups(here), **kwargs)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    lrs = set()
    for number in range(6):
        xs = inputs(number, SHAPES)
        step(ours, refs, xs)
        step_here(theirs, here, xs)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        lrs.add(theirs.param_groups[0]["lr"])
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
        assert same(values(refs), here), f"step {number}"
    assert same(ours.state_dict(), theirs.state_dict())  # momentum as well, which OneCycleLR and CyclicLR change
    assert len(lrs) > 1


def test_every_scheduler_of_torch_is_among_the_cases() -> None:
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_work_as_they_do_in_one_process(pair: World, name: str, kind: str) -> None:
    pair.on(0, schedule, name, kind)
