"""Children that a handler has forked: they have all that the worker has, but of its threads only the one they are in.

A child that comes back from the handler into the library's own code would go on as the worker: answer its message,
receive what is sent to its parent, run what is to be run when the program ends. So it ends there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def end_child(code: int = 0) -> NoReturn:
    """Ends this process, which was forked from a worker's, at once and without anything that is to be done at an
    interpreter's end. What it has printed is written.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
