"""`python -m actorrpc`: the command line."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from actorrpc.compat import install
from actorrpc.compat.children import VARIABLE
from actorrpc.compat.compare import compare


def main(arguments: list[str] | None = None) -> None:
    """Does what the command line says.

    Arguments:
        arguments: without the program's name; default: those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m actorrpc", description="Runs programs on actorrpc.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a program for torch.distributed.rpc on actorrpc, unchanged",
        description="Runs a Python program, with actorrpc in the place of torch.distributed.rpc in it and in the "
        "processes that it starts.",
    )
    run.add_argument("--quiet", action="store_true", help="do not say on stderr that actorrpc stands in")
    run.add_argument(
        "--compare",
        action="store_true",
        help="run it twice, under torch.distributed.rpc and under actorrpc, and print how outputs and times differ",
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module, as in python -m")
    run.add_argument("program", metavar="PROGRAM", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="what the program is given")
    options = parser.parse_args(arguments)
    if options.compare:
        print(compare(options.program, options.arguments, module=options.module))
        return
    run_program(options.program, options.arguments, module=options.module, quiet=options.quiet)


def run_program(program: str, arguments: list[str], *, module: bool = False, quiet: bool = False) -> None:
    """Runs a program as Python would, with the stand-in in force. Raises what the program raises.

    Arguments:
        program: a file, or with `module` the name of a module.
        arguments: what it finds in `sys.argv` after its own name.
        quiet: does not say on stderr, once for all processes of the program, that the stand-in is in force.
    """
    if not (module or Path(program).exists()):
        sys.exit(f"python -m actorrpc run: there is no file {program!r}")
    if not quiet and VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":
        print(f"actorrpc stands in for torch.distributed.rpc in {program}", file=sys.stderr)
    install()
    sys.argv[:] = [program, *arguments]
    if module:
        sys.path[0:0] = [] if "" in sys.path else [os.getcwd()]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
