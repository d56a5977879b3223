"""The kernel: carries envelopes to actors and their answers back, and knows nothing of what they mean."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import (
    DeserializationError,
    MessageTooLargeError,
    NotAMemberError,
)
from actorrpc.runtime.answers import Answers
from actorrpc.runtime.calls import Calls
from actorrpc.runtime.completion import Completion, check_seconds
from actorrpc.runtime.credit import Credit
from actorrpc.runtime.crew import Crew
from actorrpc.runtime.doubts import Doubts
from actorrpc.runtime.forked import end_child
from actorrpc.runtime.handling import NO_CONTEXT, Handling, here
from actorrpc.runtime.keeper import Keeper
from actorrpc.runtime.limits import Limits
from actorrpc.runtime.members import Members
from actorrpc.runtime.message import RUNNING, GivenUp, Message, Parcel, Route
from actorrpc.runtime.outbox import Outbox
from actorrpc.runtime.patience import Patience
from actorrpc.runtime.router import Router
from actorrpc.runtime.serving import Serving
from actorrpc.runtime.waking import Waking
from actorrpc.wire import envelope
from actorrpc.wire.codec import Codec, mentions_main
from actorrpc.wire.envelope import HEADER_SIZE, Flag, Kind
from actorrpc.wire.names import lacks_main

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.cells import Cell
    from actorrpc.runtime.clock import Clock
    from actorrpc.runtime.completion import Call
    from actorrpc.runtime.message import Meter, Tracer
    from actorrpc.runtime.peers import Record
    from actorrpc.wire.envelope import Frame
    from actorrpc.wire.transport import Transport

log = logging.getLogger("actorrpc")
_NEVER = float("inf")


class Worker:
    """One member of a world, in one process: its actors, its peers, its pending calls and its threads.

    Arguments:
        record: who it is.
        transport: what carries its messages.
        clock: what passes its time.
        threads: how many handlers may run at once.
        timeout: seconds that a call gets which names none; 0 for ever.
    """

    raised_as: Callable[[Exception], BaseException] = staticmethod(lambda error: error)
    """What a caller sees of a callee's error."""

    def __init__(self, record: Record, transport: Transport, clock: Clock, *, threads: int, timeout: float) -> None:
        self.record, self.transport, self.clock, self.timeout = record, transport, clock, timeout
        self.id = record.id
        self.codec = Codec(f"on {record}")
        self.reference_readers: set[tuple[str, str]] = set()
        """The loading functions of references, by module and name: what is saved of answers that cannot be read."""
        self.members = Members(self)
        self.peers, self.names, self.ranks = self.members.peers, self.members.names, self.members.ranks
        self.calls = Calls(self)
        self.serving = Serving(self)
        self.limits = Limits(self)
        self.credit = Credit(self)
        self.cells: dict[tuple[int, int], Cell] = {}
        self.fallback: Cell | None = None
        """Takes what is addressed to actors that have no cell."""
        self.greeted: Callable[[bytes], None] | None = None
        """Takes greetings, in the control lane."""
        self.tracer: Tracer | None = None
        """Records the tensors of messages that belong to an autograd context."""
        self.around: Callable[[Callable[..., Any], Any, Any], Any] | None = None
        """Calls, with their arguments, the functions and methods that others ask for; None where nobody looks on."""
        self.meter: Meter | None = None
        """Measures how long requests take here; None where nobody looks on."""
        self.message_class: type[Message] = Message
        """What messages are made of as they come; who looks on at calls puts a subclass here."""
        self.afoot: set[object] = set()
        """Handlers that are in progress on no thread of the pool: coroutines."""
        self.services: dict[type, Any] = {}
        """What is installed here, by type, for those who only know the worker."""
        self.answers = Answers(self)
        self.router = Router(self)
        self.place = self.router.place
        """Returns a place among the messages for what comes now and is none (RULE MB3)."""
        self.crew = Crew(record.name, transport, clock, self.router.route, threads)
        self.keeper = Keeper(self)
        self.doubts = Doubts(self)
        self.waking = Waking(self)
        self.outbox = Outbox(self)
        self.emit = self.outbox.emit
        """Sends a message whose payload is written; see `Outbox.emit`."""
        self.wait = Patience(self).wait
        """Blocks until something is done; see `Patience.wait`."""
        self.ending = False
        """Whether the world is about to end, so that peers that go are no surprise."""
        self.open = True
        """False once `stop` has begun: no calls any more."""
        self.closed_because = "it has shut down"
        self.forked = False
        """Whether this is its copy in a child that was forked, which can do nothing."""

    def __str__(self) -> str:
        return str(self.record)

    def become(self, number: int) -> None:
        """Takes the id that this worker is given as it joins; until then nothing was sent under any."""
        self.id, self.record = number, dataclasses.replace(self.record, id=number)

    def start(self) -> None:
        """Starts to receive."""
        self.keeper.start()

    # -- sending

    def write(
        self,
        body: object,
        to: int,
        context: int = NO_CONTEXT,
        *,
        by_value: bool = False,
        route: Route = Route.REQUEST,
    ) -> tuple[Sequence[Frame], Parcel]:
        """Writes a payload for a peer: things of `__main__` by name where the peer has the same, else by value.

        Arguments:
            body: what to write.
            to: the peer's worker id.
            context: the autograd context that it belongs to, in which the tracer records the tensors in it.
            by_value: has things of `__main__` written by value in any case.
            route: which kind of message it is.

        Raises:
            SerializationError: a part of it cannot be written, or it is too large.
            DeviceMapError: a tensor is on a device for which the peer has none.
            BaseException: a reducer said so through `Parcel.failure`.
        """
        parcel = Parcel(self, to, route)
        if context != NO_CONTEXT and self.tracer is not None:
            parcel.trace = self.tracer.sending(context, to)
        try:
            frames = self.codec.dumps(body, parcel, by_value=by_value or self.has_another_main(to))
            most = self.limits.most_message
            if most is not None and (size := HEADER_SIZE + envelope.size_of(frames)) > most:
                raise MessageTooLargeError(
                    f"a message of {size} bytes from {self} was not sent: the limit is {most} (max_message_bytes of "
                    f"RpcBackendOptions). Send less at once, or raise the limit",
                    size=size, limit=most,
                )  # fmt: skip
            return frames, parcel
        except BaseException:
            parcel.restart()
            if parcel.failure is not None:
                raise parcel.failure from parcel.failure.__cause__  # which may tell where it happened
            raise

    def has_another_main(self, to: int) -> bool:
        """Whether things of `__main__` are written by value for a peer, since it has another one."""
        peer = self.peers.get(to)
        return peer is not None and peer.by_value

    def chain(self) -> int:
        """Returns the call chain of the present thread's handler, or a new one.

        Raises:
            NotAMemberError: an actor's `main` goes on although the world has ended.
        """
        handling = here.handling
        if handling is not None and handling.worker is self:
            if handling.chain is not None:
                return handling.chain
            if self.ending and handling.turn is not None:
                raise NotAMemberError(f"the world of {self} has ended; its main makes no more calls")
        return self.id << 40 | self.calls.next_id()

    def request(
        self,
        to: int,
        target: tuple[int, int],
        body: object,
        timeout: float = -1.0,
        what: object = "a call",
        then: Callable[[Call], None] | None = None,
        note: Callable[[Call], None] | None = None,
        flags: int = 0,
        number: int | None = None,
        bounded: bool = False,
        counted: bool = False,
    ) -> Call:
        """Sends a request.

        Arguments:
            to: the callee's worker id.
            target: the actor's id there.
            body: the payload.
            timeout: seconds until the call expires; 0 for never, below 0 for the worker's default.
            what: what is called, for errors; see `Call`.
            then, note: see `Call`.
            flags: bits of `Flag`, beside those that the payload asks for.
            number: the call's id, where it is not the next one: one that no other call has.
            bounded: whether it ends, at the latest, with the time of the handler that makes it: users' own calls do.
            counted: whether it may have to wait for room (see `limits`): users' own calls do, if they do not wait for
                the answer at once.

        Returns the call, to be waited for and read with `result`.

        Raises:
            SerializationError, NotAMemberError, WorkerLostError: nothing was sent.
            RPCTimeoutError, BackpressureError: nor was it, for want of room.
        """
        check_seconds(timeout)
        frames, parcel = self.write(body, to, _context_here())
        context = parcel.context
        again = None
        if mentions_main(frames) and not self.has_another_main(to):
            again = lambda: self.write(body, to, context, by_value=True)  # noqa: E731
            flags |= Flag.NEEDS_VALUE
        return self.calls.post(
            to, target, frames, timeout, what, parcel, again, then, note, flags, None, context, number, bounded, counted
        )

    def tell(
        self, to: int, target: tuple[int, int], body: object, *, control: bool = False, what: object = "a tell"
    ) -> None:
        """Sends a message that is not answered. Raises as `request` does.

        Arguments:
            to, target, body, what: see `request`.
            control: see `Flag.CONTROL`; others may have to wait for room, as long as a call may take by default.
        """
        frames, parcel = self.write(body, to, NO_CONTEXT if control else _context_here())
        self.tell_written(to, target, frames, parcel, control, what)

    def tell_written(
        self,
        to: int,
        target: tuple[int, int],
        frames: Sequence[Frame],
        parcel: Parcel | None = None,
        control: bool = False,
        what: object = "a tell",
    ) -> None:
        """Sends a message that is not answered, whose payload is written."""
        number = self.calls.next_id()
        refs, context, trace = (0, NO_CONTEXT, None)
        if parcel is not None:
            refs, context, trace = (Flag.REFS if parcel.refs else 0), parcel.context, parcel.trace
        try:
            flags = refs | (Flag.CONTROL if control else Flag.COUNTED)
            if not control:
                self.limits.admit(to, target, number, frames, True, self.calls.deadline_here(-1.0)[0], what)
            out = (Kind.TELL, flags, number, *target, self.chain(), context, _NEVER)
            self.emit(to, out, frames, False, trace, False)
        except BaseException:
            self.limits.answered(number)
            if parcel is not None:
                parcel.restart()
            raise

    def greet(self, way: int, data: bytes) -> None:
        """Sends a greeting along a way that was dialled by hand."""
        self.transport.send(way, envelope.greeting(data))

    def take(self, frames: Sequence[Frame]) -> None:
        """Routes a message that did not come through the transport just now."""
        job = self.router.route(frames)
        if job is not None:
            self.crew.submit(job)

    # -- handling

    def perform(self, message: Message) -> None:
        """Runs a message's handler on the present thread and sees to it that the message is answered."""
        message.stage = RUNNING
        if message.flags & Flag.COUNTED:
            self.credit.begin(message)
        if self.clock.now() >= self.transport.overdue or self.waking.active:  # in this order: see the lookout
            self.waking.check(message)
        if message.given_up:
            self.serving.drop(message)
            return  # what has not begun is not run
        here.handling = Handling(self, message, message.chain, message.mailbox, message.turn)
        here.context = message.context
        try:
            message.cell.run(message)
        except DeserializationError as e:
            flags = 0
            if not message.read:  # else it is of something that the handler has read
                flags = Flag.UNREAD | (Flag.NEEDS_VALUE if lacks_main(e) else 0)
            message.fail(e, flags)
        except GivenUp:
            self.serving.drop(message)
        except BaseException as e:
            message.fail(e)
        finally:
            if self.forked:  # before anything that other threads may have held when there were any
                end_child()
            self.serving.returned(message)
            here.handling = None
            here.context = NO_CONTEXT
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)

    def wait_result(self, call: Call) -> Any:
        """Waits for a call until it is answered or expires, and reads its answer."""
        try:
            if not self.wait(call, call.deadline):
                self.calls.expire(call)
        except BaseException:
            self.calls.abandon(call)
            raise
        return self.answers.read(call)

    def complete(self, what: Completion) -> None:
        """Marks something of this worker's own as done."""
        self.crew.done(what, self.place())

    # -- the end

    def disown(self, reason: str) -> None:
        """Says, in a child that was forked, that the worker is its parent's; nothing is closed."""
        self.open, self.closed_because = False, reason
        self.forked = self.crew.forked = True

    def stop(self, timeout: float = 5.0, linger: float = 1.0) -> None:
        """Ends the worker: pending calls fail, threads end, sockets close.

        Arguments:
            timeout: seconds that threads get to end; handlers that still run then are left alone.
            linger: seconds that messages which are queued get to leave.
        """
        if not self.open:
            return
        self.open = False
        self.limits.close()
        self.calls.fail_all_to(None, lambda: NotAMemberError(f"{self} has shut down; the call may or may not have run"))
        self.keeper.stop()
        if not self.crew.stop(timeout):
            log.warning("%s: handlers still run after %g s; they are left behind", self, timeout)
        self.calls.publish_left()
        self.members.verdicts.close()
        self.transport.close(linger)
        self.cells.clear()
        self.fallback = self.greeted = None
        self.members.watchers.clear()
        self.members.greeters.clear()

    @property
    def quiet(self) -> bool:
        """Whether no call is pending and no handler runs or is queued."""
        return not (self.calls.pending or self.afoot or self.calls.loose_ends) and self.crew.quiet

    def statistics(self) -> dict[str, int]:
        """Returns counts: pending calls, actors, peers dialled, threads, running and queued handlers, limits."""
        return {
            "pending": len(self.calls.pending),
            "actors": len(self.cells),
            "dialled": sum(p.dialled for p in list(self.peers.values())),
            **self.crew.statistics(),
            **self.limits.statistics(),
        }


def _context_here() -> int:
    """Returns the autograd context that what the present thread sends belongs to."""
    context = here.context
    return context if context == NO_CONTEXT or torch.is_grad_enabled() else NO_CONTEXT


def new_incarnation() -> int:
    """Draws the number by which a worker's present life is told from earlier ones."""
    return int.from_bytes(os.urandom(8), "little")
