"""What is said of a member that has died."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import Protocol

from actorrpc.errors import MemberDiedError
from actorrpc.launching.child import Report

UNGUARDED = 86  # exit code of a child whose import of __main__ called run() again


class Restarts(Protocol):
    @property
    def restarts(self) -> int: ...


class Dead(Protocol):
    """What must be known of it; see ``processes``."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def member(self) -> Restarts: ...
    @property
    def life(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def report(self) -> Report | None: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def again_at(self) -> float | None: ...


def died(p: Dead, others: Sequence[str], is_driver: bool = False) -> MemberDiedError:
    """The error that says who died of what."""
    report = p.report
    by_signal = None
    if p.exitcode is not None and p.exitcode < 0 and (report is None or report.kind == "returned"):
        by_signal = _signal_name(-p.exitcode)
    if report is not None and report.kind in ("raised", "exited"):
        what = report.text
    elif report is not None and report.kind == "interrupted":
        what, by_signal = "was interrupted (SIGINT)", "SIGINT"
    elif by_signal:
        what = f"was killed by {by_signal}"
    elif p.exitcode == UNGUARDED and not p.ready:
        what = "launches the world again: put the launch under  if __name__ == '__main__':  in the script"
    elif not p.ready:
        what = f"exited with code {p.exitcode} while it was importing the main script (its own output says why)"
    else:
        what = f"exited with code {p.exitcode} (os._exit or sys.exit?)"
    text = f'member "{p.name}" (pid {p.pid}, host {socket.gethostname()}) died: {what}'
    if p.life and p.again_at is None:
        text += f"\n(it had been started again {p.life} of {p.member.restarts} times)"
    if is_driver and p.member.restarts:
        text += "\n(the driver, rank 0, is not started again whatever its role's restarts: the world ends with it)"
    if others:
        text += f"\n(soon afterwards, probably because of it: {', '.join(others)})"
    remote = report.traceback if report is not None else ""
    if remote:
        text += f"\n\nThe traceback of {p.name}:\n{remote}"
    error = MemberDiedError(
        text, name=p.name, pid=p.pid, exitcode=p.exitcode, signal=by_signal, traceback=remote.rstrip()
    )
    if report is not None and report.kind == "raised" and report.value:
        # Not every exception can be loaded (a constructor with two arguments, say); its text is there in any case.
        with contextlib.suppress(Exception):
            cause = pickle.loads(report.value)
            error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
