"""The envelope: what the first bytes of every message say, in a fixed layout.

A message is `[header + pickle][buffer]...`: the header and the pickle share the first frame, since one small frame
costs a third of what two cost. Nothing behind the header is read before the header is known to come from a peer.

GR1, for all versions to come: the first three bytes of every message are "a", the version of the protocol and the
kind; a greeting is these three bytes in a frame, and JSON in a second one. So workers of two versions can tell each
other that they do not fit. What the JSON of every version has is told at `services.roster.Hello`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Union

from actorrpc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

Frame = Union[bytes, bytearray, memoryview]  # noqa: UP007  an alias, which mypy wants so
"""One part of a message."""

PROTOCOL = 2


class Kind:
    """What a message is for. Requests are answered by a reply or an error, tells by nothing.

    Plain numbers, as in `Flag`, since to look at the member of an enumeration takes long (0.2 us in Python 3.11).
    """

    REQUEST: Final = 1
    TELL: Final = 2
    REPLY: Final = 3
    ERROR: Final = 4
    GREETING: Final = 5
    """JSON, never a pickle: between a worker and a directory that need not know each other yet (RULE GR1)."""
    CANCEL: Final = 6
    """The sender of the request of this number no longer waits for its answer. A header alone, whose `remaining` is 0
    where the time of the call has run out.
    """
    WANT: Final = 7
    """The sender waits for room. A header alone; for this and the next two see `runtime.limits`."""
    CREDIT: Final = 8
    """The numbers of counted messages that have begun, as unsigned integers of 64 bits."""
    LIMITS: Final = 9
    """The limits that the class of an actor sets, in `call` and `chain`; 0: none of its own. A header alone."""


class ActorId(NamedTuple):
    """Names an actor (or an object behind a reference) on the worker that a message goes to.

    Attributes:
        creator: the id of the worker that made the name up.
        local: a number that this worker uses once.
    """

    creator: int
    local: int


class Flag:
    """Bits of the header's flags."""

    REFS: Final = 1
    """The payload holds references: whoever drops the message must load it, so that their counts come out right."""
    NEEDS_VALUE: Final = 2
    """An error that says: nothing was run, since a name of `__main__` is unknown here; send it by value. A request that
    says: its sender can."""
    CONTROL: Final = 8
    """A message of the library's own house-keeping: not counted as work that a graceful end waits for."""
    KEEP: Final = 16
    """The result stays with the callee, as the object of the reference (caller, call); the answer carries nothing."""
    DROPPED: Final = 32
    """An error that says: nothing was run, since the call was cancelled or its time had run out. It has no payload."""
    COUNTED: Final = 64
    """A message that takes up room at its sender until it has begun."""
    UNREAD: Final = 4
    """An error that says: the payload could not be loaded, so references in it were not taken over."""


class Header(NamedTuple):
    """The fixed part of a message.

    Attributes:
        kind: what the message is for.
        flags: bits of `Flag`.
        caller: the sender's worker id.
        incarnation: the sender's incarnation; a restarted worker has a new one.
        call: the sender's number of the call; in an answer, the number of the call answered.
        sequence: counts the messages from this sender to this receiver; a gap means that some are lost.
        creator, local: the target actor's id.
        chain: the call chain that the message belongs to.
        context: the autograd context, or -1.
        remaining: seconds until the caller gives up (infinity: never). Relative, as hosts' clocks differ.
    """

    kind: int
    flags: int
    caller: int
    incarnation: int
    call: int
    sequence: int
    creator: int
    local: int
    chain: int
    context: int
    remaining: float


_LAYOUT = struct.Struct("<2sBBIQQQIQQqd")
_MARK = b"a" + bytes([PROTOCOL])
HEADER_SIZE = _LAYOUT.size
_CONTEXT = struct.Struct("<q")
_unpack = _LAYOUT.unpack_from


def pack(header: Header) -> bytes:
    """Returns the header's bytes, HEADER_SIZE of them."""
    return _LAYOUT.pack(_MARK, *header)


pack_fields = _LAYOUT.pack
"""`pack` for the hot path: the mark first, then the fields of `Header` in their order."""
MARK = _MARK


def greeting(data: bytes) -> list[Frame]:
    """Returns the frames of a greeting."""
    return [MARK + bytes([Kind.GREETING]), data]


def read_greeting(frames: Sequence[Frame]) -> bytes | None:
    """Returns the JSON of a greeting, of whatever version; None where the frames are something else."""
    if len(frames) != 2 or len(frames[0]) != 3 or frames[0][0] != MARK[0] or frames[0][2] != Kind.GREETING:
        return None
    return bytes(frames[1])


def unpack(frame: bytes | bytearray | memoryview) -> Header:
    """Reads the header at the start of a first frame.

    Raises:
        ProtocolError: the bytes are too few, or of another protocol or version.
    """
    if len(frame) < HEADER_SIZE:
        raise ProtocolError(f"a message of {len(frame)} bytes is too short to be one of actorrpc's")
    mark, *fields = _unpack(frame)
    if mark != _MARK:
        if mark[:1] == _MARK[:1]:
            raise ProtocolError(f"the peer speaks version {mark[1]} of the protocol, this worker version {PROTOCOL}")
        raise ProtocolError("the message is not one of actorrpc's")
    return Header(*fields)


def context_of(frame: bytes | bytearray | memoryview) -> int:
    """Returns the autograd context of a message whose header is known to be good."""
    context: int = _CONTEXT.unpack_from(frame, HEADER_SIZE - 16)[0]
    return context


def size_of(frames: Sequence[Frame]) -> int:
    """Returns the bytes of a message's frames together."""
    return sum(memoryview(f).nbytes for f in frames)
