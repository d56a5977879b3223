"""The rendezvous store of a world that may have a token: a hint counts only where it was written with that token.

Anybody may be able to write into the store. So rank 0 seals its hint with the world's keys, and what a worker reads
that is not so sealed leads it nowhere: it is not dialled with the world's keys, and no word from there is read. It may
be left over, and is read again until rank 0's own is there. But if somebody answers at the place that it names, and it
stays, then rank 0 was most probably given another token, or none: that is an error some seconds later.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actorrpc.errors import AuthenticationError
from actorrpc.services.devices import Devices
from actorrpc.services.store import HintStore
from actorrpc.wire.curve import knock, words_in
from actorrpc.wire.envelope import greeting
from actorrpc.wire.zeromq import reachable

if TYPE_CHECKING:
    from actorrpc.services.roster import Hello
    from actorrpc.wire.curve import Keys

_KNOCK_SECONDS = 1.0
_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0
"""How long a hint of somebody else's must stay, where somebody answers, until it is taken for rank 0's own."""
_GONE_SECONDS = 10.0
"""How long another rank 0 may take to come, once one that had another token has ended."""


class SealedStore(HintStore):
    """A HintStore that hands out only what was written with the same keys; without keys, only what is not sealed.

    Args:
        init_method, rank: See ``HintStore``.
        keys: Of the world's token; None where this worker was given none.
    """

    def __init__(self, init_method: str, rank: int, keys: Keys | None) -> None:
        super().__init__(init_method, rank)
        self.hello: Hello | None = None
        """What a rank 0 that has no token may be told of this worker."""
        self._keys = keys
        self._foreign: bytes | None = None
        self._answers_since: float | None = None
        self._look_again = self._seen = 0.0

    def publish(self, hint: bytes, deadline: float) -> None:
        """Leave the hint; see ``HintStore``."""
        super().publish(hint if self._keys is None else self._keys.seal(hint), deadline)

    def read(self, deadline: float) -> bytes | None:
        """Look for the hint; see ``HintStore``.

        Raises:
            AuthenticationError: What is there was not written with this worker's token.
        """
        found = super().read(deadline)
        if found is None:
            self._look_back(deadline)
            return None
        if self._keys is None:
            hint = found if words_in(found) is None else None
        else:
            hint = self._keys.unseal(found)
        if hint is None:
            self._look_into(found, deadline)
        else:
            self._foreign = self._answers_since = None
        return hint

    def _look_into(self, found: bytes, deadline: float) -> None:
        """Sees whether somebody is at the place that a hint of somebody else's names, and raises once that is sure."""
        now = time.monotonic()
        self._seen = now
        if found != self._foreign:
            self._foreign, self._answers_since, self._look_again = found, None, now
        if now >= self._look_again:
            if self._somebody_answers(found, min(_KNOCK_SECONDS, max(0.1, deadline - now))) and not self._answers_since:
                self._answers_since = now
            now = time.monotonic()
            self._look_again = now + _PAUSE_SECONDS
        answers = self._answers_since is not None
        if (self._answers_since is not None and now - self._answers_since >= _PATIENCE_SECONDS) or now + 1 >= deadline:
            raise self._refusal(found, answers, now)

    def _look_back(self, deadline: float) -> None:
        """Raises where a rank 0 that answered, and had no such token, has ended since: for want of this worker."""
        if self._foreign is None or self._answers_since is None:
            return
        now = time.monotonic()
        if now - self._seen >= _GONE_SECONDS or now + 1 >= deadline:
            raise self._refusal(self._foreign, True, now)

    def _somebody_answers(self, found: bytes, seconds: float) -> bool:
        sealed = words_in(found)
        try:
            data = json.loads(found if sealed is None else sealed)
            by_zeromq = [str(e) for e in data["endpoints"] if str(e).startswith(("tcp://", "ipc://"))]
            endpoint, session = reachable(by_zeromq), str(data["session"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False
        words = self._farewell(session) if sealed is None else ()
        return knock(endpoint, seconds, with_keys=sealed is not None and self._keys is not None, words=words)

    def _farewell(self, session: str) -> list[Any]:
        """What a rank 0 without a token is told, in plain words: else it would wait for this worker in vain."""
        if self.hello is None:
            return []
        reason = "it has a security_token, and rank 0 has none"
        told = replace(self.hello, versions={}, devices=Devices(), withdrawn=reason)
        return list(greeting(json.dumps({"session": session, **told.to_json()}).encode()))

    def _refusal(self, found: bytes, answers: bool, now: float) -> AuthenticationError:
        if self._keys is None:
            what = "with a security_token, and this worker has none"
        elif words_in(found) is None:
            what = "without a security_token, and this worker has one"
        else:
            what = "with another security_token than this worker's"
        who = (
            "Somebody answers where it points, so it is most probably rank 0's own."
            if answers
            else "Nobody answers where it points: it may be left over from an earlier run. Is rank 0 running?"
        )
        me = f"rank {self._rank}" if self._rank >= 0 else "this guest"
        address, waited = self._place.address, now - self._began
        return AuthenticationError(
            f"{me} cannot join the world at {address}: what lies there to say where rank 0 listens was "
            f"written {what}. {who} Give all workers of a world the same token, as security_token in their options or "
            f"as ACTORRPC_TOKEN in their environment",
            address=address,
            waited=waited,
        )
