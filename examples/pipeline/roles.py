"""A small convolutional net in two stages on two workers. The driver cuts each batch into micro-batches.

While the second stage works on one micro-batch, the first one works on the next: the driver hands stage 1's future to
stage 2 as a reference, and does not touch what flows between them. Gradients flow back the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer

SIZE, CLASSES = 12, 4
STAGES = ("stage:0", "stage:1")


def make_batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generates pictures with a bright bar, of shape [count, 1, SIZE, SIZE]; its place and direction is the class."""
    pictures = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    for picture, number in zip(pictures, classes.tolist(), strict=True):
        line = 2 + (number % 2) * (SIZE // 2)
        view = picture[0] if number < 2 else picture[0].t()
        view[line : line + 2] += 1.0
    return pictures, classes


class Stage(nn.Module):
    """One half of the net. It takes references to tensors, and fetches them itself.

    Arguments:
        number: 0 for the convolutions, 1 for the classifier.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        if number == 0:
            self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        else:
            self.layers = nn.Sequential(
                nn.Conv2d(8, 16, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(3),
                nn.Flatten(),
                nn.Linear(144, CLASSES),
            )

    def forward(self, x: "rpc.RRef[Tensor]") -> Tensor:
        """Takes a reference to the input; returns the output."""
        y: Tensor = self.layers(x.to_here())
        return y

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Returns references to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """Both stages, for their driver.

    Arguments:
        split: how many micro-batches a batch is cut into.
    """

    def __init__(self, split: int) -> None:
        self.split = split
        self.stages = [rpc.remote(name, Stage, args=(number,)) for number, name in enumerate(STAGES)]

    def __call__(self, batch: Tensor) -> Tensor:
        """Returns the scores of a batch."""
        first, second = self.stages
        futures = [
            second.rpc_async().forward(first.remote().forward(rpc.RRef(piece))) for piece in batch.chunk(self.split)
        ]
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Returns references to all parameters."""
        return [ref for stage in self.stages for ref in stage.rpc_sync().parameter_rrefs()]


@dataclass
class Result:
    """What training came to: the loss of each step, and the share of fresh pictures that are classified right."""

    losses: list[float]
    accuracy: float


def drive(steps: int, batch: int, split: int) -> Result:
    """Trains the pipeline; the driver's program. Arguments: see `__main__`."""
    torch.set_num_threads(1)
    pipeline, losses = Pipeline(split), []
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameter_rrefs(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pictures, classes = make_batch(batch, generator)
        with autograd.context() as context_id:
            loss = nn.functional.cross_entropy(pipeline(pictures), classes)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    pictures, classes = make_batch(200, generator)
    with torch.no_grad():
        accuracy = (pipeline(pictures).argmax(1) == classes).float().mean().item()
    return Result(losses, accuracy)
