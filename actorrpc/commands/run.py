"""`actorrpc run`: a program for torch.distributed.rpc on actorrpc, unchanged."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.commands.failing import CommandError

if TYPE_CHECKING:
    from actorrpc.commands.declaring import Commands

EXAMPLES = """examples:
  actorrpc run main.py --epochs 3             the program's own arguments follow its name
  actorrpc run -m package.module              as python -m does
  actorrpc run --compare main.py              twice, under torch.distributed.rpc and under actorrpc, side by side
  torchrun --nproc-per-node 4 -m actorrpc run main.py
"""


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "run",
        help="run a program for torch.distributed.rpc on actorrpc, unchanged",
        description="Runs a Python program with actorrpc in the place of torch.distributed.rpc, in the program and in\n"
        "the processes that it starts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quiet", action="store_true", help="do not say on stderr that actorrpc stands in")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run it twice, under torch.distributed.rpc and under actorrpc, and print how outputs and times differ",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    # One argument, as argparse would take a "--" that follows the program's name for its own.
    parser.add_argument(
        "program", nargs=argparse.PARSER, metavar="PROGRAM", help="a Python file, and its own arguments"
    )
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Runs the program, or compares it."""
    program, *arguments = options.program[1:] if options.program[0] == "--" else options.program
    _check(program, options.module)
    if options.compare:
        from actorrpc.compat.compare import compare

        try:
            print(compare(program, arguments, module=options.module))
        except RuntimeError as error:
            raise CommandError(str(error), 2) from None
    else:
        run_program(program, arguments, module=options.module, quiet=options.quiet)
    return 0


def _check(program: str, module: bool) -> None:
    """Sees that there is a program. Raises CommandError where there is none."""
    if module:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        package = program.partition(".")[0]  # what is in it is found by importing it, which is the program's beginning
        if not package or importlib.util.find_spec(package) is None:
            raise CommandError(f"there is no module {package!r}; the current folder is looked in")
    elif not Path(program).exists():
        raise CommandError(f"there is no file {program!r}; -m runs a module by its name")
    elif Path(program).is_dir() and not (Path(program) / "__main__.py").exists():
        raise CommandError(f"{program!r} is a folder without a __main__.py")
    elif not os.access(program, os.R_OK):
        raise CommandError(f"{program!r} may not be read by this user")


def run_program(program: str, arguments: list[str], *, module: bool = False, quiet: bool = False) -> None:
    """Runs a program as Python would, with the stand-in in force. Raises what the program raises.

    Arguments:
        program: a file, or with `module` the name of a module.
        arguments: what it finds in `sys.argv` after its own name.
        quiet: does not say on stderr, once for all processes of the program, that the stand-in is in force.
    """
    from actorrpc.compat import install
    from actorrpc.compat.children import VARIABLE

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
