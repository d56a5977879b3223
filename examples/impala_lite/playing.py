"""Playing CartPole: several environments at once, by one forward pass a step. Nothing here sends a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from examples.impala_lite.network import ActorCritic

ENVIRONMENT = "CartPole-v1"


@dataclass
class Rollout:
    """Some steps of several environments; tensors of [steps, environments].

    Attributes:
        version: of the weights that chose the actions.
        states, next_states: before and after each step, with a last dimension of 4; the latter before any reset.
        actions, rewards, ends, cuts: what was done, and what came of it: see `v_trace`.
        log_probs: how likely the policy that chose it made each action.
        returns: the total rewards of the episodes that came to their end here.
    """

    version: int
    states: torch.Tensor
    next_states: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor
    ends: torch.Tensor
    cuts: torch.Tensor
    returns: list[float] = field(default_factory=list)


class Table:
    """Environments that are played side by side. One that has ended an episode begins the next one at once.

    Arguments:
        count: how many.
        seed: the first one's; the others count on from there.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.environments: list[gym.Env[Any, Any]] = [gym.make(ENVIRONMENT) for _ in range(count)]
        self.states = np.stack([e.reset(seed=seed + i)[0] for i, e in enumerate(self.environments)])
        self.totals = [0.0] * count
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def play(self, network: ActorCritic, version: int, steps: int) -> Rollout:
        """Plays some steps, with actions drawn from the policy."""
        rows: list[tuple[torch.Tensor, ...]] = []
        returns: list[float] = []
        for _ in range(steps):
            states = torch.from_numpy(self.states)
            log_probs = network(states)[0].log_softmax(-1)
            actions = torch.multinomial(log_probs.exp(), 1, generator=self.random)
            after, rewards, ends, cuts = self._step(actions.squeeze(1).tolist(), returns)
            rows.append((states, after, actions, log_probs.gather(1, actions), rewards, ends, cuts))
        states, after, actions, log_probs, rewards, ends, cuts = (
            torch.stack(column) for column in zip(*rows, strict=True)
        )
        return Rollout(version, states, after, actions.squeeze(2), log_probs.squeeze(2), rewards, ends, cuts, returns)

    def _step(self, actions: list[int], returns: list[float]) -> tuple[torch.Tensor, ...]:
        after = np.empty_like(self.states)
        self.states = np.empty_like(self.states)
        rewards, ends, cuts = [], [], []
        for i, (environment, action) in enumerate(zip(self.environments, actions, strict=True)):
            state, reward, end, cut, _ = environment.step(action)
            self.totals[i] += float(reward)
            after[i] = self.states[i] = state
            if end or cut:
                returns.append(self.totals[i])
                self.totals[i], self.states[i] = 0.0, environment.reset()[0]
            rewards.append(float(reward))
            ends.append(bool(end))
            cuts.append(bool(cut and not end))
        return torch.from_numpy(after), torch.tensor(rewards), torch.tensor(ends), torch.tensor(cuts)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


@torch.no_grad()
def evaluate(network: ActorCritic, episodes: int, seed: int) -> list[float]:
    """Plays whole episodes, with the best action at each step; returns their total rewards."""
    environments: list[gym.Env[Any, Any]] = [gym.make(ENVIRONMENT) for _ in range(episodes)]
    states = {i: environment.reset(seed=seed + i)[0] for i, environment in enumerate(environments)}
    totals = [0.0] * episodes
    while states:
        actions = network(torch.from_numpy(np.stack(list(states.values()))))[0].argmax(1).tolist()
        for i, action in zip(list(states), actions, strict=True):
            states[i], reward, end, cut, _ = environments[i].step(action)
            totals[i] += float(reward)
            if end or cut:
                del states[i]
                environments[i].close()
    return totals
