"""The proxies of references: how a method is called through one, in each of the four ways."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from actorrpc.errors import BackpressureTimeoutError, NotAMemberError, WorkerLostError
from actorrpc.profiling import span
from actorrpc.runtime.futures import Future
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.services.executor import ASYNC_MARK
from actorrpc.wire.codec import mentions_main

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from actorrpc.rref import RRef
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.handles import Dressed, OwnerHandle, UserHandle
    from actorrpc.wire.envelope import Frame

ASKED = frozenset((ASYNC_MARK, "__func__", "__name__", "__qualname__", "__torch_function__", "__wrapped__"))
"""Attributes that Python, torch and this library look for on anything callable; no proxy has them."""


class Proxy:
    """Stands for the object of a reference: its attributes are methods to call in one of four ways, and a call of the
    proxy is a call of the object. It may be sent to others.
    """

    __slots__ = ("_ref", "_timeout", "_verb")

    def __init__(self, ref: RRef[Any], verb: str, timeout: float) -> None:
        self._ref, self._verb, self._timeout = ref, verb, timeout

    def __getattr__(self, name: str) -> ProxyMethod:
        if name in ASKED:
            raise AttributeError(name)
        return ProxyMethod(self._ref, self._verb, self._timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_method(self._ref, self._verb, self._timeout, "__call__", args, kwargs)

    def __reduce__(self) -> Any:
        return Proxy, (self._ref, self._verb, self._timeout)

    def __copy__(self) -> Proxy:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self._ref.__reduce__()

    def __repr__(self) -> str:
        return f"{self._ref!r}.{self._verb}()"


class ProxyMethod:
    """A method of a proxy. It may be sent as a function: the callee then calls through the reference."""

    __slots__ = ("_name", "_ref", "_timeout", "_verb")

    def __init__(self, ref: RRef[Any], verb: str, timeout: float, name: str) -> None:
        self._ref, self._verb, self._timeout, self._name = ref, verb, timeout, name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return call_method(self._ref, self._verb, self._timeout, self._name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            raise AttributeError(
                f"{self!r} is a method to be called, and has no attribute {name!r}; a proxy reads no plain attributes: "
                f"have a method or function on {self._ref.owner_name()!r} return them"
            )
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return ProxyMethod, (self._ref, self._verb, self._timeout, self._name)

    def __repr__(self) -> str:
        return f"{self._ref!r}.{self._verb}().{self._name}"


def call_method(
    ref: RRef[Any],
    verb: str,
    timeout: float,
    name: str | Dressed,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    what: str | None = None,
) -> Any:
    """Calls a method through a reference, in the way that `verb` says; `what`: what errors call it, else its name."""
    handle = ref._handle
    handle.check()
    worker = handle.service.worker
    body = name, args, kwargs
    what = what or (name if isinstance(name, str) else name.name)
    with span(verb, what, worker, handle.owner):
        if verb == "rpc_sync":
            return worker.wait_result(worker.request(handle.owner, handle.ref, body, timeout, what, bounded=True))
        if verb == "rpc_async":
            try:
                return Future._of_call(
                    worker,
                    lambda then: worker.request(
                        handle.owner, handle.ref, body, timeout, what, then, bounded=True, counted=True
                    ),
                )
            except (WorkerLostError, BackpressureTimeoutError) as e:
                return failed_future(e)
        if verb == "tell":
            return worker.tell(handle.owner, handle.ref, body, what=what)
        return ref._wrap(handle.service.create(handle.owner, handle.ref, body, timeout, what))


def start_call(ref: RRef[Any], timeout: float, name: str, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Calls a method through a reference; returns what waits for its result, which costs less than a future."""
    handle = ref._handle
    handle.check()
    worker = handle.service.worker
    call = worker.request(handle.owner, handle.ref, (name, args, {}), timeout, name, bounded=True)
    return lambda: worker.wait_result(call)


def call_all(
    refs: Sequence[RRef[Any]], timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Future[Any]]:
    """Calls one method of several objects with the same arguments, which are written once.

    Returns the futures, in the order of `refs`.
    """
    if not refs:
        return []
    worker = refs[0]._worker
    frames = _written_once(worker, name, args, kwargs)
    if frames is None:
        return [_or_failed(lambda r=ref: call_method(r, "rpc_async", timeout, name, args, kwargs)) for ref in refs]  # type: ignore[misc]

    def send(handle: OwnerHandle | UserHandle) -> Future[Any]:
        handle.check()
        return Future._of_call(
            worker,
            lambda then: worker.calls.post(
                handle.owner, handle.ref, frames, timeout, name, then=then, bounded=True, counted=True
            ),
        )

    with _sharing(worker, refs, frames):
        return [_or_failed(lambda r=ref: send(r._handle)) for ref in refs]  # type: ignore[misc]


def tell_all(
    refs: Sequence[RRef[Any]], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[RRef[Any], Exception]]:
    """Has one method of several objects called with the same arguments, which are written once, and waits for nothing.

    Returns those that could not be told, and why.
    """
    failed: list[tuple[RRef[Any], Exception]] = []
    if not refs:
        return failed
    worker = refs[0]._worker
    frames = _written_once(worker, name, args, kwargs)
    with contextlib.nullcontext() if frames is None else _sharing(worker, refs, frames):
        for ref in refs:
            try:
                if frames is None:
                    call_method(ref, "tell", -1.0, name, args, kwargs)
                else:
                    ref._handle.check()
                    with span("tell", name, worker, ref._handle.owner):
                        worker.tell_written(ref._handle.owner, ref._handle.ref, frames, what=name)
            except Exception as e:
                failed.append((ref, e))
    return failed


def _written_once(
    worker: Worker, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Frame] | None:
    """Writes a call that several are to get; returns None where each one must have its own."""
    frames, parcel = worker.write((name, args, kwargs), worker.id)
    if parcel.refs or mentions_main(frames) or here.context != NO_CONTEXT:
        # Every receiver of a reference needs a fork of its own, and every message of an autograd context is recorded;
        # what may have to go again, by value, goes by itself.
        parcel.restart()
        return None
    return frames


def _sharing(worker: Worker, refs: Sequence[RRef[Any]], frames: Sequence[Frame]) -> AbstractContextManager[object]:
    """Has the large arguments of a call that several references get from this thread written once for all."""
    if len(frames) == 1 or len(refs) == 1:
        return contextlib.nullcontext()
    return worker.transport.sharing([ref._handle.owner for ref in refs], frames)


def _or_failed(send: Callable[[], Future[Any]]) -> Future[Any]:
    """Sends; where that fails, returns a future that has failed, so that the other members of a group are called."""
    try:
        return send()
    except (WorkerLostError, NotAMemberError) as e:
        return failed_future(e.with_traceback(None))  # where it was sent says nothing to who waits
    except Exception as e:
        return failed_future(e)


def failed_future(error: Exception) -> Future[Any]:
    """Returns a future that is done, with an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def body_of(
    func: Callable[..., Any], args: tuple[Any, ...] | list[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns what a call of a function says: the function, its arguments, its keywords.

    Raises:
        TypeError: one of them is none.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {func!r} of type {type(func).__name__}")
    if not (args is None or isinstance(args, (tuple, list))):
        raise TypeError(f"args must be a tuple, not {type(args).__name__}; for one argument write args=(x,)")
    if not (kwargs is None or isinstance(kwargs, dict)):
        raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
    return func, tuple(args) if args else (), kwargs or {}
