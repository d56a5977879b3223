"""RemoteModules for TorchScript: what `torch.jit.script` makes of one that was given an interface.

There is nothing in TorchScript that could call another worker, but it can call Python. So the interface's `forward` is
written out as source, with its own types, and its body hands the arguments to a function that TorchScript leaves to
Python. Scripted code sees a module that has the interface, and which of them is remote it cannot tell.

What leads from a compiled module back to the RemoteModule is an attribute of a tensor: TorchScript has no other value
that brings its Python object along, and keeps it for as long as itself.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import typing
from typing import Any, Final

import torch
from torch import Tensor, nn

NOT_PICKLED: Final = (
    "Passing a script RemoteModule over RPC is not supported, nor can pickle or torch.save write one: a RemoteModule "
    "can only be pickled when using RPC, before torch.jit.script has compiled it. Send that one, or its module_rref, "
    "and compile it where it arrives."
)

_SOURCE = """
def actorrpc_run(token: Tensor, {parameters}) -> R:
    return run(token, {arguments})

def actorrpc_begin(token: Tensor, {parameters}) -> Tensor:
    return begin(token, {arguments})

def actorrpc_end(token: Tensor) -> R:
    return end(token)

def forward(self, {shown}) -> R:
    return actorrpc_run(self.token, {names})

def forward_async(self, {shown}) -> Future[R]:
    return actorrpc_fork(actorrpc_end, actorrpc_begin(self.token, {names}))
"""


def check(interface: Any) -> None:
    """Raises ValueError where something is not an interface with a `forward`."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(f"_module_interface_cls is a class decorated with @torch.jit.interface, not {interface!r}")
    if not callable(getattr(interface, "forward", None)):
        raise ValueError(f"the interface {interface.__qualname__} has no forward, and a RemoteModule runs that alone")


def signature_of(interface: Any) -> inspect.Signature:
    """Returns the signature of an interface's `forward`, without self."""
    signature = inspect.signature(interface.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def scriptable(remote: nn.Module, interface: Any) -> nn.Module:
    """Returns a module with an interface, for TorchScript to compile, that runs a RemoteModule."""
    made: nn.Module = _class_of(interface)(remote)
    return made


class Scriptable(nn.Module):
    """Stands for a RemoteModule in what is compiled. Those made have `forward` and `forward_async`."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.refusal = NOT_PICKLED
        self.token = torch.empty(0)
        self.token.remote = remote  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> Scriptable:
        """Passes it on, for a parent that is not compiled."""
        _remote_of(self.token).train(mode)
        return super().train(mode)

    @torch.jit.export
    def __getstate__(self) -> Tensor:
        raise RuntimeError(self.refusal)

    @torch.jit.export
    def __setstate__(self, state: Tensor) -> None:
        raise RuntimeError(self.refusal)


@functools.cache
def _class_of(interface: Any) -> Any:
    """Makes the class of what stands for RemoteModules of an interface."""
    parameters = list(signature_of(interface).parameters.values())
    types = typing.get_type_hints(interface.forward)
    names: dict[str, Any] = {
        "Tensor": Tensor, "Future": torch.jit.Future, "actorrpc_fork": torch.jit.fork, "R": types.get("return", Tensor),
        "run": _run, "begin": _begin, "end": _end,
    }  # fmt: skip
    plain, shown, given, passed = [], [], [], []
    for number, parameter in enumerate(parameters):
        name, default = parameter.name, ""
        names[f"T{number}"] = types.get(name, Tensor)
        if parameter.default is not parameter.empty:
            names[f"D{number}"], default = parameter.default, f" = D{number}"
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        if keyword and "*" not in shown:
            shown.append("*")
        plain.append(f"a{number}: T{number}")
        shown.append(f"{name}: T{number}{default}")
        given.append(f"{name}=a{number}" if keyword else f"a{number}")
        passed.append(name)
    source = _SOURCE.format(
        parameters=", ".join(plain), arguments=", ".join(given), shown=", ".join(shown), names=", ".join(passed)
    )
    file = f"<RemoteModule of {interface.__module__}.{interface.__qualname__} at {id(interface):#x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # TorchScript reads it there
    names["__name__"] = __name__
    exec(compile(source, file, "exec", dont_inherit=True), names)  # annotations are to be types, not text
    for name in ("actorrpc_run", "actorrpc_begin", "actorrpc_end"):
        names[name] = torch.jit.ignore(names[name])  # type: ignore[no-untyped-call]
    forward_async = torch.jit.export(names["forward_async"])
    body = {"__module__": __name__, "forward": names["forward"], "forward_async": forward_async}
    return type(f"Remote{interface.__name__}", (Scriptable,), body)


# -- called by what is compiled


def _remote_of(token: Tensor) -> Any:
    try:
        return token.remote  # type: ignore[attr-defined]
    except AttributeError:
        raise RuntimeError("this is a copy of a scripted RemoteModule, and it refers to none") from None


def _run(token: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _remote_of(token).forward(*args, **kwargs)


def _begin(token: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Makes the call at once; TorchScript's fork, which waits for it, may have to wait for a thread."""
    begun = torch.empty(0)
    begun.future = _remote_of(token).forward_async(*args, **kwargs)  # type: ignore[attr-defined]
    return begun


def _end(begun: Tensor) -> Any:
    return begun.future.wait()  # type: ignore[attr-defined]
