"""What the learner learns by: an actor-critic step on rollouts of older policies. Nothing here sends a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from examples.impala_lite.network import ActorCritic
from examples.impala_lite.playing import Rollout
from examples.impala_lite.vtrace import v_trace


@dataclass(frozen=True)
class Step:
    """What one step of the optimizer did.

    Attributes:
        weight: the mean importance weight: 1 if the actors' policies were the learner's.
        entropy: the policy's, in nats; log 2 is a coin.
        lag: by how many versions the rollouts were behind, on average.
    """

    weight: float
    entropy: float
    lag: float


class Trainer:
    """The network, its optimizer, and the version of the weights, which counts the steps.

    Arguments:
        gamma: the discount.
        lr: Adam's learning rate.
        entropy_cost: how much the loss favours a policy that is not sure.
    """

    def __init__(self, gamma: float = 0.99, lr: float = 1e-3, entropy_cost: float = 0.01) -> None:
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma must be at least 0 and less than 1, not {gamma}")
        self.gamma, self.entropy_cost = gamma, entropy_cost
        self.network = ActorCritic()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.version = 0

    def step(self, rollouts: list[Rollout]) -> Step:
        """Takes one step on rollouts, of whichever versions."""

        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(rollout, name) for rollout in rollouts], dim=1)

        logits, values = self.network(joined("states"))
        with torch.no_grad():
            next_values = self.network(joined("next_states"))[1]
        log_policy = logits.log_softmax(-1)
        log_probs = log_policy.gather(-1, joined("actions").unsqueeze(-1)).squeeze(-1)
        targets = v_trace(
            (log_probs - joined("log_probs")).detach(),
            joined("rewards") * (1 - self.gamma),  # so that values are at most 1, which a new network is near to
            joined("ends"),
            joined("cuts"),
            values.detach(),
            next_values,
            self.gamma,
            trace=0.95,
        )
        advantages = targets.advantages / (targets.advantages.std() + 1e-6)
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        loss = functional.mse_loss(values, targets.values) * 10 - (log_probs * advantages).mean()
        self.optimizer.zero_grad()
        (loss - self.entropy_cost * entropy).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        lag = sum(self.version - rollout.version for rollout in rollouts) / len(rollouts)
        self.version += 1
        return Step(float(targets.weights.mean()), float(entropy.detach()), lag)
