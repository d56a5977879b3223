"""CartPole with an agent that waits for the states of all observers, and chooses their actions in one forward pass.

With `--no_batch` it answers each by itself, and the results are no longer the same every time.

MASTER_ADDR=localhost MASTER_PORT=29500 python batch_cartpole.py --observers 2
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync
from torch.distributions import Categorical
from torch.futures import Future

AGENT, OBSERVER = "agent", "ob{}"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--observers", type=int, default=2)
parser.add_argument("--episodes", type=int, default=4)
parser.add_argument("--steps", type=int, default=40, help="of each observer in an episode")
parser.add_argument("--gamma", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--no_batch", action="store_true")
options = parser.parse_args()


class Policy(nn.Module):
    """Probabilities over the last dimension, for one state or a batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 64)
        self.dropout = nn.Dropout(p=0.5)
        self.out = nn.Linear(64, 2)

    def forward(self, state: Tensor) -> Tensor:
        return F.softmax(self.out(F.relu(self.dropout(self.hidden(state)))), dim=-1)


class Observer:
    """Plays a fixed number of steps in an episode, so that all observers end together."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=options.seed + self.id)
        self.select_action = Agent.select_action if options.no_batch else Agent.select_action_batch

    def run_episode(self, agent: Any, steps: int) -> tuple[list[float], int]:
        state, _ = self.env.reset()
        rewards, ends = [], 0
        for _ in range(steps):
            action = rpc_sync(agent.owner(), self.select_action, args=(agent, self.id, torch.from_numpy(state)))
            state, reward, fell, cut, _ = self.env.step(action)
            if fell or cut:
                rewards.append(0.0)
                ends += 1
                state, _ = self.env.reset()
            else:
                rewards.append(float(reward))
        return rewards, ends


class Agent:
    """Has the policy; gathers states."""

    def __init__(self, observers: int) -> None:
        self.observers = [remote(OBSERVER.format(number), Observer) for number in range(1, observers + 1)]
        self.rref = RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.lock = threading.Lock()
        self.states = torch.zeros(observers, 4)
        self.pending = observers
        self.actions: Future[Tensor] = Future()
        self.log_probs: list[list[Tensor]] = []
        self.clear()

    def clear(self) -> None:
        self.log_probs = [[] for _ in self.observers]

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent: Any, observer: int, state: Tensor) -> Future[int]:
        """Keeps a state; the future has this observer's action once all states of the step are there."""
        self: Agent = agent.local_value()
        self.states[observer].copy_(state)
        answer: Future[int] = self.actions.then(lambda actions: int(actions.wait()[observer].item()))
        with self.lock:
            self.pending -= 1
            if self.pending == 0:
                self.pending = len(self.observers)
                choice = Categorical(self.policy(self.states.clone()))
                actions = choice.sample()
                for saved, log_prob in zip(
                    self.log_probs,
                    choice.log_prob(actions),
                    strict=True,
                ):
                    saved.append(log_prob)
                done, self.actions = self.actions, Future()
                done.set_result(actions)
        return answer

    @staticmethod
    def select_action(agent: Any, observer: int, state: Tensor) -> int:
        self: Agent = agent.local_value()
        choice = Categorical(self.policy(state))
        action = choice.sample()
        self.log_probs[observer].append(choice.log_prob(action))
        return int(action.item())

    def run_episode(self, steps: int) -> tuple[float, int]:
        """Has all observers play, learns from it; returns the mean reward and how often the pole fell."""
        futures = [
            rpc_async(observer.owner(), observer.rpc_sync().run_episode, args=(self.rref, steps))
            for observer in self.observers
        ]
        played = torch.futures.wait_all(futures)
        rewards = torch.tensor([each for each, _ in played])
        returns = torch.zeros_like(rewards)
        later = torch.zeros(len(self.observers))
        for step in reversed(range(steps)):
            later = rewards[:, step] + options.gamma * later
            returns[:, step] = later
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probs = torch.stack([torch.stack(each) for each in self.log_probs])
        self.optimizer.zero_grad()
        (-log_probs * returns).sum().backward()
        self.optimizer.step()
        self.clear()
        return rewards.sum(1).mean().item(), sum(ends for _, ends in played)


def run_worker(rank: int, observers: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.manual_seed(options.seed)
    name = OBSERVER.format(rank) if rank else AGENT
    rpc.init_rpc(name, rank=rank, world_size=observers + 1)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    if rank == 0:
        agent = Agent(observers)
        begun = time.perf_counter()
        for episode in range(options.episodes):
            reward, ends = agent.run_episode(options.steps)
            word = "episode" if options.no_batch else "result episode_"
            print(f"{word}{episode}={[reward, ends]}", flush=True)
        steps = options.episodes * options.steps * observers
        weight = sum(p.detach().double().abs().sum().item() for p in agent.policy.parameters())
        if not options.no_batch:
            print(f"result weight={weight!r}")
        print(f"result steps={steps}")
        print(f"speed steps_per_second={steps / (time.perf_counter() - begun):.1f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(options.observers,), nprocs=options.observers + 1, join=True)
