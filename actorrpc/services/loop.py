"""The loop: runs what is `async def` on a worker, in one thread that is started when the first coroutine comes.

RULE AS1 (turns). A coroutine that answers an actor's message keeps that message's turn until it ends. Its turn runs
while the coroutine does and waits while it awaits, whatever that is: so messages of its own call chain are admitted
(RULE MB2), and how many others go on beside it is what the class says (`concurrency`).
RULE AS2 (circumstances). What is kept for a thread elsewhere (the handling, the autograd context, torch's grad mode)
follows the coroutine: it is put in place before each of its steps and away after. The tasks that a coroutine begins,
and what it gives to `asyncio.to_thread`, begin with what it has, but for its turn.
RULE AS3 (no waits). Nothing may block the loop's thread. A wait of this library's that would is an error there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.errors import ActorRPCError, NotAMemberError
from actorrpc.runtime.awaiting import LoopGate, Wake, on_loop
from actorrpc.runtime.cells import MailboxCell
from actorrpc.runtime.clock import SystemClock
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.forked import end_child
from actorrpc.runtime.handling import Handling, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.clock import Thread
    from actorrpc.runtime.mailbox import Turn
    from actorrpc.runtime.message import Message
    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_making = threading.Lock()


def loop_of(worker: Worker) -> Loop:
    """Returns a worker's loop, which is started where it was not."""
    with _making:
        loop: Loop | None = worker.services.get(Loop)
        if loop is None:
            loop = worker.services[Loop] = Loop(worker)
        return loop


