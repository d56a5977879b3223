"""The names of the system actors, the same on every worker."""

from __future__ import annotations

from actorrpc.wire.envelope import ActorId

SYSTEM = 0xFFFFFFFE
"""The creator in names that are the same everywhere."""

DIRECTORY = ActorId(SYSTEM, 1)
EXECUTOR = ActorId(SYSTEM, 2)
CREATOR = ActorId(SYSTEM, 3)
OBJECTS = ActorId(SYSTEM, 4)
MEMBER = ActorId(SYSTEM, 5)
"""Takes the directory's announcements."""
AUTOGRAD = ActorId(SYSTEM, 6)
ELASTIC = ActorId(SYSTEM, 7)
"""Hears who comes into an elastic world and who is about to leave it."""
HERALD = ActorId(SYSTEM, 8)
"""Tells and hears who is gone."""
WAITS = ActorId(SYSTEM, 9)
"""Says who waits for whom; breaks deadlocks."""
NAMES = ActorId(SYSTEM, 12)
"""Knows actors by their names; rank 0's."""
CHECKPOINTS = ActorId(SYSTEM, 13)
"""Keeps what actors want to have after a restart; rank 0's."""
ENDING = ActorId(SYSTEM, 14)
"""Ends the world; rank 0's."""
FIGURES = ActorId(SYSTEM, 15)
"""Says how much a worker has to do."""
ROOT = ActorId(SYSTEM, 16)
"""The actor of a worker that was launched in a role."""
OWN_NUMBER = 1 << 63
"""Added to the numbers that a worker gives to references and forks, which never meet those of other calls then."""
