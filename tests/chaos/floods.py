"""One who sends more than the other can take."""

from __future__ import annotations

from tests.chaos.table import Tally, row
from tests.test_limits import produce_for
from tests.worlds import World

_MOST = 200e6


@row("flood", "calls of 100 kB to an actor that takes 1 ms for each", 4, 120, "seconds", seeded=False)
def flood(tally: Tally, seconds: int) -> None:
    """Half of the time by `tell`, half by `rpc_async`; neither side may grow by 200 MB, and every call runs."""
    for verb in ("tell", "rpc_async"):
        with World(2, timeout=seconds + 120) as world:
            try:
                found: dict[str, int] = world.on(0, produce_for, seconds / 2, verb)
            except Exception as e:
                tally.is_hung(f"{verb}: {e}")
                continue
            finally:
                tally.tried += seconds // 2
        sender, receiver = (found[side] / 1e6 for side in ("mine", "theirs"))
        tally.note(
            f"{verb}: {found['sent']} calls in {seconds / 2:g} s; at most {sender:.0f} MB more at the sender and "
            f"{receiver:.0f} MB more at the receiver"
        )
        if max(found["mine"], found["theirs"]) >= _MOST:
            tally.is_lost(f"{verb}: memory grew beyond {_MOST / 1e6:g} MB")
