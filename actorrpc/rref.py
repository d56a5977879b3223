"""References to objects of other workers, and the proxies through which their methods are called."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from actorrpc.errors import NotAMemberError
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.profiling import fetching, span
from actorrpc.proxies import Proxy
from actorrpc.runtime.completion import check_seconds
from actorrpc.runtime.futures import Future
from actorrpc.runtime.handling import here
from actorrpc.services.autograd import Autograd
from actorrpc.services.handles import OwnerHandle, UserHandle
from actorrpc.services.ids import CREATOR, EXECUTOR, OWN_NUMBER, ROOT
from actorrpc.services.objects import Objects
from actorrpc.session import Session, current
from actorrpc.streams import WINDOW, StreamProxy
from actorrpc.wire.codec import reading, writing
from actorrpc.workers import info_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.runtime.message import Parcel
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.forks import Id
    from actorrpc.services.objects import Written
    from actorrpc.workers import WorkerInfo

T = TypeVar("T")
LIMITS = "_actorrpc_limits"
"""The attribute of an Actor's class in which its limits are, if it sets some."""
_NEVER = float("inf")


class RRef(Generic[T]):
    """A reference to an object on some worker, its *owner*.

    `RRef(value)` makes one to an object of this process; `remote`, and the `remote()` of a reference, make them to
    objects of others. It may be sent to other workers, as an argument or result of calls, and in nothing else. The
    object lives as long as anybody holds a reference to it. Where the object is an Actor, calls go through its mailbox.

    Two references are equal only if they are the same Python object, also where they refer to the same value.

    After `shutdown` a reference still says who owned it, and on the owner still gives its object; all else raises
    NotAMemberError.

    Arguments:
        value: an object of this process, which becomes the owner.
        type_hint: the type of the value, for torch's sake; of a scripted module, the interface it is used through.

    Raises:
        NotAMemberError: this process is in no world.
        RuntimeError: the scripted module does not have the interface.
        TypeError: the hint is no type.

    Examples:
        >>> ref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        >>> ref.to_here()
        tensor([4., 4.])
        >>> ref.rpc_sync().size()
        torch.Size([2])
    """

    __slots__ = ("__weakref__", "_handle")
    _handle: OwnerHandle | UserHandle

    def __init__(self, value: T, type_hint: Any = None) -> None:
        _check_hint(value, type_hint)
        self._handle = current().objects.own(value)

    @classmethod
    def _wrap(cls, handle: OwnerHandle | UserHandle) -> RRef[Any]:
        ref = cls.__new__(cls)
        ref._handle = handle
        return ref

    @property
    def _worker(self) -> Worker:
        return self._handle.service.worker

    def owner(self) -> WorkerInfo:
        """Returns the worker that has the object."""
        return info_of(self._worker.peers[self._handle.owner].record)

    def owner_name(self) -> str:
        """Returns the name of the worker that has the object."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Returns whether the object is on this worker."""
        return isinstance(self._handle, OwnerHandle)

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner is known to know of this reference: for one that `remote` made, whether the object
        has been made, or has failed to be. Always true on the owner. A handler that asks this of a reference which
        came in a message waits for the owner to know of it, as torch does before it calls the function.
        """
        handle = self._handle
        if here.handling is not None and isinstance(handle, UserHandle) and handle.fork.id != handle.ref:
            return handle.confirmed or not _has_failed(handle.future())
        return handle.confirmed

    def local_value(self) -> T:
        """Returns the object itself, on its owner; waits for it while it is being made.

        The wait is bounded by the time that the creation was given, if this reference made the object, else by the
        worker's own (`get_rpc_timeout`).

        Raises:
            RuntimeError: this worker is not the owner.
            RPCTimeoutError: time ran out.
            BaseException: what its creation raised.
        """
        if not isinstance(self._handle, OwnerHandle):
            raise RuntimeError(
                f"For {self._spelled()}, can't call localValue() on user {_spelled(info_of(self._worker.record))}. "
                f"Call it on owner {_spelled(self.owner())}; to_here() fetches a copy"
            )
        return self._own_value(self._handle, "local_value", None)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Fetches a copy of the object; on the owner, returns the object itself. Waits while it is being made.

        Arguments:
            timeout: seconds; 0 for ever; below 0 (the default) the worker's own.

        Raises:
            RPCTimeoutError: time ran out.
            BaseException: what the object's creation raised.
        """
        check_seconds(timeout)
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            return self._own_value(handle, "to_here", timeout)
        handle.check()
        self._check_open("to_here() on it after deletion")
        worker = handle.service.worker
        with fetching(worker, handle.owner):
            call = worker.request(handle.owner, handle.ref, (None, (), {}), timeout, "to_here", bounded=True)
            value: T = worker.wait_result(call)
        return value

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the object, which is a scalar tensor.

        Arguments:
            dist_autograd_ctx_id: the autograd context in which it was made; its gradients go there. Below 0 (the
                default): plain `backward()` on the object, which is possible on its owner only.
            retain_graph: keeps the graph for another pass.

        Raises:
            RuntimeError: the object is no tensor; or there is no context and this worker is not the owner.
            BaseException: as `actorrpc.autograd.backward`, and what the object's creation raised.
        """
        if not self.is_owner():
            if dist_autograd_ctx_id < 0:
                raise RuntimeError(
                    f"User RRefs require 'dist_autograd_ctx_id' to be specified, the id of the autograd context: this "
                    f"is {self._worker}, the owner is {self.owner_name()!r}; without it, backward() works there only"
                )
            handle = self._handle
            handle.check()
            body: tuple[object, ...] = (_backward, (self, dist_autograd_ctx_id, retain_graph), {})
            self._worker.wait_result(self._worker.request(handle.owner, EXECUTOR, body, -1.0, "RRef.backward"))
            return
        value = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"RRef should contain a tensor for .backward(), not {type(value).__qualname__}")
        if dist_autograd_ctx_id < 0:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            service: Autograd = self._worker.services[Autograd]
            service.backward(dist_autograd_ctx_id, [value], retain_graph)

    def _own_value(self, handle: OwnerHandle, what: str, timeout: float | None) -> T:
        """Waits for an object of this worker: `timeout` seconds, and no longer than its creation may take.

        None: as long as that may take, or the worker's own limit where another reference has made it.
        """
        calls, entry, creation = handle.service.worker.calls, handle.entry, handle.creation
        if not entry.ready.done:
            limits = [creation.deadline] if creation is not None else []
            if timeout is not None or creation is None:
                limits.append(calls.deadline(-1.0 if timeout is None else timeout))
            deadline = min((at for at in limits if at is not None), default=None)
            if not self._worker.wait(entry.ready, deadline):
                if creation is not None and deadline == creation.deadline:
                    calls.expire(creation)
                    handle.check()
                raise calls.too_late(what, handle.owner, -1.0 if timeout is None else timeout)
        handle.check()
        value: T = entry.value
        return value

    def _get_future(self) -> Future[None]:
        """Returns the future of the object's creation: None once it has been made, or the error. For a reference that
        came in a message, of its recording by the owner; for an object that is there, a future that is done.
        """
        return self._handle.future()

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the object, which must be importable here; the owner is asked once.

        Arguments:
            timeout: as in `to_here`.
            blocking: False: returns a Future of the type at once.

        Raises (or the future does) as `to_here` does.
        """
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            entry = handle.entry
            if blocking:
                return type(self._own_value(handle, "_get_type", timeout))
            return entry.future().then(lambda _: type(entry.value))
        future = handle.type
        if future is None or (future.done() and _has_failed(future)):  # one that ran out of time may be asked for again
            handle.check()
            worker = handle.service.worker
            body: tuple[Any, ...] = type, (), {}
            with span("rpc_async", "_rref_typeof_on_owner", worker, handle.owner):  # torch's name for it
                future = handle.type = Future._of_call(
                    worker, lambda then: worker.request(handle.owner, handle.ref, body, timeout, "_get_type", then=then)
                )
        return future.wait() if blocking else future

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a proxy: `ref.rpc_sync().method(*args)` calls the object's method on its owner, waits, and returns
        its result. `timeout`: see the function `rpc_sync`.

        To a type checker the proxy is the object itself, whose methods it completes and checks. That is wrong in two
        places: attributes that are no methods, which a proxy does not read, and `async def` methods, whose result this
        returns, not a coroutine (`await ref.rpc_async().method()` says nothing wrong).
        """
        return cast("T", Proxy(self, "rpc_sync", timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `ref.rpc_async().method(*args)` calls the object's method on its owner and returns a Future.
        `timeout`: see the function `rpc_async`.
        """
        return Proxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `ref.remote().method(*args)` calls the object's method on its owner and returns a reference
        to the result, which stays there. `timeout`: see the function `remote`.
        """
        return Proxy(self, "remote", timeout)

    def tell(self) -> Any:
        """Returns a proxy: `ref.tell().method(*args)` has the object's method called on its owner, and waits for
        nothing. What it raises goes to the owner's log.
        """
        return Proxy(self, "tell", UNSET_RPC_TIMEOUT)

    def stream(self, timeout: float = UNSET_RPC_TIMEOUT, window: int = WINDOW) -> Any:
        """Returns a proxy: `ref.stream().method(*args)` calls a generator method (an async one, or one that returns
        anything to iterate over) and returns the Stream of its items: `for item in ref.stream().rollout(100)`.

        An actor serves other messages between two items.

        Arguments:
            timeout: seconds for each wait for an item; 0 for ever; below 0 (the default) the worker's own.
            window: how many items are made ahead of the one that is asked for; 0: none. Default 2.
        """
        check_seconds(timeout)
        return StreamProxy(self, timeout, window)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            raise AttributeError(
                f"a reference has no attribute {name!r}; the object is on {self.owner_name()!r}: "
                f"call its methods with .rpc_sync().{name}(...), or fetch a copy with .to_here()"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        handle = self._handle
        what = "its actor" if handle.ref == ROOT else f"({handle.ref[0]}, {_number(handle.ref)})"
        return f"{kind}({what}, owner={self.owner_name()!r})"

    def __str__(self) -> str:
        handle = self._handle
        if handle.ref == ROOT:
            return repr(self)
        if isinstance(handle, OwnerHandle):
            return f"OwnerRRef({_unique(handle.ref)})"
        return f"UserRRef(RRefId = {_unique(handle.ref)}, ForkId = {_unique(_shown_fork(handle))})"

    def _spelled(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle) or handle.ref == ROOT:
            return str(self)
        return f"UserRRef(rref_id={_unique(handle.ref)}, fork_id={_unique(_shown_fork(handle))})"

    def __reduce__(self) -> Any:
        self._check_open("fork an UserRRef after deletion")
        raise RuntimeError(
            f"Can not pickle rref in python pickler: {self!r} cannot be saved or copied either, since nobody would "
            f"count who holds it. An RRef travels as an argument or result of RPC calls only; to keep the object "
            f"itself, fetch it with to_here() and save that"
        )

    def _check_open(self, what: str) -> None:
        worker = self._worker
        if not (worker.open or self.is_owner()):
            raise NotAMemberError(f"Cannot call {what}. {self!r} on {worker}: {worker.closed_because}")

    def __copy__(self) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


PyRRef = RRef
"""Torch's name for it."""


