"""The functions of `torch.distributed.rpc`, under its names."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from actorrpc import actor, debug, reducers, rref
from actorrpc.backends import BackendType, choose, end, register_backend, start
from actorrpc.errors import BackpressureTimeoutError, WorkerLostError
from actorrpc.options import (
    DEFAULT_INIT_METHOD,
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    own_options,
)
from actorrpc.process import foreign, process, set_foreign
from actorrpc.profiling import span
from actorrpc.proxies import body_of, failed_future
from actorrpc.runtime.completion import check_seconds
from actorrpc.runtime.futures import Future
from actorrpc.runtime.handling import here
from actorrpc.services.ids import EXECUTOR
from actorrpc.services.roster import ELASTIC
from actorrpc.session import (
    Session,
    current,
    is_available,
    open_session,
    set_default,
    withdraw,
)
from actorrpc.workers import WorkerInfo, check_name, info_of, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.rref import RRef
    from actorrpc.workers import Args, Kwargs, Later, To

R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")


def _alone(function: F) -> F:
    """Keeps other threads of the process out of `init_rpc`: the one that failed would take the other's session away."""

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        joining = process().joining
        if not joining.acquire(blocking=False):
            raise RuntimeError("another thread of this process is in init_rpc already; a process is one worker only")
        with joining:  # whose end, unlike a `finally`, no Ctrl-C can come before
            joining.release()
            return function(*args, **kwargs)

    return cast("F", alone)


