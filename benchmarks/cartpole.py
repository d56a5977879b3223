"""Reinforcement learning under torch and with actorrpc standing in: ``python -m benchmarks.cartpole``.

The program is `tests/programs/plain/cartpole.py`, which knows nothing of actorrpc. Both run it in turn, as a user
would; what counts are the environment's steps per second that it prints, those of all observers together.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.pairs import PATIENCE, Figures, free_port, medians

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "plain" / "cartpole.py"
COMMANDS = {"torch": [], "actorrpc": ["-m", "actorrpc", "run", "--quiet"]}
ROWS = {
    "steps_per_second": "steps/s",
    "while_playing": "steps/s without learning",
}
LEAST = ("steps_per_second", 1.3)
"""How many times as fast --check wants it."""


def run(library: str, arguments: list[str]) -> Figures:
    """Runs the program once; returns its figures."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *COMMANDS[library], str(PROGRAM), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{library} has not finished in {PATIENCE:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise SystemExit(f"{library} failed:\n{out}")
    found = dict(re.findall(r"(\w+)=([\d.]+)", next(x for x in out.splitlines() if x.startswith("speed "))))
    return {key: float(found[key]) for key in ROWS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cartpole", description="Steps of CartPole per second.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each library runs (default: 3)")
    parser.add_argument("--steps", type=int, default=4000, help="steps of a run, at least (default: 4000)")
    parser.add_argument("--observers", type=int, default=1, help="processes that play (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's figures there")
    parser.add_argument("--check", action="store_true", help="fail unless actorrpc is as far ahead as it should be")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps", "observers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")

    program = ["--steps", str(options.steps), "--world_size", str(options.observers + 1)]
    rounds: dict[str, list[Figures]] = {library: [] for library in COMMANDS}
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for library in COMMANDS if i % 2 == 0 else reversed(COMMANDS):
            rounds[library].append(run(library, program))
    theirs, ours = medians(rounds["torch"]), medians(rounds["actorrpc"])
    print(f"{'median of the rounds':36}{'torch':>12}{'actorrpc':>12}{'times ahead':>13}")
    for key, title in ROWS.items():
        print(f"{title:36}{theirs[key]:12,.0f}{ours[key]:12,.0f}{ours[key] / theirs[key]:13.2f}")
    if options.json:
        record = {"median": {"theirs": theirs, "ours": ours}, "rounds": rounds}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    key, least = LEAST
    if options.check and ours[key] < least * theirs[key]:
        print(f"{ours[key] / theirs[key]:.2f} times torch's {ROWS[key]}, at least {least} is wanted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
