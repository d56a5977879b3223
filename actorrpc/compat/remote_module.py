"""RemoteModule as torch's own looks from within: what it keeps, and in which order, is what its `__dict__` shows.

torch's tests look at that, and so may programs that go through the attributes of what they were sent.
"""

from __future__ import annotations

from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from actorrpc import nn as own
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.nn.methods import Methods
    from actorrpc.rref import RRef

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""What torch sends of a RemoteModule, and all that one has that was sent, but for its two methods."""


class _RemoteModule(own.RemoteModule):
    """The base class of torch's RemoteModule, which takes an interface as its last argument. See `actorrpc.nn`.

    The state of an `nn.Module` (empty, of a RemoteModule) is made when something is set that needs it.

    Attributes:
        is_device_map_set: whether this worker has a device map for the owner.
    """

    is_device_map_set: bool

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs, _module_interface_cls=_module_interface_cls)

    def _fill(self, device: str, ref: RRef[nn.Module], methods: Methods, training: bool) -> None:
        on = ref.owner_name()
        maps = getattr(current().options, "device_maps", {})
        values = on, device, bool(maps.get(on)), methods.interface is not None, methods, ref
        self.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
        if not training:
            self.__dict__["training"] = training
        names = "forward_async", "forward"
        if all(getattr(type(self), name) is getattr(own.RemoteModule, name) for name in names):  # not the user's own
            # The methods of another that refers to the same module: its own would keep it, and so the reference, until
            # the collector comes.
            other = own.RemoteModule.__new__(own.RemoteModule)
            own.RemoteModule._fill(other, device, ref, methods, training)
            for name in names:
                self.__dict__[name] = MethodType(getattr(methods, name), other)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)) and "_modules" not in self.__dict__:
            kept = dict(self.__dict__)
            nn.Module.__init__(self)
            self.__dict__.update(kept)
        super().__setattr__(name, value)


class RemoteModule(_RemoteModule):
    """`actorrpc.nn.RemoteModule` under the stand-in."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


RemoteModule.__doc__ = own.RemoteModule.__doc__

for _name, _value in vars(nn.Module()).items():
    _frozen: Any = MappingProxyType(_value) if isinstance(_value, dict) else _value
    setattr(_RemoteModule, _name, frozenset(_value) if isinstance(_value, set) else _frozen)
