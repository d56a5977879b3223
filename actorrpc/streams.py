"""Streams: the items of a generator on another worker, one after the other, with a window of items ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actorrpc.errors import ActorRPCError, SerializationError
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.profiling import span
from actorrpc.proxies import ASKED, body_of, failed_future
from actorrpc.runtime.completion import check_seconds, describe
from actorrpc.runtime.futures import Future
from actorrpc.services.ids import CREATOR
from actorrpc.services.streams import Streamed, opened
from actorrpc.session import current
from actorrpc.workers import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from actorrpc.rref import RRef
    from actorrpc.services.handles import OwnerHandle, UserHandle
    from actorrpc.workers import To

T = TypeVar("T")
WINDOW = 2
"""How many items are made ahead where nobody says."""
_NEXT = "__next__", (), {}  # type: ignore[var-annotated]
"""Asks for an item; where the generator could not be made, it is answered with that error."""


class Stream(Iterator[T], AsyncIterator[T], Generic[T]):
    """The items of a generator on another worker: `for item in stream`, or `async for`. `stream()` makes it.

    Up to `window` items are made ahead of the one that is asked for, no more. What the generator raises is raised in
    the place of the item, with the remote traceback, and ends the stream; so does the loss of the worker. Where an item
    does not come in time, RPCTimeoutError is raised, but the item is not lost: ask again, or close.

    The generator is closed, so that its `finally` runs, when the stream is: by `close`, at the end of a `with` block,
    or when the stream is garbage-collected, which happens at once when a loop that had the only reference to it is
    left. It is also closed when this worker is lost. A stream stays where it was made: it cannot be sent.
    """

    def __init__(self, handle: OwnerHandle | UserHandle, what: str, timeout: float, window: int) -> None:
        self._handle: OwnerHandle | UserHandle | None = handle
        self._what, self._timeout, self._window = what, timeout, window
        self._asked: deque[Future[tuple[T] | None]] = deque()
        self._worker = handle.service.worker
        self._ask(window)

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        future = self._next()
        if future is None:
            raise StopIteration
        try:
            taken = future.wait(self._seconds())
        except BaseException:
            self._not_taken(future)
            raise
        if taken is None:
            self.close()
            raise StopIteration
        return taken[0]

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        future = self._next()
        if future is None:
            raise StopAsyncIteration
        try:
            taken = await Within(future, self._seconds())
        except BaseException:
            self._not_taken(future)
            raise
        if taken is None:
            self.close()
            raise StopAsyncIteration
        return taken[0]

    def close(self) -> None:
        """Closes the generator, and drops the items that were made ahead. May be called twice."""
        self._handle = None  # whose end says so to the owner
        self._asked.clear()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream of {self._what}{', closed' if self._handle is None else ''}>"

    def __reduce__(self) -> Any:
        raise SerializationError(f"{self!r} stays where it is: send its items, or a reference to what streams them")

    def _next(self) -> Future[tuple[T] | None] | None:
        """Asks for one item more, and returns the future of the first (None in it: the end); None after the end."""
        if self._handle is None:
            return None
        self._ask(self._window + 1 - len(self._asked))
        return self._asked.popleft()

    def _ask(self, count: int) -> None:
        handle, worker = self._handle, self._worker
        assert handle is not None
        for _ in range(count):
            try:  # without a limit: each wait has one
                future: Future[Any] = Future._of_call(
                    worker,
                    lambda then: worker.request(handle.owner, handle.ref, _NEXT, 0.0, self._what, then=then),
                )
            except ActorRPCError as e:  # what was made ahead comes first
                future = failed_future(e)
            self._asked.append(future)

    def _seconds(self) -> float:
        return self._worker.timeout if self._timeout < 0 else self._timeout

    def _not_taken(self, future: Future[Any]) -> None:
        if future.done():
            self.close()
        elif self._handle is not None:  # whoever waited has only lost patience
            self._asked.appendleft(future)


class Within(Generic[T]):
    """Awaits a future, for some seconds at most; 0 or below: without bound."""

    def __init__(self, future: Future[T], seconds: float) -> None:
        self._future, self._seconds = future, seconds

    def __await__(self) -> Generator[Any, None, T]:
        return self._future._awaited(self._seconds)


class StreamProxy:
    """Stands for the object of a reference: its methods are called for their items."""

    __slots__ = ("_ref", "_timeout", "_window")

    def __init__(self, ref: RRef[Any], timeout: float, window: int) -> None:
        check_window(window)
        self._ref, self._timeout, self._window = ref, timeout, window

    def __getattr__(self, name: str) -> Callable[..., Stream[Any]]:
        if name in ASKED:
            raise AttributeError(name)
        return lambda *args, **kwargs: self._open(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Stream[Any]:
        return self._open("__call__", args, kwargs)

    def _open(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        handle = self._ref._handle
        handle.check()
        service, body = handle.service, (Streamed(name), args, kwargs)
        with span("stream", name, service.worker, handle.owner):
            made = service.create(handle.owner, handle.ref, body, 0.0, name)
        return Stream(made, name, self._timeout, self._window)


def stream(
    to: To,
    func: Callable[..., Any],
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    window: int = WINDOW,
) -> Stream[Any]:
    """Calls a generator function on a worker (an async one, or a function that returns anything to iterate over), and
    returns the Stream of its items: `for line in rpc.stream("worker1", read_lines, args=(path,))`.

    Arguments: see `rpc_sync`. `timeout` is for each wait for an item.
        window: how many items are made ahead of the one that is asked for; 0: none. Default 2.

    Raises:
        WorkerLostError, SerializationError, NotAMemberError: nothing was sent; see `rpc_sync`.
    """
    check_seconds(timeout)
    check_window(window)
    objects = current().objects
    func, args, kwargs = body_of(func, args, kwargs)
    number = resolve(objects.worker, to)
    with span("stream", func, objects.worker, number):
        handle = objects.create(number, CREATOR, (opened, (func, *args), kwargs), 0.0, func)
    return Stream(handle, describe(func), timeout, window)


def check_window(window: object) -> None:
    """Refuses what is no window.

    Raises:
        TypeError, ValueError: it is no whole number, or below 0.
    """
    if not isinstance(window, int):
        raise TypeError(f"window must be how many items are made ahead, not {window!r}")
    if window < 0:
        raise ValueError(f"window must be 0 (each item is made when it is asked for) or above, not {window}")
