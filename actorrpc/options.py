"""What `init_rpc` can be told, beside name, rank and world size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from actorrpc.runtime.limits import DEFAULT_BYTES, DEFAULT_CALLS
from actorrpc.services.devices import Devices
from actorrpc.values import Device, as_callee, as_count, as_device, as_device_map, as_known_names, as_seconds

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_TIMEOUT = 300.0
DEFAULT_SWITCH_INTERVAL = 2e-4
DEFAULT_HEARTBEAT_TIMEOUT = 10.0
DEFAULT_DEADLOCK_AFTER = 2.0
UNSET_RPC_TIMEOUT = -1.0
_INIT_TIMEOUT_VARIABLE = "ACTORRPC_INIT_TIMEOUT"
_HEARTBEAT_VARIABLE = "ACTORRPC_HEARTBEAT_TIMEOUT"
_HEARTBEAT_RANGE = 0.5, 80.0
"""Less than the first is noise; more than the second ZeroMQ cannot tell."""
_TOKEN_VARIABLE = "ACTORRPC_TOKEN"

TRANSPORTS = ("ibv", "shm", "tcp", "uv")
CHANNELS = ("basic", "cma", "cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth", "mpt_uv", "shm")
"""What TensorPipe knows, or is said to know."""

PROCESS_GROUP_IS_GONE = (
    "ProcessGroupRpcBackendOptions and BackendType.PROCESS_GROUP are gone, from PyTorch as well: write "
    "TensorPipeRpcBackendOptions(rpc_timeout=..., init_method=..., num_worker_threads=...) and BackendType.TENSORPIPE, "
    "or leave both out"
)

_OF_TORCH: type | tuple[()] = getattr(getattr(torch._C, "_distributed_rpc", None), "RpcBackendOptions", ())
"""Torch's own class, which not all platforms have; the stand-in puts another one in its place later."""


