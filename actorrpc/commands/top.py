"""`actorrpc top`: what the workers of a running world have to do."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING

from actorrpc.commands.failing import CommandError
from actorrpc.commands.worlds import ADDRESSES, add_arguments, enter, find

if TYPE_CHECKING:
    from rich.text import Text

    from actorrpc.attaching import Attached
    from actorrpc.commands.declaring import Commands
    from actorrpc.commands.watching import Line, Watcher

_SORTS = ("rank", "calls", "p99", "waiting", "memory")
_STYLES = {"title": "bold", "head": "reverse", "silent": "yellow", "lost": "bold red", "note": "dim"}
_AT_LEAST_SECONDS = 1.0
"""What workers get to answer."""
EXAMPLES = f"""examples:
  actorrpc top                           the world that was launched on this host, until Ctrl-C
  actorrpc top node17:29500              one whose workers meet there
  actorrpc top node17:29500 --once       the figures of one second, as text
  actorrpc top --once --json             the same, for scripts
  actorrpc top --prometheus 9464         the same figures at http://127.0.0.1:9464/metrics, until the world ends

{ADDRESSES}
columns:
  calls/s, sent/s   calls and tells that came to the worker, and that it sent
  p50, p99          how long calls took there, from their coming until they were answered
  waiting           messages in mailboxes, and handlers that wait for a thread
  running           handlers that run, and do not wait themselves
  open              calls of its own that are not answered
  in/s, out/s       bytes from and to others

exit code: 0 when it was told to end or the world has ended, 1 when the world cannot be reached or its rank 0 was lost.
"""


def declare(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "top",
        help="show what the workers of a running world have to do",
        description="Looks into a running world as a guest, and shows for each worker how many calls it serves, how\n"
        "long they take and what waits there. It does not disturb the world, which ends without waiting for it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="time between two looks; default 1"
    )
    parser.add_argument("--sort", choices=_SORTS, default="rank", help="what to sort workers by; default rank")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the figures of one interval, and end")
    how.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve the figures there for Prometheus instead; default of HOST: 127.0.0.1",
    )
    parser.add_argument("--json", action="store_true", help="with --once: as JSON")
    parser.set_defaults(runs=runs)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.1 to 3600 seconds")
    return seconds


def runs(options: argparse.Namespace) -> int:
    """Shows the figures."""
    if options.json and not options.once:
        raise CommandError("--json needs --once", 2)
    if not options.once and options.prometheus is None:
        _check_screen()
    options.address = find(options.address)
    if options.prometheus is not None:
        from actorrpc.commands.exporter import place_of, serve

        place = place_of(options.prometheus)
        with enter(options, "prometheus") as world:
            return serve(world, options.address, place)
    with enter(options, "top") as world:
        return _once(world, options) if options.once else _live(world, options)


def _watcher(world: Attached, interval: float) -> Watcher:
    from actorrpc.commands.watching import Watcher

    return Watcher(world._session, max(interval, _AT_LEAST_SECONDS))


def _once(world: Attached, options: argparse.Namespace) -> int:
    from actorrpc.commands.watching import lines_of

    watcher = _watcher(world, options.interval)
    watcher.look()
    watcher.pause(options.interval)
    shot = watcher.look()
    if options.json:
        print(json.dumps(shot.as_json(options.address), indent=2))
    else:
        width = shutil.get_terminal_size((120, 24)).columns
        print("\n".join(line.text.rstrip() for line in lines_of(shot, options.address, width, sort=options.sort)))
    return 0


def _check_screen() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise CommandError("the live view needs rich (pip install 'actorrpc[top]'); --once does without") from None
    if not sys.stdout.isatty():
        raise CommandError("the live view needs a terminal; --once prints the figures, and --once --json for scripts")


def _live(world: Attached, options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from actorrpc.commands.watching import lines_of

    watcher, console = _watcher(world, options.interval), Console()
    foot = f"every {options.interval:g} s; Ctrl-C ends"
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while (end := watcher.end()) is None:
                shot = watcher.look()
                lines = lines_of(shot, options.address, console.width, console.height, options.sort, foot)
                live.update(drawn(lines), refresh=True)
                watcher.pause(options.interval)
    except KeyboardInterrupt:
        return 0
    return say_end(options.address, end)


def drawn(lines: list[Line]) -> Text:
    """Returns lines as rich shows them."""
    from rich.text import Text

    return Text("\n").join(Text(line.text, _STYLES.get(line.kind, "")) for line in lines)


def say_end(address: str, end: tuple[str, bool]) -> int:
    """Says how a world has ended, in one line; returns the exit code."""
    text, in_order = end
    print(f"the world at {address} {text}")
    return 0 if in_order else 1
