"""``python -m examples.pipeline``: two stages on two workers, and a driver that feeds them micro-batches."""

import argparse
import sys

import actorrpc as rpc
from examples.pipeline.roles import drive


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.pipeline",
        description="A convolutional net in two stages on two workers, trained in micro-batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="batches to train on")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="pictures in a batch")
    parser.add_argument("--split", type=int, default=4, metavar="N", help="micro-batches that a batch is cut into")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "split"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    driver = rpc.Role(drive, 1, options.steps, options.batch, options.split)
    try:
        result = rpc.launch(driver=driver, stage=rpc.Role(None, 2))
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    if result is not None:
        print(
            f"Loss {result.losses[0]:.3f} at first, {result.losses[-1]:.3f} after {len(result.losses)} steps; "
            f"{result.accuracy:.1%} of fresh pictures are right."
        )


if __name__ == "__main__":
    main()
