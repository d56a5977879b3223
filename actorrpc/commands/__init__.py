"""The command line: `actorrpc`, also `python -m actorrpc`. A command is a module of this package.

Each has `declare(commands)`, which adds its parser and names the function that runs it: that function is given the
parsed options and returns the exit code. A `CommandError` ends a command with one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys

from actorrpc.commands.failing import CommandError
from actorrpc.version import VERSION

# In the order of --help. A command's module imports what it needs only when it runs: --help stays quick.
COMMANDS = ("run", "launch", "top", "trace", "check", "version")

_WITH_TORCH = ("run", "launch", "top", "trace")

WRONG_USE = 2  # as argparse ends
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to stdout fails of."""


def main(arguments: list[str] | None = None) -> int:
    """Does what the command line says.

    Arguments:
        arguments: without the program's name; default: those of this process.

    Returns:
        the exit code: 0 when the command did what it was asked, 1 when it could not (one line on stderr says why and
        what to do) or its output could not be written (silently, where nobody reads it any more), 2 for a wrong command
        line, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="actorrpc",
        description="Remote calls and actors for PyTorch programs on several processes and hosts.",
        epilog="'actorrpc COMMAND --help' tells more about a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"actorrpc {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"actorrpc.commands.{name}").declare(commands)
    options = argparse.Namespace(command=None)
    try:
        try:
            parser.parse_args(arguments, options)
        except SystemExit:  # of --help, which is printed
            _flush()
            raise
        if options.command is None:
            parser.print_help(sys.stderr)
            return WRONG_USE
        code = _run(options)
        _flush()  # now: at the interpreter's end nobody could catch what it raises
        return code
    except OSError as error:
        unread, full = isinstance(error, BrokenPipeError), error.filename is None and error.errno in _UNWRITABLE
        if options.command == "run" or not (unread or full):  # the program's own matter, or none of the output
            raise
        _drop_output()
        if full:
            print(f"{_named(options)}: what it prints cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    """Runs a command; returns the exit code. Raises what the command's prints raise."""
    if options.command != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that a terminal's encoding lacks
    try:
        if options.command in _WITH_TORCH:
            # Torch's C code imports it, and swallows what comes meanwhile: a Ctrl-C would be lost.
            importlib.import_module("numpy")
        return int(options.runs(options))
    except CommandError as error:
        print(f"{_named(options)}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _named(options: argparse.Namespace) -> str:
    return f"actorrpc {options.command}" if options.command else "actorrpc"


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Lets what is still to be written go nowhere: it would fail again at the interpreter's end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
