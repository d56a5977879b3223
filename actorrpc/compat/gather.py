"""All workers, or some, exchange one object each: torch's `_all_gather`, and the barriers made of it.

The one whose name comes first leads: the others give it what they have, and it sends the whole to each. Every worker
counts its exchanges with the same members, so that those that follow each other are kept apart.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from actorrpc import rpc
from actorrpc.errors import ActorRPCError, RPCTimeoutError
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rpc import get_rpc_timeout, get_worker_info, rpc_async, rpc_sync
from actorrpc.runtime.peers import Standing
from actorrpc.session import current, is_available
from actorrpc.workers import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actorrpc.session import Session

log = logging.getLogger("actorrpc")
_LOOK_SECONDS = 0.5
"""How often whoever waits for others looks whether they are still there."""

Key = tuple[tuple[str, ...], int, tuple[int, ...]]
"""The members' names, sorted, which of their exchanges it is, and their ids: one that comes again is another one."""


class _Exchange:
    """One exchange, as one worker knows it. The leader collects in it; to others, the whole comes."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.failure: ActorRPCError | None = None
        """Why it will not be whole, where another member has said so."""
        self.over = threading.Event()


class _Exchanges:
    """Those of one membership."""

    def __init__(self) -> None:
        self.door = threading.Lock()
        self.numbers: collections.Counter[tuple[int, ...]] = collections.Counter()
        self.open: dict[Key, _Exchange] = {}
        self.failures: dict[tuple[int, ...], tuple[int, str, bool]] = {}
        """The last failure among the same members: of which exchange, why, and whether it timed out. Whoever comes to
        that exchange when it is over is told so."""

    def begin(self, names: tuple[str, ...], ids: tuple[int, ...]) -> tuple[Key, _Exchange]:
        """Takes part in the next exchange of these members."""
        with self.door:
            key = names, self.numbers[ids], ids
            self.numbers[ids] += 1
            return key, self.open.setdefault(key, _Exchange())

    def find(self, key: Key) -> _Exchange | None:
        """Returns an exchange, which need not have begun here yet; None where it is over. Under the door."""
        if key not in self.open and key[1] < self.numbers[key[2]]:
            return None
        return self.open.setdefault(key, _Exchange())

    def over_error(self, key: Key, how: str) -> ActorRPCError:
        """The error for whoever comes to an exchange that is over. Under the door."""
        text = f"exchange {key[1]} of {', '.join(key[0])} is over{how}"
        number, why, timed_out = self.failures.get(key[2], (-1, "", False))
        return _failure(f"{text}: {why}", timed_out) if number == key[1] else ActorRPCError(text)


def _failure(why: str, timed_out: bool) -> ActorRPCError:
    return RPCTimeoutError(why) if timed_out else ActorRPCError(why)


_door = threading.Lock()


def _exchanges(session: Session) -> _Exchanges:
    with _door:
        found: _Exchanges = session.worker.services.setdefault(_Exchanges, _Exchanges())
        return found


def _give(key: Key, name: str, value: Any) -> None:
    """At the leader: takes what a member gives."""
    exchanges = _exchanges(current())
    with exchanges.door:
        exchange = exchanges.find(key)
        if exchange is None:
            raise exchanges.over_error(key, f", and {name!r} came too late")
        if name in exchange.given:
            raise RuntimeError(f"{name!r} took part twice in exchange {key[1]} of {', '.join(key[0])}")
        exchange.given[name] = value
        if len(exchange.given) == len(key[0]):
            exchange.over.set()


def _take(key: Key, given: dict[str, Any]) -> None:
    """At the others: takes the whole."""
    exchanges = _exchanges(current())
    with exchanges.door:
        exchange = exchanges.find(key)
        if exchange is None:
            raise exchanges.over_error(key, f" on {get_worker_info().name!r}")
        exchange.given = given
        exchange.over.set()


def _fail(key: Key, why: str, timed_out: bool) -> None:
    """At the leader: a member could not give. At the others: the leader has not got all. Either way, who waits ends."""
    exchanges = _exchanges(current())
    with exchanges.door:
        exchange = exchanges.find(key)
        if exchange is not None and not exchange.over.is_set():
            exchange.failure = _failure(why, timed_out)
            exchange.over.set()


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchanges an object with other workers, each of which calls this as well.

    Arguments:
        obj: what this worker gives.
        worker_names: who takes part; default: all workers of the world. In an elastic world these are those who are
            there, and all who take part must see the same ones.
        timeout: seconds that others are waited for, and that the messages may take; 0 for ever. By default the messages
            may take `get_rpc_timeout()`, and others are waited for until they come or are lost.

    Returns what each has given, by the workers' names.

    Raises:
        RPCTimeoutError: a call or the others took too long, here or at another member; it says for whom.
        WorkerLostError: one of the others was lost.
        ActorRPCError: another member could not give, or send, what was to be exchanged.
        NotAMemberError: this process is in no world, or a name is not known.
    """
    session, own = current(), get_worker_info().name
    names = tuple(sorted(set(worker_names or (record.name for record in present(session.worker)))))
    ids = tuple(session.worker.names.get(name, -1) for name in names)
    exchanges, seconds = _exchanges(session), get_rpc_timeout() if timeout < 0 else timeout
    key, exchange = exchanges.begin(names, ids)
    try:
        if own == names[0]:
            _give(key, own, obj)
            _wait(session, exchange, names, timeout)
            _send_whole(key, exchange.given, names[1:], seconds)
        else:
            rpc_sync(names[0], _give, args=(key, own, obj), timeout=seconds)
            _wait(session, exchange, names[:1], timeout)
        return exchange.given
    except Exception as e:
        timed_out = isinstance(e, RPCTimeoutError)
        exchanges.failures[ids] = key[1], str(e), timed_out
        how = f"timed out in _all_gather after {seconds:.2f} seconds" if timed_out else "failed in _all_gather"
        for name in names[1:] if own == names[0] else names[:1]:
            with contextlib.suppress(RuntimeError):  # it is gone as well
                rpc_async(name, _fail, args=(key, f"{own} {how}: {e}", timed_out), timeout=0)
        raise
    finally:
        with exchanges.door:
            exchanges.open.pop(key, None)


