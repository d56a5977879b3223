"""``python -m examples.impala_lite``: trains until CartPole is solved."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("gymnasium", "matplotlib", "tqdm")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.impala_lite",
        description="IMPALA in small: a learner, actors that stream rollouts to it, and an evaluator.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--actors", type=int, default=3, metavar="N", help="actors that play")
    parser.add_argument("--environments", type=int, default=8, metavar="N", help="environments an actor")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="steps a rollout")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="rollouts a step of the learner")
    parser.add_argument("--max-steps", type=int, default=3000, metavar="N", help="give up after so many steps")
    parser.add_argument("--evaluate-every", type=int, default=5, metavar="N", help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed")
    parser.add_argument("--kill-one", type=int, default=0, metavar="STEP", help="kill an actor after this step")
    parser.add_argument("--out", type=Path, default=Path("runs/impala_lite"), metavar="DIR", help="where results go")
    options = parser.parse_args(arguments)
    for name in ("actors", "environments", "steps", "batch", "max_steps", "evaluate_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("seed", "kill_one"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0")
    return options


def main() -> None:
    options = parse()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"This example needs {' and '.join(missing)}: pip install -e '.[examples]'")

    # Imported here, so that what is missing is said above in one line.
    import actorrpc as rpc
    from examples.impala_lite.actors import Evaluator, RolloutActor
    from examples.impala_lite.learner import EPISODES, Learner
    from examples.impala_lite.report import csv_path, draw_curve

    learner = rpc.Role(
        Learner,
        1,
        out=options.out,
        seed=options.seed,
        batch=options.batch,
        max_steps=options.max_steps,
        evaluate_every=options.evaluate_every,
        kill_at=options.kill_one,
    )
    actor = rpc.Role(
        RolloutActor, options.actors, options.seed, options.environments, options.steps, restarts=3, backoff=0.1
    )
    try:
        run = rpc.launch(learner=learner, actor=actor, evaluator=Evaluator)
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. The evaluations until now are in {csv_path(options.out)}")
    if run is None:
        return  # under torchrun, only the learner's process has the result

    print(f"Learning curve: {draw_curve(run, options.out)}")
    print(f"Evaluations: {csv_path(options.out)}")
    if run.lost:
        print(f"Actors lost: {len(run.lost)}, back: {len(run.back)}")
    if run.solved:
        print(f"Solved! The average of {EPISODES} episodes is {run.average} after {run.frames} frames.")
    else:
        print(f"Not solved in {options.max_steps} steps. The last average was {run.average}, of {run.threshold}.")


if __name__ == "__main__":
    main()
