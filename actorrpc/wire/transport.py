"""What the kernel asks of a transport: carry frames to a peer, and hand out what came in.

The real one is `wire.zeromq`; `actorrpc.testing` has a simulated one. THREAD RULES of every transport: `receive`
belongs to the one thread that leads; `send`, `dial`, `flush` and `wake` may be called from any thread; `wake` also from
a finalizer or a signal handler, so it takes no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame


class Transport(Protocol):
    """Carries messages between workers; order is kept from one sender to one receiver."""

    @property
    def endpoints(self) -> list[str]:
        """Where others reach this worker, best first."""

    def dial(self, peer: int, endpoints: Sequence[str]) -> None:
        """Opens the way to a peer; an earlier way to the same peer number is closed first. Does not wait."""

    def hang_up(self, peer: int, linger: float = 0.0) -> None:
        """Closes the way to a peer and drops what is queued, after `linger` seconds at the most. Unknown ones pass."""

    holding: bool
    """Whether messages are held back, to leave together with others."""

    crowded: bool
    """Whether more messages lie there than the last one: then answers had better wait for each other."""

    emptied: int
    """How many times `receive` has found nothing there."""

    def send(self, peer: int, frames: Sequence[Frame], hold: bool = False, lasting: bool = True) -> None:
        """Queues one message for a dialled peer. Never blocks.

        Arguments:
            peer: whom it is for.
            frames: its parts.
            hold: whether it may wait for others to the same peer: until the next `receive` that finds nothing at once,
                or `flush`, or until enough are held. It keeps its place before all later ones.
            lasting: whether the frames stay as they are until they have left. Those of an answer or a tell may not:
                their sender has no moment at which it could know that. Then they are copied.

        Raises:
            KeyError: the peer was not dialled, or hung up.
        """

    def flush(self) -> None:
        """Sends what is held back. From any thread."""

    def receive(self, timeout: float | None) -> list[Frame] | None:
        """Waits for a message, at most `timeout` seconds (None: without bound).

        Returns its frames; None when `wake` was called or time ran out.
        """

    def wake(self) -> None:
        """Ends the present or else the next `receive`."""

    def close(self, linger: float = 0.0) -> None:
        """Frees everything; what is queued gets `linger` seconds to leave. Only after the last `receive` returned."""


def snapshot(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Copies the frames of a message that may change before they have left; the first cannot."""
    return frames if len(frames) == 1 else [frames[0], *map(bytes, frames[1:])]