class RpcBackendOptions:
    """Options of a worker. All of them can be read and set as attributes; other names are refused.

    Arguments:
        rpc_timeout: time limit, in seconds, of calls that name none of their own; 0: no limit. Default 60.
        init_method: where the workers meet: `env://` (the default: MASTER_ADDR and MASTER_PORT), `tcp://host:port` or
            `file:///path`.
        num_worker_threads: how many handlers may run at once; one that waits for a call does not count. Default 16.
        init_timeout: seconds that `init_rpc` waits for all workers. Default 300, or ACTORRPC_INIT_TIMEOUT.
        switch_interval: what `sys.setswitchinterval` is set to while the worker is up, in seconds, so that calls are
            answered while the main thread computes in Python; None leaves it alone. Default 0.0002.
        security_token: a secret that all workers of the world share, str or bytes: no message of anybody without it is
            read, and all that is sent is encrypted (docs/security.md). Default ACTORRPC_TOKEN, or none. It is never
            shown or logged.
        address: where this worker listens: an address of this host, the name of an interface of it ("eth0"), or a name
            that means it. Default ACTORRPC_ADDRESS, or else loopback for a world on one host, and the address on the
            way to rank 0 for others.
        report_leaks: whether a graceful shutdown lists, in a warning of the logger "actorrpc", the references that are
            still held then, and where each was made. Default False, or ACTORRPC_REPORT_LEAKS=1.
        max_pending: how many calls this worker may have under way to each other one, and to itself: calls that are not
            answered and tells that have not begun. A quarter of them may be to one actor or object, and to functions.
            Further ones wait for room, or raise BackpressureError (see `no_wait`). `rpc_sync` does not count: it waits
            for its answer in any case. Each caller has as many; a class with many callers may have a limit of its own
            (`class Agent(rpc.Actor, max_pending=...)`). Default 40,000.
        max_pending_bytes: the same in bytes of what has not begun; a larger message goes alone. Default 128 MiB.
        max_message_bytes: a larger message is refused, with a MessageTooLargeError. Default None: any size.
        heartbeat_timeout: after how many seconds without a sign of life (a process that is stopped, a network that is
            cut) the others take this worker for lost, 0.5 to 80; 0: never. Heartbeats go on while it computes. Give all
            workers the same. Default 10, or ACTORRPC_HEARTBEAT_TIMEOUT.
        deadlock_after: when a call has waited for so many seconds, the library finds out whether its caller and its
            callee wait for each other; if they do, the call raises DeadlockError. 0: never. Default 2.

    Raises:
        ValueError, TypeError: an option is out of range, or of the wrong kind.
    """

    report_leaks: bool = False

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        init_timeout: float | None = None,
        switch_interval: float | None = DEFAULT_SWITCH_INTERVAL,
        security_token: str | bytes | None = None,
        address: str | None = None,
        report_leaks: bool | None = None,
        max_pending: int = DEFAULT_CALLS,
        max_pending_bytes: int = DEFAULT_BYTES,
        max_message_bytes: int | None = None,
        heartbeat_timeout: float | None = None,
        deadlock_after: float = DEFAULT_DEADLOCK_AFTER,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.num_worker_threads = num_worker_threads
        self.init_timeout = (
            _of_environment(_INIT_TIMEOUT_VARIABLE, DEFAULT_INIT_TIMEOUT) if init_timeout is None else init_timeout
        )
        self.switch_interval = switch_interval
        self.security_token = os.environ.get(_TOKEN_VARIABLE) if security_token is None else security_token
        self.address = address
        self.report_leaks = os.environ.get("ACTORRPC_REPORT_LEAKS") == "1" if report_leaks is None else report_leaks
        self.max_pending, self.max_pending_bytes = max_pending, max_pending_bytes
        self.max_message_bytes = max_message_bytes
        self.heartbeat_timeout = (
            _of_environment(_HEARTBEAT_VARIABLE, DEFAULT_HEARTBEAT_TIMEOUT)
            if heartbeat_timeout is None
            else heartbeat_timeout
        )
        self.deadlock_after = deadlock_after

    if not TYPE_CHECKING:  # type checkers see misspelt names themselves, unless there is a __setattr__

        def __setattr__(self, name, value):
            # It would do nothing. A subclass of somebody else's may have attributes of its own.
            kind = type(self)
            if kind.__module__ == __name__ and not name.startswith("_") and not hasattr(kind, name):
                known = [known for known in dir(kind) if not (known.startswith("_") or callable(getattr(kind, known)))]
                raise AttributeError(f"{kind.__name__} has no option {name!r}; there are: {', '.join(known)}")
            super().__setattr__(name, value)

    @property
    def rpc_timeout(self) -> float:
        """Time limit, in seconds, of calls that name none of their own; 0: no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        rule = "must be 0 (never) or seconds above it"
        self._rpc_timeout = as_seconds("rpc_timeout", seconds, rule, lambda s: s >= 0)

    @property
    def init_method(self) -> str:
        """Where the workers meet."""
        return self._init_method

    @init_method.setter
    def init_method(self, method: str) -> None:
        if not isinstance(method, str):
            raise TypeError(f"init_method must be an address such as 'tcp://host:port', not {method!r}")
        self._init_method = method

    @property
    def num_worker_threads(self) -> int:
        """How many handlers may run at once."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, number: int) -> None:
        self._num_worker_threads = as_count("num_worker_threads", number)

    @property
    def max_pending(self) -> int:
        """How many calls may be under way to each worker."""
        return self._max_pending

    @max_pending.setter
    def max_pending(self, number: int) -> None:
        self._max_pending = as_count("max_pending", number)

    @property
    def max_pending_bytes(self) -> int:
        """How many bytes of calls that have not begun may be under way to each worker."""
        return self._max_pending_bytes

    @max_pending_bytes.setter
    def max_pending_bytes(self, number: int) -> None:
        self._max_pending_bytes = as_count("max_pending_bytes", number)

    @property
    def max_message_bytes(self) -> int | None:
        """How many bytes a message may have; None: any."""
        return self._max_message_bytes

    @max_message_bytes.setter
    def max_message_bytes(self, number: int | None) -> None:
        self._max_message_bytes = None if number is None else as_count("max_message_bytes", number)

    @property
    def init_timeout(self) -> float:
        """Seconds that `init_rpc` waits for all workers."""
        return self._init_timeout

    @init_timeout.setter
    def init_timeout(self, seconds: float) -> None:
        self._init_timeout = as_seconds("init_timeout", seconds, "must be seconds above 0", lambda s: s > 0)

    @property
    def heartbeat_timeout(self) -> float:
        """After how many seconds without a sign of life the others take this worker for lost; 0: never."""
        return self._heartbeat_timeout

    @heartbeat_timeout.setter
    def heartbeat_timeout(self, seconds: float) -> None:
        low, high = _HEARTBEAT_RANGE
        self._heartbeat_timeout = as_seconds(
            "heartbeat_timeout",
            seconds,
            f"(or {_HEARTBEAT_VARIABLE}) must be 0 (never) or seconds from {low:g} to {high:g}",
            lambda s: s == 0 or low <= s <= high,
        )

    @property
    def deadlock_after(self) -> float:
        """After how many seconds of waiting for a call the library looks for a deadlock; 0: never."""
        return self._deadlock_after

    @deadlock_after.setter
    def deadlock_after(self, seconds: float) -> None:
        rule = "must be 0 (never) or seconds above it"
        self._deadlock_after = as_seconds("deadlock_after", seconds, rule, lambda s: s >= 0)

    @property
    def switch_interval(self) -> float | None:
        """What `sys.setswitchinterval` is set to while the worker is up; None: nothing."""
        return self._switch_interval

    @switch_interval.setter
    def switch_interval(self, seconds: float | None) -> None:
        if seconds is not None:
            seconds = as_seconds("switch_interval", seconds, "must be None or seconds above 0", lambda s: s > 0)
        self._switch_interval = seconds

    @property
    def security_token(self) -> str | bytes | None:
        """The secret that all workers share; None: anybody who reaches a worker may run code in it."""
        return self._security_token

    @security_token.setter
    def security_token(self, token: str | bytes | None) -> None:
        if token is not None and not isinstance(token, (str, bytes)):  # neither here nor below is it to be seen
            raise TypeError(f"security_token must be a str or bytes, not a {type(token).__name__}")
        if token is not None and not token:
            raise ValueError("security_token (or ACTORRPC_TOKEN) is empty; leave it out where there is none")
        if isinstance(token, str) and not _is_text(token):
            raise ValueError(
                "security_token is a str that cannot be written in UTF-8 (there is half of a surrogate pair in it); "
                "give it as bytes"
            )
        self._security_token = token

    @property
    def address(self) -> str | None:
        """Where this worker listens; None: at what ACTORRPC_ADDRESS says, or what fits the world."""
        return self._address

    @address.setter
    def address(self, address: str | None) -> None:
        if not (address is None or isinstance(address, str)):
            raise TypeError(f"address must be an address, an interface or a name of this host, not {address!r}")
        self._address = address

    def __repr__(self) -> str:
        fields = {name.removeprefix("_"): value for name, value in vars(self).items()}
        shown = {**fields, "security_token": "(not shown)"} if fields.get("security_token") is not None else fields
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options under the name, and with the keywords, that programs for `torch.distributed.rpc` use.

    There is no TensorPipe below. All that `RpcBackendOptions` takes is taken as well, by keyword.

    Arguments:
        device_maps: by the name of a callee, which device there each device of this worker becomes: numbers, names or
            `torch.device`s, one to one. `init_rpc` checks them against the devices of all workers, on all of them.
            Arguments of calls to it go by the map, its results by the inverse. Where a callee has none, CUDA tensors go
            to the device of the same index there, and the call raises DeviceMapError where there is none.
        devices: the CUDA devices that this worker may use for calls; by default those of its own maps and those that
            others map to.
        _transports, _channels: names that TensorPipe knows. They are checked, and change nothing.

    Raises:
        ValueError, TypeError: an option is out of range, or of the wrong kind; a device map is not one to one.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Iterable[Device] | None = None,
        _transports: Iterable[str] | None = None,
        _channels: Iterable[str] | None = None,
        init_timeout: float | None = None,
        switch_interval: float | None = DEFAULT_SWITCH_INTERVAL,
        security_token: str | bytes | None = None,
        address: str | None = None,
        report_leaks: bool | None = None,
        max_pending: int = DEFAULT_CALLS,
        max_pending_bytes: int = DEFAULT_BYTES,
        max_message_bytes: int | None = None,
        heartbeat_timeout: float | None = None,
        deadlock_after: float = DEFAULT_DEADLOCK_AFTER,
    ) -> None:
        super().__init__(
            rpc_timeout,
            init_method,
            num_worker_threads=num_worker_threads,
            init_timeout=init_timeout,
            switch_interval=switch_interval,
            security_token=security_token,
            address=address,
            report_leaks=report_leaks,
            max_pending=max_pending,
            max_pending_bytes=max_pending_bytes,
            max_message_bytes=max_message_bytes,
            heartbeat_timeout=heartbeat_timeout,
            deadlock_after=deadlock_after,
        )
        self.device_maps = {} if device_maps is None else device_maps
        self.devices = () if devices is None else devices
        self._transports = as_known_names("_transports", _transports, TRANSPORTS)
        self._channels = as_known_names("_channels", _channels, CHANNELS)

    @property
    def device_maps(self) -> dict[str, dict[torch.device, torch.device]]:
        """By callee, which device there each of this worker's becomes. A copy: `set_device_map` adds to it."""
        return {to: dict(device_map) for to, device_map in self._device_maps.items()}

    @device_maps.setter
    def device_maps(self, maps: Mapping[str, Mapping[Device, Device]]) -> None:
        if not isinstance(maps, Mapping):
            raise TypeError(f"device_maps must be a dict, by the name of the callee, of dicts of devices, not {maps!r}")
        self._device_maps = {as_callee(to): as_device_map(to, device_map, {}) for to, device_map in maps.items()}

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices that this worker may use for calls; none: those of the maps. A copy."""
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Iterable[Device]) -> None:
        if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
            raise TypeError(f"devices must be a list of devices, not {devices!r}")
        self._devices = [as_device(device) for device in devices]
        for device in self._devices:
            if device.type != "cuda":
                raise ValueError(f"devices must be CUDA devices, not {device.type}")

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds to the device map for a callee.

        Arguments:
            to: the callee's name.
            device_map: which device there each device of this worker becomes.

        Raises:
            ValueError: the whole would not be one to one; nothing is added then.
            TypeError: it is no map of devices.
        """
        whole = as_device_map(as_callee(to), device_map, self._device_maps.get(to, {}))
        self._device_maps = {**self._device_maps, to: whole}  # not in place: a copy of these options may share it

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Sets the CUDA devices that this worker may use for calls. Raises as the constructor does."""
        self.devices = devices


class ProcessGroupRpcBackendOptions(RpcBackendOptions):
    """Stands for what PyTorch gave up long ago, to say what to write instead. It cannot be made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(PROCESS_GROUP_IS_GONE)


