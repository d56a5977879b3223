"""The tutorial's own run: four layers, three hidden units, ten words, random data, SGD; ten epochs of five batches."""

import torch
from torch import nn

import actorrpc as rpc
from actorrpc import autograd
from actorrpc.optim import DistributedOptimizer
from examples.rnn_ps.model import Decoder, EmbeddingTable
from examples.rnn_ps.roles import SERVER, parameter_references, remote_parameters

BATCH, WORDS, EMBEDDING, HIDDEN, INDICES, LAYERS = 5, 10, 2, 3, 3, 4


class TutorialTrainer(rpc.Actor):
    """Trains the tutorial's model with the tutorial's numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, LAYERS, dropout=0.5)

    def main(self) -> list[float]:
        """Returns the mean loss of each epoch."""
        embedding = rpc.remote(SERVER, EmbeddingTable, args=(WORDS, EMBEDDING, 0.5, 0))
        decoder = rpc.remote(SERVER, Decoder, args=(WORDS, HIDDEN, 0.5, 0))
        parameters = [*remote_parameters(embedding), *parameter_references(self.lstm), *remote_parameters(decoder)]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
        criterion, means = nn.CrossEntropyLoss(), []
        hidden = torch.randn(LAYERS, INDICES, HIDDEN), torch.randn(LAYERS, INDICES, HIDDEN)
        for epoch in range(10):
            losses = []
            for _ in range(5):
                data = torch.randint(WORDS, (BATCH, INDICES))
                target = torch.randint(INDICES, (BATCH, WORDS))
                with autograd.context() as context_id:
                    hidden = hidden[0].detach(), hidden[1].detach()
                    output, hidden = self.lstm(embedding.rpc_sync().forward(data), hidden)
                    loss = criterion(decoder.rpc_sync().forward(output), target)
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
            means.append(sum(losses) / len(losses))
            print(f"Training epoch {epoch}: loss {means[-1]:.4f}", flush=True)
        return means
