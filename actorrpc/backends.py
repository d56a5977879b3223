"""The backends that `init_rpc` may be told to use: this library's own, and those that programs register.

Under the names and signatures of `torch.distributed.rpc.backend_registry`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from actorrpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_INIT_TIMEOUT,
    DEFAULT_RPC_TIMEOUT,
    PROCESS_GROUP_IS_GONE,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    is_of_torch,
    own_options,
)
from actorrpc.process import Foreign

log = logging.getLogger("actorrpc")
_uses = itertools.count()


class BackendValue(NamedTuple):
    """The value of a BackendType.

    Attributes:
        construct_rpc_backend_options_handler: makes its options.
        init_backend_handler: starts it, and returns its agent.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Growing(type):
    """The class of BackendType: what an enumeration's class can do, and it can grow."""

    _by_name: dict[str, BackendType]

    @property
    def __members__(cls) -> Mapping[str, BackendType]:
        return MappingProxyType(cls._by_name)

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls._by_name.values()))

    def __len__(cls) -> int:
        return len(cls._by_name)

    def __contains__(cls, what: object) -> bool:
        return isinstance(what, cls)

    def __getitem__(cls, name: str) -> BackendType:
        try:
            return cls._by_name[name]
        except KeyError:
            raise KeyError(_unknown(cls, name)) from None

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return cls._by_name[name]
        except KeyError:
            raise AttributeError(_unknown(cls, name)) from None

    def __call__(cls, value: object) -> BackendType:
        for member in cls._by_name.values():
            if member is value or member.value is value or member.value == value:
                return member
        raise ValueError(f"{value!r} is not the value of a BackendType")

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"BackendType.{name} cannot be set; register_backend adds a member")

    def __dir__(cls) -> list[str]:
        return [*type.__dir__(cls), *cls._by_name]

    def __repr__(cls) -> str:
        return "<enum 'BackendType'>"


class BackendType(metaclass=_Growing):
    """An enumeration of the backends: TENSORPIPE (this library's own, under the name that torch gave its own) and what
    `register_backend` adds. It is one object that grows, so that whoever imported it early sees later members.

    Attributes:
        name: the name it was registered by.
        value: its two handlers.
    """

    TENSORPIPE: ClassVar[BackendType]
    _by_name: ClassVar[dict[str, BackendType]] = {}
    name: str
    value: BackendValue

    if TYPE_CHECKING:  # how it looks from outside; see the metaclass

        def __init__(self, value: BackendValue) -> None: ...

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], BackendType], tuple[str]]:
        return _named, (self.name,)


def _named(name: str) -> BackendType:
    return BackendType[name]


def _unknown(cls: _Growing, name: str) -> str:
    if name == "PROCESS_GROUP":
        return PROCESS_GROUP_IS_GONE
    return f"there is no backend {name!r}; there are: {', '.join(cls._by_name)} (register_backend adds one)"


def backend_registered(backend_name: str) -> bool:
    """Returns whether a backend of this name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Adds a backend that `init_rpc` can be told to use.

    Arguments:
        backend_name: its name.
        construct_rpc_backend_options_handler: called with rpc_timeout and init_method, and keywords if any were given;
            returns its options. It should do with these two alone, so that `init_rpc` can tell by the type of options
            for which backend they are.
        init_backend_handler: called with the keywords store (of torch), name, rank, world_size and
            rpc_backend_options; returns the backend's agent, which is kept until `shutdown`. That calls the agent's
            `join(shutdown=True, timeout=...)`, if graceful, and its `shutdown()`, where it has these.
            A handler may start the own backend by `init_backend(BackendType.TENSORPIPE, ...)`; calls work then, else
            they are the agent's business.

    Returns the new member of BackendType.

    Raises:
        RuntimeError: there is one of this name.
        TypeError: the name is no str, or a handler cannot be called.
    """
    if not isinstance(backend_name, str):
        raise TypeError(f"the name of a backend is a str, not {backend_name!r}")
    for handler in (construct_rpc_backend_options_handler, init_backend_handler):
        if not callable(handler):
            raise TypeError(f"a handler of the backend {backend_name!r} cannot be called: {handler!r}")
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    member: BackendType = object.__new__(BackendType)
    member.name = backend_name
    member.value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType._by_name[backend_name] = member
    return member


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Makes the options of a backend: TensorPipeRpcBackendOptions for BackendType.TENSORPIPE.

    Arguments:
        backend: a member of BackendType.
        rpc_timeout, init_method: see RpcBackendOptions.
        kwargs: further options of that backend.

    Raises:
        TypeError: `backend` is no member of BackendType, or does not know an option.
    """
    member = backend_of(backend)
    return member.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Starts a backend: calls its handler with these arguments, and returns its agent.

    BackendType.TENSORPIPE takes store (not used), name, rank, world_size and rpc_backend_options; it joins a world as
    `init_rpc` does, and raises as that does.
    """
    return backend_of(backend).value.init_backend_handler(*args, **kwargs)


