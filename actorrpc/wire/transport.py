"""What the kernel asks of a transport: carry frames to a peer, and hand out what came in.

The real one is `wire.zeromq`; `actorrpc.testing` has a simulated one. THREAD RULES of every transport: `receive`
belongs to the one thread that leads; `send`, `dial`, `flush` and `wake` may be called from any thread; `wake` also from
a finalizer or a signal handler, so it takes no lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from actorrpc.wire.envelope import Frame

T = TypeVar("T")

AT_ONCE: Final = 0
SOON: Final = 1
LATER: Final = 2
"""How long a message may be held back; see `Transport.send`."""
COPIED_BELOW: Final = 256 * 1024
"""Bytes of a frame below which it is copied before `Transport.send` returns, wherever it then is."""


class News:
    """What a transport finds out of a peer, whose number is 0 or above, without having had a message."""

    ENDED: Final = "ended"
    """Its process has ended."""
    CUT: Final = "cut"
    """The connection to it has ended, or nothing was heard over it for too long."""
    REFUSED: Final = "refused"
    """Nobody listens where it did."""
    UNREACHED: Final = "unreached"
    """No connection has come about."""
    AWAKE: Final = "awake"
    """Of no peer (-1): this process itself has stood still until now, for so long that peers may have given it up."""


class Transport(Protocol):
    """Carries messages between workers; order is kept from one sender to one receiver."""

    told: Callable[[int, str], None]
    """Called with a peer's number and what has become of it, one of `News`, by a thread of the transport's own; may be
    told more than once.
    """

    silence: float
    """After how many seconds of silence a connection counts as ended; 0: never."""

    @property
    def overdue(self) -> float:
        """From when on it may be said that this process has stood still until now; infinity: never. `News.AWAKE` says
        the same, a little later.
        """

    def attend(self, peer: int, pid: int) -> None:
        """Has the end of a dialled peer's process on this host told, where that can be seen here."""

    def is_local(self, peer: int) -> bool:
        """Returns whether the way to a peer never leaves this host, so that nothing but its ends can break it."""

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

    def send(self, peer: int, frames: Sequence[Frame], hold: int = AT_ONCE, lasting: bool = True) -> None:
        """Queues one message for a dialled peer. Never blocks.

        Arguments:
            peer: whom it is for.
            frames: its parts.
            hold: whether it may wait for others to the same peer: AT_ONCE, not at all; SOON, until the next `receive`
                that finds nothing at once, or `flush`, or until enough are held; LATER, until one of the last two. It
                keeps its place before all later ones.
            lasting: whether large frames (from `COPIED_BELOW` on) stay as they are until they have left. Those of an
                answer or a tell may not: their sender has no moment at which it could know that. Then they are copied,
                as smaller ones are in any case.

        Raises:
            KeyError: the peer was not dialled, or hung up.
        """

    def sharing(self, peers: Sequence[int], frames: Sequence[Frame]) -> AbstractContextManager[object]:
        """Has the buffers of a message, its frames but the first, written once for all peers to whom it is sent by
        this thread in the `with` block, as far as that can be done. What is sent must hold the same buffers, not
        equal ones.
        """

    def flush(self) -> None:
        """Sends what is held back. From any thread."""

    def receive(self, timeout: float | None) -> list[Frame] | None:
        """Waits for a message, at most `timeout` seconds (None: without bound).

        Returns its frames; None when `wake` was called or time ran out.
        """

    def wake(self) -> None:
        """Ends the present or else the next `receive`. Where messages came as well, the first `receive` that finds no
        more of them does not wait either: whoever called this learns from `emptied` that all is taken in.
        """

    def close(self, linger: float = 0.0) -> None:
        """Frees everything; what is queued gets `linger` seconds to leave. Only after the last `receive` returned."""


def snapshot(frames: Sequence[Frame], lasting: bool = False) -> Sequence[Frame]:
    """Copies the frames of a message that may change before they have left (see `Transport.send`); the first cannot."""
    if len(frames) == 1:
        return frames
    return [frames[0], *(f if lasting and memoryview(f).nbytes >= COPIED_BELOW else bytes(f) for f in frames[1:])]


def taken_out(late: deque[T]) -> Iterator[T]:
    """Takes all messages out of a queue, to be added to what is held: `held.extend(taken_out(late))`, in two lines.

    A finalizer or a signal handler of the user's may send in the midst of that, and flush what is held. So a message
    goes from one to the other in one step of the interpreter's, in which none of them runs.

    Raises:
        IndexError: (as it is used) they were taken out meanwhile.
    """
    return map(deque.popleft, itertools.repeat(late, len(late)))
