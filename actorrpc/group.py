"""Groups: several actors called as one."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from actorrpc.errors import CancelledError, GroupError, WorkerLostError
from actorrpc.group_streams import GroupStream
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.proxies import call_all, call_method, failed_future, tell_all
from actorrpc.rref import RRef
from actorrpc.runtime.completion import check_seconds
from actorrpc.runtime.futures import Future
from actorrpc.runtime.peers import Standing
from actorrpc.streams import WINDOW, Stream, Within, check_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.worker import Worker


class Group(Sequence[RRef[Any]]):
    """A sequence of references. Calls go to all members at once; results come in the members' order.

    `any()` and `scatter()` return a group that is called in another way; `pick()` one of a single member.

    Arguments:
        members: the references.
        turns: counts for `pick`; default: a count of its own.
    """

    def __init__(self, members: Sequence[RRef[Any]], turns: Iterator[int] | None = None) -> None:
        self._members = list(members)
        self._first = False
        self._shares: list[Any] | None = None
        self._turns = itertools.count() if turns is None else turns

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> RRef[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Group: ...
    def __getitem__(self, index: int | slice) -> RRef[Any] | Group:
        if isinstance(index, slice):
            return Group(self._members[index])
        try:
            return self._members[index]
        except IndexError:
            raise IndexError(f"there is no member {index} in a group of {len(self)}") from None

    if not TYPE_CHECKING:  # which sees by itself what a group has not

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(
                f"a group has no attribute {name!r}; call its members' methods with .rpc_sync().{name}(...), "
                f"or those of one member with [0].rpc_sync().{name}(...)"
            )

    def __iter__(self) -> Iterator[RRef[Any]]:
        return iter(self._members)

    def __repr__(self) -> str:
        return f"Group({self._members!r})"

    # -- modifiers

    def any(self) -> Group:
        """Returns the same members, of which the first to answer counts: its result is the call's, and the other
        members' calls are cancelled.
        """
        group = Group(self._members)
        group._first, group._shares = True, self._shares
        return group

    def pick(self, least_loaded: bool = False) -> Group:
        """Returns a group of one member: the next in turn whose worker is there; if none of them is, the next in turn.

        A call of it returns a list of one result, as a call of any group does.

        Arguments:
            least_loaded: takes, of those to whose workers the fewest calls of this worker are under way, the next in
                turn.

        Raises:
            IndexError: the group is empty.
        """
        if not self._members:
            raise IndexError("an empty group has nobody to pick")
        turn = next(self._turns) % len(self)
        inline = self._members[turn:] + self._members[:turn]
        inline = [member for member in inline if _is_there(member)] or inline  # no calls are under way to the dead
        if not least_loaded:
            return Group(inline[:1])
        under_way = Counter(call.peer for call in list(inline[0]._worker.calls.pending.values()))
        return Group([min(inline, key=lambda member: under_way[member._handle.owner])])

    def scatter(self, shares: Sequence[Any]) -> Group:
        """Returns the same members, each of which gets its own share as the call's first argument.

        Raises:
            ValueError: there are not as many shares as members.
        """
        shares = list(shares)
        if len(shares) != len(self):
            raise ValueError(f"{len(shares)} shares for a group of {len(self)} members")
        group = Group(self._members)
        group._first, group._shares = self._first, shares
        return group

    # -- verbs

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `group.rpc_sync().method(*args)` calls all members and returns the list of their results
        (with `any()`, one result).

        Raises:
            GroupError: calls failed; it names the members and holds their exceptions.
        """
        return _GroupProxy(lambda *call: self._call(timeout, *call).wait())

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `group.rpc_async().method(*args)` calls all members and returns one GroupFuture."""
        return _GroupProxy(lambda *call: self._call(timeout, *call))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `group.remote().method(*args)` calls all members and returns the Group of references to
        their results.
        """
        return _GroupProxy(lambda *call: Group(self._send("remote", timeout, *call)))

    def tell(self) -> Any:
        """Returns a proxy: `group.tell().method(*args)` has all members' method called, and waits for nothing."""
        return _GroupProxy(self._tell)

    def stream(self, timeout: float = UNSET_RPC_TIMEOUT, window: int = WINDOW) -> Any:
        """Returns a proxy: `group.stream().method(*args)` streams from all members at once, and returns a GroupStream:
        `for member, item in group.stream().rollout(100)` has the items as they come.

        Arguments: see `RRef.stream`; the window is each member's own.
        """
        check_seconds(timeout)
        check_window(window)
        return _GroupProxy(lambda *call: self._stream(timeout, window, *call))

    def _stream(
        self, timeout: float, window: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GroupStream:
        streams: list[Stream[Any] | Exception] = []
        for i, member in enumerate(self._members):
            own = args if self._shares is None else (self._shares[i], *args)
            try:
                streams.append(getattr(member.stream(timeout, window), name)(*own, **kwargs))
            except WorkerLostError as e:
                streams.append(e)
        return GroupStream(self._members, streams, timeout)

    def _call(self, timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupFuture:
        if self._shares is None:
            futures = call_all(self._members, timeout, name, args, kwargs)
        else:
            futures = self._send("rpc_async", timeout, name, args, kwargs)
        return GroupFuture(self._members, futures, self._first)

    def _tell(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._shares is not None:
            self._send("tell", UNSET_RPC_TIMEOUT, name, args, kwargs)
        elif failed := tell_all(self._members, name, args, kwargs):
            raise GroupError.of([(member.owner_name(), e) for member, e in failed], len(self))

    def _send(self, verb: str, timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls all members, also when one of them cannot be; says so afterwards, in its future if it has one."""
        sent: list[Any] = []
        failed: list[tuple[str, BaseException]] = []
        for i, member in enumerate(self._members):
            own = args if self._shares is None else (self._shares[i], *args)
            try:
                sent.append(call_method(member, verb, timeout, name, own, kwargs))
            except Exception as e:
                if verb == "rpc_async":
                    sent.append(failed_future(e))
                else:
                    failed.append((member.owner_name(), e))
        if failed:
            raise GroupError.of(failed, len(self))
        return sent


def _is_there(member: RRef[Any]) -> bool:
    peer = member._worker.peers.get(member._handle.owner)
    return peer is not None and peer.standing is Standing.MEMBER and not peer.leaving


class _GroupProxy:
    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(name, args, kwargs)


class GroupFuture(Future[Any]):
    """The future of a group's call: the list of results, in the members' order; or, with `any()`, the first result.

    `group.rpc_async()` makes it; there is no need to make one by hand.

    Arguments:
        members, futures: who was called, and each one's own future.
        first: whether the first result counts.
    """

    def __init__(self, members: Sequence[RRef[Any]], futures: Sequence[Future[Any]], first: bool = False) -> None:
        super().__init__()
        if futures:
            self._worker = futures[0]._worker
        self._members, self._futures, self._first = list(members), list(futures), first
        self._left = len(self._futures)
        self._order: list[int] = []
        for i, future in enumerate(self._futures):
            future.add_done_callback(lambda done, i=i: self._one(i, done))  # type: ignore[misc]
        if not self._futures and first:
            nobody = IndexError("the group is empty")
            self.set_exception(GroupError("an empty group has no first answer: it has no members", [nobody]))
        elif not self._futures:
            self.set_result([])

    def as_completed(self, timeout: float = UNSET_RPC_TIMEOUT) -> AsCompleted:
        """Yields each member with its future, in the order in which they are done; by `for` or `async for`.

        Arguments:
            timeout: seconds for each next one; default: the call's own limit.
        """
        return AsCompleted(self._members, self._futures, self._worker, timeout)

    def settled(self) -> Future[list[Any]]:
        """Returns a future of what became of every member's call, in the members' order: its result, or the exception
        that it raised, as `asyncio.gather(..., return_exceptions=True)` has them. It never fails itself.
        """
        made: Future[list[Any]] = Future() if self._worker is None else Future._of(self._worker)
        futures, door, left = self._futures, threading.Lock(), len(self._futures)

        def note(_: Future[Any]) -> None:
            nonlocal left
            with door:
                left -= 1
                last = not left
            if last:
                made.set_result([f._value if f._error is None else f._error for f in futures])

        for future in futures:
            future.add_done_callback(note)
        if not futures:
            made.set_result([])
        return made

    def _one(self, i: int, done: Future[Any]) -> None:
        with self._door:
            self._left -= 1
            last = not self._left
        if self._first and done._error is None:
            if self._complete_once(done._value, None):
                self._cancel_members()
        elif last:
            failed = [(m, f._error) for m, f in zip(self._members, self._futures, strict=True) if f._error is not None]
            if failed and (not self._first or len(failed) == len(self._futures)):
                self._complete_once(None, GroupError.of([(m.owner_name(), e) for m, e in failed], len(self._futures)))
            elif not self._first:
                self._complete_once([f._value for f in self._futures], None)

    def cancel(self) -> bool:
        """Cancels the calls of all members that are not done; see `Future.cancel`."""
        if not self._complete_once(None, CancelledError(f"the call of a group of {len(self._members)} was cancelled")):
            return False
        self._cancel_members()
        return True

    def _cancel_members(self) -> None:
        for future in self._futures:
            future.cancel()


class AsCompleted(Iterator[tuple[RRef[Any], Future[Any]]], AsyncIterator[tuple[RRef[Any], Future[Any]]]):
    """The members of a group's call with their futures, in the order in which they are done.

    `as_completed()` makes it. Where the next one takes longer than `timeout`, RPCTimeoutError is raised, and it may be
    asked for again.
    """

    def __init__(
        self, members: Sequence[RRef[Any]], futures: Sequence[Future[Any]], worker: Worker | None, timeout: float
    ) -> None:
        check_seconds(timeout)
        self._members, self._futures, self._timeout = members, futures, timeout
        self._done: list[int] = []
        self._steps: list[Future[None]] = [Future() if worker is None else Future._of(worker) for _ in futures]
        self._next = 0
        turn = itertools.count()

        def note(i: int) -> None:
            self._done.append(i)
            self._steps[next(turn)].set_result(None)

        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: note(i))  # type: ignore[misc]

    def __next__(self) -> tuple[RRef[Any], Future[Any]]:
        if self._next == len(self._steps):
            raise StopIteration
        self._steps[self._next].wait(self._timeout)
        return self._take()

    async def __anext__(self) -> tuple[RRef[Any], Future[Any]]:
        if self._next == len(self._steps):
            raise StopAsyncIteration
        await Within(self._steps[self._next], self._timeout)
        return self._take()

    def _take(self) -> tuple[RRef[Any], Future[Any]]:
        which = self._done[self._next]
        self._next += 1
        return self._members[which], self._futures[which]
