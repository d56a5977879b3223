"""Autograd contexts: which there are, what belongs to each on this worker, and when it is over.

A context's id is (creator's worker id, counter). A worker has a part in it from the first message of the context that
it sends or reads. Its end spreads along the messages: whoever had a part tells those that it sent to. What arrives
later for a context that is over is not recorded.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from actorrpc.runtime.peers import Standing
from actorrpc.services.carrying import Carrying
from actorrpc.services.recording import BASE, ReceivingTrace, SendingTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from actorrpc.runtime.worker import Worker
    from actorrpc.services.leaves import Leaves
    from actorrpc.services.passes import Pass
    from actorrpc.services.recording import Received, Sent

_MEMBER = Standing.MEMBER
_BITS = 48
_COUNTERS = (1 << _BITS) - 1


class Context:
    """One worker's part in a context.

    Attributes:
        id: the context's id.
        lock: taken to record, and to use up what was recorded.
        token: the last one; see `recording`.
        sent: the messages that left, by their numbers.
        received: (sender, number) of those that came.
        last: by the other end of a message: whether the last one came (True) or left (False).
        generation: how many passes have used the graph up. What was recorded before then is no part of later passes.
        touched: the workers that got a message of this context from here, recorded or not.
        grads: what the passes gave, by leaf.
        passes: those that this worker took part in, by their ids.
        began: the `Contexts.clock` when this worker's part began, before it can have used a parameter.
        over: whether it has ended here; nothing is recorded any more.
        apart: whether tensors came that are not on the CPU: the engine has other threads for their part of the graph.
    """

    def __init__(self, number: int, worker: Worker, leaves: Leaves, numbers: itertools.count[int], began: int) -> None:
        self.id, self.began = number, began
        self._worker, self._leaves, self._numbers = worker, leaves, numbers
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of what it guards.
        self.lock = threading.RLock()
        self.over = self.apart = False
        self.generation = 0
        self.touched: set[int] = set()
        self.grads: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, Pass] = {}
        self.renew()

    def renew(self) -> None:
        """Begins a new graph."""
        self.token = BASE
        self.sent: dict[int, Sent] = {}
        self.received: set[tuple[int, int]] = set()
        self.last: dict[int, bool] = {}

    def next_number(self) -> int:
        """Returns a number for a message."""
        return next(self._numbers)

    def note_sent(self, sent: Sent) -> None:
        """Notes a message that is about to leave."""
        self.sent[sent.number] = sent
        self.last[sent.peer] = False

    def note_received(self, received: Received) -> None:
        """Notes a message that was read."""
        self.received.add((received.sender, received.number))
        self.last[received.sender] = True

    def running(self) -> Pass:
        """Returns the pass that the present thread works for.

        Raises:
            RuntimeError: it works for none.
        """
        found = self._leaves.current()
        if found is None or found.context is not self:
            raise RuntimeError(
                "this graph goes on at other workers, where plain backward() cannot follow; "
                "use dist_autograd.backward(context_id, [loss]) inside of the context"
            )
        return found

    def places_of(self, tensors: Sequence[torch.Tensor]) -> list[str | None] | None:
        """Returns the devices of tensors that are sent; None where all are on the CPU."""
        carrying: Carrying | None = self._worker.services.get(Carrying)
        return None if carrying is None else carrying.places_of(tensors)

    def name_of(self, peer: int) -> str:
        """Names a worker, for errors."""
        known = self._worker.peers.get(peer)
        return str(known.record) if known is not None else f"rank {peer}"


class Ended(NamedTuple):
    """What is to be done when a context has ended on a worker.

    Attributes:
        peers: whom to tell.
        lowest: and that all contexts of its creator with smaller counters are over.
        passes: those that it knew, which may still run.
    """

    peers: set[int]
    lowest: int
    passes: list[Pass]


def largest_of(creator: int) -> int:
    """Returns the largest id that a context of a worker can have."""
    return creator << _BITS | _COUNTERS


def creator_of(number: int) -> int:
    """Returns the worker id of a context's creator."""
    return number >> _BITS


