"""Steps of torch optimizers without what torch puts around each, where nobody would see it.

`torch.optim.Optimizer` wraps the `step` of every class in one that opens a span for profilers and calls hooks. That
costs as much as the step of a small model itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as _torchs

if TYPE_CHECKING:
    from collections.abc import Callable

_profiler_enabled: Any = torch._C._autograd._profiler_enabled
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler is on, or a hook on the optimizer's steps, or on all optimizers'."""
    return bool(
        _profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torchs._global_optimizer_pre_hooks
        or _torchs._global_optimizer_post_hooks
    )


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Returns what makes a step of an optimizer: its `step`, or what torch has wrapped in it, if nobody watches."""
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__ or watched(optimizer):
        return optimizer.step
    return functools.partial(step.__wrapped__, optimizer)
