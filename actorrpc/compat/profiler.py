"""Torch's legacy profiler (`torch.autograd.profiler_legacy.profile`) and calls: the caller's side.

While it is on, a call is a span, `rpc_async#f(a -> b)`, that lasts until the answer; what the callee did comes into the
profile at its end, as `rpc_async#f(a -> b)#remote_op: aten::add`, with the callee's rank as node id. So do calls that
the callee made in turn, and what callbacks of the calls' futures do. As in torch, the newer profilers see no calls.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc
from torch.autograd import profiler_legacy, profiler_util
from torch.distributed.rpc import server_process_global_profiler

from actorrpc import profiling, proxies
from actorrpc.compat import scripted
from actorrpc.compat.recorder import Collection, Noted, Recorded, RecordedMethod, _order, local
from actorrpc.compat.tapes import Tape
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rref import RRef
from actorrpc.runtime.completion import Call
from actorrpc.runtime.futures import Future
from actorrpc.runtime.lanes import Lane
from actorrpc.services.spans import key_of, name_of
from actorrpc.session import current, is_available
from actorrpc.workers import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.worker import Worker

log = logging.getLogger("actorrpc")
_C: Any = torch._C
_event_list: Any = profiler_util.EventList
_numbers = itertools.count(1)
_SHOW_SECONDS = 1.0
_SETTINGS = ("use_cuda", "record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules")


def is_on() -> bool:
    """Returns whether the present thread's calls are to be recorded."""
    return local.collection is not None


def is_wanted() -> bool:
    """Returns whether calls are spans on the present thread: where the legacy profiler is on."""
    return bool(
        _C._autograd._profiler_enabled() and _C._autograd._profiler_type() == _C._profiler.ActiveProfilerType.LEGACY
    )