class Contexts:
    """The contexts that a worker has a part in. It is the worker's tracer.

    Arguments:
        worker: whose.
        leaves: the leaves that its passes hold.
        doubt: called with the id of a context whose end nobody may tell here, since the worker from which its messages
            came is gone.
    """

    def __init__(self, worker: Worker, leaves: Leaves, doubt: Callable[[int], None]) -> None:
        self._worker, self._leaves, self._doubt = worker, leaves, doubt
        # Reentrant: the collector may run a finalizer of the user's, which sends, in the midst of what it guards.
        self._door = threading.RLock()
        self.clock = 0
        """Counts changes of this worker's parameters; whoever makes one counts it, when it is done."""
        self._known: dict[int, Context] = {}
        self._last = 0
        """The counter of the last one that was begun here."""
        self._numbers = itertools.count(1)
        self._own: set[int] = set()
        """The counters of those that were begun here and are not over."""
        self._lowest: dict[int, int] = {}
        """By creator: all counters below are over."""
        self._over: dict[int, set[int]] = {}
        """By creator: others that are over."""

    # -- lives

    def begin(self) -> Context:
        """Begins a context of this worker's own."""
        with self._door:
            self._last += 1
            self._own.add(self._last)
            return self._make(self._worker.id << _BITS | self._last)

    def _make(self, number: int) -> Context:
        made = Context(number, self._worker, self._leaves, self._numbers, self.clock)
        return self._known.setdefault(number, made)  # a finalizer may have made it meanwhile

    def find(self, number: int) -> Context | None:
        """Returns a context that this worker has a part in; None where it has none."""
        return self._known.get(number)

    def get(self, number: int) -> Context:
        """Returns a context that this worker has a part in.

        Raises:
            RuntimeError: there is none of this id.
            TypeError: it is no id.
        """
        if not isinstance(number, int):
            raise TypeError(
                f"incompatible function arguments: context_id must be the number that "
                f"`with dist_autograd.context() as context_id:` gives, not {type(number).__name__}"
            )
        found = self._known.get(number)
        if found is None:
            raise RuntimeError(
                f"Could not find autograd context with id: {number} on {self._worker}. It is over, or no message of "
                f"it has come here; work inside of `with dist_autograd.context() as context_id:`"
            )
        return found

    def join(self, number: int) -> Context | None:
        """Returns a context, of which this worker has a part from now on; None where it is over."""
        found = self._known.get(number)
        if found is None:
            with self._door:
                creator, counter = number >> _BITS, number & _COUNTERS
                if creator == self._worker.id:
                    return self._known.get(number)
                if not self._is_member(creator):
                    return None
                if counter < self._lowest.get(creator, 0) or counter in self._over.get(creator, ()):
                    return None
                found = self._known.get(number) or self._make(number)
        return found

    def _is_member(self, peer: int) -> bool:
        known = self._worker.peers.get(peer)
        return known is not None and known.standing is _MEMBER

    def end(self, number: int, lowest: int = 0) -> Ended | None:
        """Ends this worker's part in a context.

        Arguments:
            number: the context's id.
            lowest: all contexts of its creator with smaller counters are over as well.

        Returns what is then to be done; None where it was over already.
        """
        creator, counter = number >> _BITS, number & _COUNTERS
        with self._door:
            if creator == self._worker.id:
                if counter not in self._own:
                    return None
                self._own.remove(counter)
                lowest = min(self._own, default=self._last + 1)
            else:
                over = self._over.setdefault(creator, set())
                lowest = max(lowest, self._lowest.get(creator, 0))
                self._lowest[creator] = lowest
                seen = counter in over
                over.add(counter)
                self._over[creator] = {n for n in over if n >= lowest}
                if seen and number not in self._known:
                    return None
            found = self._known.pop(number, None)
        if found is None:
            return None
        kept = found.token, found.sent, found.grads, found.passes  # not to die under the lock: finalizers may call
        with found.lock:
            found.over = True
            peers = (found.touched | set(found.last)) - {self._worker.id}
            found.renew()
            found.grads, found.passes = {}, {}
        return Ended(peers, lowest, list(kept[3].values()))

    def touch(self, number: int, peer: int) -> bool:
        """Notes a worker to be told of a context's end; returns whether it has not ended."""
        found = self._known.get(number)
        if found is None:
            return False
        found.touched.add(peer)  # before it asks: its end first says that it is over, and then looks whom to tell
        return not found.over

    # -- the tracer

    def sending(self, context: int, peer: int) -> SendingTrace | None:
        """See `Tracer`."""
        found = self.join(context)
        if found is None:
            return None
        found.touched.add(peer)  # see `touch`
        return None if found.over else SendingTrace(found, peer)

    def receiving(self, context: int, peer: int) -> ReceivingTrace | None:
        """See `Tracer`."""
        found = self.join(context)
        if found is None:
            return None
        if not self._is_member(peer):
            self._doubt(context)
        return ReceivingTrace(found, peer)

    def all(self) -> list[Context]:
        """Returns the contexts that this worker has a part in."""
        return list(self._known.values())

    def statistics(self) -> dict[str, int]:
        """Returns counts: contexts, and what is kept of those that are over."""
        return {"contexts": len(self._known), "over": sum(map(len, self._over.values()))}
