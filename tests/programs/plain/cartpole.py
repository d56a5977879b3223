"""Reinforcement learning on CartPole: one agent with the policy, and observers that each play in an environment.

An observer asks the agent for every action and reports every reward, in two calls. With one observer all results follow
from the seed.

MASTER_ADDR=localhost MASTER_PORT=29500 python cartpole.py --episodes 20
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import count
from typing import Any

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async
from torch.distributions import Categorical

AGENT = "agent"
OBSERVER = "obs{}"

# Read as the module is loaded, in the children too.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--world_size", type=int, default=2, metavar="W", help="processes: an agent and W-1 observers")
parser.add_argument("--episodes", type=int, default=0, metavar="N", help="stop after so many; 0: when it is solved")
parser.add_argument("--steps", type=int, default=0, metavar="N", help="stop after the episode with step N; 0: do not")
parser.add_argument("--log_interval", type=int, default=10, metavar="N", help="episodes from one line to the next")
parser.add_argument("--gamma", type=float, default=0.99, metavar="G", help="how much later rewards count")
parser.add_argument("--seed", type=int, default=1, metavar="S")
options = parser.parse_args()


class Policy(nn.Module):
    """Gives the probabilities of pushing the cart to either side."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.out = nn.Linear(128, 2)

    def forward(self, state: Tensor) -> Tensor:
        return F.softmax(self.out(F.relu(self.dropout(self.hidden(state)))), dim=1)


class Observer:
    """Plays an episode whenever the agent says so."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.env = gym.make("CartPole-v1")
        self.seed: int | None = options.seed + self.id

    def run_episode(self, agent: Any) -> None:
        state, _ = self.env.reset(seed=self.seed)
        self.seed = None
        for _ in range(10000):
            action = agent.rpc_sync().select_action(self.id, state)
            state, reward, fell, cut, _ = self.env.step(action)
            agent.rpc_sync().report_reward(self.id, reward)
            if fell or cut:
                break


class Agent:
    """Has the policy, and what happened in the present episode."""

    def __init__(self, world_size: int) -> None:
        self.rref = RRef(self)
        self.observers: list[Any] = []
        self.rewards: dict[int, list[float]] = {}
        self.log_probs: dict[int, list[Tensor]] = {}
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.eps = torch.finfo(torch.float32).eps
        self.running_reward = 0.0
        spec = gym.make("CartPole-v1").spec
        assert spec is not None
        self.threshold = spec.reward_threshold or 0.0
        for rank in range(1, world_size):
            info = rpc.get_worker_info(OBSERVER.format(rank))
            self.observers.append(remote(info, Observer))
            self.rewards[info.id] = []
            self.log_probs[info.id] = []

    # Called by observers.

    def select_action(self, observer: int, state: Any) -> int:
        probabilities = self.policy(torch.from_numpy(state).float().unsqueeze(0))
        choice = Categorical(probabilities)
        action = choice.sample()
        self.log_probs[observer].append(choice.log_prob(action))
        return int(action.item())

    def report_reward(self, observer: int, reward: float) -> None:
        self.rewards[observer].append(reward)

    # Its own.

    def run_episode(self) -> None:
        """Has all observers play at the same time, and waits for them."""
        futures = [
            # The function is a method of a proxy: the observer's process calls it, and it calls its own worker.
            rpc_async(observer.owner(), observer.rpc_sync().run_episode, args=(self.rref,))
            for observer in self.observers
        ]
        for future in futures:
            future.wait()

    def finish_episode(self) -> tuple[float, int]:
        """Learns from the episode; returns the least reward of any observer, and how many steps all made."""
        log_probs = [p for each in self.log_probs.values() for p in each]
        rewards = [r for each in self.rewards.values() for r in each]
        least = min(sum(each) for each in self.rewards.values())
        self.running_reward = 0.05 * least + (1 - 0.05) * self.running_reward
        for observer in self.rewards:
            self.rewards[observer], self.log_probs[observer] = [], []

        backwards, later = [], 0.0
        for reward in reversed(rewards):
            later = reward + options.gamma * later
            backwards.append(later)
        returns = torch.tensor(backwards[::-1])
        returns = (returns - returns.mean()) / (returns.std() + self.eps)
        losses = [-log_prob * r for log_prob, r in zip(log_probs, returns, strict=True)]
        self.optimizer.zero_grad()
        torch.cat(losses).sum().backward()
        self.optimizer.step()
        return least, len(rewards)


def train(world_size: int) -> None:
    agent = Agent(world_size)
    print(f"This runs until the average reward is above {agent.threshold}.", flush=True)
    rewards: list[float] = []
    steps, playing, begun = 0, 0.0, time.perf_counter()
    for episode in count(1):
        started = time.perf_counter()
        agent.run_episode()
        playing += time.perf_counter() - started
        reward, made = agent.finish_episode()
        steps += made
        rewards.append(reward)
        if episode % options.log_interval == 0:
            print(f"Episode {episode}\tlast {reward:.2f}\taverage {agent.running_reward:.2f}", flush=True)
        if agent.running_reward > agent.threshold:
            print(f"Solved: the average reward is {agent.running_reward}", flush=True)
            break
        if episode == options.episodes or 0 < options.steps <= steps:
            break
    seconds = time.perf_counter() - begun
    if world_size == 2:  # observers that play side by side draw from one generator in any order
        print(f"result rewards={rewards}")
        print(f"result running_reward={agent.running_reward!r}")
        print(f"result steps={steps}")
        weight = sum(p.detach().double().abs().sum().item() for p in agent.policy.parameters())
        print(f"result weight={weight!r}")
    print(f"result episodes={len(rewards)}")
    # The whole of training, what the agent learns between the episodes included; and playing alone.
    print(f"speed steps_per_second={steps / seconds:.1f} while_playing={steps / playing:.1f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.manual_seed(options.seed)
    if rank == 0:
        rpc.init_rpc(AGENT, rank=rank, world_size=world_size)
        print(f"library {rpc.init_rpc.__module__}", flush=True)
        train(world_size)
    else:
        rpc.init_rpc(OBSERVER.format(rank), rank=rank, world_size=world_size)
        print(f"library {rpc.init_rpc.__module__}", flush=True)
    rpc.shutdown()  # observers serve in here


if __name__ == "__main__":
    mp.spawn(run_worker, args=(options.world_size,), nprocs=options.world_size, join=True)
