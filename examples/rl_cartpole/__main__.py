"""``python -m examples.rl_cartpole``: trains until CartPole is solved."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("gymnasium", "matplotlib", "tqdm")
WORLD_SIZE = "processes: one agent, W-1 observers (default: 2; 4 with --elastic)"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rl_cartpole",
        description="Distributed reinforcement learning: an agent learns CartPole from what its observers see.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, default=argparse.SUPPRESS, metavar="W", help=WORLD_SIZE)
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="episodes from log line to log line")
    parser.add_argument("--gamma", type=float, default=0.99, metavar="G", help="how much to value future rewards")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed for reproducibility")
    parser.add_argument("--max-episodes", type=int, default=3000, metavar="N", help="give up after so many episodes")
    parser.add_argument("--out", type=Path, default=Path("runs/rl_cartpole"), metavar="DIR", help="where results go")
    parser.add_argument("--elastic", action="store_true", help="kill observers while it trains; new ones take over")
    parser.add_argument("--kill-every", type=int, default=20, metavar="N", help="so many episodes from kill to kill")
    options = parser.parse_args(arguments)
    if not hasattr(options, "world_size"):
        options.world_size = 4 if options.elastic else 2
    for name, least in (("world_size", 2), ("log_interval", 1), ("seed", 0), ("max_episodes", 1), ("kill_every", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.elastic and options.world_size < 3:
        parser.error("--elastic needs a --world-size of at least 3: one of the observers is always left alone")
    if not 0 <= options.gamma < 1:
        parser.error("--gamma must be at least 0 and less than 1")
    return options


def main() -> None:
    options = parse()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"This example needs {' and '.join(missing)}: pip install -e '.[examples]'")

    # Imported here, so that what is missing is said above in one line.
    import actorrpc as rpc
    from examples.rl_cartpole.report import csv_path, draw_curve
    from examples.rl_cartpole.roles import Agent, Observer

    agent = rpc.Role(
        Agent,
        1,
        out=options.out,
        gamma=options.gamma,
        seed=options.seed,
        log_interval=options.log_interval,
        max_episodes=options.max_episodes,
        kill_every=options.kill_every if options.elastic else 0,
    )
    restarts = options.max_episodes if options.elastic else 0
    observer = rpc.Role(Observer, options.world_size - 1, seed=options.seed, restarts=restarts, backoff=0.05)
    try:
        training = rpc.launch(agent=agent, observer=observer)
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. The episodes until now are in {csv_path(options.out)}")
    if training is None:
        return  # under torchrun, only the agent's process has the result

    picture = draw_curve(training, options.out)
    print(f"Learning curve: {picture}")
    print(f"Episodes: {csv_path(options.out)}")
    if training.solved:
        print(f"Solved! Running reward is now {training.running_reward}!")
    else:
        print(
            f"Not solved in {options.max_episodes} episodes. Running reward is now {training.running_reward}, "
            f"and the threshold is {training.threshold}."
        )


if __name__ == "__main__":
    main()