@_alone
def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker, and waits until all workers of the world have joined.

    Where neither `world_size` nor WORLD_SIZE says how many there will be, the world is elastic: rank 0 begins it alone,
    others join while it lasts, each once all who are there know of it, and leave by `shutdown`. When rank 0 is gone,
    nobody can join any more. A worker that has left, or was lost, may come again under its name and rank.

    Arguments:
        name: the worker's name, unique in the world: letters, digits, `_`, `:`, `-`; fewer than 128.
        backend: a member of BackendType; by default the one that the options are for, and BackendType.TENSORPIPE (the
            library's own) where none are given. Torch's BackendType.TENSORPIPE will do as well.
        rank: this worker's number, from 0; default: RANK of the environment.
        world_size: how many workers there will be; default: WORLD_SIZE of the environment, else any number.
        rpc_backend_options: RpcBackendOptions or TensorPipeRpcBackendOptions, torch's too; or what the backend takes.

    What one worker finds wrong is told to the others, where they can be reached, so that all raise at once.

    Raises:
        InvalidNameError: nobody can have this name.
        ValueError: the rank, world size or an option is not valid.
        TypeError: backend or options are something else, or do not fit together.
        RendezvousError: the workers did not come together in time (it says who is missing), or do not fit together; the
            name or rank is taken, or rank 0 is gone (elastic worlds).
        DeviceMapError: a device map of one of them does not fit.
        RuntimeError: this process is a worker already, or another thread is about to make it one.
    """
    _check_fresh()
    try:
        chosen, options = choose(backend, rpc_backend_options)
        if chosen is BackendType.TENSORPIPE:
            check_name(name)
    except (TypeError, ValueError) as fault:
        _tell_the_others(name, rank, world_size, rpc_backend_options, fault)
        raise
    if chosen is BackendType.TENSORPIPE:
        join(name, rank, world_size, options)
        return
    rank, world_size = _numbers(rank, world_size, getattr(options, "init_method", ""))
    if world_size == ELASTIC:
        raise ValueError(f"init_rpc needs world_size=..., or WORLD_SIZE in the environment, for {chosen!r}")
    try:
        started = start(chosen, name, rank, world_size, options)
    except BaseException:
        shutdown(graceful=False)  # what its handler may have begun
        raise
    if not isinstance(started.agent, Session):
        set_foreign(started)


@_alone
def join(
    name: str, rank: int, world_size: int | None, options: RpcBackendOptions, role: str = "", index: int = 0,
    guest: bool = False,
) -> Session:  # fmt: skip
    """`init_rpc` for the library's own backend, with a role, or as a guest of an elastic world; a world of roles may be
    an ELASTIC one by its size.
    """
    _check_fresh()
    if guest:
        rank, world_size = -1, ELASTIC
    elif world_size is None or not (role and world_size == ELASTIC):
        rank, world_size = _numbers(rank, world_size, options.init_method)
    try:
        return open_session(name, rank, world_size, options, role, index, _prepare, guest)
    except BaseException:
        set_default(None)
        raise


def _prepare(session: Session) -> None:
    """Has all in place before others can call: they may while this worker still waits to hear that all are there."""
    install(session)
    set_default(session)
    debug.dump_if_asked()


def _check_fresh() -> None:
    there = current().worker if is_available() else foreign()
    if there is not None:
        way = "call shutdown first (a guest: close the world that attach returned)"
        raise RuntimeError(f"RPC is already initialized in this process, as {there}; {way}")


def _numbers(rank: int, world_size: int | None, init_method: str) -> tuple[int, int]:
    """Returns rank and world size as they are given, or in the environment; ELASTIC where there is no size."""
    rank = _whole("rank", rank)
    if rank < 0:
        rank = _environment("RANK", init_method)
    if world_size is None and "WORLD_SIZE" not in os.environ:
        if rank < 0:
            raise ValueError(f"rank {rank} in the environment: ranks are 0 or above")
        return rank, ELASTIC
    world_size = _environment("WORLD_SIZE", init_method) if world_size is None else _whole("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside of a world of {world_size}: ranks are 0 to world_size - 1")
    return rank, world_size


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r} of type {type(value).__name__}") from None


def _tell_the_others(name: object, rank: int, world_size: int | None, options: object, fault: Exception) -> None:
    method = DEFAULT_INIT_METHOD if options is None else getattr(options, "init_method", None)
    token = getattr(options, "security_token", None)  # without it, it would listen to whoever left a hint
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(method, str):
            withdraw(name, *_numbers(rank, world_size, method), method, token, fault)


def _construct_own(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init_own(store: object, name: str, rank: int, world_size: int | None, rpc_backend_options: object) -> Session:
    return join(name, rank, world_size, own_options(rpc_backend_options))


register_backend("TENSORPIPE", _construct_own, _init_own)


def install(session: Session) -> None:
    """Teaches a worker what this room knows and those below do not: references and actors."""
    reducers.install(session)
    rref.install(session)
    actor.install(session)


def _environment(variable: str, init_method: str) -> int:
    try:
        return int(os.environ[variable])
    except KeyError:  # in words that torch's tests look for
        what = "environment variable RANK expected" if init_method == "env://" else "rank parameter missing"
        raise ValueError(f"{what}: init_rpc needs rank=..., or RANK in the environment") from None
    except ValueError:
        raise ValueError(f"{variable}={os.environ[variable]!r} in the environment is not a number") from None


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this process's membership. Does nothing where there is none.

    Arguments:
        graceful: serve until all workers have called `shutdown` and all work is done, so that a server's program can
            consist of nothing else. In an elastic world: until this worker's own calls are answered, those of others
            that had begun too, and the others know that it leaves. False: leave at once; others' calls to this worker
            fail.
        timeout: seconds that a graceful shutdown may take; 0 (the default) without bound, but for lost workers.

    Raises:
        RuntimeError: this worker was launched in a role, so that `launch` ends the world itself; or a graceful end was
            asked for by a handler.
        RendezvousError: time ran out (it says who is late, or what goes on); the worker is closed all the same.
        WorkerLostError: rank 0 was lost, so that nobody can say when all is done; the worker is closed all the same.
    """
    other = foreign()
    if other is not None:
        set_foreign(None)
        try:
            shutdown(graceful, timeout)  # what its handler may have begun with the own backend
        finally:
            end(other, graceful, timeout)
        return
    if not is_available():
        return
    session = current()
    if graceful and session.launched:
        raise RuntimeError(
            f"{session.worker} was launched: launch ends the world when the driver's main returns; do not call shutdown"
        )
    if graceful and here.handling is not None:
        raise RuntimeError(
            "a handler cannot wait for the end of the world, which waits for it: call shutdown elsewhere"
        )
    try:
        if graceful and session.elastic is not None:
            session.depart(timeout)
            session.wind_up()
            session.leave("it has called shutdown", linger=2.0)
        elif graceful:
            session.serve_out(timeout)
            session.wind_up()
            session.close(2.0)
        else:
            session.leave()
    except BaseException:
        session.leave("its shutdown failed")  # else those who still wait for it would do so for ever
        raise
    finally:
        session.close(0.2)
        set_default(None)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Returns the WorkerInfo of a worker, which calls take in place of its name.

    Arguments:
        worker_name: the worker's name; default: this worker's own.

    Raises:
        TypeError: `worker_name` is neither a name nor a rank.
        NotAMemberError: there is no worker of this name, or this process is in no world.
    """
    worker = current().worker
    if worker_name is None:
        return info_of(worker.record)
    return info_of(worker.peers[resolve(worker, worker_name)].record)


@overload
def rpc_sync(
    to: To, func: Callable[..., Later[R]], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> R: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., R], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> R: ...
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Calls a function on a worker, waits for it, and returns its result.

    Arguments:
        to: the worker's name, rank or WorkerInfo; it may be this one.
        func: a function, builtin, class, bound method or lambda. Functions and classes go by name and must be
            importable there; those of `__main__`, lambdas and local ones go by value where they must.
        args, kwargs: its arguments. Tensors arrive as copies of equal value, shape and stride.
        timeout: seconds; 0 for ever; below 0 (the default) the worker's own, 60 unless told otherwise.

    Returns the function's result.

    Raises:
        RPCTimeoutError: time ran out; the function may or may not have run.
        WorkerLostError: the callee died or left.
        SerializationError, DeserializationError: an argument or the result cannot be written, or not be read on the
            other side.
        NotAMemberError: there is no such worker, or this process is in no world.
        BaseException: what the function raised, with its remote traceback as the cause.
    """
    worker = current().worker
    body, number = body_of(func, args, kwargs), resolve(worker, to)
    with span("rpc_sync", func, worker, number):
        return worker.wait_result(worker.request(number, EXECUTOR, body, timeout, func, bounded=True))


@overload
def rpc_async(
    to: To, func: Callable[..., Later[R]], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., R], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[R]: ...
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Calls a function on a worker and returns a Future of its result at once. Arguments: see `rpc_sync`.

    Raises:
        SerializationError, NotAMemberError: nothing was sent; see `rpc_sync`.
        BackpressureError: nor was it in a block of `no_wait`, where too much is under way to the callee.

    Whatever else the call comes to is raised by `Future.wait`: WorkerLostError and RPCTimeoutError, too, also where
    nothing was sent. Where too much is under way to the callee (`max_pending` of the options), this waits for room, at
    most for the call's time.

    Tensors over 256 KiB may leave without being copied first: leave them unchanged until the future is done.
    """
    worker, body = current().worker, body_of(func, args, kwargs)
    number = resolve(worker, to)
    with span("rpc_async", func, worker, number):
        try:
            return Future._of_call(
                worker,
                lambda then: worker.request(number, EXECUTOR, body, timeout, func, then, bounded=True, counted=True),
            )
        except (WorkerLostError, BackpressureTimeoutError) as e:  # a loop over workers is to go on
            return failed_future(e)


@overload
def remote(
    to: To, func: Callable[..., Later[R]], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[R]: ...
@overload
def remote(
    to: To, func: Callable[..., R], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[R]: ...
def remote(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Calls a function (often a class) on a worker, and returns a reference to its result, which stays there.

    The arguments are copied when `remote` returns, but for tensors and arrays over 256 KiB, which may leave without a
    copy: leave those unchanged until `confirmed_by_owner()` of the reference is true. Those for this worker itself are
    always copied.

    Arguments: see `rpc_sync`. `timeout` is for the making of the object.

    Raises:
        WorkerLostError, SerializationError, NotAMemberError: nothing was sent; see `rpc_sync`.
        RPCTimeoutError, BackpressureError: nor was it, since too much is under way to the callee; see `rpc_async`.

    Whatever else the call comes to is raised at the next use of the reference, also where that passes it on: what the
    function raised, RPCTimeoutError, WorkerLostError, DeserializationError.
    """
    session = current()
    func, args, kwargs = body_of(func, args, kwargs)
    number = resolve(session.worker, to)
    with span("remote", func, session.worker, number):
        return rref.make(session, number, func, args, kwargs, timeout)


def _set_rpc_timeout(seconds: float) -> None:
    """Sets the time limit of calls that name none of their own, from now on.

    Arguments:
        seconds: the limit; 0: none.

    Raises:
        ValueError, TypeError: it is below 0, or no number.
        NotAMemberError: this process is in no world.
    """
    check_seconds(seconds)
    if seconds < 0:
        raise ValueError(f"the default timeout must be 0 (never) or seconds above it, not {seconds}")
    current().worker.timeout = float(seconds)


def get_rpc_timeout() -> float:
    """Returns the time limit, in seconds, of calls that name none of their own; 0: no limit.

    Raises:
        NotAMemberError: this process is in no world.
    """
    return current().worker.timeout
