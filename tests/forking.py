"""For tests that fork beside a running world."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any


def in_child(action: Callable[[], Any]) -> str:
    """Forks, and returns what came of an action in the child; "hangs" after 10 s."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = f"returned {action()!r}"
            except BaseException as e:
                text = f"{type(e).__name__}: {e}"
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], 10)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return "hangs"
        return os.read(read, 1000).decode()
    finally:
        os.close(read)
        os.waitpid(pid, 0)
