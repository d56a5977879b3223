"""What several tests of autograd share."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import actorrpc as rpc
from actorrpc import autograd, session
from actorrpc.services.autograd import Autograd
from tests.worlds import World, dressed, run_body, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def among_three(body: Callable[[], None]) -> Callable[[World], None]:
    """Makes a test of a function that is to run on rank 0 of a standing world of three, in its main thread."""

    def test(trio: World) -> None:
        trio.on(0, run_body, body.__module__, body.__qualname__)

    return dressed(test, body)


class Fails(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ZeroDivisionError("in backward")


def service() -> Autograd:
    """Returns this worker's actor for gradients."""
    found: Autograd = session.current().worker.services[Autograd]
    return found


def nothing_left() -> None:
    """Waits until this worker has no context, no pass and no hold on a leaf."""
    mine = service()
    until(lambda: not mine.contexts.all(), what=f"contexts are left: {[c.id for c in mine.contexts.all()]}")
    until(lambda: not mine.leaves.running and not mine.leaves._held, what="a pass still runs")
    until(lambda: not mine.contexts._own, what="contexts of this worker's own are left")


def everywhere(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs something on all workers, by calls from here."""
    size = len(session.current().worker.peers)
    return [rpc.rpc_sync(rank, function, args=args) for rank in range(size)]


@functools.cache
def weight() -> Tensor:
    """A leaf of this process."""
    return torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64).requires_grad_()


def scaled(x: Tensor) -> Tensor:
    """Multiplies by this process's weight."""
    return x * weight()


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Makes a leaf."""
    return torch.tensor(values, dtype=dtype).requires_grad_()


def weight_gradient(context_id: int) -> Tensor | None:
    """Returns what a context holds for this process's weight."""
    return autograd.get_gradients(context_id).get(weight())


def gradient_at(worker: int | str, context_id: int) -> Tensor | None:
    """Returns what a context holds for another worker's weight."""
    found: Tensor | None = rpc.rpc_sync(worker, weight_gradient, args=(context_id,))
    return found


def same(found: Tensor | None, expected: Tensor | Sequence[float]) -> None:
    """Fails unless a gradient is there and right."""
    assert found is not None, f"there is no gradient; expected {expected}"
    expected = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected)


def put_hook(x: Any, hook: Callable[[Tensor], object]) -> Any:
    """Puts a hook on a tensor; torch's own method has no types."""
    return x.register_hook(hook)


def put_accumulated_hook(x: Any, hook: Callable[[Tensor], object]) -> Any:
    """Puts a hook on a leaf, for when its gradient has accumulated."""
    return x.register_post_accumulate_grad_hook(hook)


def pause(seconds: float) -> None:
    """Takes time."""
    time.sleep(seconds)
