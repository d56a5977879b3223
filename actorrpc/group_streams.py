"""Groups' streams: the items of several generators, as they come."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from actorrpc.errors import GroupError, RPCTimeoutError
from actorrpc.proxies import failed_future
from actorrpc.runtime.futures import Future
from actorrpc.streams import Stream, Within

if TYPE_CHECKING:
    from actorrpc.rref import RRef


class GroupStream(Iterator[tuple["RRef[Any]", Any]], AsyncIterator[tuple["RRef[Any]", Any]]):
    """The items of several members' streams, each with the member that made it, in the order in which they come.
    `group.stream()` makes it. It is over when all streams are.

    What goes wrong at a member ends that member's stream only: it is raised as a GroupError that names the member, and
    the others' items can be asked for on. Where none comes in time, RPCTimeoutError is raised, and no item is lost. The
    generators are closed when this is, as those of a Stream are.

    Arguments:
        members: who streams.
        streams: what they stream, or why they do not.
        timeout: seconds for each wait; below 0 the worker's own.
    """

    def __init__(
        self, members: Sequence[RRef[Any]], streams: Sequence[Stream[Any] | Exception], timeout: float
    ) -> None:
        self._members, self._timeout = list(members), timeout
        self._streams: dict[int, Stream[Any]] = {}
        self._heads: dict[int, Future[Any]] = {}
        self._arrivals = _Arrivals()
        for i, stream in enumerate(streams):
            if isinstance(stream, Stream):
                self._streams[i] = stream
                self._expect(i)
            else:
                self._expect(i, failed_future(stream))

    def __iter__(self) -> GroupStream:
        return self

    def __next__(self) -> tuple[RRef[Any], Any]:
        while self._heads:
            bell = self._arrivals.bell(self._members[0])
            if bell is not None:
                try:
                    bell.wait(self._seconds())
                except RPCTimeoutError:
                    raise self._too_late() from None
            found = self._take()
            if found is not None:
                return found
        raise StopIteration

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> tuple[RRef[Any], Any]:
        while self._heads:
            bell = self._arrivals.bell(self._members[0])
            if bell is not None:
                try:
                    await Within(bell, self._seconds())
                except RPCTimeoutError:
                    raise self._too_late() from None
            found = self._take()
            if found is not None:
                return found
        raise StopAsyncIteration

    def close(self) -> None:
        """Closes all streams. May be called twice."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._heads.clear()

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, i: int, head: Future[Any] | None = None) -> None:
        """Has the next item of a member noted when it comes; not by this object itself, which the calls would keep."""
        head = self._streams[i]._next() if head is None else head
        if head is not None:
            self._heads[i] = head
            head.add_done_callback(functools.partial(self._arrivals.note, i))

    def _take(self) -> tuple[RRef[Any], Any] | None:
        i = self._arrivals.come.popleft()
        try:
            taken = self._heads.pop(i).value()
        except Exception as e:
            self._end(i)
            raise GroupError.of([(self._members[i].owner_name(), e)], len(self._members)) from e
        if taken is None:
            self._end(i)
            return None
        self._expect(i)
        return self._members[i], taken[0]

    def _end(self, i: int) -> None:
        stream = self._streams.pop(i, None)
        if stream is not None:
            stream.close()

    def _seconds(self) -> float:
        return self._members[0]._worker.timeout if self._timeout < 0 else self._timeout

    def _too_late(self) -> RPCTimeoutError:
        late = ", ".join(sorted({self._members[i].owner_name() for i in self._heads}))
        return RPCTimeoutError(f"waited {self._seconds():g} s for an item of the streams of {late}; none came")


class _Arrivals:
    """Whose items have come and were not taken."""

    def __init__(self) -> None:
        self.come: deque[int] = deque()
        self._door = threading.Lock()
        self._bell: Future[None] | None = None

    def note(self, i: int, _: Future[Any]) -> None:
        with self._door:
            self.come.append(i)
            bell, self._bell = self._bell, None
        if bell is not None:
            bell.set_result(None)

    def bell(self, member: RRef[Any]) -> Future[None] | None:
        """Returns what is done when the next item comes; None where one has."""
        with self._door:
            if self.come:
                return None
            self._bell = Future._of(member._worker)
            return self._bell
