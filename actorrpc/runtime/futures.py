"""The future: a `torch.futures.Future` that can also be waited for with a bound, and interrupted.

A plain subclass would not do. `then` of torch's class gives back torch's class, its `wait` cannot be interrupted nor
lend a handler's place, and completing it runs callbacks on the thread that completes. Here the state lives in a
`Completion`; torch's own part is filled in afterwards (`_publish`), for `torch.futures.wait_all` and `collect_all`,
which look at it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from actorrpc.errors import CancelledError, RPCTimeoutError, SerializationError
from actorrpc.runtime import awaiting
from actorrpc.runtime.clock import LockGate
from actorrpc.runtime.completion import Call, Completion, Waiter, check_seconds, describe
from actorrpc.runtime.copies import as_torch_raises, bare_copy
from actorrpc.runtime.handling import here, in_context
from actorrpc.runtime.lanes import Lane
from actorrpc.wire.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
T = TypeVar("T")
S = TypeVar("S")
_Base: Any = torch._C.Future
"""Of torch's two classes the inner one, whose methods take half as long to call."""
# Reentrant: the collector may run a finalizer that completes the same future; called itself, as futures are many.
_RLock: Any = type(threading.RLock())
_NO_CALL = Completion()
"""In the place of a call that is about to be sent; nobody waits for it."""


