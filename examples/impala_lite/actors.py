"""Who plays: actors that stream rollouts, and an evaluator. They need nothing of the learner, and so start fast."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import torch

import actorrpc as rpc
from examples.impala_lite.network import ActorCritic
from examples.impala_lite.playing import Rollout, Table, evaluate


class RolloutActor(rpc.Actor, concurrency=2):
    """Plays with the newest weights that it has. Two messages at once, so that weights come in while a rollout waits
    for the first ones; all its coroutines run on one loop, so that none come in while it plays.
    """

    def __init__(self, seed: int, environments: int, steps: int) -> None:
        torch.set_num_threads(1)
        # Another life of the same actor shall not see the same episodes again.
        self.table = Table(environments, seed + 1000 * self.index + os.getpid() % 1000)
        self.steps = steps
        self.network = ActorCritic()
        self.version = -1
        self.has_weights = asyncio.Event()

    async def set_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self.network.load_state_dict(weights)
        self.version = version
        self.has_weights.set()

    async def rollouts(self) -> AsyncIterator[Rollout]:
        """Streams rollouts without end. How many are made ahead, the window of the stream says: an actor that is faster
        than the learner waits here, at its `yield`.
        """
        await self.has_weights.wait()
        while True:
            yield self.table.play(self.network, self.version, self.steps)

    def die(self) -> None:
        """Kills this process, to see what the others make of it."""
        os.kill(os.getpid(), signal.SIGKILL)

    def on_stop(self) -> None:
        self.table.close()


class Evaluator(rpc.Actor):
    """Plays whole episodes with weights that it is given, while training goes on."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.network = ActorCritic()

    def evaluate(self, weights: dict[str, torch.Tensor], episodes: int, seed: int) -> float:
        """Returns the average total reward of some episodes, with the best action at each step."""
        self.network.load_state_dict(weights)
        returns = evaluate(self.network, episodes, seed)
        return sum(returns) / len(returns)
