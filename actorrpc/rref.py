"""References to objects of other workers, and the proxies through which their methods are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.runtime.futures import Future
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.services.autograd import Autograd
from actorrpc.services.handles import OwnerHandle, UserHandle
from actorrpc.services.ids import CREATOR, EXECUTOR, ROOT
from actorrpc.services.objects import Objects
from actorrpc.session import Session, current
from actorrpc.wire.codec import mentions_main, reading, writing
from actorrpc.workers import info_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.runtime.message import Parcel
    from actorrpc.runtime.worker import Worker
    from actorrpc.services.objects import Written
    from actorrpc.workers import WorkerInfo

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to an object on some worker, its *owner*. It may be sent to other workers; the object lives as long
    as anybody holds a reference to it. Where the object is an Actor, calls go through its mailbox.

    Arguments:
        value: an object of this process, which becomes the owner.
        type_hint: accepted as torch does; the type of the value, for scripted code.

    Raises:
        NotAMemberError: this process is in no world.
    """

    __slots__ = ("__weakref__", "_handle")
    _handle: OwnerHandle | UserHandle

    def __init__(self, value: T, type_hint: Any = None) -> None:
        del type_hint
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
        """Returns whether the owner is known to know of this reference. Always true on the owner."""
        return self._handle.confirmed

    def local_value(self) -> T:
        """Returns the object itself, on its owner; waits for it while it is being made.

        Raises:
            RuntimeError: this worker is not the owner.
            BaseException: what its creation raised.
        """
        handle = self._handle
        if not isinstance(handle, OwnerHandle):
            raise RuntimeError(
                f"local_value() works on the owner only: this is {self._worker}, the owner is {self.owner_name()!r}; "
                f"to_here() fetches a copy"
            )
        self._worker.wait(handle.entry.ready, None)
        value: T = handle.entry.value
        return value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Fetches a copy of the object; on the owner, returns the object itself.

        Arguments:
            timeout: seconds; 0 for ever; below 0 (the default) the worker's own.

        Raises:
            RPCTimeoutError: time ran out.
            BaseException: what the object's creation raised.
        """
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            return self.local_value()
        handle.check()
        worker = handle.service.worker
        value: T = worker.wait_result(worker.request(handle.owner, handle.ref, (None, (), {}), timeout, "to_here"))
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
                    f"without a context id, backward() works on the owner only: this is {self._worker}, the owner is "
                    f"{self.owner_name()!r}; give it the id of the autograd context"
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

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `ref.rpc_sync().method(*args)` calls the object's method on its owner, waits, and returns
        its result. `timeout`: see the function `rpc_sync`.
        """
        return Proxy(self, "rpc_sync", timeout)

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

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            raise AttributeError(
                f"a reference has no attribute {name!r}; the object is on {self.owner_name()!r}: "
                f"call its methods with .rpc_sync().{name}(...), or fetch a copy with .to_here()"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        creator, local = self._handle.ref
        what = "its actor" if self._handle.ref == ROOT else f"({creator}, {local & 0x7FFFFFFFFFFFFFFF})"
        return f"{kind}({what}, owner={self.owner_name()!r})"

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "an RRef can be written into RPC messages only; pickle, torch.save and copy cannot count who holds it"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


class Proxy:
    """Stands for the object of a reference: its attributes are methods to call in one of four ways."""

    __slots__ = ("_ref", "_timeout", "_verb")

    def __init__(self, ref: RRef[Any], verb: str, timeout: float) -> None:
        self._ref, self._verb, self._timeout = ref, verb, timeout

    def __getattr__(self, name: str) -> ProxyMethod:
        return ProxyMethod(self._ref, self._verb, self._timeout, name)

    def __repr__(self) -> str:
        return f"{self._ref!r}.{self._verb}()"


class ProxyMethod:
    """A method of a proxy. It may be sent as a function: the callee then calls through the reference."""

    __slots__ = ("_name", "_ref", "_timeout", "_verb")

    def __init__(self, ref: RRef[Any], verb: str, timeout: float, name: str) -> None:
        self._ref, self._verb, self._timeout, self._name = ref, verb, timeout, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_method(self._ref, self._verb, self._timeout, self._name, args, kwargs)

    def __reduce__(self) -> Any:
        return ProxyMethod, (self._ref, self._verb, self._timeout, self._name)

    def __repr__(self) -> str:
        return f"{self._ref!r}.{self._verb}().{self._name}"


def call_method(
    ref: RRef[Any],
    verb: str,
    timeout: float,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    what: str | None = None,
) -> Any:
    """Calls a method through a reference, in the way that `verb` says; `what`: what errors call it, else its name."""
    handle = ref._handle
    handle.check()
    worker = handle.service.worker
    body, what = (name, args, kwargs), what or name
    if verb == "rpc_sync":
        return worker.wait_result(worker.request(handle.owner, handle.ref, body, timeout, what))
    if verb == "rpc_async":
        return Future.of_call(
            worker, lambda then: worker.request(handle.owner, handle.ref, body, timeout, what, then=then)
        )
    if verb == "tell":
        return worker.tell(handle.owner, handle.ref, body)
    return RRef._wrap(handle.service.create(handle.owner, handle.ref, body, timeout, what))


def call_all(
    refs: Sequence[RRef[Any]], timeout: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Future[Any]]:
    """Calls one method of several objects with the same arguments, which are written once.

    Returns the futures, in the order of `refs`.
    """
    if not refs:
        return []
    worker = refs[0]._worker
    frames, parcel = worker.write((name, args, kwargs), worker.id)
    if parcel.refs or mentions_main(frames) or here.context != NO_CONTEXT:
        # Every receiver of a reference needs a fork of its own, and every message of an autograd context is recorded;
        # what may have to go again, by value, goes by itself.
        parcel.restart()
        return [_or_failed(lambda r=ref: call_method(r, "rpc_async", timeout, name, args, kwargs)) for ref in refs]  # type: ignore[misc]

    def send(handle: OwnerHandle | UserHandle) -> Future[Any]:
        handle.check()
        return Future.of_call(
            worker, lambda then: worker.calls.post(handle.owner, handle.ref, frames, timeout, name, then=then)
        )

    return [_or_failed(lambda r=ref: send(r._handle)) for ref in refs]  # type: ignore[misc]


def _or_failed(send: Callable[[], Future[Any]]) -> Future[Any]:
    """Sends; where that fails, returns a future that has failed, so that the other members of a group are called."""
    try:
        return send()
    except Exception as e:
        return failed_future(e)


def failed_future(error: Exception) -> Future[Any]:
    """Returns a future that is done, with an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _backward(ref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    ref.backward(context_id, retain_graph)


def make(session: Session, to: int, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
    """Has a function's result made on a worker; returns a reference to it."""
    return RRef._wrap(session.objects.create(to, CREATOR, (func, tuple(args), dict(kwargs)), timeout, func))


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
