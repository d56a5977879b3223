"""V-trace: value targets and advantages from what an older policy did.

After Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures"
(2018, https://arxiv.org/abs/1802.01561), section 4.1; `trace` is the lambda of its remark 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Targets(NamedTuple):
    """What the learner fits: each [steps, environments].

    Attributes:
        values: where the value function should be.
        advantages: by how much each action was better than the value, weighted; for the policy's gradient.
        weights: the truncated importance weights, of which 1 says that both policies agree.
    """

    values: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


@torch.no_grad()
def v_trace(
    log_ratios: torch.Tensor,
    rewards: torch.Tensor,
    ends: torch.Tensor,
    cuts: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    gamma: float,
    trace: float = 1.0,
) -> Targets:
    """Returns the targets of rollouts, each argument of [steps, environments].

    Arguments:
        log_ratios: log of how likely the learner's policy makes each action, over how likely the actor's made it.
        rewards: of each step.
        ends: whether the step ended the episode by a fall: nothing comes after it.
        cuts: whether the step ended it by the time limit: what would have come after counts, by `next_values`.
        values: of the state before each step.
        next_values: of the state after it, before the environment is reset.
        gamma: the discount.
        trace: how much of a later surprise an earlier step is told; 0 to 1.
    """
    ratios = log_ratios.exp()
    weights, traces = ratios.clamp(max=1.0), trace * ratios.clamp(max=1.0)
    goes_on = 1.0 - ends.to(values.dtype)
    same_episode = 1.0 - (ends | cuts).to(values.dtype)
    surprises = weights * (rewards + gamma * goes_on * next_values - values)
    corrections = torch.zeros_like(values)
    later = torch.zeros_like(values[0])
    for step in range(len(values) - 1, -1, -1):
        later = surprises[step] + gamma * same_episode[step] * traces[step] * later
        corrections[step] = later
    # After the last step, and after a cut, there is no corrected value: the value function's own stands in.
    following = next_values.clone()
    following[:-1] += same_episode[:-1] * corrections[1:]
    advantages = weights * (rewards + gamma * goes_on * following - values)
    return Targets(values + corrections, advantages, weights)
