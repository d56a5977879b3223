"""The two roles of the tutorial: observers run episodes, the agent chooses their actions and learns from them."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

import actorrpc as rpc
from examples.rl_cartpole.learner import Learner
from examples.rl_cartpole.report import Episode, Report, Training

ENVIRONMENT = "CartPole-v1"


class Observer(rpc.Actor):
    """Owns an environment, and runs an episode in it whenever the agent asks."""

    def __init__(self, seed: int = 1) -> None:
        self.env: gym.Env[npt.NDArray[np.float32], int] = gym.make(ENVIRONMENT)
        self.seed: int | None = seed + self.index  # each observer sees other episodes

    def run_episode(self, agent: "rpc.RRef[Agent]", killed_at: int | None = None) -> str:
        """Plays one episode. The two calls of each step stay two, as in the tutorial, to show both kinds.

        Arguments:
            agent: who chooses the actions.
            killed_at: a step at which this process is killed, to see what the others make of it.

        Returns under which name it reported: another one in each life of this observer.
        """
        state, _ = self.env.reset(seed=self.seed)
        self.seed = None  # the first episode is seeded; the environment's own generator goes on from there
        name, done = f"{self.name} ({os.getpid()})", False
        for step in itertools.count():
            if done:
                break
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            action = agent.rpc_sync().select_action(name, state)
            state, reward, end, cut, _ = self.env.step(action)
            done = end or cut
            # One way: nobody waits for an answer. The agent still has every reward before this call returns to it.
            agent.tell().report_reward(name, float(reward), cut and not end)
        return name

    def on_stop(self) -> None:
        self.env.close()


class Agent(rpc.Actor):
    """Holds the policy. Its mailbox serves one message at a time, so the learner needs no lock."""

    def __init__(
        self,
        out: Path,
        gamma: float = 0.99,
        seed: int = 1,
        log_interval: int = 10,
        max_episodes: int = 3000,
        kill_every: int = 0,
    ) -> None:
        torch.set_num_threads(1)  # the policy is small: more threads cost more than they give
        torch.manual_seed(seed)
        self.learner = Learner(gamma)
        self.out = out
        self.log_interval = log_interval
        self.max_episodes = max_episodes
        self.kill_every = kill_every
        self.names: set[str] = set()
        self.killed = self.added = 0
        self.rng = random.Random(seed)

    def select_action(self, observer: str, state: npt.NDArray[np.float32]) -> int:
        return self.learner.select_action(observer, state)

    def report_reward(self, observer: str, reward: float, cut: bool) -> None:
        self.learner.report_reward(observer, reward, cut)

    def main(self) -> Training:
        """Runs episodes until the running reward passes the threshold of the environment."""
        threshold = gym.spec(ENVIRONMENT).reward_threshold
        assert threshold is not None
        training = Training(threshold)
        begun = time.monotonic()
        with Report(self.out, self.log_interval, self.max_episodes) as report:
            report.say(f"This will run until reward threshold of {threshold} is reached. Ctrl+C to exit.")
            for number in range(1, self.max_episodes + 1):
                if self.kill_every:
                    self.learner.keep(self._run_with_whoever_is_there(number, report))
                else:
                    # All observers at once; while this waits, their messages are served. An episode may take any time.
                    self.world.observer.rpc_sync(timeout=0).run_episode(self.rref)
                last_reward = self.learner.finish_episode()
                episode = Episode(number, last_reward, self.learner.running_reward, time.monotonic() - begun)
                training.episodes.append(episode)
                report.episode(episode)
                if training.solved:
                    break
            if self.kill_every:
                report.say(f"Observers killed: {self.killed}, added: {self.added}")
        return training

    def _run_with_whoever_is_there(self, number: int, report: Report) -> set[str]:
        """Runs an episode on the observers that are there, one of which may be killed; returns who came to the end."""
        finished: set[str] = set()
        while not finished:
            observers = self.world.observer
            if not observers:  # the launcher is about to start one again
                self.serve(0.1)
                continue
            kills = number % self.kill_every == 0 and len(observers) > 1
            victim = self.rng.randrange(len(observers)) if kills else -1
            futures = [
                observer.rpc_async(timeout=0).run_episode(self.rref, self.rng.randrange(9) if i == victim else None)
                for i, observer in enumerate(observers)
            ]
            for observer, future in zip(observers, futures, strict=True):
                try:
                    finished.add(future.wait())
                except rpc.WorkerLostError:
                    self.killed += 1
                    report.say(f"Episode {number}\t{observer.owner_name()} is gone; {len(observers) - 1} go on")
        for name in sorted(finished - self.names):
            if number > 1:
                self.added += 1
                report.say(f"Episode {number}\t{name} was added")
        self.names |= finished
        return finished
