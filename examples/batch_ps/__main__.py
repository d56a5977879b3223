"""``python -m examples.batch_ps``: trainers whose gradients a server takes in batches."""

import argparse
import sys

import actorrpc as rpc
from examples.batch_ps.roles import Server, Trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.batch_ps",
        description="A parameter server that steps once for all trainers and answers them together.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trainers", type=int, default=3, metavar="N", help="processes that compute gradients")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of the server")
    parser.add_argument("--lr", type=float, default=0.1, metavar="R", help="learning rate of SGD")
    options = parser.parse_args(arguments)
    for name in ("trainers", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    try:
        result = rpc.launch(
            trainer=rpc.Role(Trainer, options.trainers, options.steps),
            server=rpc.Role(Server, 1, options.trainers, options.lr),
        )
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    if result is not None:
        print(f"{result.steps} steps for {options.trainers} trainers: {result.accuracy:.1%} of fresh points are right.")


if __name__ == "__main__":
    main()
