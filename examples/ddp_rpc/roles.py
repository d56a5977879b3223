"""Each trainer has the dense part, which DistributedDataParallel keeps equal; the large sparse table is on a server.

The two do not know of each other: DDP averages the dense gradients over its own process group, while the pass that goes
through the server brings the sparse ones there. All gradients of a trainer's step are in its autograd context.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer

SERVER = "server:0"
WORDS, WIDTH, CLASSES, BATCH, LENGTH = 500, 16, 4, 32, 6


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generates bags of words, of shape [BATCH, LENGTH], and their classes: the most frequent word modulo CLASSES."""
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    words = torch.randint(WORDS // CLASSES, (BATCH, LENGTH), generator=generator) * CLASSES
    return words + classes[:, None], classes


class Table(nn.Module):
    """The sparse part: the mean vector of a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        """Takes words of shape [bags, words]; returns vectors of shape [bags, WIDTH]."""
        vectors: Tensor = self.bags(words)
        return vectors

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Returns references to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Dense(nn.Module):
    """The dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, vectors: Tensor) -> Tensor:
        """Takes vectors of shape [bags, WIDTH]; returns scores of shape [bags, CLASSES]."""
        scores: Tensor = self.layers(vectors)
        return scores


@dataclass
class Result:
    """What training came to: each trainer's mean loss in the first and the last tenth, and whether all have the same
    dense part at the end.
    """

    first: float
    last: float
    equal: bool


class Trainer(rpc.Actor):
    """Trains. The first one conducts. Arguments: see `__main__`."""

    def __init__(self, trainers: int, steps: int) -> None:
        torch.set_num_threads(1)
        self.trainers, self.steps = trainers, steps
        self.store: TCPStore | None = None

    def train(self, table: rpc.RRef[Table], host: str, port: int) -> tuple[list[float], list[Tensor]]:
        """Trains in a process group of all trainers.

        Arguments:
            table: the sparse part.
            host, port: where the first trainer has the group's store.

        Returns the loss of each step, and the dense part's weights at the end.
        """
        store = self.store or TCPStore(host, port, self.trainers, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.index, world_size=self.trainers)
        try:
            model = DistributedDataParallel(Dense())
            parameters = [*table.rpc_sync().parameter_rrefs(), *(rpc.RRef(p) for p in model.parameters())]
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
            generator, losses = torch.Generator().manual_seed(self.index), []
            for _ in range(self.steps):
                words, classes = make_batch(generator)
                with autograd.context() as context_id:
                    loss = nn.functional.cross_entropy(model(table.rpc_sync().forward(words)), classes)
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
            return losses, [parameter.detach() for parameter in model.parameters()]
        finally:
            dist.destroy_process_group()

    def main(self) -> Result | None:
        """Has all trainers train side by side."""
        if self.index > 0:
            return None
        table = rpc.remote(SERVER, Table)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.store = TCPStore(host, 0, self.trainers, is_master=True, wait_for_workers=False)
        runs = self.world.trainer.rpc_sync(timeout=0).train(table, host, self.store.port)
        tenth = max(1, self.steps // 10)
        first = sum(sum(losses[:tenth]) for losses, _ in runs) / (tenth * len(runs))
        last = sum(sum(losses[-tenth:]) for losses, _ in runs) / (tenth * len(runs))
        equal = all(torch.equal(a, b) for _, weights in runs for a, b in zip(weights, runs[0][1], strict=True))
        return Result(first, last, equal)
