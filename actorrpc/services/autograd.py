"""The actor of a worker that takes its part in backward passes (`passes`) and in the ends of contexts (`contexts`)."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from actorrpc.errors import ActorRPCError, RemoteError
from actorrpc.runtime.handling import NO_CONTEXT, here, in_context
from actorrpc.runtime.lanes import Job, Lane
from actorrpc.runtime.message import Route
from actorrpc.services.contexts import Contexts, creator_of
from actorrpc.services.ids import AUTOGRAD
from actorrpc.services.leaves import Leaves
from actorrpc.services.passes import Aborted, Pass
from actorrpc.wire.envelope import Flag, Kind
from actorrpc.wire.failures import read_failure, write_failure
from actorrpc.wire.transport import SOON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.peers import Peer
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.contexts import Context
    from actorrpc.services.passes import Grads

_NEVER = float("inf")
_NO_PASS = 0
"""Where a header says the pass: no pass has this id."""


class Autograd:
    """The actor.

    It receives: gradients of a message (a tell whose header names context, pass and message), the end of a context (a
    tell whose header says all, see `_tell_end`), requests to begin a pass, and tells: tell me of a context's end, a
    pass has failed, end a pass.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.leaves = worker, Leaves()
        self.contexts = Contexts(worker, self.leaves, self._doubt)
        self._passes = itertools.count(1)
        worker.services[Autograd] = self
        worker.cells[AUTOGRAD] = self
        worker.tracer = self.contexts
        worker.members.watchers.append(self._gone)

    # -- what the face asks for

    def backward(self, context_id: int, roots: Sequence[torch.Tensor] | torch.Tensor, retain_graph: bool) -> None:
        """Runs a pass from here; see `actorrpc.autograd.backward`."""
        context = self.contexts.get(context_id)
        roots = _check_roots(roots)
        number = self.worker.id << 40 | next(self._passes)
        begun = context.passes[number] = Pass(self, context, number)
        begun.claimed = True
        begun.open(retain_graph)
        with in_context(NO_CONTEXT):  # the pass's own messages, and those of hooks, are no part
            begun.conduct(roots)

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
        passes = (running for context in self.contexts.all() for running in list(context.passes.values()))
        return [text for text in (running.describe() for running in passes) if text is not None]

    # -- messages

    def accept(self, message: Message) -> Job | None:
        """Takes a message in; gradients go straight to whoever waits for them, who reads them."""
        message.cell = self
        if message.context == NO_CONTEXT:
            return (Lane.CONTROL, self.worker.perform, message)
        if message.chain == _NO_PASS:
            self.worker.crew.put_off((Lane.CONTROL, self._ended, message))
            return None
        context = self.contexts.join(message.context)
        if context is None:
            if message.wants_answer:
                return (Lane.CONTROL, self.worker.perform, message)
            return None  # late: its context is over
        if not message.wants_answer:
            known = context.passes.get(message.chain)
            if known is not None:
                message.context = NO_CONTEXT  # it is no part of the context itself
                known.deliver(message)
            return None
        known = self._pass(context, message.chain)
        if known.claimed:
            return (Lane.CONTROL, self.worker.perform, message)
        known.claimed = True
        message.cell = _Part(known)
        return (Lane.FREE, self.worker.perform, message)

    def _pass(self, context: Context, number: int) -> Pass:
        return context.passes.get(number) or context.passes.setdefault(number, Pass(self, context, number))

    def run(self, message: Message) -> None:
        """Handles what is short."""
        here.context = NO_CONTEXT
        if message.wants_answer:  # to begin a pass that has begun, or whose context is over
            begun, message.context = self.contexts.get(message.context).passes[message.chain], NO_CONTEXT
            begun.begun_by(message.caller, message.load())
            message.reply(None)
            return
        verb, context_id, *rest = message.load()
        if verb == "tell me":
            if not self.contexts.touch(context_id, message.caller):
                self._tell_end(message.caller, context_id, 0)
            return
        context = self.contexts.join(context_id)
        if context is None:
            return
        known = self._pass(context, rest[0])  # it may be about to begin here
        if verb == "abort":
            known.aborted(message.caller)
            return
        error = read_failure(rest[1], self.worker.codec)
        if not isinstance(error, Exception):  # a sys.exit there must not end this process
            error = RemoteError(f"the backward pass ended with {error!r}", type_name=type(error).__qualname__)
        known.fail(error)

    def _ended(self, message: Message) -> None:
        self._release(message.context, message.call, message.caller)

    def _release(self, context_id: int, lowest: int, teller: int) -> None:
        ended = self.contexts.end(context_id, lowest)
        if ended is not None:
            for running in ended.passes:  # one that has failed elsewhere: the news of that can come later, or never
                if not running.over:
                    running.aborted(teller)
            for peer in ended.peers:
                if peer != teller:
                    self._tell_end(peer, context_id, ended.lowest)

    def _doubt(self, context_id: int) -> None:
        """Asks a context's creator to tell of its end, since whoever would have done so is gone."""
        self.tell(creator_of(context_id), ("tell me", context_id))

    def _gone(self, peer: Peer) -> None:
        for context in self.contexts.all():
            for running in list(context.passes.values()):
                if running.root == peer.record.id:
                    running.aborted(peer.record.id)
                elif peer.record.id in running.engaged:
                    running.fail(self.worker.members.lost_error(peer, "it had a part in the backward pass"))
        for context in self.contexts.all():
            creator = creator_of(context.id)
            if creator == peer.record.id:
                self._release(context.id, 0, creator)
            elif creator != self.worker.id:
                self._doubt(context.id)

    # -- sending

    def tell(self, peer: int, body: object) -> None:
        """Tells another worker's actor something, if it is still there."""
        try:
            self.worker.tell(peer, AUTOGRAD, body, control=True)
        except ActorRPCError:
            pass  # whoever was lost has no part any more

    def _tell_end(self, peer: int, context_id: int, lowest: int) -> None:
        """Tells another worker that a context is over, and all of its creator with counters below `lowest`.

        There is one for each training step, so it is no pickle, and leaves with the next message, or soon (TR6).
        """
        out = (Kind.TELL, Flag.CONTROL, lowest, *AUTOGRAD, _NO_PASS, context_id, _NEVER)
        with suppress(ActorRPCError):
            self.worker.emit(peer, out, (b"",), SOON)

    def send_begin(self, begun: Pass, peer: int, body: object) -> None:
        """Has a worker begin its part in a pass. Raises as `Worker.request` does."""
        worker = self.worker
        frames, parcel = worker.write(body, peer, route=Route.GRADIENTS)

        def note(call: Call) -> None:
            if call.failed:
                worker.crew.submit((Lane.CONTROL, begun.begun_failed, call))
            else:  # at once: a job would cost two changes of threads
                begun.one_done(call.peer)

        worker.calls.post(
            peer, AUTOGRAD, frames, 0.0, "a backward pass", parcel, note=note, flags=Flag.CONTROL, chain=begun.id,
            context=begun.context.id,
            lasting=False,  # gradients become somebody's `.grad`, which hooks and optimizers change in place
        )  # fmt: skip

    def send_grads(self, begun: Pass, peer: int, number: int, grads: Grads | None) -> None:
        """Sends the gradients of a message to its sender; None for a message that was never read here."""
        worker = self.worker
        frames = worker.write(grads, peer, route=Route.GRADIENTS)[0]
        out = (Kind.TELL, Flag.CONTROL, number, *AUTOGRAD, begun.id, begun.context.id, _NEVER)
        worker.emit(peer, out, frames, lasting=False)

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
        begun = self._begun
        here.context = message.context = NO_CONTEXT  # the pass's own messages, and those of hooks, are no part
        try:
            begun.begun_by(message.caller, message.load())
            begun.conduct([])
        except Aborted:
            pass
        except BaseException as e:
            if message.caller == begun.root:
                raise
            message.worker.services[Autograd].report(begun, e)
        message.reply(None)


def _check_roots(roots: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    if isinstance(roots, torch.Tensor):
        roots = [roots]
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"incompatible function arguments: roots must be a list of tensors, not {type(roots).__name__}; "
            f"backward(context_id, [loss])"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"incompatible function arguments: roots must be tensors, not {type(root).__name__}; wait() gives a "
                f"Future's tensor, and rref.backward(context_id) begins at what an RRef refers to"
            )
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root: no gradient can flow from it to anything")
        if root.numel() != 1:
            raise RuntimeError(
                f"root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar; "
                f"reduce it, with .sum() say"
            )
    return roots
