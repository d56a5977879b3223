"""How much a worker has under way to a peer, or to an actor there, and who waits for room. Plain logic."""

from __future__ import annotations

from collections import deque
from typing import Final

from actorrpc.runtime.completion import Completion
from actorrpc.runtime.handling import here

PATIENCE_SECONDS: Final = 0.25
MOST_PATIENCE: Final = 5.0
"""How long a window must stand still before a handler does more than wait (LM3): at first, and at last."""

Place = tuple[int, int, int]
"""An actor: its worker's id, and its own id."""
Counted = tuple[int, bool, "Window", "Window"]
"""A message that was sent and takes up room: its bytes, whether it is a tell, and the windows of actor and peer."""




class Window:
    """What one worker has under way to a peer, or to an actor there. Under the door of its `Limits`.

    Attributes:
        to: the peer's id.
        place: the actor; None for the peer as a whole.
        calls, bytes: how much it is.
        tells: how many of the calls are tells; of a peer's window only.
        most_calls, most_bytes: how much it may be.
        waiting: who waits for room.
        racing: how many of those serve a mailbox meanwhile (LM4).
        moved: when room was last given back.
        patience: seconds for which it must have stood still before a handler does more than wait.
        stuck: whether it has stood still for so long, and was not half empty since.
    """

    __slots__ = (
        "bytes", "calls", "most_bytes", "most_calls", "moved", "patience", "place", "racing", "stuck", "tells",
        "to", "waiting",
    )  # fmt: skip

    def __init__(self, to: int, place: Place | None, most_calls: int, most_bytes: int) -> None:
        self.to, self.place, self.most_calls, self.most_bytes = to, place, most_calls, most_bytes
        self.calls = self.bytes = self.tells = 0
        self.waiting: deque[Room] = deque()
        self.racing, self.moved = 0, 0.0
        self.patience, self.stuck = PATIENCE_SECONDS, False

    def fits(self, size: int) -> bool:
        """Whether there is room for one more message."""
        return self.calls < self.most_calls and (not self.bytes or self.bytes + size <= self.most_bytes)

    def add(self, size: int) -> None:
        """Takes up room."""
        self.calls += 1
        self.bytes += size

    def state(self, to: str) -> str:
        """Says how full it is; `to`: whom it is for, in words."""
        return (
            f"{self.calls} calls with {self.bytes} bytes to {to} are under way, and {len(self.waiting)} wait; the "
            f"limits are {self.most_calls} calls and {self.most_bytes} bytes (max_pending and max_pending_bytes, of "
            f"the options or of the Actor's class). It does not keep up: call it less often, or wait for answers"
        )

    @property
    def open(self) -> bool:
        """Whether who comes now need not queue behind others."""
        return not self.waiting or self.racing > 0

    def queue(self, room: Room) -> None:
        """Has somebody wait."""
        self.waiting.append(room)
        self.racing += room.racing

    def leave(self, room: Room) -> None:
        """Takes somebody out who waits."""
        self.waiting.remove(room)
        self.racing -= room.racing

    def give_back(self, calls: int, size: int, now: float, ready: list[Room]) -> None:
        """Gives room back; adds those who are to be woken to `ready`."""
        self.calls -= calls
        self.bytes -= size
        self.moved = now
        if self.calls <= self.most_calls // 2 and self.bytes <= self.most_bytes // 2:
            self.patience, self.stuck = PATIENCE_SECONDS, False
        if self.racing:
            ready.extend(self.waiting)
            return
        while self.waiting and self.fits(self.waiting[0].size):
            room = self.waiting.popleft()
            room.granted = True
            self.add(room.size)
            ready.append(room)


class Room(Completion):
    """The wait of one thread for room.

    Attributes:
        size: bytes.
        granted: whether it has got some.
        in_handler: whether it is a handler's.
        racing: whether a mailbox is served meanwhile: an actor's `main` does from the first.
    """

    __slots__ = ("granted", "in_handler", "racing", "size")

    def __init__(self, size: int, racing: bool = False) -> None:
        super().__init__()
        handling = here.handling
        self.size, self.granted = size, False
        self.in_handler = handling is not None and handling.message is not None
        self.racing = handling is not None and handling.turn is not None and (racing or not self.in_handler)
