"""The backward pass over the workers of a context.

The worker that it starts on, its *root*, begins the others that it exchanged messages with; they do so in turn. Each
runs one pass of torch's engine over its part of the graph (`recording` says why nobody waits for ever) and answers
whoever began it first when that is done and all that it began have answered: so the root has its answers when all is
done. Who begins another says which messages it has sent there and which it has read from there, so that both know at
once of those that never came or were never read: their gradients are None.

A begin rides on the first gradients for that worker where the last message between the two came from there: the engine
then comes to it before anything that would have to be waited for.

When something fails on a worker, the root hears of it with type and traceback, and tells all to end.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from actorrpc.errors import RPCTimeoutError, WorkerLostError
from actorrpc.runtime.completion import Completion
from actorrpc.services import engine
from actorrpc.services.carrying import Carrying
from actorrpc.services.leaves import add
from actorrpc.services.recording import SEND_NODE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.services.autograd import Autograd
    from actorrpc.services.contexts import Context
    from actorrpc.services.recording import Received, Sent

Grads = list[torch.Tensor | None]
"""The gradients of a message's tensors; None for one that nothing used."""


class Aborted(Exception):
    """A pass ends here because it has failed elsewhere."""


class _Slot(Completion):
    """Where the gradients of one message are waited for."""

    __slots__ = ("grads", "message")

    def __init__(self) -> None:
        super().__init__()
        self.message: Message | None = None
        self.grads: Grads | None = None


