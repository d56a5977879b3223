"""``python -m examples.ddp_rpc``: DistributedDataParallel for the dense part, a parameter server for the sparse one."""

import argparse
import sys

import actorrpc as rpc
from examples.ddp_rpc.roles import Trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ddp_rpc",
        description="Data-parallel trainers that share a sparse table on a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trainers", type=int, default=2, metavar="N", help="processes that train")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="batches of each trainer")
    options = parser.parse_args(arguments)
    for name in ("trainers", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    trainer = rpc.Role(Trainer, options.trainers, options.trainers, options.steps)
    try:
        result = rpc.launch(trainer=trainer, server=rpc.Role(None))
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    if result is not None:
        print(f"Loss {result.first:.3f} at first, {result.last:.3f} at the end.")
        print("The dense parts of all trainers are equal." if result.equal else "The dense parts differ!")


if __name__ == "__main__":
    main()
