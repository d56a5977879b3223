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

import itertools
import threading
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import ActorRPCError, RPCTimeoutError, WorkerLostError
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.runtime.message import Outgoing
from actorrpc.services.contexts import Contexts
from actorrpc.services.ids import AUTOGRAD
from actorrpc.services.leaves import Leaves, add, graph_task
from actorrpc.wire.envelope import Flag, Kind
from actorrpc.wire.failures import read_failure, write_failure

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.contexts import Context
    from actorrpc.services.recording import Received, Sent

_NEVER = float("inf")
_Grads = list[torch.Tensor | None]


class _Aborted(Exception):
    """A pass ends here because it has failed elsewhere."""


class _Begin(torch.autograd.Function):
    """The first node of a pass: it ties the engine's graph task to the pass."""

    @staticmethod
    def forward(ctx: Any, begun: Pass, *outputs: torch.Tensor) -> Any:
        ctx.begun = begun
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.begun.tie(graph_task())
        return None, *grads


class _Slot(Completion):
    """Where the gradients of one message are waited for."""

    __slots__ = ("grads", "message")

    def __init__(self) -> None:
        super().__init__()
        self.message: Message | None = None
        self.grads: _Grads | None = None


class Pass:
    """One worker's part in a pass.

    Attributes:
        id: the pass's id: the root's worker id, and a counter.
        context: the context that it runs in.
        grads: what it gave, by leaf.
        claimed: whether a thread is on its way to run it.
    """

    def __init__(self, service: Autograd, context: Context, number: int) -> None:
        self.id, self.context, self._service = number, context, service
        self.grads: dict[torch.Tensor, torch.Tensor] = {}
        self.claimed = False
        self._door = threading.Lock()
        self._opened = self._retain = False
        self._task = -1
        self._slots: dict[int, _Slot] = {}
        self._error: BaseException | None = None
        self._begun: set[int] = set()
        self._engaged: set[int] = set()
        """The workers that are known to take part without being begun from here."""
        self._open_calls = 1
        """How many of those begun have not answered; one more as long as the engine runs."""
        self._all_done = Completion()
        self._waits_for: Sent | None = None

    @property
    def root(self) -> int:
        """The worker id of where it started."""
        return self.id >> 40

    def open(self, retain: bool) -> None:
        """Takes hold of what was recorded until now. May be called twice."""
        context = self.context
        with context.lock:
            if self._opened:
                return
            self._opened, self._retain = True, retain
            self._generation = context.generation
            self._base, self._token = context.base, context.token
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
            _Aborted: the pass has failed elsewhere.
            BaseException: it failed here, or, on the root, elsewhere.
        """
        me = self._service.worker.id
        try:
            self._give_nothing(me, but=frozenset(number for sender, number in self._received if sender == me))
            for peer, came in self._last.items():
                if not (came or peer == me or peer in self._engaged):
                    self.begin(peer)
            self._run_engine(roots)
            with self.context.lock:
                for leaf, grad in self.grads.items():
                    self.context.grads[leaf] = add(self.context.grads.get(leaf), grad)
            self.grads = {}
            self._one_done()
            self._wait(self._all_done, "the other workers to end their parts of the backward pass")
        except BaseException as e:
            self.fail(e)
            raise
        finally:
            del self._token, self._base
            self._sent = {}

    def _run_engine(self, roots: Sequence[torch.Tensor]) -> None:
        leaves, outputs = self._service.leaves, [self._token, *roots]
        kept = leaves.hold(self._base, outputs)
        try:
            with torch.enable_grad():
                firsts = _Begin.apply(self, *outputs)  # type: ignore[no-untyped-call]
            seeds = [torch.zeros(()), *(torch.ones_like(root) for root in roots)]
            torch.autograd.backward(firsts, seeds, retain_graph=self._retain)
        finally:
            leaves.release(self, kept)
            leaves.running.pop(self._task, None)

    def tie(self, task: int) -> None:
        """Notes the engine's graph task."""
        self._task = task
        self._service.leaves.running[task] = self

    def gradients_of(self, sent: Sent) -> _Grads:
        """Waits for the gradients of a message; called by the engine."""
        if sent.number not in self._sent:
            raise _used_up()
        slot = self._slot(sent.number)
        self._waits_for = sent
        self._wait(slot, str(sent))
        self._waits_for = None
        message, slot.message = slot.message, None
        if message is not None:
            slot.grads = message.load()
        grads, slot.grads = slot.grads, None
        return grads or [None] * sent.count

    def answer(self, received: Received, grads: _Grads) -> None:
        """Sends the gradients of a message to where it came from; called by the engine."""
        if received.generation != self._generation:
            raise _used_up()
        peer, worker = received.sender, self._service.worker
        if peer == worker.id:
            self.give(received.number, grads)
        elif peer in self._begun or peer in self._engaged:
            self._service.send_grads(self, peer, received.number, grads)
        else:
            self.begin(peer, received.number, grads)

    def begin(self, peer: int, number: int = 0, grads: _Grads | None = None) -> None:
        """Has another worker take its part.

        Arguments:
            peer: its worker id.
            number, grads: gradients that ride on the message.
        """
        self._begun.add(peer)
        with self._door:
            self._open_calls += 1
        sent = [n for n, message in self._sent.items() if message.peer == peer]
        read = [n for sender, n in self._received if sender == peer]
        try:
            self._service.send_begin(self, peer, (self._retain, sent, read, number, grads))
        except WorkerLostError as e:
            self._one_done()
            self.missing(peer, e)

    def missing(self, peer: int, error: WorkerLostError) -> None:
        """Takes note that a worker is gone. Where nothing came from it, nothing of this graph hangs on it."""
        if any(sender == peer for sender, _ in self._received):
            self.fail(error)
            return
        self._give_nothing(peer)

    def _give_nothing(self, peer: int, but: Collection[int] = ()) -> None:
        """Gives up the gradients of messages to a worker."""
        for number, sent in list(self._sent.items()):
            if sent.peer == peer and number not in but:
                self.give(number, None)

    def begun_answered(self, call: Call) -> None:
        """Takes the answer of a worker that was begun from here."""
        try:
            self._service.worker.result(call)
        except WorkerLostError as e:
            self.missing(call.peer, e)
        except BaseException as e:
            self.fail(e)
        self._one_done()

    def _one_done(self) -> None:
        with self._door:
            self._open_calls -= 1
            last = not self._open_calls
        if last and not self._all_done.done:
            self._service.worker.complete(self._all_done)

    def _wait(self, what: Completion, for_what: str) -> None:
        worker = self._service.worker
        seconds = worker.timeout
        deadline = worker.clock.now() + seconds if seconds > 0 else None
        if self._error is None and not worker.wait(what, deadline):
            raise RPCTimeoutError(
                f"the backward pass of context {self.context.id} waited {seconds:g} s on {worker} for {for_what}; "
                f"longer passes need RpcBackendOptions(rpc_timeout=seconds) (0: for ever)"
            )
        if self._error is not None:
            raise self._error

    # -- what comes from others

    def begun_by(self, peer: int, body: tuple[bool, list[int], list[int], int, _Grads | None]) -> None:
        """Takes what another worker says as it begins this one, for the first time or again."""
        retain, sent, read, number, grads = body
        self.open(retain)
        self._engaged.add(peer)
        if grads is not None:
            self.give(number, grads)
        self._give_nothing(peer, but=frozenset(read))
        for unknown in sent:
            if (peer, unknown) not in self._received:
                self._service.send_grads(self, peer, unknown, None)

    def _slot(self, number: int) -> _Slot:
        return self._slots.get(number) or self._slots.setdefault(number, _Slot())

    def give(self, number: int, grads: _Grads | None) -> None:
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
            if self._error is not None:
                return
            self._error, over = error, self._all_done.done
        for what in (*self._slots.values(), self._all_done):
            if not what.done:
                worker.complete(what)
        if worker.id == self.root and not over:
            self.spread_abort()

    def spread_abort(self, but: int = -1) -> None:
        """Tells the workers that this one exchanged messages with that the pass has failed."""
        for peer in self._begun | self._engaged:
            if peer != but:
                self._service.tell(peer, ("abort", self.context.id, self.id))

    def aborted(self, by: int) -> None:
        """Takes the news that the pass has failed elsewhere."""
        if self._error is None:
            self.fail(_Aborted(f"the pass has failed elsewhere, says rank {by}"))
            self.spread_abort(by)

    def describe(self) -> str | None:
        """Says what the pass waits for on this worker; None for nothing."""
        waits_for = self._waits_for
        return None if waits_for is None else str(waits_for)


