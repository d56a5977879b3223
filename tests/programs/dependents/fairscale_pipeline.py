"""A pipeline of FairScale: four layers on two workers, trained from a third over distributed autograd."""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

warnings.filterwarnings("ignore", category=FutureWarning)  # names of torch.cuda.amp that FairScale still uses

from fairscale.experimental.nn.distributed_pipeline import (  # noqa: E402
    DistributedLoss,
    DistributedPipeline,
    PipelineModulesGraph,
)


class Layer(nn.Module):
    """Its weights come from a generator of its own: layers of one worker are made at the same time."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(seed)) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Sum(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right


def train() -> None:
    first = RemoteModule("stage1/cpu", Layer, (8, 16, 1))
    second = RemoteModule("stage2/cpu", Layer, (16, 16, 2))
    third = RemoteModule("stage2/cpu", Layer, (16, 16, 3))
    last = RemoteModule("stage1/cpu", Sum)
    graph = PipelineModulesGraph()
    graph.add_sequence([first], [0])
    graph.add_sequence([second, third], [first])
    graph.add_layer(last, [first, third])
    pipeline = DistributedPipeline(graph, chunks=4, checkpoint="never")
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=0.5)
    mean_square = DistributedLoss(nn.MSELoss)
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
    target = data.repeat(1, 2).cos()
    for step in range(5):
        with dist_autograd.context() as context:
            loss = mean_square(pipeline(data), rpc.RRef(target)).to_here()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"result loss{step}={loss.item()}", flush=True)


def run(rank: int, port: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    rpc.init_rpc("master" if rank == 0 else f"stage{rank}", rank=rank, world_size=3)
    if rank == 0:
        print("library", rpc.init_rpc.__module__, flush=True)
        train()
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="29500")
    mp.spawn(run, args=(parser.parse_args().port,), nprocs=3)
