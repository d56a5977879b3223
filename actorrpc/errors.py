"""The exceptions of the package, one tree.

Whatever the library itself finds wrong is an `ActorRPCError`. An exception that a remote function raised keeps its own
type where that type can be imported here; its `__cause__` is then a `RemoteTraceback`.

Each class takes its message first and its fields as keywords, so that it survives pickling (`type(e)(*e.args)`, then
the fields as state).
"""

from __future__ import annotations

import sys
from concurrent import futures
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self


class ActorRPCError(RuntimeError):
    """Base of all errors that the library itself raises."""


class SerializationError(ActorRPCError):
    """An object cannot be written into a message. The message says which part of it and why."""


class DeserializationError(ActorRPCError):
    """A message arrived that cannot be read here. The reason is the `__cause__`."""


class UnknownNameError(DeserializationError):
    """A message refers to a function, class or module that cannot be imported here.

    Args:
        message: what to tell the user.
        module: the module that is missing, or in which the name is missing.
        name: the qualified name in that module; "" where the module itself was asked for.
    """

    def __init__(self, message: str, *, module: str = "", name: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.name = name


class RemoteError(ActorRPCError):
    """Stands for a remote exception whose own type cannot be made here.

    Args:
        message: what to tell the user.
        type_name: module and qualified name of the remote exception's type.
        text: the remote exception's `str`.
        where: where it happened, in words.
    """

    def __init__(self, message: str, *, type_name: str = "", text: str = "", where: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.text = text
        self.where = where


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that happened elsewhere; its `str` is the traceback rendered there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        # The newline keeps the heading off the line on which Python prints the type's name.
        return f"\n{self.text}"


class ProtocolError(ActorRPCError):
    """Bytes came in that are not a message of this protocol, or of another version of it."""


class InvalidNameError(ActorRPCError, ValueError):
    """A worker, or an actor, cannot have this name."""


class WrongResultError(ActorRPCError, TypeError):
    """A function that is marked with `functions.async_execution` returned something else than a Future."""


class NotAMemberError(ActorRPCError):
    """There is no such worker in the world, or this process is not (or no longer) in one."""


class ActorGoneError(ActorRPCError):
    """The actor, or the object behind a reference, is no longer there."""


class RPCTimeoutError(ActorRPCError, TimeoutError):
    """A call was not answered within its time. It may or may not have run."""


class DeadlockError(ActorRPCError):
    """A call was given up because its caller and its callee wait for each other, maybe by way of others.

    Args:
        message: what to tell the user.
        members: those who wait for each other: actors, or functions, each with its worker, in order.
    """

    def __init__(self, message: str, *, members: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)


class CancelledError(ActorRPCError, futures.CancelledError):
    """A call or a future was cancelled (`Future.cancel`). The call may have begun, and then runs on."""


class BackpressureError(ActorRPCError):
    """A call was not sent, since too much is under way to its callee, and the caller was not to wait (`no_wait`)."""


class BackpressureTimeoutError(RPCTimeoutError, BackpressureError):
    """A call was not sent, since too much was under way to its callee for all of its time."""


class MessageTooLargeError(SerializationError):
    """A message has more bytes than `max_message_bytes` allows, and was not sent.

    Args:
        message: what to tell the user.
        size, limit: its bytes, and those it may have.
    """

    def __init__(self, message: str, *, size: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.size = size
        self.limit = limit


class BlockingWaitError(ActorRPCError):
    """A coroutine on a worker's loop called something that would block its thread, and with it all other coroutines
    there. Use `await` instead, as the message says.
    """


class WorkerLostError(ActorRPCError):
    """A peer died, fell silent or left while something depended on it.

    Args:
        message: what to tell the user.
        worker, rank, host, pid: who it was; this worker itself, where the others have taken it for lost.
        reason: how it was noticed.
        may_have_run: whether the call may have run there; if not, it is safe to repeat it.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        rank: int = -1,
        host: str = "",
        pid: int = 0,
        reason: str = "",
        may_have_run: bool = False,
    ) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run
        self.worker = worker
        self.rank = rank
        self.host = host
        self.pid = pid
        self.reason = reason


class StaleGradientsError(ActorRPCError):
    """A step was refused, since other steps have changed the parameters since its context first used them.

    Args:
        message: what to tell the user.
        steps: how many, by owner's name, where they are too many.
    """

    def __init__(self, message: str, *, steps: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.steps = dict(steps or {})


class GradientMismatchError(ActorRPCError, AssertionError):
    """A step over several workers gave another value or gradient than in one process.

    Args:
        message: what to tell the user.
        hop: which of the step's calls, from 0; -1 for a leaf of the step's own worker.
        method: the method that was called; "__call__" for a call of the object itself.
        owner: the name of the worker that has the object.
        tensor: which tensor: "argument[0]", "argument['x']", "result", "result[1]", "parameter 'weight'".
        what: "value" or "gradient".
    """

    def __init__(
        self, message: str, *, hop: int = -1, method: str = "", owner: str = "", tensor: str = "", what: str = ""
    ) -> None:
        super().__init__(message)
        self.hop = hop
        self.method = method
        self.owner = owner
        self.tensor = tensor
        self.what = what


class RendezvousError(ActorRPCError):
    """The workers of a world did not find each other.

    Args:
        message: what to tell the user.
        address: where they were to meet, as given (`tcp://host:port`, `file:///path`).
        waited: seconds spent on it.
        over: whether the reason is that the world is about to end.
    """

    def __init__(self, message: str, *, address: str = "", waited: float = 0.0, over: bool = False) -> None:
        super().__init__(message)
        self.over = over
        self.address = address
        self.waited = waited


class AuthenticationError(RendezvousError):
    """The workers of a world do not have the same `security_token`, or one of them cannot use it."""


class DeviceMapError(RendezvousError, ValueError):
    """A worker's devices or device maps do not fit the workers of the world, which is raised on all of them; or a
    tensor is on a device that becomes none of the other worker's, which is raised by the call.
    """


class CheckpointError(ActorRPCError):
    """A checkpoint could not be written, or read again. The one before it stands."""


class MemberDiedError(ActorRPCError):
    """A process of a launched world raised or died before the driver had returned; all others were ended.

    Its `__cause__` is the member's own exception, where that can be loaded here.

    Args:
        message: what to tell the user.
        name: the member, "observer:1".
        pid: its process id.
        exitcode: as `multiprocessing` gives it (a negative one is a signal); None where it had to be ended.
        signal: the name of the signal that ended it, if one did.
        traceback: its traceback as text, "" where it had none.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        pid: int = 0,
        exitcode: int | None = None,
        signal: str | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.name = name
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal
        self.traceback = traceback


if sys.version_info >= (3, 11):
    GROUPS: Any = BaseExceptionGroup  # noqa: F821
    """The base of all exceptions that hold others."""
    _Group = ExceptionGroup[Exception]  # noqa: F821
else:

    class _Group(Exception):
        """What stands for ExceptionGroup in Python 3.10: the same attributes and methods; `except*` there is none."""

        def __new__(cls, message: str, exceptions: Sequence[Exception], **_: Any) -> Any:
            return super().__new__(cls, message, list(exceptions))

        @property
        def message(self) -> Any:
            return self.args[0]

        @property
        def exceptions(self) -> tuple[Any, ...]:
            return tuple(self.args[1])

        def __str__(self) -> str:
            count = len(self.exceptions)
            return f"{self.message} ({count} sub-exception{'s' if count != 1 else ''})"

        def derive(self, excs: Sequence[Exception]) -> Any:
            return _Group(self.message, excs)

        def subgroup(self, condition: Any) -> Any:
            return self.split(condition)[0]

        def split(self, condition: Any) -> tuple[Any, Any]:
            def fits(error: Exception) -> bool:
                is_kind = isinstance(condition, (type, tuple))
                return isinstance(error, condition) if is_kind else bool(condition(error))

            if fits(self):
                return self, None
            parts = [[e for e in self.exceptions if fits(e) is wanted] for wanted in (True, False)]
            there, rest = (self.derive(part) if part else None for part in parts)
            return there, rest

    GROUPS = _Group


_NAMED = 8
"""So many members are named first in the text of a GroupError."""


class GroupError(_Group, ActorRPCError):
    """Calls to members of a group failed. It is an ExceptionGroup, where Python has that, else very like one.

    Args:
        message: what to tell the user.
        exceptions: what they raised.
        names: the members that raised them, in the same order.
        size: how many members the group has.
    """

    def __new__(cls, message: str, exceptions: Sequence[Exception], **_: Any) -> Self:
        made: Self = super().__new__(cls, message, exceptions)
        made.names, made.size = ("",) * len(exceptions), 0
        return made

    def __init__(
        self, message: str, exceptions: Sequence[Exception], *, names: Sequence[str] = (), size: int = 0
    ) -> None:
        super().__init__(message, exceptions)
        self.names = tuple(names) or ("",) * len(exceptions)
        self.size = size

    @property
    def errors(self) -> list[tuple[str, Exception]]:
        """The members' names, each with what it raised."""
        return list(zip(self.names, self.exceptions, strict=True))

    def derive(self, excs: Sequence[Exception]) -> GroupError:  # type: ignore[override]  # of these kinds only
        """Makes one of some of the exceptions; `split` and `except*` ask for it."""
        names = {id(error): name for name, error in self.errors}
        return GroupError(self.message, excs, names=[names.get(id(error), "") for error in excs], size=self.size)

    @staticmethod
    def of(errors: Sequence[tuple[str, BaseException]], size: int) -> GroupError:
        """Makes the error of a group's call; its `__cause__` is the first member's."""
        names = [name for name, _ in errors]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        text = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in errors)
        made = GroupError(
            f"{len(errors)} of {size} members of the group failed ({', '.join(names[:_NAMED])}{more}): {text}",
            [e if isinstance(e, Exception) else RemoteError(repr(e)) for _, e in errors],
            names=names,
            size=size,
        )
        made.__cause__ = errors[0][1]
        return made