class Loop:
    """A worker's asyncio loop and its thread. Made by `loop_of`.

    Arguments:
        worker: whose.

    Raises:
        ActorRPCError: the worker lives in a simulated world.
    """

    def __init__(self, worker: Worker) -> None:
        if not isinstance(worker.clock, SystemClock):
            raise ActorRPCError("a simulated world has no asyncio loop: its clock and threads are not the system's")
        self._worker = worker
        self._idle = on_loop(Handling(worker, None, None))
        self._door = threading.Lock()
        self._ending = False
        self._patience = 0.0
        self._answering: dict[Message, Handler] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_begin)
        self._loop.set_default_executor(_Threads(thread_name_prefix=f"{worker.record.name}-to-thread"))
        self._thread: Thread = worker.clock.start(self._run, f"{worker.record.name}-loop")

    def answer(self, message: Message, coroutine: Coroutine[Any, Any, Any], give: Callable[[Any], None]) -> None:
        """Takes a message over from its handler, which returned a coroutine: runs it, and answers the message.

        Arguments:
            message: what asks for it. Its turn ends with the coroutine.
            coroutine: not yet begun.
            give: takes the result.

        Raises:
            NotAMemberError: the worker is at its end.
        """
        turn = message.turn

        def done(value: Any, error: BaseException | None) -> None:
            self._answering.pop(message, None)
            message.on_cancel = None
            try:
                if error is None:
                    give(value)
            except BaseException as e:
                error = e
            if error is not None and not message.answered:  # a cancelled one is answered at once
                if message.kept is not None:
                    message.kept.fill(None, error)
                message.fail(error)
            if turn is not None:
                cell = message.cell
                assert isinstance(cell, MailboxCell)
                cell.finish(turn)

        handling = Handling(self._worker, message, message.chain, message.mailbox, turn)
        handler = self._answering[message] = Handler(self, coroutine, handling, message.context, done)
        message.turn = None  # before it runs, which may be at once
        try:
            self._submit(handler)
        except BaseException:
            message.turn = turn
            self._answering.pop(message, None)
            raise
        message.on_cancel = functools.partial(self.cancel, message)
        if message.cancelled or message not in self._answering:  # before that could be seen; or it is over
            self.cancel(message)
            message.on_cancel = None

    def cancel(self, message: Message) -> None:
        """Cancels the coroutine that answers a message, if one does: CancelledError is raised where it awaits."""
        handler = self._answering.get(message)
        if handler is not None:
            self._call(handler.cancel)

    def run(self, coroutine: Coroutine[Any, Any, Any], handling: Handling) -> Any:
        """Runs a coroutine on the loop, under a handling that is the present thread's, and waits for it.

        Returns its result; raises what it raises.
        """
        over, outcome = Completion(), []

        def done(value: Any, error: BaseException | None) -> None:
            outcome.append((value, error))
            self._worker.complete(over)

        outside, here.handling = here.handling, None  # the coroutine has the turn; this thread only waits
        try:
            handler = Handler(self, coroutine, handling, here.context, done)
            self._submit(handler)
            try:
                self._worker.wait(over, None, lead=False)
            except BaseException:
                self._call(handler.cancel)
                raise
        finally:
            here.handling = outside
        ((value, error),) = outcome
        if error is not None:
            raise error
        return value

    def stop(self, patience: float) -> None:
        """Ends the loop: cancels what runs there, and waits for its thread.

        Arguments:
            patience: seconds that coroutines get to end.
        """
        with self._door:
            if self._ending:
                return
            self._ending, self._patience = True, patience
        self._call(self._loop.stop)
        if asyncio._get_running_loop() is self._loop:  # a coroutine closes its own worker
            return
        self._thread.join(patience + 1.0)
        if self._thread.is_alive():
            log.warning("%s: a coroutine still runs after %g s; it is left behind", self._worker, patience)

    # -- inside

    @property
    def ending(self) -> bool:
        """Whether `stop` was called."""
        return self._ending

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself."""
        return self._loop

    @property
    def worker(self) -> Worker:
        """Whose it is."""
        return self._worker

    def _submit(self, handler: Handler) -> None:
        with self._door:
            if self._ending:
                handler.close()
                raise NotAMemberError(f"{self._worker} has shut down; the coroutine was not run")
            self._worker.afoot.add(handler)
            self._loop.call_soon_threadsafe(handler.begin)

    def _call(self, run: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            pass  # it is closed

    def _run(self) -> None:
        loop = self._loop
        here.handling = self._idle
        try:
            while not self._ending:
                try:
                    loop.run_forever()
                except BaseException:  # a SystemExit in a task of the user's: not the end of the others
                    log.exception("%s: a task on the loop ended with an exit", self._worker)
            self._wind_up()
        except BaseException:
            log.exception("%s: the loop did not end well", self._worker)
        finally:
            here.handling = None
            loop.close()

    def _wind_up(self) -> None:
        loop = self._loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=self._patience))
        loop.run_until_complete(loop.shutdown_asyncgens())


class Carried(Coroutine[Any, Any, Any]):
    """A coroutine together with its circumstances (RULE AS2).

    Arguments:
        coroutine: what to run.
        handling, context: what it has.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], handling: Handling | None, context: int) -> None:
        self._coroutine, self._handling, self._context = coroutine, handling, context
        self._grad = True

    def send(self, value: Any) -> Any:
        return self.step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self.step(self._coroutine.throw, *error)

    def close(self) -> None:
        self.step(self._coroutine.close)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:  # what asyncio shows of a task: its name, where it stands
        return getattr(self._coroutine, name)

    def step(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a step of the coroutine in its circumstances. On a thread's stack, it says whose step is run there."""
        outside, context, grad = here.handling, here.context, torch.is_grad_enabled()
        here.handling, here.context = self._handling, self._context
        if grad is not self._grad:
            torch.set_grad_enabled(self._grad)
        try:
            return step(*args)
        finally:
            if self._handling is not None and self._handling.worker.forked:
                end_child()
            self._context, self._grad = here.context, torch.is_grad_enabled()
            here.handling, here.context = outside, context
            if grad is not self._grad:
                torch.set_grad_enabled(grad)


def _begin(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Makes the tasks of the loop."""
    if asyncio.iscoroutine(coroutine) and not isinstance(coroutine, Carried):
        carried = Carried(coroutine, here.handling, here.context)
        carried._grad = torch.is_grad_enabled()
        coroutine = carried
    return asyncio.Task(coroutine, loop=loop, **kwargs)


class _Threads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`: what runs there belongs to the call chain of the coroutine, and to its
    autograd context, but has no turn to lend: the coroutine that awaits it does.
    """

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        handling = here.handling
        if handling is None:
            return super().submit(function, *args, **kwargs)
        elsewhere = Handling(handling.worker, handling.message, handling.chain)
        return super().submit(_elsewhere, elsewhere, here.context, functools.partial(function, *args, **kwargs))


def _elsewhere(handling: Handling, context: int, function: Callable[[], Any]) -> Any:
    here.handling, here.context = handling, context
    try:
        return function()
    finally:
        if handling.worker.forked:
            end_child()
        del here.handling, here.context


class Handler(Carried):
    """The coroutine of a message (or of an actor's `main`), with its turn (RULE AS1).

    Arguments:
        home: the loop.
        coroutine: what to run.
        handling: its circumstances, with the turn.
        context: the autograd context.
        done: called once with the result, or with None and the error, on the loop.
    """

    def __init__(
        self,
        home: Loop,
        coroutine: Coroutine[Any, Any, Any],
        handling: Handling,
        context: int,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        super().__init__(coroutine, on_loop(handling), context)
        self._home, self._mailbox, self._turn, self._done = home, handling.mailbox, handling.turn, done
        self._asleep = False
        self._awaited: Wake | None = None
        self._task: asyncio.Task[Any] | None = None

    def awaits(self) -> tuple[Handling | None, Turn[Any] | None, Wake | None]:
        """Returns whose coroutine it is, with its turn, and what it sleeps on where that is known."""
        return self._handling, self._turn, self._awaited if self._asleep else None

    def begin(self) -> None:
        """Makes its task; on the loop."""
        self._task = asyncio.Task(self, loop=self._home.loop)

    def cancel(self) -> None:
        """Cancels its task; on the loop, after `begin`."""
        if self._task is not None:
            self._task.cancel()

    def send(self, value: Any) -> Any:
        if self._asleep:
            self._asleep = False
            leave = self._wake_up()
            if leave is not None:
                return leave
        return self._go_on(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        if self._mailbox is not None and self._turn is not None:
            self._asleep, self._awaited = False, None
            self._mailbox.force(self._turn)
        return self._go_on(self._coroutine.throw, *error)

    def _go_on(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            yielded = self.step(step, *args)
        except StopIteration as e:
            self._end(e.value, None)
            raise
        except BaseException as e:
            error: BaseException = e
            if isinstance(e, asyncio.CancelledError) and self._home.ending:
                error = NotAMemberError(f"{self._home.worker} has shut down; the coroutine was cancelled")
            self._end(None, error)
            raise StopIteration from None  # whoever called is told; asyncio need not say it again
        if self._mailbox is not None and self._turn is not None:
            self._fall_asleep(yielded)
        return yielded

    def _end(self, value: Any, error: BaseException | None) -> None:
        try:
            self._done(value, error)
        except BaseException:
            log.exception("%s: a coroutine's end failed", self._home.worker)
        finally:
            self._home.worker.afoot.discard(self)

    def _fall_asleep(self, yielded: Any) -> None:
        mailbox, turn = self._mailbox, self._turn
        assert mailbox is not None
        assert turn is not None
        self._asleep = True
        wake = self._awaited = yielded if isinstance(yielded, Wake) and yielded.core is not None else None
        core = wake.core if wake is not None else None
        MailboxCell.start(mailbox.suspend(turn, core.number if core is not None and core.done else None))
        if wake is not None and wake.waiter is not None and core is not None:
            wake.waiter.mailbox, wake.waiter.turn = mailbox, turn
            if core.done:  # it came before it could see that
                mailbox.arrived(turn, core.number)

    def _wake_up(self) -> Wake | None:
        """Takes the turn up again. Returns what to sleep on where others go first (RULE MB3), else None."""
        mailbox, turn, wake = self._mailbox, self._turn, self._awaited
        assert mailbox is not None
        assert turn is not None
        self._awaited = None
        if wake is not None and wake.core is not None and wake.core.done:
            number = wake.core.number
        else:  # of what it waited for nobody knows the place: all that has come goes first
            now = Completion()
            self._home.worker.complete(now)
            number = now.number
        gate = LoopGate(self._home.loop)
        ready = mailbox.resume(turn, number, gate)
        if turn in ready:
            ready.remove(turn)
            turn.gate = None
            MailboxCell.start(ready)
            return None
        MailboxCell.start(ready)
        gate.wake._asyncio_future_blocking = True
        return gate.wake
