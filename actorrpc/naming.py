"""References by name: to whoever has the name now, also after a restart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ActorGoneError, BlockingWaitError, NotAMemberError, WorkerLostError
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.proxies import ASKED, call_method
from actorrpc.runtime.completion import Call, Completion, check_seconds
from actorrpc.runtime.peers import Standing
from actorrpc.session import current
from actorrpc.streams import WINDOW, check_window
from actorrpc.world import root_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.rref import RRef
    from actorrpc.runtime.futures import Future
    from actorrpc.session import Session

GAP = 30.0
_LOOK_SECONDS = 0.02


class Named:
    """A reference to whoever has a name: the actor of a role by its worker's name ("observer:1"), or one that was
    spawned with a name. Where its worker has died and another has the name, calls go to that.

    A call is delivered at most once: one that may have run is never sent again, and raises WorkerLostError. One that
    could not be sent goes to the next who has the name.

    It may be sent to others. Its methods are those of a reference; there is nothing to fetch by it.

    Arguments:
        name: the name.
        gap: seconds (30 by default) that calls wait, before they are sent, while nobody has the name; 0: they fail at
            once. (In `async def`, where waits are refused, `await asyncio.to_thread(reference.now)` waits, and finds.)
    """

    __slots__ = ("_gap", "_name", "_ref")

    def __init__(self, name: str, gap: float = GAP) -> None:
        check_seconds(gap)
        if not 0 <= gap < math.inf:
            raise ValueError(f"gap must be seconds, 0 or more, not {gap!r}")
        self._name, self._gap = name, gap
        self._ref: RRef[Any] | None = None

    def __repr__(self) -> str:
        return f"Named({self._name!r}, gap={self._gap:g})"

    def __reduce__(self) -> Any:
        return Named, (self._name, self._gap)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy; see `RRef.rpc_sync`."""
        check_seconds(timeout)
        return _NamedProxy(lambda *call: self._call(timeout, *call).wait())

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy; see `RRef.rpc_async`. In the gap the call itself waits, as where there is no room for it."""
        check_seconds(timeout)
        return _NamedProxy(lambda *call: self._call(timeout, *call))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy; see `RRef.remote`. The result lives, and dies, with the worker that made it."""
        check_seconds(timeout)
        return _NamedProxy(lambda *call: self._send("remote", timeout, *call))

    def tell(self) -> Any:
        """Returns a proxy; see `RRef.tell`. What was told to a worker that died is lost."""
        return _NamedProxy(lambda *call: self._send("tell", UNSET_RPC_TIMEOUT, *call))

    def stream(self, timeout: float = UNSET_RPC_TIMEOUT, window: int = WINDOW) -> Any:
        """Returns a proxy; see `RRef.stream`. A stream ends with the worker that makes its items."""
        check_seconds(timeout)
        check_window(window)

        def open_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            session = current()
            ref = self._resolve(session, session.worker.clock.now() + self._gap)
            return getattr(ref.stream(timeout, window), name)(*args, **kwargs)

        return _NamedProxy(open_one)

    def now(self) -> RRef[Any]:
        """Returns the reference to who has the name now; waits in the gap.

        Raises:
            ActorGoneError: nobody has it, and nobody has come to have it in time.
        """
        session = current()
        return self._resolve(session, session.worker.clock.now() + self._gap)

    def _call(self, timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = self._send("rpc_async", timeout, name, args, kwargs)
        return future

    def _send(self, verb: str, timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = current()
        end = session.worker.clock.now() + self._gap
        while True:
            ref = self._resolve(session, end)
            try:
                sent = call_method(ref, verb, timeout, name, args, kwargs)
            except WorkerLostError as e:
                if e.may_have_run:
                    raise
                self._ref = None
                continue
            if verb == "rpc_async" and sent.done() and not isinstance(sent._core, Call):  # it was not sent
                error = sent._error
                if isinstance(error, WorkerLostError) and not error.may_have_run:
                    self._ref = None
                    continue
            return sent

    def _resolve(self, session: Session, end: float) -> RRef[Any]:
        try:
            return self._look(session, end)
        except BlockingWaitError:
            raise BlockingWaitError(
                f"to find out who has the name {self._name!r}, or to wait until somebody has it, would block the "
                f"worker's loop: within `async def`, `await asyncio.to_thread(reference.now)` first, and calls through "
                f"the same reference can follow. The call was not sent"
            ) from None

    def _look(self, session: Session, end: float) -> RRef[Any]:
        worker = session.worker
        while True:
            ref = self._ref = self._found(session)
            if ref is not None:
                return ref
            now = worker.clock.now()
            if now >= end:
                waited = f" for {self._gap:g} s" if self._gap else ""
                raise ActorGoneError(
                    f"nobody has had the name {self._name!r}{waited}: its worker has died and was not started again "
                    f"yet, or there never was such an actor; the call was not sent"
                )
            worker.wait(Completion(), min(end, now + _LOOK_SECONDS), lead=False)

    def _found(self, session: Session) -> RRef[Any] | None:
        worker, ref = session.worker, self._ref
        if ref is not None and ref._worker is worker and _is_there(session, ref._handle.owner):
            return ref
        number = worker.names.get(self._name)
        if number is not None and worker.peers[number].record.role:
            return root_of(session, number) if _is_there(session, number) else None
        try:
            found: RRef[Any] = session.names.find(self._name)
        except NotAMemberError:
            return None
        return found if _is_there(session, found._handle.owner) else None


def _is_there(session: Session, number: int) -> bool:
    peer = session.worker.peers[number]
    return peer.standing is Standing.MEMBER and not peer.leaving


class _NamedProxy:
    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ASKED:
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)


def named(name: str, gap: float = GAP) -> Named:
    """Returns a reference to whoever has a name, now and later; see `Named`."""
    return Named(name, gap)
