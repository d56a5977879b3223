"""What a training step costs, beside ``torch.distributed.rpc``: ``python -m benchmarks.train``.

One step of an MLP that lives on another worker: a context, the forward pass there, the backward pass over both workers,
and a step of the distributed optimizer. Both libraries run the same program in turn; see `benchmarks.calls`.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Figures, Row, median_us, medians, run_both

BATCH = 16
WIDTHS = {16: 400, 1024: 60}
"""Widths of the MLP, and how many steps of each are measured."""
TRIPS = {10: 40, 40: 15}
"""Round trips to a worker that keeps a hidden state, and how many backward passes over each are measured."""
ROWS = [
    *(Row(str(width), f"step of an MLP of width {width}", "us") for width in WIDTHS),
    *(Row(f"trips {trips}", f"backward over {trips} recurrent trips", "us") for trips in TRIPS),
]
LEAST = {"16": 1.3, "1024": 1.0}
"""How many times as fast --check wants it."""
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


def trainer(library: str) -> Figures:
    rpc: Any = importlib.import_module(library)
    parent = library.removesuffix(".rpc")  # torch.distributed.rpc has its siblings beside it
    autograd: Any = importlib.import_module(f"{parent}.autograd")
    optim: Any = importlib.import_module(f"{parent}.optim")
    figures = {}
    for width, steps in WIDTHS.items():
        module = rpc.remote("server", Mlp, args=(width,))
        parameters = rpc.rpc_sync("server", parameters_of, args=(library, module))
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
        x, wanted = torch.randn(BATCH, width), torch.randn(BATCH, width)

        def step() -> None:
            with autograd.context() as context_id:
                loss = nn.functional.mse_loss(module.rpc_sync().forward(x), wanted)  # noqa: B023
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)  # noqa: B023

        figures[str(width)] = median_us(step, steps, warm_up=steps // 4)

    cell, start = rpc.remote("server", Cell), torch.randn(16, 16, requires_grad=True)
    for trips, passes in TRIPS.items():
        times = []
        for _ in range(passes):
            with autograd.context() as context_id:
                cell.rpc_sync().reset()
                value = start * 1
                for _ in range(trips):
                    value = cell.rpc_sync().step(value)
                root = [value.sum()]
                begun = time.perf_counter_ns()
                autograd.backward(context_id, root)
                times.append(time.perf_counter_ns() - begun)
        figures[f"trips {trips}"] = statistics.median(times) / 1000
    return figures


def run_rank(library: str, rank: int, port: int) -> Figures:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's shutdown warns of torch's own code
    warnings.filterwarnings("ignore", ".*support for functional optimizers")
    rpc: Any = importlib.import_module(library)
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2)
    figures = trainer(library) if rank == 0 else {}
    rpc.shutdown()
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description="What a training step costs.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each library runs (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's figures there")
    parser.add_argument("--check", action="store_true", help="fail unless actorrpc is as far ahead as it should be")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    theirs: list[Figures] = []
    ours: list[Figures] = []
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
        run_both(i, run_rank, [(theirs, "torch.distributed.rpc"), (ours, "actorrpc")])
    a, b = medians(theirs), medians(ours)
    print(f"{'median of the rounds':36}{'unit':>9}{'torch.distributed.rpc':>24}{'actorrpc':>24}{'times ahead':>13}")
    for row in ROWS:
        x, y = a[row.key], b[row.key]
        print(f"{row.title:36}{row.unit:>9}{x:24,.0f}{y:24,.0f}{row.ahead(x, y):13.2f}")
    if options.json:
        record = {"median": {"theirs": a, "ours": b}, "rounds": {"theirs": theirs, "ours": ours}}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    late = [key for key, least in LEAST.items() if options.check and a[key] < least * b[key]]
    for key in late:
        print(f"width {key}: {a[key] / b[key]:.2f} times as fast, {LEAST[key]} is wanted", file=sys.stderr)
    growth = b["trips 40"] / b["trips 10"]
    if options.check and growth > MOST_GROWTH:
        print(
            f"40 round trips take {growth:.1f} times as long as 10, {MOST_GROWTH:g} at most are wanted", file=sys.stderr
        )
        return 1
    return 1 if late else 0


if __name__ == "__main__":
    # Under its importable name, so that what is called travels by a name that the callee can import.
    from benchmarks.train import main as main_by_name

    sys.exit(main_by_name())
