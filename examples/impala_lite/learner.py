"""The learner: takes rollouts from all actors, makes steps of them, and sends its weights to all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import actorrpc as rpc
from examples.impala_lite.network import weights_of
from examples.impala_lite.playing import Rollout
from examples.impala_lite.report import Report, Run
from examples.impala_lite.training import Trainer

THRESHOLD, EPISODES = 475.0, 20


class Learner(rpc.Actor):
    """Takes rollouts as they come, from whichever actor, and makes a step of each batch.

    Arguments:
        out: the folder for results.
        batch: rollouts a step.
        max_steps: gives up after so many.
        evaluate_every: steps from one evaluation to the next, which does not begin before the last one has ended.
        kill_at: the step after which one actor is killed; 0: none.
    """

    def __init__(self, out: Path, seed: int, batch: int, max_steps: int, evaluate_every: int, kill_at: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.trainer = Trainer()
        self.out, self.seed, self.batch = out, seed, batch
        self.max_steps, self.evaluate_every, self.kill_at = max_steps, evaluate_every, kill_at
        self.run = Run(THRESHOLD)
        self.pending: list[Rollout] = []
        self.asked = 0  # of which version the last evaluation is
        self.evaluation: rpc.Future[float] | None = None

    async def main(self) -> Run:
        """Trains until the evaluator's average reaches the threshold."""
        with Report(self.out, self.run, self.max_steps) as self.report:
            self.report.say(f"This will run until the evaluator's average is {THRESHOLD:g}. Ctrl+C to exit.")
            while not self._over():
                actors = self.world.actor  # whoever is there now
                if not actors:
                    await asyncio.sleep(0.05)  # the launcher is about to start one again
                    continue
                self._broadcast(actors)
                with actors.stream(window=1).rollouts() as rollouts:
                    try:
                        async for actor, rollout in rollouts:
                            self._take(actor.owner_name(), rollout)
                            if self._over() or len(self.world.actor) > len(actors):
                                break  # one is there again, from which nothing is streamed yet
                    except rpc.GroupError as error:
                        for name in names_of_lost(error):
                            self.report.lost(name, self.trainer.version)
        return self.run

    def _over(self) -> bool:
        """Solved, and by all: an actor that was lost is waited for, so that one sees it come back."""
        return (self.run.solved and not self.report.gone) or self.trainer.version >= self.max_steps

    def _broadcast(self, actors: rpc.Group) -> None:
        try:
            actors.tell().set_weights(self.trainer.version, weights_of(self.trainer.network))
        except rpc.GroupError as error:
            names_of_lost(error)  # the others were told; the stream says it again, after what they had made before

    def _take(self, actor: str, rollout: Rollout) -> None:
        self.report.rollout(actor, self.trainer.version, rollout)
        self.pending.append(rollout)
        if len(self.pending) < self.batch:
            return
        rollouts, self.pending = self.pending, []
        step = self.trainer.step(rollouts)
        self.report.step(self.trainer.version, step)
        actors = self.world.actor
        self._broadcast(actors)
        if self.trainer.version == self.kill_at and actors:
            actors.pick().tell().die()
        self._evaluate()

    def _evaluate(self) -> None:
        if self.evaluation is not None and self.evaluation.done():
            self.report.evaluation(self.asked, self.evaluation.wait())
            self.evaluation = None
        version = self.trainer.version
        if self.evaluation is None and version >= self.asked + self.evaluate_every:
            weights, evaluator = weights_of(self.trainer.network), self.world.evaluator[0]
            self.evaluation = evaluator.rpc_async().evaluate(weights, EPISODES, self.seed + version)
            self.asked = version


def names_of_lost(error: rpc.GroupError) -> tuple[str, ...]:
    """Returns who was lost; raises the error again where it is another one."""
    if not all(isinstance(e, rpc.WorkerLostError) for e in error.exceptions):
        raise error
    return tuple(error.names)
