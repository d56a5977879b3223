"""A parameter server that answers all trainers at once: each waits for the update that all of their gradients make.

MASTER_ADDR=localhost MASTER_PORT=29500 python batch_parameter_server.py --trainers 2
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.futures import Future

SERVER, TRAINER = "ps", "trainer{}"
INPUTS, CLASSES, BATCH = 8, 4, 16


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class BatchUpdateParameterServer:
    """Gathers the gradients of as many trainers as there are, then makes one step."""

    def __init__(self, trainers: int) -> None:
        self.model = make_model()
        self.lock = threading.Lock()
        self.future_model: Future[nn.Module] = Future()
        self.trainers = trainers
        self.received = 0
        self.updates = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> nn.Module:
        return self.model

    def get_updates(self) -> int:
        return self.updates

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server: Any, gradients: list[Tensor]) -> Future[nn.Module]:
        """Adds gradients; the future has the model when the last trainer's are there."""
        self: BatchUpdateParameterServer = server.local_value()
        with self.lock:
            self.received += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
            future = self.future_model
            if self.received >= self.trainers:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.trainers
                self.received = 0
                self.updates += 1
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future_model = Future()
        return future


class Trainer:
    """Works out gradients of the model that it was given last."""

    def __init__(self, server: Any, number: int) -> None:
        self.server, self.number = server, number
        self.loss = nn.CrossEntropyLoss()
        self.generator = torch.Generator().manual_seed(number)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (BATCH,), generator=self.generator)
        inputs = torch.randn(BATCH, INPUTS, generator=self.generator)
        inputs[torch.arange(BATCH), labels] += 2.0
        return inputs, labels

    def train(self, steps: int) -> list[float]:
        model = self.server.rpc_sync().get_model()
        losses = []
        for _ in range(steps):
            inputs, labels = self.next_batch()
            loss = self.loss(model(inputs), labels)
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.server.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.server, [p.grad for p in model.cpu().parameters()]),
            )
        return losses


def run_trainer(server: Any, number: int, steps: int) -> list[float]:
    return Trainer(server, number).train(steps)


def run_server(trainers: int, steps: int) -> None:
    server = rpc.RRef(BatchUpdateParameterServer(trainers))
    futures = [
        rpc.rpc_async(TRAINER.format(number), run_trainer, args=(server, number, steps))
        for number in range(1, trainers + 1)
    ]
    for number, losses in enumerate(torch.futures.wait_all(futures), 1):
        print(f"result losses_{number}={losses}")
    print(f"result updates={server.rpc_sync().get_updates()}")
    for name, parameter in server.local_value().model.named_parameters():
        print(f"result {name}={parameter.detach().double().abs().sum().item()!r}")


def run(rank: int, trainers: int, steps: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    name = TRAINER.format(rank) if rank else SERVER
    rpc.init_rpc(name, rank=rank, world_size=trainers + 1, rpc_backend_options=options)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    # A trainer may take any time. (As an option, 0 would be the time to meet as well.)
    rpc._set_rpc_timeout(0)  # type: ignore[attr-defined]
    if rank == 0:
        run_server(trainers, steps)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    mp.spawn(run, args=(chosen.trainers, chosen.steps), nprocs=chosen.trainers + 1, join=True)