def _used_up() -> RuntimeError:
    return RuntimeError(
        "this graph was used by an earlier backward pass of the context, which has freed it; "
        "give that one retain_graph=True"
    )


class Autograd:
    """The actor of a worker that takes its part in backward passes, and in the ends of contexts.

    It receives: gradients of a message (a tell whose header names context, pass and message), requests to begin a pass,
    and tells: release a context, a pass has failed, end a pass.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.leaves = worker, Leaves()
        self.contexts = Contexts(worker, self.leaves)
        self._passes = itertools.count(1)
        worker.services[Autograd] = self
        worker.cells[AUTOGRAD] = self
        worker.tracer = self.contexts
        worker.members.watchers.append(self._gone)

    # -- what the face asks for

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a pass from here; see `actorrpc.autograd.backward`."""
        context = self.contexts.get(context_id)
        _check_roots(roots)
        number = self.worker.id << 40 | next(self._passes)
        begun = context.passes[number] = Pass(self, context, number)
        begun.claimed = True
        begun.open(retain_graph)
        outside, here.context = here.context, NO_CONTEXT  # the pass's own messages, and those of hooks, are no part
        try:
            begun.conduct(roots)
        finally:
            here.context = outside

    def gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Returns what the passes gave to the leaves of this worker."""
        context = self.contexts.get(context_id)
        with context.lock:
            return dict(context.grads)

    def end(self, context_id: int) -> None:
        """Ends a context, here and on all workers that have a part in it."""
        self._release(context_id, 0, self.worker.id)

    def waits(self) -> list[str]:
        """Says what the passes that run here wait for."""
        found = (running.describe() for running in list(self.leaves.running.values()))
        return [text for text in found if text is not None]

    # -- messages

    def accept(self, message: Message) -> Job | None:
        """Takes a message in; gradients go straight to whoever waits for them, who reads them."""
        message.cell = self
        if message.context == NO_CONTEXT:
            return Job(Lane.CONTROL, self.worker.perform, message)
        context = self.contexts.join(message.context)
        if context is None:
            if message.wants_answer:
                return Job(Lane.CONTROL, self.worker.perform, message)
            return None  # late: its context is over
        if not message.wants_answer:
            known = context.passes.get(message.chain)
            if known is not None:
                known.deliver(message)
            return None
        known = context.passes.get(message.chain)
        if known is None:
            known = context.passes[message.chain] = Pass(self, context, message.chain)
        if known.claimed:
            return Job(Lane.CONTROL, self.worker.perform, message)
        known.claimed = True
        return Job(Lane.FREE, self._take_part, (known, message))

    def _take_part(self, what: tuple[Pass, Message]) -> None:
        known, message = what
        message.cell = _Part(known)
        self.worker.perform(message)

    def run(self, message: Message) -> None:
        """Handles what is short."""
        here.context = NO_CONTEXT
        if message.wants_answer:  # to begin a pass that has begun, or whose context is over
            self.contexts.get(message.context).passes[message.chain].begun_by(message.caller, message.load())
            message.reply(None)
            return
        verb, context_id, *rest = message.load()
        if verb == "release":
            self._release(context_id, rest[0], message.caller)
            return
        context = self.contexts.join(context_id)
        known = context.passes.get(rest[0]) if context is not None else None
        if known is None:
            return
        if verb == "abort":
            known.aborted(message.caller)
        else:
            known.fail(read_failure(rest[1], self.worker.codec))

    def _release(self, context_id: int, lowest: int, teller: int) -> None:
        told = self.contexts.end(context_id, lowest)
        if told is not None:
            peers, lowest = told
            for peer in peers - {teller}:
                self.tell(peer, ("release", context_id, lowest))

    def _gone(self, peer: Peer) -> None:
        for context in self.contexts.all():
            for running in list(context.passes.values()):
                if running.root == peer.record.id:
                    running.aborted(peer.record.id)
        self.contexts.forget(peer.record.id)

    # -- sending

    def tell(self, peer: int, body: object) -> None:
        """Tells another worker's actor something, if it is still there."""
        try:
            self.worker.tell(peer, AUTOGRAD, body, control=True)
        except ActorRPCError:
            pass  # whoever was lost has no part any more

    def send_begin(self, begun: Pass, peer: int, body: object) -> None:
        """Has a worker begin its part in a pass. Raises as `Worker.request` does."""
        worker = self.worker
        frames, parcel = worker.write(body, peer)

        def note(call: Call) -> None:
            worker.crew.submit(Job(Lane.CONTROL, begun.begun_answered, call))

        worker.calls.post(
            peer, AUTOGRAD, frames, 0.0, "a backward pass", parcel, note=note, flags=Flag.CONTROL, chain=begun.id,
            context=begun.context.id,
        )  # fmt: skip

    def send_grads(self, begun: Pass, peer: int, number: int, grads: _Grads | None) -> None:
        """Sends the gradients of a message to its sender; None for a message that was never read here."""
        worker = self.worker
        frames, _ = worker.write(grads, peer)
        out = Outgoing(Kind.TELL, Flag.CONTROL, number, *AUTOGRAD, begun.id, begun.context.id, _NEVER)
        worker.emit(peer, out, frames)

    def report(self, failed: Pass, error: BaseException) -> None:
        """Tells the root of a pass what it failed of."""
        frames = [bytes(memoryview(frame)) for frame in write_failure(error, str(self.worker), self.worker.codec)]
        self.tell(failed.root, ("failed", failed.context.id, failed.id, frames))


class _Part:
    """The cell of the first request to begin a pass here: it runs for as long as the pass does."""

    def __init__(self, begun: Pass) -> None:
        self._begun = begun

    def accept(self, message: Message) -> Job | None:
        raise AssertionError("it is never registered")

    def run(self, message: Message) -> None:
        begun, service = self._begun, message.worker.services[Autograd]
        here.context = NO_CONTEXT
        try:
            begun.begun_by(message.caller, message.load())
            begun.conduct([])
        except _Aborted:
            pass
        except BaseException as e:
            if message.caller == begun.root:
                raise
            service.report(begun, e)
        message.reply(None)


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if not isinstance(roots, (list, tuple)):
        raise TypeError(f"roots must be a list of tensors, not {type(roots).__name__}")
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"roots must be tensors, not {type(root).__name__}")
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root: no gradient can flow from it to anything")
        if root.numel() != 1:
            raise RuntimeError(
                f"root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar; "
                f"reduce it, with .sum() say"
            )
