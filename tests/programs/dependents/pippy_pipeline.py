"""PiPPy's pipeline driver: a traced model in three stages, one on each of three workers, forward and backward."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed.rpc as rpc
from pippy import run_pippy
from pippy.IR import MultiUseParameterConfig, Pipe, TrivialLossWrapper, pipe_split
from pippy.microbatch import LossReducer, TensorChunkSpec
from pippy.PipelineDriver import PipelineDriver1F1B, PipelineDriverFillDrain
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        pipe_split()
        x = torch.tanh(self.second(x))
        pipe_split()
        x = self.third(x)
        return x  # noqa: RET504 - of a known type


def gradient_of(executor: rpc.RRef[Any], name: str) -> torch.Tensor:
    gradient = executor.local_value().mod.get_parameter(name).grad
    assert isinstance(gradient, torch.Tensor)
    return gradient


def master(_: object, arguments: argparse.Namespace) -> None:
    print("library", rpc.init_rpc.__module__, flush=True)
    torch.manual_seed(3)
    model, data, target = Model(), torch.randn(12, 6), torch.randn(12, 3)
    loss_of = nn.MSELoss(reduction="sum")
    loss_of(model(data), target).backward()
    pipe = Pipe.from_tracing(TrivialLossWrapper(model, loss_of), MultiUseParameterConfig.REPLICATE)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    places = {place: pipe.remap_qualname(place) for place, _ in pipe.split_gm.named_parameters()}
    for kind in (PipelineDriverFillDrain, PipelineDriver1F1B):
        driver = kind(
            pipe,
            3,
            arguments.world_size,
            args_chunk_spec=(TensorChunkSpec(0), TensorChunkSpec(0)),
            kwargs_chunk_spec={},
            output_chunk_spec=LossReducer(0.0, lambda a, b: a + b),
            _debug_mask_minibatches=False,
        )
        # Two passes, whose gradients add up.
        for number in range(2):
            print(f"result loss {number} of {kind.__name__}={driver(data, target).item()}", flush=True)
        for place, old in places.items():
            (stage, inner), name = place.split(".", 1), old.removeprefix("module.")
            executor = driver.remote_stage_executor_rrefs[stage][1]
            gradient = rpc.rpc_sync(executor.owner(), gradient_of, args=(executor, inner))
            assert torch.allclose(gradient, 2 * expected[name], atol=1e-4), name
            print(f"result {name} of {kind.__name__}={gradient.flatten().tolist()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", dest="master_port", default="29500")
    run_pippy(
        master,
        argparse.Namespace(
            **vars(parser.parse_args()), world_size=3, rank=-1, master_addr="localhost", cuda=0, num_worker_threads=32
        ),
    )