def backend_of(backend: object) -> BackendType:
    """Returns the member of BackendType that a user names; torch's BackendType.TENSORPIPE names the own one.

    Raises:
        TypeError: it is nothing that names a backend.
    """
    if isinstance(backend, BackendType):
        return backend
    if isinstance(backend, Enum) and hasattr(backend.value, "init_backend_handler"):  # a member of torch's enumeration
        if backend.name == "TENSORPIPE":
            return BackendType.TENSORPIPE
        raise TypeError(
            f"{backend!r} is registered with torch.distributed.rpc, whose backends do not work here; give its handlers "
            f"to actorrpc.register_backend"
        )
    hint = f"; write BackendType[{backend!r}]" if isinstance(backend, str) and backend_registered(backend) else ""
    raise TypeError(
        f"Argument backend must be a member of BackendType, not {backend!r} of type {type(backend).__name__}{hint}; "
        f"there are: {', '.join(map(repr, BackendType))}"
    )


def choose(backend: object, options: object) -> tuple[BackendType, Any]:
    """Finds out which backend, with which options, a program asks for.

    Arguments:
        backend: a member of BackendType, ours or torch's; None: whichever the options are for.
        options: of that backend; None: its defaults.

    Raises:
        TypeError: one of them is something else, or they do not fit together.
        ValueError: an option is out of range.
    """
    chosen = None if backend is None else backend_of(backend)
    if options is None:
        chosen = chosen or BackendType.TENSORPIPE
        return chosen, construct_rpc_backend_options(chosen)
    if not _is_kind_of_options(type(options)):
        kind = type(options)
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, such as "
            f"TensorPipeRpcBackendOptions, not {kind.__module__}.{kind.__qualname__}"
        )
    if chosen is None:
        chosen = _inferred(options)
    if chosen is BackendType.TENSORPIPE:
        return chosen, own_options(options)
    wanted, kind = _kind_made_by(chosen), type(options)
    if wanted is not None and not isinstance(options, wanted):
        raise TypeError(
            f"options of type {kind.__module__}.{kind.__qualname__} do not fit {chosen!r}, which takes "
            f"{wanted.__module__}.{wanted.__qualname__}"
        )
    return chosen, options


def _inferred(options: object) -> BackendType:
    """Returns the backend whose kind of options comes nearest to the type of these; of two alike, the older one."""
    best, nearness = None, 0
    for candidate in BackendType:
        kind = _kind_made_by(candidate) if candidate is not BackendType.TENSORPIPE else _own_kind(options)
        if kind is not None and isinstance(options, kind) and len(kind.__mro__) > nearness:
            best, nearness = candidate, len(kind.__mro__)
    if best is None:
        kind = type(options)
        raise TypeError(
            f"Could not infer backend for options of type {kind.__module__}.{kind.__qualname__}: no backend takes "
            f"them; there are: {', '.join(map(repr, BackendType))}. Derive from TensorPipeRpcBackendOptions, or "
            f"register a backend"
        )
    return best


def _own_kind(options: object) -> type | None:
    """Returns as what the own backend takes options; None where it does not."""
    kind = type(options)
    if isinstance(options, TensorPipeRpcBackendOptions):
        return TensorPipeRpcBackendOptions
    if is_of_torch(kind):
        return next((base for base in kind.__mro__ if base.__module__.startswith("torch.")), kind)
    return kind if kind is RpcBackendOptions else None


def _kind_made_by(backend: BackendType) -> type | None:
    """Returns the type of the options that a backend makes; None where it makes none of its own accord."""
    try:
        kind = type(construct_rpc_backend_options(backend))
    except Exception as e:
        log.debug("%r makes no options without being told more: %r", backend, e)
        return None
    return kind if _is_kind_of_options(kind) else None


def _is_kind_of_options(kind: type) -> bool:
    return issubclass(kind, RpcBackendOptions) or is_of_torch(kind)


def start(backend: BackendType, name: str, rank: int, world_size: int, options: Any) -> Foreign:
    """Starts a backend that a program has registered. Raises what its handler does, or torch's rendezvous."""
    seconds = timedelta(seconds=getattr(options, "init_timeout", DEFAULT_INIT_TIMEOUT))
    meeting = rendezvous(options.init_method, rank=rank, world_size=world_size, timeout=seconds)
    store, _, _ = next(meeting)
    store = PrefixStore(f"actorrpc_backend_{next(_uses)}", store)
    store.set_timeout(seconds)
    agent = init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options
    )  # fmt: skip
    return Foreign(repr(backend), agent, meeting)


def end(what: Foreign, graceful: bool, timeout: float) -> None:
    """Ends the agent of a backend that a program has registered. Raises what it does."""
    join, shutdown = getattr(what.agent, "join", None), getattr(what.agent, "shutdown", None)
    try:
        if graceful and callable(join):
            join(shutdown=True, timeout=timeout)
    finally:
        if callable(shutdown):
            shutdown()
