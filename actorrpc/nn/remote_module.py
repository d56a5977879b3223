"""RemoteModule: a module on another worker that is used like one of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from actorrpc.nn import interfaces
from actorrpc.nn.devices import parse
from actorrpc.nn.methods import Description, Generated, Methods, describe
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.proxies import body_of, call_method
from actorrpc.rpc import rpc_async, rpc_sync
from actorrpc.rref import RRef
from actorrpc.session import current
from actorrpc.wire.codec import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self


class RemoteModule(nn.Module):
    """A module that is made, and stays, on some worker, its *owner*. Calling it runs it there.

    `forward` and `forward_async` take what the module's own `forward` takes (`help(remote.forward)` shows it). In an
    autograd context both are recorded, so that gradients reach the module's parameters, on the owner. Calls run beside
    each other, as those through any RRef do.

    It may be sent to other workers, which then use the same module; attributes that were set on it stay behind. Pickle,
    `torch.save` and `copy` refuse it. It may be a part of another module: that one's `train` and `eval` reach it, but
    its parameters are none of that one's, and `to` and its like leave it alone. The other methods of `nn.Module` are
    refused, as torch refuses them; the error says what to do instead.

    Arguments:
        remote_device: the worker, by name or as "rank:1", and the device there: "ps/cuda:0", "rank:1/cpu". Without a
            device: the CPU.
        module_cls: the module's class, or a function that returns a module; called on the owner.
        args, kwargs: what it is called with.
        _module_interface_cls: a class decorated with `@torch.jit.interface`, importable on the owner. There the module
            is compiled, and must have that interface; `forward` has the interface's signature; and `torch.jit.script`
            can compile this object, and what it is a part of. (The name is torch's.)

    Attributes:
        on: the owner's name.
        device: the device there. Tensors in arguments are moved to it. Those in results are moved to the CPU; where
            this worker has a device map for the owner they are left as they are, and travel by that.
        training: the mode that was last set through this object; others may have set another one since.
        is_scriptable: whether there is an interface.

    Raises:
        NotAMemberError: there is no such worker, or this process is in no world.
        ValueError: remote_device is malformed, module_cls made no module, or the interface is none.
        RuntimeError: there is no such device, or not there; or the module cannot be compiled or lacks the interface.
        BaseException: what module_cls raised, with its remote traceback as the cause. See also `rpc_sync`.
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]
    is_scriptable: bool
    generated_methods: Methods

    forward = Generated("Runs the module on its owner, waits, and returns its result.")
    forward_async = Generated("Runs the module on its owner, and returns a Future of its result at once.")

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            interfaces.check(_module_interface_cls)
        owner, device = parse(current().worker, remote_device)
        maker: object = module_cls
        if isinstance(maker, nn.Module) or not callable(maker):
            raise TypeError(
                f"module_cls must be a class of modules, or a function that returns one, not {maker!r}; "
                f"RemoteModule.init_from_module_rref takes a module that exists already"
            )
        what = *body_of(module_cls, args, kwargs), device, _module_interface_cls
        ref, description, training = rpc_sync(owner, _make, args=what)
        self._fill(device, ref, Methods(description, _module_interface_cls), training)

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> Self:
        """Makes a RemoteModule of a module that exists.

        Arguments:
            remote_device: as for the class; the device is where the module is. It is not moved, and it stays on the
                worker that owns it, also where this names another worker (that must exist).
            module_rref: a reference to the module.
            _module_interface_cls: as for the class; but the module is not compiled if it is not already.

        Raises as the class does; also what the creation of the module raised.
        """
        _, device = parse(current().worker, remote_device)
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref must be an RRef to a module, not {type(module_rref).__name__}")
        if _module_interface_cls is not None:
            interfaces.check(_module_interface_cls)
        what = module_rref, device, _module_interface_cls
        description, training = rpc_sync(module_rref.owner(), _look_at, args=what)
        made = cls.__new__(cls)
        made._fill(device, module_rref, Methods(description, _module_interface_cls), training)
        return made

    def _fill(self, device: str, ref: RRef[nn.Module], methods: Methods, training: bool) -> None:
        """Makes the state of one that `__init__` does not make, too."""
        nn.Module.__init__(self)
        self.on, self.device, self.module_rref = ref.owner_name(), device, ref
        self.is_scriptable, self.generated_methods = methods.interface is not None, methods
        self.training = training

    def get_module_rref(self) -> RRef[nn.Module]:
        """Returns a reference to the module itself."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Returns references to the module's parameters, which stay on the owner: for an optimizer over workers.

        Arguments:
            recurse: whether those of submodules are among them.
        """
        found: list[RRef[nn.Parameter]] = self._there(_parameters, recurse)
        return found

    def train(self, mode: bool = True) -> Self:
        """Sets the module's mode, on the owner: `nn.Module.train`; `eval()` is `train(False)`."""
        self._there(_train, mode)
        self.training = mode
        return self

    # -- calling

    def _run(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.device(self.device).type == "cpu":
            what = f"{self.generated_methods.description.module}.forward"
            return call_method(self.module_rref, verb, UNSET_RPC_TIMEOUT, "__call__", args, kwargs, what)
        call: Callable[..., Any] = rpc_sync if verb == "rpc_sync" else rpc_async
        mapped = bool(getattr(current().options, "device_maps", {}).get(self.on))
        return call(self.module_rref.owner(), _run_on, args=(self.module_rref, self.device, mapped, args, kwargs))

    def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc_sync(self.module_rref.owner(), function, args=(self.module_rref, *args))

    # -- sending

    def __reduce_ex__(self, protocol: Any) -> Any:
        if writing() is None:
            raise RuntimeError(
                f"Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: the "
                f"module is on {self.on!r}, and pickle, torch.save and copy cannot count who refers to it. "
                f"get_module_rref().to_here() fetches a copy, get_module_rref().rpc_sync().state_dict() its state"
            )
        return _receive, (type(self), self.device, self.module_rref, self.generated_methods, self.training)

    def __prepare_scriptable__(self) -> Any:
        interface = self.generated_methods.interface
        if interface is None:
            raise RuntimeError(
                "a RemoteModule cannot be compiled by torch.jit.script unless it was given an interface, as "
                "_module_interface_cls; or call it from code that is not scripted (what it calls may be: module_cls "
                "can be a function that returns torch.jit.script(module))"
            )
        return interfaces.scriptable(self, interface)

    # -- as a module, and as a part of one

    def __repr__(self) -> str:
        return f"RemoteModule({self.generated_methods.description.module} on {self.on}/{self.device})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            on = self.__dict__.get("on")
            if name.startswith("_") or on is None:
                raise
            raise AttributeError(
                f"a RemoteModule has no attribute {name!r}; the module is on {on!r}: call its methods with "
                f"get_module_rref().rpc_sync().{name}(...); its parameters are remote_parameters()"
            ) from None

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """For a module that this one is part of, to which it is one without parts; refused to others."""
        if memo is None:
            raise _refusal(self, "named_modules")
        if remove_duplicate and self in memo:
            return iter(())
        memo.add(self)
        return iter([(prefix, self)])

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Does nothing: what moves or converts a module that this one is part of leaves it as it is."""
        return self


def _receive(
    kind: type[RemoteModule], device: str, ref: RRef[nn.Module], methods: Methods, training: bool
) -> RemoteModule:
    made = kind.__new__(kind)
    made._fill(device, ref, methods, training)
    return made


# -- on the owner


def _make(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, interface: Any
) -> tuple[RRef[nn.Module], Description, bool]:
    _check_device(device)
    module = _checked(module_cls(*args, **kwargs), "Expect `module_cls(*args, **kwargs)` returns")
    module.to(device)
    if interface is not None:
        module = torch.jit.script(module)
    return RRef(module, interface), describe(module), module.training


def _look_at(ref: RRef[nn.Module], device: str, interface: Any) -> tuple[Description, bool]:
    _check_device(device)
    module = _checked(ref.local_value(), "Expect `module_rref` refers to")
    RRef(module, interface)  # which says what is wrong
    return describe(module), module.training


def _checked(module: object, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what} an instance of <class nn.Module>, but it is an instance of {type(module)}")
    return module


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as e:
        raise RuntimeError(f"{current().worker} cannot use the device {device!r}: {e}") from e


def _parameters(ref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in ref.local_value().parameters(recurse)]


def _train(ref: RRef[nn.Module], mode: bool) -> None:
    ref.local_value().train(mode)


def _run_on(ref: RRef[nn.Module], device: str, mapped: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _moved((args, kwargs), device)
    result = ref.local_value()(*args, **kwargs)
    return result if mapped else _moved(result, "cpu")  # here, so that the move is a part of the graph


def _moved(value: Any, device: str) -> Any:
    kinds: Any = (torch.Tensor, PackedSequence)  # the latter would be taken for a tuple of tensors
    return pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, kinds) else x, value, is_leaf=lambda x: isinstance(x, kinds)
    )


# -- what is refused

_FOR_PARENTS = {"eval", "get_extra_state", "set_extra_state"}
"""What nn.Module's own code calls on parts of a module, and does what is right for this one, too."""


def _advice(name: str) -> str:
    call = f"call get_module_rref().rpc_sync().{name}(...), or "
    if name.startswith("named_") or name in ("buffers", "children", "modules"):
        call = ""  # what they return is an iterator, which cannot be sent
    return f"{call}send a function there, in which get_module_rref().local_value() is the module"


def _refusal(module: RemoteModule, name: str) -> ValueError:
    text = f"Method ``{name}`` not supported for RemoteModule."
    if name in ("parameters", "named_parameters"):
        return ValueError(f"{text} Please use ``remote_parameters`` instead.")
    return ValueError(f"{text} The module is on {module.on!r}: {_advice(name)}")


def _refusing(name: str) -> Any:
    def refuse(self: RemoteModule, *_: Any, **__: Any) -> Any:
        raise _refusal(self, name)

    refuse.__name__, refuse.__qualname__ = name, f"RemoteModule.{name}"
    refuse.__doc__ = "Refused: the module is on another worker."
    return refuse


for _name in dir(nn.Module):
    _own = _name.startswith("_") or _name in RemoteModule.__dict__ or _name in _FOR_PARENTS
    if not _own and callable(getattr(nn.Module, _name)):
        setattr(RemoteModule, _name, _refusing(_name))
