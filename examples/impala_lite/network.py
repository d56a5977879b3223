"""The policy and the value function: one small network with two heads."""

from __future__ import annotations

import torch
from torch import nn


class ActorCritic(nn.Module):
    """Maps a batch of CartPole states to logits of the two actions and to values."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, 2)
        self.value = nn.Linear(hidden, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(states)
        return self.policy(features), self.value(features).squeeze(-1)


def weights_of(network: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a copy of the weights, to be sent while training goes on."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
