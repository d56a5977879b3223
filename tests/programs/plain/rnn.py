"""A language model whose embedding and decoder live on a parameter server; the trainer has the LSTM.

MASTER_ADDR=localhost MASTER_PORT=29500 python rnn.py --epochs 3
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

SERVER, TRAINER = "ps", "trainer"
BATCH, TOKENS, INPUTS, HIDDEN, LENGTH, LAYERS = 5, 10, 2, 3, 3, 4
BATCHES = 5

Hidden = tuple[Tensor, Tensor]


def _call_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs on the owner."""
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method, or a function of a module, where the referenced object is."""
    return rpc.rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


def _parameter_rrefs(module: nn.Module) -> list[Any]:
    return [RRef(parameter) for parameter in module.parameters()]


def _uniform(parameters: Iterator[nn.Parameter], seed: int) -> None:
    """Draws weights from a generator of their own: remote constructors may run side by side."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data.uniform_(-0.1, 0.1, generator=generator)


def _seed(value: int) -> None:
    torch.manual_seed(value)


class EmbeddingTable(nn.Module):
    """Words to vectors."""

    def __init__(self, tokens: int, inputs: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(tokens, inputs)
        _uniform(self.parameters(), 1)

    def forward(self, words: Tensor) -> Tensor:
        vectors: Tensor = self.drop(self.encoder(words))
        return vectors


class Decoder(nn.Module):
    """Hidden states to scores of words."""

    def __init__(self, tokens: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, tokens)
        _uniform(self.parameters(), 2)

    def forward(self, states: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.drop(states))
        return scores


class RNNModel(nn.Module):
    """The whole: two parts on the server, one here."""

    def __init__(self, server: str, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = rpc.remote(server, EmbeddingTable, args=(TOKENS, INPUTS, dropout))
        self.rnn = nn.LSTM(INPUTS, HIDDEN, LAYERS, dropout=dropout)
        self.decoder = rpc.remote(server, Decoder, args=(TOKENS, HIDDEN, dropout))

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        vectors = _remote_method(EmbeddingTable.forward, self.embedding, words)
        states, hidden = self.rnn(vectors, hidden)
        return _remote_method(Decoder.forward, self.decoder, states), hidden

    def parameter_rrefs(self) -> list[Any]:
        """References to the parameters of all three parts."""
        rrefs: list[Any] = []
        rrefs.extend(_remote_method(_parameter_rrefs, self.embedding))
        rrefs.extend(_parameter_rrefs(self.rnn))
        rrefs.extend(_remote_method(_parameter_rrefs, self.decoder))
        return rrefs


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(BATCHES):
        words = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)
        # Scores are [BATCH, LENGTH, TOKENS]; the loss takes the second dimension for classes.
        yield words, torch.randint(LENGTH, (BATCH, TOKENS), generator=generator)


def run_trainer(epochs: int) -> None:
    hidden = torch.randn(LAYERS, LENGTH, HIDDEN), torch.randn(LAYERS, LENGTH, HIDDEN)
    model = RNNModel(SERVER)
    rrefs = model.parameter_rrefs()
    print(f"result parameters={len(rrefs)}")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.05)
    criterion = nn.CrossEntropyLoss()
    rpc.rpc_sync(SERVER, _seed, args=(4,))  # for the dropout there
    for epoch in range(epochs):
        total = 0.0
        for words, target in batches():
            with dist_autograd.context() as context_id:
                hidden[0].detach_()
                hidden[1].detach_()
                scores, hidden = model(words, hidden)
                loss = criterion(scores, target)
                dist_autograd.backward(context_id, [loss])
                if epoch == 0 and total == 0.0:
                    gradients = dist_autograd.get_gradients(context_id)
                    norm = sum(g.double().pow(2).sum().item() for g in gradients.values()) ** 0.5
                    print(f"result gradients_here={len(gradients)}")
                    print(f"result gradient_norm_here={norm!r}")
                optimizer.step(context_id)
            total += loss.item()
        print(f"result loss_{epoch}={total / BATCHES!r}", flush=True)
    for number, rref in enumerate(rrefs):
        print(f"result weight_{number}={rref.to_here().detach().double().abs().sum().item()!r}")


def run_worker(rank: int, world_size: int, epochs: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.manual_seed(rank)
    rpc.init_rpc(TRAINER if rank == 1 else SERVER, rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 1:
        run_trainer(epochs)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    mp.spawn(run_worker, args=(2, parser.parse_args().epochs), nprocs=2, join=True)
