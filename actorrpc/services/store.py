"""The rendezvous store. It carries one thing: a hint where rank 0's directory listens.

It is built upon torch's own stores, so that MASTER_ADDR and MASTER_PORT, ``torchrun``, ``file://`` and a process group
on the same port all work, but it does not use ``torch.distributed.rendezvous``: given the real world size that blocks
for 30 minutes, and given a world of one it still blocks, deaf to Ctrl-C, wherever a server is there and mute.

Seen with torch 2.13, and the reason for the shape of this file:

- A ``TCPStore``'s constructor, ``check`` and ``wait`` block for ever, whatever their timeout, once a server that has
  accepted the connection does not answer (stopped, or no store at all). So every operation of torch's runs in a thread
  of its own that can be given up (``_Attempt``).

What else torch's stores do is told in ``places``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from actorrpc.errors import RendezvousError
from actorrpc.services.places import PAUSE, FilePlace, TcpPlace, parse_place

T = TypeVar("T")


class HintStore:
    """Where rank 0 leaves, and the others find, the hint.

    Not for use by two threads at once. Nothing here blocks longer than it says, and every wait ends with Ctrl-C.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``, as torch takes them.
        rank: This worker's rank, -1 for none. Rank 0 hosts the store, except where torchrun's agent does.
        clock_slice: About how long, in seconds, ``read`` may block.

    Raises:
        RendezvousError: The address, or the environment behind ``env://``, is not usable as written.
    """

    def __init__(self, init_method: str, rank: int, *, clock_slice: float = 1.0) -> None:
        self._place: TcpPlace | FilePlace = parse_place(init_method, rank)
        self._rank = rank
        self._slice = clock_slice
        self._began = time.monotonic()
        self._attempt: _Attempt[bytes | None] | None = None
        self._last_error = ""
        self._is_closed = False

    @property
    def master_host(self) -> str | None:
        """The host of the address, without brackets; None for ``file://``."""
        return self._place.host

    def publish(self, hint: bytes, deadline: float) -> None:
        """Leave the hint, over whatever an earlier run left; may be called again with a newer one.

        Args:
            hint: A short value.
            deadline: When to give up, on ``time.monotonic()``.

        Raises:
            RendezvousError: The store could not be hosted or reached in time, or another program has its port.
        """
        self._check_open()
        while True:
            attempt = _Attempt(lambda: self._place.publish(hint, deadline))
            if attempt.wait(deadline - time.monotonic()):
                error = attempt.error
                if error is None:
                    return
                if isinstance(error, RendezvousError):
                    raise error
                self._last_error = _first_line(error)
            else:
                self._last_error = "it does not answer"
            if time.monotonic() + PAUSE >= deadline:
                raise self._too_late(", but could not leave the hint for the others", "Is it reachable from here?")
            time.sleep(PAUSE)

    def peek(self, seconds: float = 0.5) -> bytes | None:
        """Return the hint that is there, without waiting for one to come; None also where nobody can say in time."""
        self._check_open()
        attempt = _Attempt(lambda: self._place.read())
        attempt.wait(seconds)
        return attempt.value

    def read(self, deadline: float) -> bytes | None:
        """Look for the hint, asking the store anew.

        Returns at once where there is one, so a caller that does not like what it gets should pause before it looks
        again: the hint may be an earlier run's until rank 0 has written its own.

        Args:
            deadline: When to give up, on ``time.monotonic()``.

        Returns:
            The hint as it is now, or None after about ``clock_slice`` seconds without one.

        Raises:
            RendezvousError: There is none, and the deadline has passed; or the address can never work.
        """
        self._check_open()
        until = min(time.monotonic() + self._slice, deadline)
        while True:
            # One that the last call left behind is waited for first: a mute server would otherwise get a thread a call.
            if self._attempt is None or self._attempt.is_stale():
                self._attempt = _Attempt(lambda: self._place.read())
            attempt = self._attempt
            if attempt.wait(max(until - time.monotonic(), PAUSE)):
                self._attempt = None
                if isinstance(attempt.error, RendezvousError):
                    raise attempt.error
                if attempt.error is not None:
                    self._last_error = _first_line(attempt.error)
                elif attempt.value is not None:
                    return attempt.value
                else:
                    self._last_error = "the store is there, and no hint in it yet"
            else:
                self._last_error = "it does not answer"
            if time.monotonic() >= deadline:
                raise self._too_late(
                    ", but rank 0 has published no address",
                    "Is rank 0 running, and does it use the same address? Is the address reachable from here?",
                )
            if time.monotonic() >= until:
                return None
            time.sleep(min(PAUSE, max(0.0, until - time.monotonic())))

    def seen(self) -> str:
        """Say in words what was found last, and where."""
        return f"at {self._place.address}; last seen there: {self._last_error or 'nothing'}"

    def close(self) -> None:
        """Let go of the store. Rank 0 ends its server, unless a process group shares it. May be called twice."""
        self._is_closed = True
        self._attempt = None
        self._place.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RendezvousError("this HintStore was closed here, by its own worker", address=self._place.address)

    def _too_late(self, lacking: str, advice: str) -> RendezvousError:
        waited = time.monotonic() - self._began
        who = "this process" if self._rank < 0 else f"rank {self._rank}"
        return RendezvousError(
            f"{who} waited {waited:.1f} s at {self._place.address}{lacking}. "
            f"Last seen: {self._last_error or 'nothing'}. {advice}",
            address=self._place.address,
            waited=waited,
        )


class _Attempt(Generic[T]):
    """One operation in a thread of its own, so that whoever waits for it can be interrupted, and can give it up."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self._done = threading.Event()
        self._began = time.monotonic()
        self.value: T | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="actorrpc-store", daemon=True).start()

    def _run(self) -> None:
        try:
            self.value = self._operation()
        except BaseException as exc:  # it is raised, or told, where it is waited for
            self.error = exc
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(max(0.0, seconds))

    def is_stale(self) -> bool:
        """Whether to try once more beside it: its server may have gone without a word."""
        return time.monotonic() - self._began > 5.0 and not self._done.is_set()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__
