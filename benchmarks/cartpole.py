"""Reinforcement learning under torch and with actorrpc standing in: ``python -m benchmarks.cartpole``.

The program is `tests/programs/plain/cartpole.py`, which knows nothing of actorrpc. Both run it as a user would, to the
same episode, in slices that alternate: the run that has no turn is stopped. What counts are the environment's steps,
those of all observers together, per second in which the run was not stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pairs import PATIENCE, Plan, Samples, free_port, prepare, say
from benchmarks.rows import Result, Row, parser_for, plan_of, report, result_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "plain" / "cartpole.py"
COMMANDS = {"torch": [], "ours": ["-m", "actorrpc", "run", "--quiet"]}
ROW = Row("cartpole", "CartPole to the same episode", "steps/s", 2, 1.3, rate=True)
STEPS = 4000
_BEGINS, _ENDS = "This runs until", "speed "
"""How the lines begin between which the program trains."""


class Run:
    """One run of the program, which is stopped unless it has its turn. A context manager."""

    def __init__(self, library: str, arguments: Sequence[str]) -> None:
        self.library, self.seconds, self.rate = library, 0.0, 0.0
        self._arguments = arguments
        self._training = False
        self._began = 0.0
        self._text = ""

    def __enter__(self) -> Self:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "ACTORRPC_HEARTBEAT_TIMEOUT": "80",  # a run that is stopped is not dead
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *COMMANDS[self.library], str(PROGRAM), *self._arguments],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def go_on(self, seconds: float) -> None:
        """Gives the run its turn, unless it has come to its end."""
        if self.rate:
            return
        os.killpg(self._process.pid, signal.SIGCONT)
        now = time.monotonic()
        end = now + seconds
        while now < end and not self.rate:
            begun, trained = now, self._training
            self._read(end - now)
            now = time.monotonic()
            if trained:
                self.seconds += now - begun
                if not self._training:
                    self.rate = self._steps() / self.seconds
        self.stop()

    def stop(self) -> None:
        """Stops the run."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def begin(self) -> None:
        """Lets the program start, until it begins to train."""
        end = time.monotonic() + PATIENCE
        while not self._training:
            self.go_on(0.2)
            if time.monotonic() > end:
                raise SystemExit(f"{self.library} has not begun in {PATIENCE:.0f} s:\n{self._text}")

    def _read(self, seconds: float) -> None:
        """Takes what the program prints within so many seconds, until it begins or ends to train."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], max(0.0, seconds))[0]:
            return
        data = os.read(pipe.fileno(), 65536)
        if not data:
            raise SystemExit(f"{self.library} failed:\n{self._text}")
        self._text += data.decode()
        lines = self._text.splitlines()
        begun, ended = (any(x.startswith(start) for x in lines) for start in (_BEGINS, _ENDS))
        if begun and not self._began:
            self._began = time.monotonic()
        self._training = begun and not ended

    def _steps(self) -> float:
        found = dict(re.findall(r"(\w+)=([\d.]+)", self._text))
        if "steps" in found:
            return float(found["steps"])
        return float(found["steps_per_second"]) * (time.monotonic() - self._began)  # the program's clock is not stopped


def race(plan: Plan, steps: int = STEPS, observers: int = 1) -> Samples:
    """Runs the program under both, and returns their steps per second."""
    samples: Samples = {ROW.key: {library: [] for library in COMMANDS}}
    arguments = ["--steps", str(steps), "--world_size", str(observers + 1)]
    for number in range(plan.rounds):
        say(f"CartPole: round {number + 1} of {plan.rounds}")
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(Run(library, arguments)) for library in COMMANDS]
            for run in runs:
                run.stop()
            for run in runs:
                run.begin()
            end = time.monotonic() + PATIENCE
            while not all(run.rate for run in runs):
                for run in runs:
                    run.go_on(plan.seconds)
                if time.monotonic() > end:
                    raise SystemExit(f"CartPole was not done in {PATIENCE:.0f} s")
            for run in runs:
                samples[ROW.key][run.library].append(run.rate)
    return samples


def cartpole(plan: Plan, steps: int = STEPS, observers: int = 1) -> list[Result]:
    """How fast a whole program is."""
    return [result_of(ROW, race(plan, steps, observers)[ROW.key])]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_for("benchmarks.cartpole", "Steps of CartPole per second.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run, at least (default: {STEPS})")
    parser.add_argument("--observers", type=int, default=1, help="processes that play (default: 1)")
    options = parser.parse_args(arguments)
    plan = plan_of(parser, options)
    for name in ("steps", "observers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    prepare()
    return report(cartpole(plan, options.steps, options.observers), plan, options.json)


if __name__ == "__main__":
    sys.exit(main())
