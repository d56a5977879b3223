"""What a run tells: lines and a progress bar while it lasts, a CSV file, and a learning curve at the end."""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections import deque
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import TracebackType

from matplotlib.figure import Figure
from tqdm import tqdm

from examples.impala_lite.playing import Rollout
from examples.impala_lite.training import Step


@dataclass(frozen=True)
class Evaluation:
    """The evaluator's average for one version of the weights, and what the actors had reached when it came.

    Attributes:
        version: of the weights.
        frames: of all environments until then.
        seconds: since the beginning.
        average: of the evaluator's episodes.
        actors: the average of the last hundred episodes that the actors have ended.
        weight, entropy, lag: see `Step`; of the last step.
    """

    version: int
    frames: int
    seconds: float
    average: float
    actors: float
    weight: float
    entropy: float
    lag: float


@dataclass
class Run:
    """What there is to tell of a run.

    Attributes:
        threshold: from which average on it is solved.
        evaluations: in order.
        episodes: the frames, and the total reward, of each episode that an actor has ended.
        frames: that the learner has seen.
        lost, back: the frames at which an actor was lost, and was there again.
    """

    threshold: float
    evaluations: list[Evaluation] = field(default_factory=list)
    episodes: list[tuple[int, float]] = field(default_factory=list)
    frames: int = 0
    lost: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)

    @property
    def average(self) -> float:
        return self.evaluations[-1].average if self.evaluations else 0.0

    @property
    def solved(self) -> bool:
        return self.average >= self.threshold


class Report:
    """Follows a run. The CSV file is written line by line, so that an interrupted run leaves what it had."""

    def __init__(self, out: Path, run: Run, max_steps: int) -> None:
        self.run, self.last, self.begun = run, Step(1.0, 0.0, 0.0), time.monotonic()
        self.gone: set[str] = set()  # actors that were lost, and are not back
        self._recent: deque[float] = deque(maxlen=100)
        out.mkdir(parents=True, exist_ok=True)
        self._file = csv_path(out).open("w", newline="", buffering=1)  # by lines; closed in __exit__
        self._rows = csv.writer(self._file)
        self._rows.writerow(field.name for field in fields(Evaluation))
        tqdm.set_lock(threading.RLock())  # its own lock is one between processes, and would start a helper process
        # disable=None: no bar unless stderr is a terminal.
        self._bar = tqdm(total=max_steps, unit="step", disable=None, dynamic_ncols=True, leave=False)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        self._file.close()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(line)
        sys.stdout.flush()

    def rollout(self, actor: str, version: int, rollout: Rollout) -> None:
        if actor in self.gone:
            self.gone.remove(actor)
            self.run.back.append(self.run.frames)
            self.say(f"Step {version}\t{actor} is back")
        self.run.frames += rollout.rewards.numel()
        self.run.episodes += [(self.run.frames, total) for total in rollout.returns]
        self._recent += rollout.returns

    def step(self, version: int, step: Step) -> None:
        self.last = step
        self._bar.update()
        self._bar.set_postfix_str(f"{self.run.frames} frames, average {self.run.average:.1f}", refresh=False)

    def lost(self, actor: str, version: int) -> None:
        if actor not in self.gone:
            self.gone.add(actor)
            self.run.lost.append(self.run.frames)
            self.say(f"Step {version}\t{actor} is lost; the others go on")

    def evaluation(self, version: int, average: float) -> None:
        seconds = time.monotonic() - self.begun
        actors = sum(self._recent) / max(1, len(self._recent))
        last = Evaluation(version, self.run.frames, seconds, average, actors, *astuple(self.last))
        self.run.evaluations.append(last)
        self._rows.writerow(astuple(last))
        self.say(
            f"Step {version}\tEvaluator: {average:.1f}\tActors: {actors:.1f}\tFrames: {last.frames}\t"
            f"Weight: {last.weight:.3f}\tLag: {last.lag:.1f}"
        )


def csv_path(out: Path) -> Path:
    return out / "evaluations.csv"


def draw_curve(run: Run, out: Path) -> Path:
    """Draws the rewards over the frames, and returns the path of the picture."""
    path = out / "learning_curve.png"
    figure = Figure(figsize=(8, 5), layout="constrained")  # no pyplot, so no display is looked for
    axes = figure.subplots()
    when, totals = [episode[0] for episode in run.episodes], [episode[1] for episode in run.episodes]
    axes.scatter(when, totals, s=4, color="0.7", linewidths=0, label="actors' episodes")
    frames = [evaluation.frames for evaluation in run.evaluations]
    averages = [evaluation.average for evaluation in run.evaluations]
    axes.plot(frames, averages, color="C0", marker=".", label="evaluator's average")
    axes.axhline(run.threshold, color="C2", linestyle="--", linewidth=1, label=f"solved: {run.threshold:g}")
    for moments, color, word in ((run.lost, "C3", "an actor is lost"), (run.back, "C1", "it is back")):
        for i, moment in enumerate(moments):
            axes.axvline(moment, color=color, linestyle=":", linewidth=1.5, label=None if i else word)
    axes.set(xlabel="frames", ylabel="total reward of an episode", title="CartPole-v1")
    axes.set_ylim(0, 520)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    return path
