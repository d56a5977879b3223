"""The server waits for the gradients of all trainers, steps once, and answers all of them with the new weights.

No thread waits meanwhile: `update` returns a future, and the trainers' calls are answered when it is completed. The
server is an actor, whose mailbox serves one message at a time, so it needs no lock.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import actorrpc as rpc

FEATURES, CLASSES, BATCH = 20, 4, 64
Weights = dict[str, Tensor]


def make_model() -> nn.Module:
    """Makes the model, the same everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generates points and their classes: which of some fixed directions they point to most."""
    directions = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
    points = torch.randn(BATCH, FEATURES, generator=generator)
    return points, (points @ directions.t()).argmax(1)


class Server(rpc.Actor):
    """Holds the weights. Arguments: see `__main__`."""

    def __init__(self, trainers: int, lr: float) -> None:
        torch.set_num_threads(1)
        self.trainers = trainers
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.come = 0
        self.updated: rpc.Future[Weights] = rpc.Future()
        self.steps = 0

    def weights(self) -> Weights:
        """Returns the weights."""
        return self.model.state_dict()

    @rpc.functions.async_execution
    def update(self, gradients: list[Tensor]) -> rpc.Future[Weights]:
        """Takes one trainer's gradients. The answer comes when all trainers' have come: the new weights."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            share = gradient / self.trainers
            parameter.grad = share if parameter.grad is None else parameter.grad + share
        self.come += 1
        answer = self.updated
        if self.come == self.trainers:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps, self.come, self.updated = self.steps + 1, 0, rpc.Future()
            answer.set_result({name: value.clone() for name, value in self.model.state_dict().items()})
        return answer

    def accuracy(self) -> float:
        """Returns the share of fresh points whose class the model finds."""
        points, classes = make_batch(torch.Generator().manual_seed(2))
        with torch.no_grad():
            return float((self.model(points).argmax(1) == classes).float().mean())


@dataclass
class Result:
    """What training came to."""

    steps: int
    accuracy: float


class Trainer(rpc.Actor):
    """Computes gradients on batches of its own. The first one conducts. Arguments: see `__main__`."""

    def __init__(self, steps: int) -> None:
        torch.set_num_threads(1)
        self.steps = steps
        self.model = make_model()

    def train(self) -> None:
        """Trains until all steps are done."""
        server = self.world.server[0]
        generator = torch.Generator().manual_seed(100 + self.index)
        self.model.load_state_dict(server.rpc_sync().weights())
        for _ in range(self.steps):
            points, classes = make_batch(generator)
            self.model.zero_grad()
            nn.functional.cross_entropy(self.model(points), classes).backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in self.model.parameters()]
            self.model.load_state_dict(server.rpc_sync().update(gradients))

    def main(self) -> Result | None:
        """Has all trainers train, and asks how well it went."""
        if self.index > 0:
            return None
        self.world.trainer.rpc_sync(timeout=0).train()
        server = self.world.server[0]
        return Result(self.steps, server.rpc_sync().accuracy())