def _send_whole(key: Key, given: dict[str, Any], names: tuple[str, ...], seconds: float) -> None:
    futures = {name: rpc_async(name, _take, args=(key, given), timeout=seconds) for name in names}
    failed: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as e:
            failed[name] = e
    if failed:
        first = next(iter(failed.values()))
        raise RPCTimeoutError(
            f"Followers {list(failed)} timed out in _all_gather after {seconds:.2f} seconds. The first of their errors "
            f"is: {first}"
        ) from first


def _wait(session: Session, exchange: _Exchange, names: tuple[str, ...], timeout: float) -> None:
    """Waits for an exchange to be whole, and for no longer than those that it needs are there."""
    worker = session.worker
    end = time.monotonic() + timeout if timeout > 0 else float("inf")
    while not exchange.over.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
        missing = [name for name in names if name not in exchange.given]
        if time.monotonic() >= end:
            raise RPCTimeoutError(
                f"{', '.join(missing)} timed out in _all_gather after {timeout:.2f} seconds: {worker} waited for them"
            )
        for name in missing:
            peer = worker.peers[worker.names[name]] if name in worker.names else None
            if peer is None or peer.standing is not Standing.MEMBER:
                why = "it was to take part in _all_gather"
                raise worker.members.lost_error(peer, why) if peer is not None else RuntimeError(f"{name!r}: {why}")
    if exchange.failure is not None:
        raise exchange.failure


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until all workers of these names have called it; what goes wrong meanwhile is only logged, as in torch."""
    try:
        _all_gather(None, worker_names)
    except RuntimeError:
        log.exception("%s: the barrier failed", current().worker)


def _wait_all_workers(timeout: float = 0) -> None:
    """Waits until all workers have called it. `timeout`, and what it raises: see `_all_gather`."""
    _all_gather(None, timeout=timeout)


@functools.wraps(rpc.shutdown)
def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    from torch.distributed.rpc import api

    waits: Callable[[float], None] = api._wait_all_workers
    if graceful and waits is not _wait_all_workers and is_available():  # a program has put its own in that place
        try:
            waits(timeout)
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
    rpc.shutdown(graceful, timeout)