class Future(torch.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """The result of something that is under way.

    Arguments:
        devices: as in `torch.futures.Future`; devices whose streams are synchronised. None on a CPU.

    A future of the user's own is completed with `set_result` or `set_exception`; one that `rpc_async` returned
    completes itself. Callbacks run on a thread of the pool, or at once on the calling thread where the future is done.
    """

    _settled = _published = False
    _value: Any = None
    _error: BaseException | None = None
    _trace: TracebackType | None = None

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        super().__init__(devices=devices)
        self._prepare(None)

    def _prepare(self, worker: Worker | None, core: Completion | None = None) -> None:
        self._worker = worker
        self._core: Completion = Completion() if core is None else core
        self._door = _RLock()
        self._callbacks: list[tuple[Callable[[Future[T]], None], int]] = []

    @classmethod
    def _of(cls, worker: Worker, core: Completion | None = None) -> Future[Any]:
        future = cls.__new__(cls)
        _Base.__init__(future, [])
        future._prepare(worker, core)
        return future

    @classmethod
    def _of_call(cls, worker: Worker, send: Callable[[Callable[[Call], None]], Call]) -> Future[Any]:
        """Makes the future of a call; `send` sends it, given what to call when it is answered and nobody waits."""
        future = cls._of(worker, _NO_CALL)
        future._core = send(future._finish)
        return future

    # -- reading

    def done(self) -> bool:
        """Returns whether a result or an error is there."""
        return self._core.done

    def wait(self, timeout: float = -1.0) -> T:
        """Waits for the result.

        Arguments:
            timeout: seconds, counted from now; 0 for ever, below 0 (the default) for the call's own limit alone.
                Where the call has a limit, the earlier of the two holds.

        Returns the result.

        Raises:
            RPCTimeoutError: time ran out. After the call's own limit the future is completed with this error; after
                `timeout` it goes on, and may be waited for again.
            TypeError, ValueError: `timeout` is no number.
            BaseException: what the call, or the callback, raised.
        """
        check_seconds(timeout)
        try:
            self._await(timeout)  # also where the result is there: an actor's earlier messages go first (RULE MB3)
        except BaseException:
            core = self._core
            if core.done and isinstance(core, Call) and self._worker is not None and not self._settled:
                # It came as this wait was interrupted, and was left to it; torch's wait_all would wait for ever.
                self._worker.crew.submit((Lane.FREE, self._finish, core))
            raise
        if not self._settled:
            self._settle_here()
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # not some frames longer with every wait
        value: T = self._value
        return value

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the result in a coroutine, on whichever asyncio loop; raises as `wait` does. A task that is
        cancelled in this wait leaves the future as it is.
        """
        return self._awaited(-1.0)

    def _awaited(self, timeout: float) -> Generator[Any, None, T]:
        core, worker = self._core, self._worker
        if worker is not None and not core.done and worker.transport.holding:
            # When the other tasks have sent what they have: the loop is about to wait, as a thread does (TR9).
            asyncio.get_running_loop().call_soon(_let_leave, worker)
        try:
            if not (yield from awaiting.until(core, timeout)):
                raise self._too_late(timeout)
        finally:
            if core.done and not self._settled:  # also where the task is cancelled: nobody else may be about to
                self._settle_here()
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        value: T = self._value
        return value

    def _await(self, timeout: float) -> None:
        core = self._core
        worker = self._worker
        handling = here.handling
        if worker is None and handling is not None:
            worker = handling.worker
        if core.done and (handling is None or handling.turn is awaiting.NO_TURN) and not (worker and worker.forked):
            return  # it blocks nobody
        now = worker.clock.now if worker is not None else None
        limit = core.deadline if isinstance(core, Call) else None
        if worker is None or now is None:
            if not core.done and not _wait_alone(core, self._door, timeout if timeout > 0 else None):
                raise self._too_late(timeout)
            return
        own = now() + timeout if 0 < timeout < math.inf else None
        deadline = limit if own is None else own if limit is None else min(own, limit)
        if worker.wait(core, deadline):
            return
        if isinstance(core, Call) and deadline == limit:
            worker.calls.expire(core)
        elif not core.done:
            raise self._too_late(timeout)

    def _too_late(self, timeout: float) -> RPCTimeoutError:
        core = self._core
        what = describe(core.what) if isinstance(core, Call) else "a future that was not completed"
        return RPCTimeoutError(f"waited {timeout:g} s for {what}; it is still under way")

    def value(self) -> T:
        """Returns the result of a future that is done.

        Raises:
            RuntimeError: it is not done.
            BaseException: what the call, or the callback, raised.
        """
        if not self._core.done:
            raise RuntimeError("the future has no value yet; wait() for it")
        return self.wait()

    def cancelled(self) -> bool:
        """Returns whether it was cancelled."""
        core = self._core
        return core.done and isinstance(core.failure if isinstance(core, Call) else self._error, CancelledError)

    # -- completing

    def cancel(self) -> bool:
        """Ends the future, unless it is done; `wait` then raises CancelledError, and callbacks run.

        The callee of a call is told: a call that has not begun there is never run, one that has can see it
        (`actorrpc.current_call().cancelled`) and runs on otherwise. So do the calls that its handler has made: a
        handler that is to end them cancels their futures. The future of `then` is cancelled alone; its callback is not
        called.

        Returns whether it took effect: False where the future was done already.
        """
        core, worker = self._core, self._worker
        if isinstance(core, Call) and worker is not None:
            return worker.calls.cancel(core)
        return self._complete_once(None, CancelledError("the future was cancelled"))

    def set_result(self, result: T) -> None:
        """Completes the future with a result.

        Raises:
            RuntimeError: it is done already, or it is the future of a call.
        """
        self._complete(result, None)

    def set_exception(self, result: BaseException) -> None:
        """Completes the future with an exception, which `wait` raises. Raises as `set_result` does."""
        if not isinstance(result, BaseException):
            raise AssertionError(f"{result!r} is of type {type(result).__name__}, not an Exception.")
        self._complete(None, result)

    def _complete(self, value: Any, error: BaseException | None) -> None:
        if isinstance(self._core, Call):
            raise RuntimeError(
                "Future can only be marked completed once: this one belongs to a call, whose answer completes it"
            )
        if not self._complete_once(value, error):
            raise RuntimeError("Future can only be marked completed once, and this one is done already")

    def _complete_once(self, value: Any, error: BaseException | None) -> bool:
        """Completes a future that is no call's; returns False where it is done already, or cancelled."""
        core = self._core
        with self._door:
            if self._settled:
                return False
            self._value, self._error, self._settled = value, error, True
            self._trace = error.__traceback__ if error is not None else None
            callbacks, self._callbacks = self._callbacks, []
        self._mark(core)
        self._publish()
        for callback in callbacks:
            self._call(callback)
        return True

    def _mark(self, core: Completion) -> None:
        """Marks a future of the user's own as done, for waiters of whichever worker."""
        if self._worker is not None:
            self._worker.complete(core)
            return
        handling = here.handling
        if handling is not None:
            handling.worker.complete(core)
            return
        with self._door:
            core.done = True
            waiters = list(core.waiters)
        for waiter in waiters:
            if waiter.mailbox is not None and waiter.turn is not None:
                waiter.mailbox.arrived(waiter.turn, 0)
            waiter.gate.open()
            if waiter.leading and waiter.wake is not None:
                waiter.wake()

    def _settle_here(self) -> None:
        """Settles the future on a thread that waits for it; torch's part is filled in off its stack."""
        self._settle()
        if self._worker is not None:
            self._worker.calls.publish_soon(self)

    def _settle_new(self) -> None:
        """Settles a future that was just made, and of which nobody else knows, with None."""
        self._settled = self._published = True
        _Base.set_result(self, None)

    def _read(self, call: Call) -> T:
        """Reads the call's answer; raises what came instead."""
        assert self._worker is not None
        value: T = self._worker.answers.read(call)
        return value

    def _settle(self) -> None:
        """Reads the call's answer, once; several threads may ask."""
        with self._door:
            if self._settled:
                return
            core, worker = self._core, self._worker
            assert isinstance(core, Call)
            assert worker is not None
            try:
                self._value = self._read(core)
            except BaseException as e:
                # Without its frames, which hold this future: torch's part will hold the error where the collector
                # does not see it. Where it happened stands in its cause.
                self._error = e.with_traceback(None)
            core.then = None
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:  # not on this thread: it may hold locks that the callback wants
            worker.crew.submit((Lane.FREE, self._call, callback))

    def _finish(self, call: Call) -> None:
        """Reads the answer and runs what hangs on it, on a thread of the pool."""
        self._core = call  # the answer may come before `_of_call` has the call in hand
        self._settle()
        self._publish()

    def _publish(self) -> None:
        """Fills in torch's own part of the future."""
        with self._door:
            if self._published or not self._settled:
                return
            self._published = True
        if self._error is None:
            _Base.set_result(self, self._value)
        else:  # what torch's set_exception does, which would come back to set_result of this class
            _Base._set_unwrap_func(self, _raise)
            # A copy: the collector does not see what torch holds, and the error itself will hold frames when it has
            # been raised, which may hold this future.
            _Base.set_result(self, bare_copy(self._error))

    # -- callbacks

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Has `callback(future)` called when the future is done, at once if it is. What it raises goes to the log. It
        runs in the autograd context in which it was given.

        Raises:
            TypeError: it cannot be called.
        """
        _check_callback(callback)
        with self._door:
            settled = self._settled
            if not settled:
                self._callbacks.append((callback, here.context))
        core, worker = self._core, self._worker
        if settled:
            self._call((callback, here.context))
        elif isinstance(core, Call) and worker is not None:
            core.urgent = True
            if core.done:  # it came before it could see that this is urgent
                worker.crew.submit((Lane.FREE, self._finish, core))

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Returns the future of `callback(self)`, which is called when this future is done, also with an error.

        What the callback raises is raised by that future's `wait`. It can be caught by its own type and, as with
        torch's futures, as a RuntimeError.

        Raises:
            TypeError: `callback` cannot be called.
        """
        _check_callback(callback)
        child: Future[S] = Future._of(self._worker) if self._worker is not None else Future()

        def run(_: Future[T]) -> None:
            if child.done():  # cancelled
                return
            try:
                value = callback(self)
            except BaseException as e:
                child._complete_once(None, as_torch_raises(e))
            else:
                child._complete_once(value, None)

        Future.add_done_callback(self, run)  # which a subclass may have do more with what its users give it
        return child

    @exposed
    def _call(self, what: tuple[Callable[[Future[T]], None], int]) -> None:
        callback, context = what
        with in_context(context):
            try:
                callback(self)
            except (Exception, SystemExit):  # a callback's exit is not its thread's, nor the end of the other callbacks
                log.exception("a callback of a future failed")

    def __reduce__(self) -> Any:
        raise SerializationError(
            "Can not pickle torch.futures.Future: it stays where it is; "
            "send its result, or make its call with remote() and send the reference"
        )


def _let_leave(worker: Worker) -> None:
    if worker.transport.holding:
        worker.transport.flush()


def _check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(
            f"incompatible function arguments. A callback must be callable, not {callback!r} of type "
            f"{type(callback).__name__}"
        )


def _raise(error: BaseException) -> None:
    raise error


@exposed
def _wait_alone(core: Completion, door: Any, timeout: float | None) -> bool:
    """Waits outside any worker: on a gate alone."""
    gate = LockGate()
    waiter = Waiter(gate)
    with door:
        if core.done:
            return True
        core.waiters.append(waiter)
    gate.wait(timeout)
    return core.done
