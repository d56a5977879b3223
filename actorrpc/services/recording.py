"""What an autograd context takes down of the messages that belong to it.

One token is threaded through all messages of a context on a worker, in the order in which they happened:
`Send(token, tensors) -> token` and `Receive(token) -> token, tensors`. The backward pass of a worker is then one
ordinary pass of torch's engine from its last token, in which each message has its turn, latest first. A Send's backward
waits for the gradients of its message; a Receive's answers the sender, with None where nothing used the tensors. Real
time orders all messages of a world, so no two workers wait for each other (RULE AG1: a Receive is recorded after its
message was read; a Send under the context's lock, held since before its message left, so that nothing of the context
comes between the two. Recording it while the message is under way costs no time.)

Recording keeps edges of the graph, not tensors, so that in-place changes after sending are right on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.services.contexts import Context

Mark = tuple[int, int]
"""What goes with a recorded tensor: the number of its message, and its place in it."""


with torch.inference_mode(False):
    SEED: Final = torch.zeros((), dtype=torch.float32, device="cpu")
    BASE: Final = SEED.detach().requires_grad_()
    _BASE_NODE: Final = torch.autograd.graph.get_gradient_edge(BASE).node  # which would be made anew each time
"""SEED is the gradient of a token, and the memory of all tokens, whose values mean nothing. BASE is the first token of
all, which requires grad so that the others do. Nothing flows there.
"""


class Sent:
    """A message with recorded tensors that left, as its sender knows it.

    Attributes:
        number: the sender's own number of it.
        peer: the worker id of the receiver.
        count: how many tensors it has.
        places: their devices; None where all are on the CPU.
    """

    __slots__ = ("_tensors", "context", "count", "number", "peer", "places")

    def __init__(self, context: Context, number: int, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        self.context, self.number, self.peer, self.count = context, number, peer, len(tensors)
        self._tensors = [(t.dtype, t.shape) for t in tensors]
        self.places = context.places_of(tensors)

    def __str__(self) -> str:
        tensors = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in self._tensors)
        return f"the gradients of {tensors}, sent to {self.context.name_of(self.peer)}"


class Received:
    """A message with recorded tensors that came, as its receiver knows it.

    Attributes:
        sender: the worker id of the sender.
        number: the sender's number of it.
        generation: the context's; see `Context`.
    """

    __slots__ = ("context", "generation", "number", "sender")

    def __init__(self, context: Context, sender: int, number: int) -> None:
        self.context, self.sender, self.number = context, sender, number
        self.generation = context.generation


class SendRpc(torch.autograd.Function):
    """A message's sending, in the graph. Traces show its node under torch's name, `SendRpcBackward`."""

    @staticmethod
    def forward(ctx: Any, sent: Sent, _: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.sent, ctx.materialize_grads = sent, False
        return SEED.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        sent: Sent = ctx.sent
        return None, None, *sent.context.running().gradients_of(sent)


class RecvRpc(torch.autograd.Function):
    """A message's receipt, in the graph: `RecvRpcBackward`."""

    @staticmethod
    def forward(ctx: Any, received: Received, _: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        ctx.received, ctx.materialize_grads = received, False
        return SEED.detach(), *tensors

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: torch.Tensor | None) -> Any:
        received: Received = ctx.received
        received.context.running().answer(received, list(grads))
        return None, None, None


SEND_NODE: Any = SendRpc._backward_cls
"""The type of the node that a message makes which left. It has the `Sent`, as `sent`."""
OWN_NODES: Final = frozenset((SEND_NODE, RecvRpc._backward_cls))
"""The types of the nodes that recording makes."""
# Without what `Function.apply` does for functorch's transforms, of which there are none around a message.
_apply_send: Any = super(torch.autograd.Function, SendRpc).apply
_apply_receive: Any = super(torch.autograd.Function, RecvRpc).apply


class SendingTrace:
    """Takes down the tensors of a message that is being written, and records them as it leaves."""

    __slots__ = ("_context", "_number", "_peer", "context", "tensors")

    def __init__(self, context: Context, peer: int) -> None:
        self.context, self._context, self._peer = context.id, context, peer
        self.tensors: list[torch.Tensor] = []
        self._number = 0

    def add(self, tensor: torch.Tensor) -> Mark:
        if not self.tensors:
            self._number = self._context.next_number()
        self.tensors.append(tensor)
        return self._number, len(self.tensors) - 1

    def take(self, tensor: torch.Tensor, mark: Mark) -> None:
        raise AssertionError("it writes")

    def __enter__(self) -> None:
        if self.tensors:
            self._context.lock.acquire()

    def __exit__(self, kind: object, *_: object) -> None:
        tensors, self.tensors = self.tensors, []
        if tensors:
            try:
                if kind is None and not self._context.over:
                    self._record(tensors)
            finally:
                self._context.lock.release()

    def _record(self, tensors: Sequence[torch.Tensor]) -> None:
        context = self._context
        sent = Sent(context, self._number, self._peer, tensors)
        with torch.enable_grad():
            context.token = _apply_send(sent, context.token, *tensors)
        context.note_sent(sent)

    def seal(self) -> None:
        raise AssertionError("it writes")

    def undo(self) -> None:
        self.tensors = []


class ReceivingTrace:
    """Takes down the tensors of a message that is being read, which turns them into outputs of the graph."""

    __slots__ = ("_context", "_number", "_sender", "context", "tensors")

    def __init__(self, context: Context, sender: int) -> None:
        self.context, self._context, self._sender = context.id, context, sender
        self.tensors: dict[int, torch.Tensor] = {}
        self._number = 0

    def add(self, tensor: torch.Tensor) -> Mark:
        raise AssertionError("it reads")

    def take(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._number, place = mark
        self.tensors[place] = tensor

    def seal(self) -> None:
        if self.tensors:
            tensors = [self.tensors[place] for place in sorted(self.tensors)]
            context = self._context
            with context.lock, torch.enable_grad():
                if context.over:
                    for tensor in tensors:
                        tensor.requires_grad_()
                    return
                context.apart = context.apart or not all(tensor.is_cpu for tensor in tensors)
                received = Received(context, self._sender, self._number)
                # The outputs are no inputs of the function, so they become non-leaves in place, Parameters included.
                context.token, *_ = _apply_receive(received, context.token, tensors)
                context.note_received(received)

    def __enter__(self) -> None:
        raise AssertionError("it reads")

    def __exit__(self, kind: object, *_: object) -> None:
        raise AssertionError("it reads")

    def undo(self) -> None:
        self.tensors = {}
