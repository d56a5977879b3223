"""What a training run tells: lines and a progress bar while it runs, a CSV file, and a learning curve at the end."""

import csv
import sys
import threading
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import TracebackType

from matplotlib.figure import Figure
from tqdm import tqdm


@dataclass(frozen=True)
class Episode:
    episode: int
    last_reward: float
    running_reward: float
    seconds: float


@dataclass
class Training:
    threshold: float
    episodes: list[Episode] = field(default_factory=list)

    @property
    def running_reward(self) -> float:
        return self.episodes[-1].running_reward if self.episodes else 0.0

    @property
    def solved(self) -> bool:
        return self.running_reward > self.threshold


class Report:
    """Follows a training run. The CSV file is written line by line, so that an interrupted run leaves what it had."""

    def __init__(self, out: Path, log_interval: int, max_episodes: int) -> None:
        self.log_interval = log_interval
        out.mkdir(parents=True, exist_ok=True)
        # Line buffered; closed in __exit__.
        self._file = csv_path(out).open("w", newline="", buffering=1)
        self._rows = csv.writer(self._file)
        self._rows.writerow(field.name for field in fields(Episode))
        # By default tqdm makes a lock between processes, and with it a helper process; one process writes here.
        tqdm.set_lock(threading.RLock())
        # disable=None: no bar unless stderr is a terminal.
        self._bar = tqdm(total=max_episodes, unit="episode", disable=None, dynamic_ncols=True, leave=False)

    def __enter__(self) -> "Report":
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

    def episode(self, episode: Episode) -> None:
        self._rows.writerow(astuple(episode))
        self._bar.set_postfix_str(f"average reward {episode.running_reward:.1f}", refresh=False)
        self._bar.update()
        if episode.episode % self.log_interval == 0:
            self.say(
                f"Episode {episode.episode}\tLast reward: {episode.last_reward:.2f}\t"
                f"Average reward: {episode.running_reward:.2f}"
            )


def csv_path(out: Path) -> Path:
    return out / "episodes.csv"


def draw_curve(training: Training, out: Path) -> Path:
    """Draws the rewards over the episodes, and returns the path of the picture."""
    path = out / "learning_curve.png"
    numbers = [episode.episode for episode in training.episodes]
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # no pyplot, so no display is looked for
    axes = figure.subplots()
    axes.plot(
        numbers, [e.last_reward for e in training.episodes], color="0.7", linewidth=0.8, label="least of all observers"
    )
    axes.plot(numbers, [e.running_reward for e in training.episodes], color="C0", label="running average")
    axes.axhline(training.threshold, color="C2", linestyle="--", linewidth=1, label=f"solved: {training.threshold:g}")
    axes.set(xlabel="episode", ylabel="reward", title="CartPole-v1")
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    return path
