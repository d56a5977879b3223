"""`actorrpc launch`: a world of roles from the command line."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

from actorrpc.commands.failing import CommandError
from actorrpc.commands.worlds import add_token, token_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.commands.declaring import Commands
    from actorrpc.roles import Role

DESCRIPTION = """Starts a world: each role's workers, in the order of the roles. The first one drives it: the world ends
when its main returns. Under torchrun, srun or mpirun, which start this command once for each worker, it takes
the part of its rank instead."""
EXAMPLES = """examples:
  actorrpc launch program:Agent 'observer=program:Observer*4'
  actorrpc launch program:Agent 'observer=program:Observer*4' --set observer.seed=1 --restarts observer=3
  actorrpc launch trainer=program:train server=None --token-file token
  actorrpc launch program:Agent 'observer=program:Observer*4' --cpus agent=2 --cpus observer=1 --devices agent=1
  torchrun --nproc-per-node 5 -m actorrpc launch program:Agent 'observer=program:Observer*4'
  srun --ntasks 5 actorrpc launch program:Agent 'observer=program:Observer*4'

The current folder is on the import path. It exits with 0 when the first role's main has returned, which is printed
unless it is None; with 1 when a worker died, which the last line on stderr names.
"""
_SPEC = re.compile(r"(?:(?P<role>\w+)=)?(?:(?P<nothing>None)|(?P<module>[\w.]+):(?P<name>[\w.]+))(?:\*(?P<count>\d+))?")
_HIGHEST = 65_535
"""Of numbers of cores and GPUs: a slip of the keyboard shall not fill the memory."""


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "launch",
        help="start a world of roles",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "roles",
        nargs="+",
        metavar="[ROLE=]MODULE:CLASS[*N]",
        help="a role: N workers (default: 1) of an Actor class or function; ROLE is by default the class's name in "
        "lower case; ROLE=None*N are workers that only serve. Quote the * for your shell",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="ROLE.NAME=VALUE", dest="arguments",
        help="an argument of the role's class or function, or of rpc.Role (backoff, checkpoints): a Python literal, or "
        "else a string",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", action="append", default=[], metavar="ROLE=N",
        help="start each worker of the role again when it dies, N times at most",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", action="append", default=[], metavar="ROLE=N",
        help="N cores for each worker of the role; or which ones all of them share: 0,1 or 4-7",
    )  # fmt: skip
    parser.add_argument(
        "--devices", action="append", default=[], metavar="ROLE=N",
        help="N GPUs for each worker of the role; or which ones all of them share: 0,1 or 0-0 for one",
    )  # fmt: skip
    add_token(parser)
    parser.add_argument(
        "--logs", action="store_true",
        help="put worker, host and pid in front of each line that the workers print and log; no effect under torchrun, "
        "srun and mpirun, which have options for that",
    )  # fmt: skip
    parser.set_defaults(runs=runs)


def runs(options: argparse.Namespace) -> int:
    """Starts the world, and prints what its driver returned."""
    from actorrpc.launching.seats import seat_of
    from actorrpc.launching.starting import prepared
    from actorrpc.options import RpcBackendOptions
    from actorrpc.roles import parts_of

    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        parts = parts_of(_roles(options))
        seat = seat_of(os.environ)
        play = prepared(parts, RpcBackendOptions(security_token=token_of(options)), seat, options.logs)
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(_line(str(error))) from error
    value = _started(play) if seat is None else _taken(play, f"{parts[seat.rank].name} (rank {seat.rank})")
    if value is not None:
        print(value)
    return 0


def _started(play: Callable[[], Any]) -> Any:
    """Plays a world whose processes are all started here."""
    from actorrpc.errors import MemberDiedError

    try:
        return play()
    except MemberDiedError as error:
        if error.traceback:
            print(error.traceback, file=sys.stderr)
        raise CommandError(_line(str(error).split("\n\nThe traceback of ")[0])) from error
    except (TypeError, OSError) as error:  # what cannot be sent to a process, or no process to be had
        raise CommandError(_line(str(error))) from error


def _taken(play: Callable[[], Any], who: str) -> Any:
    """Plays one worker's part, in this process."""
    from actorrpc.errors import RendezvousError

    try:
        return play()
    except Exception as error:
        if not isinstance(error, RendezvousError):
            traceback.print_exc()
        raise CommandError(f"{who} raised {type(error).__name__}: {_line(str(error))}") from error


# -- what the command line says


def _roles(options: argparse.Namespace) -> dict[str, Role | Callable[..., Any] | None]:
    from actorrpc.roles import Role

    found = {}
    for spec in options.roles:
        role, what, count = _parsed(spec)
        if role in found:
            raise ValueError(f"two roles are called {role!r}: give one of them another name, {role}2={spec}")
        found[role] = what, count
    given: dict[str, dict[str, Any]] = {role: {} for role in found}
    for text in options.arguments:
        _give(given, "--set", text, _literal)
    for option, read in (("restarts", _whole), ("cpus", _numbers), ("devices", _numbers)):
        for text in getattr(options, option):
            _give(given, f"--{option}", text, read, option)
    return {role: Role(what, count, **given[role]) for role, (what, count) in found.items()}


def _parsed(spec: str) -> tuple[str, Callable[..., Any] | None, int]:
    match = _SPEC.fullmatch(spec)
    if match is None or (match["nothing"] and not match["role"]):
        raise ValueError(f"{spec!r} is no role: write MODULE:CLASS, ROLE=MODULE:CLASS*N or ROLE=None")
    count = int(match["count"] or 1)
    if match["nothing"]:
        return match["role"], None, count
    what = _found(match["module"], match["name"])
    return match["role"] or match["name"].split(".")[-1].lower(), what, count


def _found(module: str, name: str) -> Any:
    try:
        what: Any = importlib.import_module(module)
    except ImportError as error:
        if module.endswith(".py"):
            raise ValueError(f"{module!r} is a file: name the module, {module.removesuffix('.py')!r}") from error
        raise ValueError(f"module {module!r} cannot be imported ({error}); the current folder is looked in") from error
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"module {module!r} raised {type(error).__name__} when it was imported: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), what)
    except AttributeError:
        raise ValueError(f"module {module!r} has no {name!r}") from None


def _give(
    given: dict[str, dict[str, Any]], option: str, text: str, read: Callable[[str], Any], name: str | None = None
) -> None:
    """Adds an argument to its role's."""
    match = re.fullmatch(r"(\w+)=(.*)" if name else r"(\w+)\.(?P<name>\w+)=(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{option} takes {'ROLE=N' if name else 'ROLE.NAME=VALUE'}, not {text!r}")
    role, name, value = match[1], name or match["name"], match[match.re.groups]
    if role not in given:
        raise ValueError(f"{option} {text}: there is no role {role!r}, but {', '.join(given)}")
    if name in given[role]:
        raise ValueError(f"{name} of the role {role!r} is given twice")
    try:
        given[role][name] = read(value)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _numbers(text: str) -> int | tuple[int, ...]:
    """A number of them, or with a comma or a dash which ones."""
    if text.isdecimal():
        return int(text)
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"{text!r} is neither a number nor a list like 0,1 or 4-7")
    pairs = [piece.partition("-") for piece in text.split(",")]
    ends = [(int(low), int(high or low)) for low, _, high in pairs]
    if wrong := [f"{low}-{high}" for low, high in ends if not low <= high <= _HIGHEST]:
        raise ValueError(f"{wrong[0]} is no range: the lower number comes first, and none is above {_HIGHEST}")
    return tuple(number for low, high in ends for number in range(low, high + 1))


def _line(text: str) -> str:
    return " ".join(text.split("\n"))
