"""What a training step costs, beside ``torch.distributed.rpc``: ``python -m benchmarks.train``.

One step of an MLP that lives on another worker: a context, the forward pass there, the backward pass over both workers,
and a step of the distributed optimizer. Both libraries run the same program, in alternation; see `benchmarks.pairs`.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import OURS, TORCH, Lane, Measures, Plan, compare, latency, rpc_world
from benchmarks.rows import Result, Row, results_of, run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 16
WIDTHS = (16, 1024)
"""Widths of the MLP."""
TRIPS = (10, 40)
"""Round trips to a worker that keeps a hidden state."""
STEPS = [
    Row("16", "training step, MLP of width 16", aim=2.2, least=1.5),
    Row("1024", "training step, MLP of width 1024", aim=1.4, least=1.1),
]
ROWS = [*STEPS, *(Row(f"trips {trips}", f"backward over {trips} recurrent trips") for trips in TRIPS)]
MOST_GROWTH = 5.0
"""How many times as long as 10 round trips 40 may take."""


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Cell:
    """A recurrent cell with a hidden state."""

    def __init__(self) -> None:
        self.weight = (torch.eye(16) * 0.5).requires_grad_()
        self.state = torch.zeros(16, 16)

    def reset(self) -> None:
        self.state = torch.zeros(16, 16)

    def step(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.state @ self.weight + x)
        return self.state


def parameters_of(rpc_name: str, module: Any) -> list[Any]:
    """Returns references to the parameters of a module of this worker."""
    rpc: Any = importlib.import_module(rpc_name)
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


@contextlib.contextmanager
def training(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Gives the measures of a training step by width, and of a backward pass by round trips."""
    with rpc_world(lane, rank, port) as rpc:
        yield measures_of(rpc, lane.library) if rank == 0 else {}


def measures_of(rpc: Any, library: str) -> Measures:
    """Returns the measures by their keys."""
    parent = library.removesuffix(".rpc")  # torch.distributed.rpc has its siblings beside it
    autograd: Any = importlib.import_module(f"{parent}.autograd")
    optim: Any = importlib.import_module(f"{parent}.optim")

    def stepping(width: int) -> Callable[[], None]:
        module = rpc.remote("w1", Mlp, args=(width,))
        parameters = rpc.rpc_sync("w1", parameters_of, args=(library, module))
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
        x, wanted = torch.randn(BATCH, width), torch.randn(BATCH, width)

        def step() -> None:
            with autograd.context() as context_id:
                loss = nn.functional.mse_loss(module.rpc_sync().forward(x), wanted)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)

        return step

    cell, start = rpc.remote("w1", Cell), torch.randn(16, 16, requires_grad=True)

    def trip(trips: int) -> float:
        with autograd.context() as context_id:
            cell.rpc_sync().reset()
            value = start * 1
            for _ in range(trips):
                value = cell.rpc_sync().step(value)
            root = [value.sum()]
            begun = time.perf_counter_ns()
            autograd.backward(context_id, root)
            return (time.perf_counter_ns() - begun) / 1000

    def tripping(trips: int) -> Callable[[float], float]:
        def measure(seconds: float) -> float:
            times: list[float] = []
            end = time.perf_counter() + seconds
            while not times or time.perf_counter() < end:
                times.append(trip(trips))
            return statistics.median(times)

        return measure

    steps = {str(width): latency(stepping(width), 1) for width in WIDTHS}
    return {**steps, **{f"trips {trips}": tripping(trips) for trips in TRIPS}}


def _measured(rows: Sequence[Row], plan: Plan) -> list[Result]:
    lanes = [Lane("torch", training, TORCH), Lane("ours", training, OURS)]
    return results_of(rows, compare(lanes, [row.key for row in rows], plan, "training"))


def steps(plan: Plan) -> list[Result]:
    """What training steps cost."""
    return _measured(STEPS, plan)


def all_of_them(plan: Plan) -> list[Result]:
    """What training steps cost, and how a backward pass grows with its round trips."""
    return _measured(ROWS, plan)


def growth(results: Sequence[Result]) -> list[str]:
    """Complains of a backward pass that takes more than its share for more round trips."""
    times = {x.row.key: x.ours for x in results}
    few, many = times["trips 10"], times["trips 40"]
    if few and many and many > MOST_GROWTH * few:
        return [f"40 round trips take {many / few:.1f} times as long as 10, {MOST_GROWTH:g} at most are wanted"]
    return []


def main(arguments: list[str] | None = None) -> int:
    return run_command("benchmarks.train", "What a training step costs.", all_of_them, arguments, growth)


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.train import main as main_by_name

    sys.exit(main_by_name())
