"""The three parts of the model, and how they are put together. Nothing here knows on which worker a part lives."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Hidden = tuple[Tensor, Tensor]


class EmbeddingTable(nn.Module):
    """Words to vectors.

    Arguments:
        words: how many there are.
        width: the size of a vector.
        dropout: the share of values that are dropped.
        seed: for the weights.
    """

    def __init__(self, words: int, width: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.table = nn.Embedding(words, width)
        with torch.no_grad():
            self.table.weight.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))

    def forward(self, numbers: Tensor) -> Tensor:
        """Takes numbers of shape [steps, columns]; returns [steps, columns, width]."""
        vectors: Tensor = self.dropout(self.table(numbers))
        return vectors


class Decoder(nn.Module):
    """Vectors to scores of all words. Arguments: see `EmbeddingTable`."""

    def __init__(self, words: int, width: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(width, words)
        with torch.no_grad():
            self.scores.weight.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
            self.scores.bias.zero_()

    def forward(self, vectors: Tensor) -> Tensor:
        """Takes vectors of shape [steps, columns, width]; returns scores of shape [steps, columns, words]."""
        scores: Tensor = self.scores(self.dropout(vectors))
        return scores


def make_lstm(width: int, layers: int, dropout: float, seed: int) -> nn.LSTM:
    """Makes the part in the middle, with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0)


class RNNModel:
    """The whole model.

    Arguments:
        embed, decode: the outer parts, as functions: modules of this process, or calls to another one.
        lstm: the part in the middle.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], lstm: nn.LSTM, decode: Callable[[Tensor], Tensor]) -> None:
        self.embed, self.lstm, self.decode = embed, lstm, decode

    def loss(self, batch: tuple[Tensor, Tensor], hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Returns the mean cross entropy of a batch, and the hidden state to begin the next one with.

        Arguments:
            batch: words and the words that follow, each of shape [steps, columns].
            hidden: where the last batch ended; None at the beginning of a text.
        """
        words, follow = batch
        output, hidden = self.lstm(self.embed(words), hidden)
        loss = nn.functional.cross_entropy(self.decode(output).flatten(0, 1), follow.flatten())
        return loss, (hidden[0].detach(), hidden[1].detach())
