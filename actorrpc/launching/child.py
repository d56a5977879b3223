"""What a member of a launched world does in its own process, around the function that it was started for.

It ends with its parent, is deaf to Ctrl-C until it can end quietly, and prints no traceback of its own: it sends one
Report to the parent, which shows the one that matters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Literal, NoReturn

from actorrpc import reducers
from actorrpc.launching.interrupts import INTERRUPTED, ignore_sigint, unblock_sigint
from actorrpc.launching.output import redirect
from actorrpc.runtime.forked import end_child

READY = b"ready"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Report:
    """How a member's function ended, as told by the member."""

    kind: Literal["returned", "raised", "exited", "interrupted"]
    text: str = ""
    value: bytes = b""  # the pickled return value, or the pickled exception
    traceback: str = ""
    lost_a_peer: bool = False  # it died of somebody else's death


def main(
    channel: connection.Connection, parent: int, is_driver: bool, output: connection.Connection | None = None
) -> None:
    """Run one member: take its work from the channel, do it, report.

    Args:
        channel: The child's end of the channel that ``processes`` describes.
        parent: The pid of the process that started this one.
        is_driver: Whether the return value is wanted.
        output: Where stdout and stderr are to go; None leaves them.

    Does not return: it ends the process, with code 0 where the function returned.
    """
    _end_with_parent(parent)
    if output is not None:
        redirect(output)
    pid = os.getpid()
    try:
        report, code = _work(channel, is_driver)
    except KeyboardInterrupt:
        # Also one that arrives while another exception is being reported. From here on a second Ctrl-C could only put
        # a traceback on the terminal: the parent ends whoever does not end.
        ignore_sigint()
        report, code = Report("interrupted"), INTERRUPTED
    if os.getpid() != pid:  # a child that the member has forked came back: it is the member who reports
        end_child(code)
    ignore_sigint()
    with contextlib.suppress(OSError):  # the parent has hung up: it is ending us
        channel.send_bytes(pickle.dumps(report))
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End the process as the interpreter would, but for taking itself apart: with torch in it, and all members at it at
    once, that takes seconds, in which everybody waits.
    """
    with contextlib.suppress(Exception):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _work(channel: connection.Connection, is_driver: bool) -> tuple[Report, int]:
    """Do the work; the report of how it ended, and the exit code that goes with it."""
    try:
        unblock_sigint()  # one that came during the imports is raised here
        try:
            channel.send_bytes(READY)
            payload = channel.recv_bytes()
        except (EOFError, OSError):  # the parent has hung up: it is ending us
            return Report("interrupted"), INTERRUPTED
        target, args, keywords = _load(payload)
        value = target(*args, **keywords)
        return Report("returned", value=_dump_value(value) if is_driver else b""), 0
    except KeyboardInterrupt:
        raise
    except SystemExit as exc:
        if exc.code is None or exc.code == 0:
            return Report("returned"), 0
        if isinstance(exc.code, int):
            return Report("exited", text=f"called sys.exit({exc.code})", traceback=_traceback(exc)), exc.code
        return Report("exited", text=f"called sys.exit: {exc.code}", traceback=_traceback(exc)), 1
    except BaseException as exc:
        return _raised(exc), 1


def _load(payload: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    try:
        target, args, keywords = pickle.loads(payload)
    except Exception as exc:
        raise ImportError(
            f"cannot load this member's function and arguments ({exc}); they must be importable here, "
            "at the top level of a module or of the main script"
        ) from exc
    return target, args, keywords


def _dump_value(value: object) -> bytes:
    if value is None:
        return b""
    try:
        return reducers.dumps(value, by_name=False)
    except Exception as exc:
        raise TypeError(f"the driver's return value ({type(value).__name__}) cannot be pickled: {exc}") from exc


def _raised(exc: BaseException) -> Report:
    """The report of an exception; whatever its class does wrong, there is a report."""
    try:
        said = str(exc)
    except Exception:
        said = "(its str() fails)"
    try:
        value = reducers.dumps(exc, by_name=False)
    except Exception:
        value = b""
    name = type(exc).__qualname__
    return Report(
        "raised",
        text=f"raised {name}: {said}" if said else f"raised {name}",
        value=value,
        traceback=_traceback(exc),
        lost_a_peer=_lost_a_peer(exc),
    )


def _traceback(exc: BaseException) -> str:
    """The traceback below this file."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__ and tb.tb_next is not None:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(exc), exc, tb))


def _lost_a_peer(exc: BaseException) -> bool:
    """Whether a WorkerLostError is behind it. By name: this package knows nothing of messaging."""
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(cls.__name__ == "WorkerLostError" for cls in type(link).__mro__):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _end_with_parent(parent: int) -> None:
    """See to it that this process does not outlive its parent, however that ends.

    On Linux by the kernel. Hazard: the signal comes when the *thread* that started this process ends, not only its
    process; ``processes.run`` stays in that thread as long as a child lives. Elsewhere, and for code that resets the
    kernel's setting (a change of credentials does), by a thread.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended while we were importing: no signal will come
            os._exit(1)
    process = multiprocessing.parent_process()
    if process is not None:
        threading.Thread(
            target=_exit_after, args=(process.sentinel,), name="actorrpc-parent-watch", daemon=True
        ).start()


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