def is_of_torch(kind: type) -> bool:
    """Returns whether a class is one of the options of `torch.distributed.rpc`, or derived from one."""
    return issubclass(kind, _OF_TORCH)


def own_options(options: object) -> RpcBackendOptions:
    """Returns options for this library's own backend; those of `torch.distributed.rpc` are taken over, value by value.

    Raises:
        TypeError: they are none, or those of another backend.
        ValueError: a value that is taken over is out of range.
    """
    if isinstance(options, TensorPipeRpcBackendOptions) or type(options) is RpcBackendOptions:
        return options
    kind = type(options)
    if is_of_torch(kind):
        names = ("rpc_timeout", "init_method", "num_worker_threads", "device_maps", "devices")
        return TensorPipeRpcBackendOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)})
    raise TypeError(
        f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, or what is derived from it, or plain "
        f"RpcBackendOptions, for BackendType.TENSORPIPE; not {kind.__module__}.{kind.__qualname__}"
    )


def devices_of(options: RpcBackendOptions) -> Devices:
    """Returns what a worker with these options says of its devices when it joins."""
    count = torch.cuda.device_count()
    if not isinstance(options, TensorPipeRpcBackendOptions):
        return Devices(count)
    maps = {to: {str(a): str(b) for a, b in m.items()} for to, m in options.device_maps.items()}
    return Devices(count, maps, tuple(map(str, options.devices)))


def _of_environment(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} in the environment is not a number of seconds") from None


def _is_text(token: str) -> bool:
    try:  # an undecodable byte of the environment is half of a surrogate pair to Python, and stands for that byte
        token.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
