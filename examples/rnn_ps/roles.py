"""The trainers. The server needs no class of its own: it is a worker that only serves."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer, clip_grad_norm_
from examples.rnn_ps.corpus import Corpus, batches, make_corpus, read_text
from examples.rnn_ps.model import Decoder, EmbeddingTable, Hidden, RNNModel, make_lstm

SERVER = "server:0"
CLIP = 0.5


@dataclass(frozen=True)
class Settings:
    """What a run is made of; see `__main__` for the meanings."""

    out: Path
    epochs: int = 8
    width: int = 128
    layers: int = 1
    dropout: float = 0.3
    lr: float = 3e-3
    columns: int = 20
    steps: int = 35
    seed: int = 1
    limit: int | None = None
    """At most so many batches an epoch; None for all."""


@dataclass
class Epoch:
    """How an epoch went: perplexities of the training and the validation text."""

    number: int
    train: float
    valid: float
    seconds: float


@dataclass
class Shared:
    """What trainers share: the parts on the server."""

    embedding: rpc.RRef[EmbeddingTable]
    decoder: rpc.RRef[Decoder]


def parameter_references(module: nn.Module) -> list[rpc.RRef[nn.Parameter]]:
    """Returns a reference to each parameter of a module of this worker."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]


def remote_parameters(module: rpc.RRef[Any]) -> list[rpc.RRef[nn.Parameter]]:
    """The same for a module of another worker."""
    found: list[rpc.RRef[nn.Parameter]] = rpc.rpc_sync(module.owner(), _parameters_of, args=(module,))
    return found


def _parameters_of(module: rpc.RRef[Any]) -> list[rpc.RRef[nn.Parameter]]:
    return parameter_references(module.local_value())


class Trainer(rpc.Actor):
    """Has an LSTM of its own, and uses the embedding and the decoder on the server. The first one conducts.

    With several trainers, each reads some of the columns of the text and steps whenever it is ready, as parameter
    servers do; the LSTMs are averaged after every epoch.
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        self.corpus: Corpus = make_corpus(read_text())
        self.lstm = make_lstm(settings.width, settings.layers, settings.dropout, settings.seed)
        torch.manual_seed(settings.seed + self.index)

    def begin(self, shared: Shared) -> None:
        """Takes the parts on the server into use."""
        self.shared = shared
        embed, decode = shared.embedding.rpc_sync().forward, shared.decoder.rpc_sync().forward
        self.model = RNNModel(embed, self.lstm, decode)
        self.parameters = [
            *remote_parameters(shared.embedding),
            *parameter_references(self.lstm),
            *remote_parameters(shared.decoder),
        ]
        # Others step between this trainer's forward and backward pass: so many steps and no more.
        others = len(self.world.trainer) - 1
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam,
            self.parameters,
            lr=self.settings.lr,
            max_staleness=others or None,
            on_stale="wait" if others else "raise",
        )

    def step(self, batch: tuple[Tensor, Tensor], hidden: Hidden | None) -> tuple[float, Hidden]:
        """Trains on one batch; returns its loss."""
        with autograd.context() as context_id:
            loss, hidden = self.model.loss(batch, hidden)
            autograd.backward(context_id, [loss])
            clip_grad_norm_(context_id, self.parameters, CLIP)
            self.optimizer.step(context_id)
        return loss.item(), hidden

    def train_epoch(self, trainers: int, title: str) -> float:
        """Trains on this trainer's columns of the text; returns the mean loss."""
        self.lstm.train()
        pieces = [(x[:, self.index :: trainers], y[:, self.index :: trainers]) for x, y in self.pieces()]
        hidden, total = None, 0.0
        # disable=None: no bar unless stderr is a terminal. One bar is enough.
        for batch in tqdm(pieces, title, unit="batch", leave=False, disable=None if self.index == 0 else True):
            loss, hidden = self.step(batch, hidden)
            total += loss
        return total / len(pieces)

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the training text in batches."""
        return batches(self.corpus.train, self.settings.columns, self.settings.steps)[: self.settings.limit]

    def weights(self) -> dict[str, Tensor]:
        """Returns the LSTM's weights."""
        return self.lstm.state_dict()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Replaces the LSTM's weights."""
        self.lstm.load_state_dict(weights)

    def optimizer_state(self) -> Any:
        """Returns what the optimizer keeps, on this worker and the server."""
        return self.optimizer.state_dict()

    def set_optimizer_state(self, state: Any) -> None:
        """Goes on from what `optimizer_state` returned."""
        self.optimizer.load_state_dict(state)

    # -- the first trainer's part

    def main(self) -> list[Epoch] | None:
        """Trains, and saves what it has after every epoch."""
        if self.index > 0:
            return None
        run = Run(self)
        run.resume()
        while len(run.epochs) < self.settings.epochs:
            run.epoch()
        return run.epochs