class Pass:
    """One worker's part in a pass.

    Attributes:
        id: the pass's id: the root's worker id, and a counter.
        context: the context that it runs in.
        grads: what it gave, by leaf.
        claimed: whether a thread is on its way to run it.
        engaged: the workers that are known to take part without being begun from here.
        task: the engine's number of the run for it; -1 where none is known.
    """

    def __init__(self, service: Autograd, context: Context, number: int) -> None:
        self.id, self.context, self._service = number, context, service
        self.grads: dict[torch.Tensor, torch.Tensor] = {}
        self.claimed = False
        self._door = threading.Lock()
        self._opened = self._retain = False
        self.task = -1
        self._slots: dict[int, _Slot] = {}
        self._error: BaseException | None = None
        self._begun: set[int] = set()
        self.engaged: set[int] = set()
        self._ended = self._spread = False
        """Whether the others were told that it has failed."""
        self._unfinished = {service.worker.id}
        """Those begun that have not answered; this worker itself as long as its engine runs."""
        self._all_done = Completion()
        self._waits: Sent | None = None
        self._waits_since: float | None = None

    @property
    def root(self) -> int:
        """The worker id of where it started."""
        return self.id >> 40

    @property
    def runs(self) -> bool:
        """Whether it has begun here and not ended."""
        return self._opened and not self._ended and self._error is None

    @property
    def over(self) -> bool:
        """Whether it has ended here without an error."""
        return self._ended

    def open(self, retain: bool) -> None:
        """Takes hold of what was recorded until now. May be called twice."""
        context = self.context
        with context.lock:
            if self._opened:
                return
            self._opened, self._retain = True, retain
            self._generation = context.generation
            self._token = context.token
            self._sent, self._received, self._last = context.sent, context.received, context.last
            if retain:
                self._sent, self._received, self._last = dict(self._sent), set(self._received), dict(self._last)
            else:
                context.generation += 1
                context.renew()

    # -- running

    def conduct(self, roots: Sequence[torch.Tensor]) -> None:
        """Runs this worker's part and waits for the parts that it began.

        Raises:
            Aborted: the pass has failed elsewhere.
            BaseException: it failed here, or, on the root, elsewhere.
        """
        me = self._service.worker.id
        try:
            if me in self._last:
                self._give_nothing(me, but=frozenset(number for sender, number in self._received if sender == me))
            for peer, came in self._last.items():
                if not (came or peer == me or peer in self.engaged):
                    self.begin(peer)
            known = self._known()
            token = self._token if known is None else None
            engine.run(self, self._service.leaves, roots, token, known or (), self._retain, self.context.apart)
            if self.grads:
                with self.context.lock:
                    before = self.context.grads
                    if before:
                        for leaf, grad in self.grads.items():
                            before[leaf] = add(before.get(leaf), grad)
                    else:
                        self.context.grads = self.grads
                self.grads = {}
            self.one_done(me)
            self._wait(self._all_done)
            self._ended = True
        except BaseException as e:
            self.fail(e)
            raise
        finally:
            del self._token
            self._sent = {}
            if self._error is not None:
                # Its traceback holds the graph, whose first node holds the pass: no collector sees through that.
                self._error = Aborted("the pass has failed")

    def _known(self) -> list[tuple[GradientEdge, torch.Tensor]] | None:
        """Where no message was read, and the gradients of all that were sent are there, nothing will be waited for, nor
        answered: the engine may begin at what was sent. Returns where, and with what gradients; None otherwise.
        """
        if self._received or self._error is not None:
            return None
        found = []
        node: Any = self._token.grad_fn
        while type(node) is SEND_NODE:
            sent: Sent = node.sent
            slot = self._slots.get(sent.number)
            if slot is None or not slot.done or sent.number not in self._sent:
                return None
            (node, _), *edges = node.next_functions
            found.append((edges, slot, sent))
        return [
            (GradientEdge(start, place), grad)
            for edges, slot, sent in found
            for (start, place), grad in zip(edges, self._taken(slot, sent), strict=True)
            if grad is not None and start is not None
        ]

    def tie(self, task: int) -> None:
        """Ties a graph task of the engine to the pass; called at the first node."""
        self.task = task
        self._service.leaves.running[task] = self

    def gradients_of(self, sent: Sent) -> Grads:
        """Waits for the gradients of a message; called by the engine."""
        if sent.number not in self._sent:
            raise _used_up()
        slot = self._slot(sent.number)
        if self._error is not None or not slot.done:
            self._waits = sent
            self._wait(slot)
            self._waits = None
        return self._taken(slot, sent)

    def _taken(self, slot: _Slot, sent: Sent) -> Grads:
        message, slot.message = slot.message, None
        if message is not None:
            slot.grads = message.load()
        grads, slot.grads = slot.grads, None
        if not grads:
            return [None] * sent.count
        if sent.places is None:
            return grads
        carrying: Carrying = self._service.worker.services[Carrying]
        return carrying.put_back(grads, sent.places)

    def answer(self, received: Received, grads: Grads) -> None:
        """Sends the gradients of a message to where it came from; called by the engine."""
        nothing = all(grad is None for grad in grads)
        peer, worker = received.sender, self._service.worker
        if received.generation != self._generation:
            if nothing:  # a handler that the earlier pass did not wait for has answered since
                return
            raise _used_up()
        try:
            if peer == worker.id:
                carrying = worker.services.get(Carrying)
                if carrying is not None:
                    carrying.wait_for(grads)
                self.give(received.number, grads)
            elif peer in self._begun or peer in self.engaged:
                self._service.send_grads(self, peer, received.number, grads)
            else:
                self.begin(peer, received.number, grads)
        except WorkerLostError:
            if not nothing:
                raise

    def begin(self, peer: int, number: int = 0, grads: Grads | None = None) -> None:
        """Has another worker take its part.

        Arguments:
            peer: its worker id.
            number, grads: gradients that ride on the message.

        Raises:
            WorkerLostError: it is gone, but there are gradients for it.
            BaseException: the pass has failed.
        """
        with self._door:
            if self._error is not None:
                raise self._error
            self._begun.add(peer)
            self._unfinished.add(peer)
        sent = [n for n, message in self._sent.items() if message.peer == peer] if self._sent else []
        read = {n for sender, n in self._received if sender == peer}
        try:
            self._service.send_begin(self, peer, (self._retain, sent, read, number, grads))
        except WorkerLostError:  # it was gone before the pass began: it has no part, unless something hangs on it
            self.one_done(peer)
            self._give_nothing(peer)
            if any(grad is not None for grad in grads or ()):
                raise

    def _give_nothing(self, peer: int, but: Collection[int] = ()) -> None:
        """Gives up the gradients of messages to a worker."""
        for number, sent in list(self._sent.items()):
            if sent.peer == peer and number not in but:
                self.give(number, None)

    def begun_failed(self, call: Call) -> None:
        """Takes the error of a worker that was begun from here."""
        try:
            self._service.worker.answers.read(call)
        except BaseException as e:
            self.fail(e)
        self.one_done(call.peer)

    def one_done(self, peer: int) -> None:
        """Notes that a worker has done its part, and all that it began."""
        with self._door:
            self._unfinished.discard(peer)
            last = not self._unfinished
        if last and not self._all_done.done:
            self._service.worker.complete(self._all_done)

    def _wait(self, what: Completion) -> None:
        if what.done and self._error is None:
            return
        worker = self._service.worker
        seconds, now = worker.timeout, worker.clock.now()
        self._waits_since = now
        try:
            if self._error is None and not worker.wait(what, now + seconds if seconds > 0 else None):
                raise RPCTimeoutError(
                    f"{self.describe()}; longer passes need RpcBackendOptions(rpc_timeout=seconds) (0: for ever)"
                )
        finally:
            self._waits_since = None
        if self._error is not None:
            raise self._error

    # -- what comes from others

    def begun_by(self, peer: int, body: tuple[bool, list[int], set[int], int, Grads | None]) -> None:
        """Takes what another worker says as it begins this one, for the first time or again."""
        retain, sent, read, number, grads = body
        self.open(retain)
        self.engaged.add(peer)
        if grads is not None:
            self.give(number, grads)
        self._give_nothing(peer, but=read)
        for unknown in sent:
            if (peer, unknown) not in self._received:
                self._service.send_grads(self, peer, unknown, None)

    def _slot(self, number: int) -> _Slot:
        return self._slots.get(number) or self._slots.setdefault(number, _Slot())

    def give(self, number: int, grads: Grads | None) -> None:
        """Gives the gradients of a message (None: there are none) to whoever waits for them, or will."""
        slot = self._slot(number)
        if not slot.done:
            slot.grads = grads
            self._service.worker.complete(slot)

    def deliver(self, message: Message) -> None:
        """`give`, for a message that is not read yet; under leadership."""
        slot = self._slot(message.call)
        if not slot.done:
            slot.message = message
            self._service.worker.crew.done(slot, message.number)

    def fail(self, error: BaseException) -> None:
        """Ends this worker's part with an error, if it is the first, and lets the others know."""
        worker = self._service.worker
        with self._door:
            if self._error is not None or self._ended:
                return
            self._error = error
        for what in (*self._slots.values(), self._all_done):
            if not what.done:
                worker.complete(what)
        if worker.id == self.root:
            self.spread_abort()

    def spread_abort(self, but: int = -1) -> None:
        """Tells the workers that this one knows to take part that the pass has failed, once."""
        with self._door:
            first, self._spread = not (self._spread or self._ended), True
            peers = (self._begun | self.engaged) - {but}
        for peer in peers if first else ():
            self._service.tell(peer, ("abort", self.context.id, self.id))

    def aborted(self, by: int) -> None:
        """Takes the news that the pass has failed elsewhere."""
        self.fail(Aborted(f"the pass has failed elsewhere, says rank {by}"))
        self.spread_abort(by)  # also where it has failed here before: whom it began may not have heard

    def describe(self) -> str | None:
        """Says what the pass waits for on this worker, and for how long it has; None for nothing."""
        worker, sent, since = self._service.worker, self._waits, self._waits_since
        if since is None:
            return None
        names = " and ".join(map(self.context.name_of, sorted(self._unfinished)))
        what = str(sent) if sent is not None else f"{names} to end their parts of it"
        return (
            f"the backward pass of context {self.context.id} waits on {worker} "
            f"for {worker.clock.now() - since:.3g} s for {what}"
        )


def _used_up() -> RuntimeError:
    return RuntimeError(
        "this graph was used by an earlier backward pass of the context, which has freed it; "
        "give that one retain_graph=True"
    )