def _number(identity: Id) -> int:
    return identity[1] & ~OWN_NUMBER


def _shown_fork(handle: UserHandle) -> Id:
    """Returns a fork's id as it is shown: that of the first has the next number, as in torch, though it is one here."""
    creator, number = handle.fork.id
    return creator, number + (handle.fork.id == handle.ref)


def _unique(identity: Id) -> str:
    return f"GloballyUniqueId(created_on={identity[0]}, local_id={_number(identity)})"


def _spelled(info: WorkerInfo) -> str:
    return f"WorkerInfo(id={info.id}, name={info.name})"


def _has_failed(future: Future[Any]) -> bool:
    try:
        future.wait()
    except Exception:
        return True
    return False


def _check_hint(value: object, hint: object) -> None:
    """Raises where a type hint cannot be one. Nothing here runs scripts on references, so it is not kept."""
    if hint is None:
        return
    if not (isinstance(hint, type) or typing.get_origin(hint) is not None):
        raise TypeError(f"type_hint must be a type, not {hint!r}")
    if isinstance(value, torch.jit.ScriptModule):
        try:
            interface = torch._C.InterfaceType(torch._jit_internal._qualified_name(hint))
        except (TypeError, RuntimeError):
            interface = None
        if interface is None or not value._c._type().isSubtypeOf(interface):
            raise RuntimeError(
                f"the scripted module of type {value.original_name} does not have the interface {hint!r}; "
                f"its type_hint is a class decorated with torch.jit.interface, or left out"
            )


def _backward(ref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    ref.backward(context_id, retain_graph)


def make(session: Session, to: int, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
    """Has a function's result made on a worker; returns a reference to it."""
    handle = session.objects.create(to, CREATOR, (func, args, kwargs), timeout, func)
    limits = getattr(func, LIMITS, None) if isinstance(func, type) else None
    if limits is not None and limits != (None, None):
        session.worker.limits.learn((to, *handle.ref), *limits)
    return RRef._wrap(handle)


def _write(ref: RRef[Any]) -> Any:
    parcel: Parcel = writing()
    try:
        return _read, ref._handle.service.write(ref._handle, parcel)
    except BaseException as e:
        parcel.failure = e  # the next use of a reference whose object could not be made, and its error
        raise


def _read(*written: Any) -> RRef[Any]:
    parcel: Parcel = reading()
    objects: Objects = parcel.worker.services[Objects]
    taken: Written = written
    return RRef._wrap(objects.read(taken, parcel))


def install(session: Session) -> None:
    """Teaches a worker's codec to write references."""
    session.worker.codec.register(RRef, _write)
    session.worker.reference_readers.add((_read.__module__, _read.__name__))
