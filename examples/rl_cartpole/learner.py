"""What the agent learns by: REINFORCE over one episode of every observer. Nothing here sends a message."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from examples.rl_cartpole.policy import Policy

EPS = float(np.finfo(np.float32).eps)


@dataclass
class Trajectory:
    """One observer's episode so far, as the agent sees it."""

    log_probs: list[torch.Tensor] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cut: bool = False  # the time limit ended the episode, not a fall

    def returns(self, gamma: float) -> list[float]:
        """The discounted sum of the rewards from each step to the end.

        An episode that was cut did not fail: what comes after is taken to be the last reward, again and again. With
        nothing there, the last steps of a perfect episode would look as bad as those before a fall, and a policy that
        had learned to balance would be taught away from it.
        """
        later = self.rewards[-1] / (1 - gamma) if self.cut else 0.0
        backwards = []
        for reward in reversed(self.rewards):
            later = reward + gamma * later
            backwards.append(later)
        return backwards[::-1]


class Learner:
    """The policy, the trajectories of the present episode, and the running reward."""

    def __init__(self, gamma: float = 0.99, lr: float = 1e-2) -> None:
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma must be at least 0 and less than 1, not {gamma}")
        self.gamma = gamma
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)
        self.running_reward = 0.0
        self.trajectories: dict[str, Trajectory] = {}

    def select_action(self, observer: str, state: npt.NDArray[np.float32]) -> int:
        """Draws an action for this state, and keeps its log-probability with its graph.

        The graph is kept, rather than made again in one batch at the end, because dropout is part of the policy that
        chose the action: another pass would draw another mask, and the gradient would be that of another policy.
        """
        probs = self.policy(torch.from_numpy(state).float().unsqueeze(0))[0]
        action = int(torch.multinomial(probs.detach(), 1))
        self._trajectory(observer).log_probs.append(probs[action].log())
        return action

    def report_reward(self, observer: str, reward: float, cut: bool = False) -> None:
        trajectory = self._trajectory(observer)
        trajectory.rewards.append(reward)
        trajectory.cut = cut

    def keep(self, observers: set[str]) -> None:
        """Forgets what others than these have reported: they did not come to the end of their episodes."""
        self.trajectories = {name: t for name, t in self.trajectories.items() if name in observers}

    def finish_episode(self) -> float:
        """Takes one step of the optimizer on what the observers reported; returns the least of their total rewards."""
        trajectories, self.trajectories = self.trajectories, {}
        if not trajectories:
            raise RuntimeError("no observer has reported anything in this episode")
        for observer, trajectory in trajectories.items():
            if len(trajectory.log_probs) != len(trajectory.rewards):
                raise RuntimeError(
                    f"{observer} has {len(trajectory.log_probs)} actions but {len(trajectory.rewards)} rewards"
                )
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories.values())
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        self._improve(list(trajectories.values()))
        return min_reward

    def _improve(self, trajectories: list[Trajectory]) -> None:
        returns = torch.tensor([r for t in trajectories for r in t.returns(self.gamma)], dtype=torch.float64)
        spread = returns.std(correction=0)
        if spread < 1e-6:
            return  # every step was as good as any other, so there is nothing to learn but rounding errors
        advantages = ((returns - returns.mean()) / (spread + EPS)).float()
        log_probs = torch.stack([p for t in trajectories for p in t.log_probs])
        loss = -(log_probs * advantages).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves this one without types
        self.optimizer.step()

    def _trajectory(self, observer: str) -> Trajectory:
        return self.trajectories.setdefault(observer, Trajectory())