@dataclass
class Run:
    """A training run, as the first trainer conducts it."""

    trainer: Trainer
    epochs: list[Epoch] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, words = self.trainer.settings, len(self.trainer.corpus.words)
        args = words, settings.width, settings.dropout, settings.seed
        self.shared = Shared(rpc.remote(SERVER, EmbeddingTable, args=args), rpc.remote(SERVER, Decoder, args=args))
        self.all = self.trainer.world.trainer
        self.all.rpc_sync().begin(self.shared)
        self.path = settings.out / "checkpoint.pt"
        settings.out.mkdir(parents=True, exist_ok=True)

    def epoch(self) -> None:
        """Trains for an epoch, validates, and saves."""
        number, begun = len(self.epochs) + 1, time.monotonic()
        losses = self.all.rpc_sync(timeout=0).train_epoch(len(self.all), f"epoch {number}")
        if len(self.all) > 1:
            self.all.rpc_sync().set_weights(_mean(self.all.rpc_sync().weights()))
        train, valid = math.exp(sum(losses) / len(losses)), math.exp(self.validate())
        done = Epoch(number, train, valid, time.monotonic() - begun)
        self.epochs.append(done)
        self.save()
        tqdm.write(f"Epoch {number}\tperplexity {train:.1f}\tvalidation {valid:.1f}\t{done.seconds:.1f} s")

    def validate(self) -> float:
        """Returns the mean loss on the validation text."""
        trainer, hidden, total, words = self.trainer, None, 0.0, 0
        self.set_training(False)
        with torch.no_grad():
            for batch in batches(trainer.corpus.valid, 10, trainer.settings.steps)[: trainer.settings.limit]:
                loss, hidden = trainer.model.loss(batch, hidden)
                total, words = total + loss.item() * batch[1].numel(), words + batch[1].numel()
        self.set_training(True)
        return total / words

    def set_training(self, on: bool) -> None:
        """Turns dropout on or off."""
        self.trainer.lstm.train(on)
        for module in (self.shared.embedding, self.shared.decoder):
            module.rpc_sync().train(on)

    def save(self) -> None:
        """Writes everything that `resume` needs."""
        state = {
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "lstm": self.trainer.weights(),
            "embedding": self.shared.embedding.rpc_sync().state_dict(),
            "decoder": self.shared.decoder.rpc_sync().state_dict(),
            "optimizers": self.all.rpc_sync().optimizer_state(),
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)  # whoever stops in between keeps the last one

    def resume(self) -> None:
        """Goes on from a checkpoint, if there is one; `__main__` removes it where that is not wanted."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=False)
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        self.all.rpc_sync().set_weights(state["lstm"])
        self.shared.embedding.rpc_sync().load_state_dict(state["embedding"])
        self.shared.decoder.rpc_sync().load_state_dict(state["decoder"])
        if len(state["optimizers"]) == len(self.all):
            self.all.scatter(state["optimizers"]).rpc_sync().set_optimizer_state()
        tqdm.write(f"Going on after epoch {len(self.epochs)}, from {self.path}")


def _mean(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]}


def local_losses(settings: Settings, count: int) -> list[float]:
    """Trains in this process alone, for comparison; returns the losses of the first batches."""
    corpus = make_corpus(read_text())
    args = len(corpus.words), settings.width, settings.dropout, settings.seed
    embedding, decoder = EmbeddingTable(*args), Decoder(*args)
    lstm = make_lstm(settings.width, settings.layers, settings.dropout, settings.seed)
    parameters = [*embedding.parameters(), *lstm.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=settings.lr)
    model, hidden, losses = RNNModel(embedding, lstm, decoder), None, []
    for batch in batches(corpus.train, settings.columns, settings.steps)[:count]:
        loss, hidden = model.loss(batch, hidden)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses
