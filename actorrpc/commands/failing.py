"""How a command says that it cannot do what it was asked."""

from __future__ import annotations


class CommandError(Exception):
    """Ends a command with its text as the one line on stderr: what happened, and what to do.

    Arguments:
        text: one line.
        exit_code: what the process ends with; default 1.
    """

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code
