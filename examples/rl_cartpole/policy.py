"""The policy network of the tutorial."""

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    """Maps a batch of CartPole states to the probabilities of pushing left and right."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)
