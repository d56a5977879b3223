"""Prints the table: `python -m tests.chaos [--quick] [--seeds N] [--only row ...]`. The exit code is 0 if all is well.

The last three columns must be 0. A row that cannot be tried here says why, and does no harm to the exit code.
"""

from __future__ import annotations

import argparse
import sys

from tests.chaos.rows import ROWS
from tests.chaos.table import Row, print_table


def main(arguments: list[str] | None = None) -> int:
    """Tries the rows that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Tries faults, and prints how it went.")
    parser.add_argument("--quick", action="store_true", help="few cases a row, and leave out what takes minutes")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many cases the rows with seeds try")
    parser.add_argument("--only", nargs="+", metavar="row", choices=sorted(ROWS), help=", ".join(ROWS))
    told = parser.parse_args(arguments)

    def count(row: Row) -> int:
        if told.seeds is not None and row.seeded:
            return int(told.seeds)
        return row.quick if told.quick else row.full

    rows = [row for name, row in ROWS.items() if told.only is None or name in told.only]
    return 0 if print_table([row for row in rows if count(row) or told.only], count) else 1


if __name__ == "__main__":
    sys.exit(main())