def call(plain: Callable[..., Any], to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    """Makes a call whose function records what it does.

    Arguments:
        plain: `rpc_sync`, `rpc_async` or `remote`, which makes it; raises and returns what that does.
        to, func, args, kwargs, timeout: for it.
    """
    worker = current().worker
    func, args, kwargs = proxies.body_of(func, args, kwargs)
    number, name = resolve(worker, to), name_of(func)
    token = worker.id, next(_numbers)
    assert local.collection is not None
    sent = Recorded(func, name, token, local.collection.settings)
    noted = _note(plain.__name__, name, worker, number, sent, token)
    return _noting(noted, lambda: plain(number, sent, args, kwargs, timeout))


class _Method(proxies.ProxyMethod):
    """A method of a reference, called under a profiler."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if local.collection is None or self._verb == "tell":
            return super().__call__(*args, **kwargs)
        handle, name = self._ref._handle, self._name
        handle.check()
        worker = handle.service.worker
        token = worker.id, next(_numbers)
        sent = RecordedMethod(name, token, local.collection.settings)
        noted = _note(self._verb, name, worker, handle.owner, sent, token)
        return _noting(
            noted, lambda: proxies.call_method(self._ref, self._verb, self._timeout, sent, args, kwargs, name)
        )


class _Proxy(proxies.Proxy):
    """The proxy of a reference, made under a profiler."""

    __slots__ = ()

    def __getattr__(self, name: str) -> proxies.ProxyMethod:
        super().__getattr__(name)  # which refuses some
        return _Method(self._ref, self._verb, self._timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self._ref, self._verb, self._timeout, "__call__")(*args, **kwargs)


def _note(verb: str, name: str, worker: Worker, to: int, sent: Recorded | RecordedMethod, token: Any) -> Noted:
    """Notes a call that is about to begin its span; whatever fails from now on fails within that."""
    assert local.collection is not None
    key = shown = key_of(verb, name, worker, to)
    if verb != "remote" and scripted.is_running():
        shown = key_of("rpc_async_jit", name, worker, to)  # torch's name for the calls of compiled functions
    noted = Noted(key, shown, worker, to, token, sent)
    local.collection.calls.append(noted)
    return noted


def _noting(noted: Noted, send: Callable[[], Any]) -> Any:
    """Sends a call and sees to it that its end is noted."""
    try:
        result = send()
    except BaseException:
        noted.end()
        raise
    if isinstance(result, Future) and isinstance(result._core, Call):
        noted.watch(result._core)
        _follow(result)
    elif isinstance(result, RRef) and result._handle.creation is not None:
        noted.watch(result._handle.creation)
    else:
        noted.end()
    return result


class _Followed(Future[Any]):
    """The future of a call that was made under a profiler, or of a callback: what its callbacks do is recorded."""

    _collection: Collection
    _publishing: threading.RLock
    _publisher = 0
    _shown = False

    def wait(self, timeout: float = -1.0) -> Any:
        """Waits as any future does, and also until what hangs on torch's part of it has run: the ends of spans, which
        would end for a second time where the block around them is left at the same moment.
        """
        try:
            return super().wait(timeout)
        finally:
            worker = self._worker
            shown = self._shown or self._publisher == threading.get_ident() or not self._settled
            if worker is not None and worker.open and not shown:
                done = threading.Event()
                # On no thread of the user's, which may hold a lock that a callback wants.
                worker.crew.submit((Lane.FREE, self._show, done))
                done.wait(_SHOW_SECONDS)

    def _show(self, done: threading.Event) -> None:
        self._publish()
        done.set()

    def _publish(self) -> None:
        with self._publishing:
            outside, self._publisher = self._publisher, threading.get_ident()
            try:
                super()._publish()
            finally:
                self._publisher = outside
            self._shown = self._published

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        super().add_done_callback(self._recorded(callback))

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        return _follow(super().then(self._recorded(callback)), self._collection)

    def _recorded(self, callback: Callable[[Future[Any]], Any]) -> Callable[[Future[Any]], Any]:
        return callback if self._worker is None else self._collection.recorded(callback, self._worker)


def _follow(future: Future[Any], collection: Collection | None = None) -> Future[Any]:
    """Makes a future one of these; its identity is known already to whoever completes it."""
    collection = collection or local.collection
    assert collection is not None
    followed: Any = future
    followed._collection, followed._publishing = collection, threading.RLock()
    followed.__class__ = _Followed  # last: it may be completed at any time
    return future


# -- torch's classes


def _start_trace(plain: Callable[[Any], None], profile: Any) -> None:
    plain(profile)
    collection = Collection({name: getattr(profile, name) for name in _SETTINGS})
    collection.enter()
    profile._collection = collection


def _exit(plain: Callable[..., Any], profile: Any, *error: Any) -> Any:
    collection: Collection | None = profile.__dict__.pop("_collection", None)
    if collection is None:
        return plain(profile, *error)
    collection.leave()
    result = plain(profile, *error)
    if collection.calls:
        try:
            profile.function_events = _merged(profile.function_events, collection)
        except Exception:
            log.exception("the profile lacks what other workers did")
    return result


def _merged(events: Any, collection: Collection) -> Any:
    """Returns a profile's events with those of other workers, by time."""
    options: dict[str, Any] = {
        name: getattr(events, f"_{name}") for name in ("use_device", "profile_memory", "with_flops")
    }
    for event in events:  # the tree was made before it was known how long the spans of calls last
        event.cpu_parent, event.cpu_children = None, []
    groups = collection.settle(events)
    trees = [_event_list(group, **options) for group in (list(events), *groups)]
    for tree in trees:  # one by one: threads of several workers may have the same number
        tree._build_tree()
    whole = _event_list(sorted(itertools.chain.from_iterable(trees), key=_order), **options)
    whole._tree_built = True
    return whole


class _ServerProfiles:
    """The profiles of all that this process does for others (`rpc._server_process_global_profile`), the inner last."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, list[Any]]] = []

    def enable(self, config: Any) -> None:
        """Begins one; raises NotAMemberError where this process is in no world."""
        worker = current().worker
        self.open.append((config, []))
        worker.around = self._around

    def disable(self) -> list[Any]:
        """Ends the one that was begun last; returns what each function that was called meanwhile has recorded."""
        if not self.open:
            raise RuntimeError("no process-global profile is on")
        _, found = self.open.pop()
        if not self.open and is_available():
            current().worker.around = None
        return found

    def _around(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        profiles = list(self.open)
        tape = Tape(profiles[-1][0]) if profiles else None
        if tape is None or not tape.begin():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            tape.end()
            if any(record.kind() == "push" for thread in tape.records for record in thread):
                for _, found in profiles:
                    found.append(tape.records)


def _proxied(verb: str) -> Callable[..., Any]:
    plain = getattr(RRef, verb)

    @functools.wraps(plain)
    def proxied(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        return plain(self, timeout) if local.collection is None else _Proxy(self, verb, timeout)

    return proxied


def _get_profiling_future(self: RRef[Any], acquireGil: bool = True) -> Future[None]:
    """Returns the future of the object's creation: a profile that ends after it has the callee's events."""
    return self._get_future()


def _bound(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: Any, *args: Any) -> Any:
        return function(plain, self, *args)

    return method


def install() -> None:
    """Has torch's legacy profiler see calls, in this process. To be called once."""
    legacy: Any = profiler_legacy.profile
    legacy._start_trace = _bound(_start_trace, legacy._start_trace)
    legacy.__exit__ = _bound(_exit, legacy.__exit__)
    reference: Any = RRef
    for verb in ("rpc_sync", "rpc_async", "remote"):
        setattr(reference, verb, _proxied(verb))
    reference._get_profiling_future = _get_profiling_future
    profiling.is_wanted = is_wanted
    servers = _ServerProfiles()
    for module in (torch.distributed.rpc, server_process_global_profiler):
        patched: Any = module
        patched._enable_server_process_global_profiler = servers.enable
        patched._disable_server_process_global_profiler = servers.disable
