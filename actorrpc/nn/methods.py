"""The methods of a RemoteModule that are made anew for each: those with the signature of the module's own `forward`.

The owner describes its `forward` in plain values, since the classes in annotations and defaults need not exist anywhere
else. Defaults are only shown: a call sends what it was given, and the owner fills in the rest. Where an interface was
given, its own signature holds, which every holder of the RemoteModule has, and its defaults are sent.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from actorrpc.nn import interfaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


class _Shown:
    """Stands in a signature for something that is only to be read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Argument(NamedTuple):
    """One argument of a `forward`.

    Attributes:
        name: its name.
        kind: its kind, as a number of `inspect`.
        annotation: as text; None without one.
        has_default: whether there is a default.
        default: the default, where it is of a plain type.
        shown: its text, where it is not.
    """

    name: str
    kind: int
    annotation: str | None = None
    has_default: bool = False
    default: Any = None
    shown: str | None = None


class Description(NamedTuple):
    """A module's `forward`, for readers elsewhere.

    Attributes:
        module: the name of the module's class.
        arguments: what it takes.
        returns: its return annotation as text; None without one.
        doc: its docstring, "" without one.
    """

    module: str
    arguments: tuple[Argument, ...]
    returns: str | None
    doc: str


def describe(module: nn.Module) -> Description:
    """Describes the `forward` of a module that is here."""
    name = getattr(module, "original_name", None) or type(module).__name__  # a scripted one has the class's own there
    forward = module.forward
    doc = inspect.getdoc(forward) or ""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return Description(name, _arguments_of_script(forward), None, doc)
    arguments = tuple(map(_argument, signature.parameters.values()))
    return Description(name, arguments, _annotation(signature.return_annotation), doc)


def _argument(parameter: inspect.Parameter) -> Argument:
    default, annotation = parameter.default, _annotation(parameter.annotation)
    if default is inspect.Parameter.empty:
        return Argument(parameter.name, int(parameter.kind), annotation)
    if type(default) in _PLAIN:
        return Argument(parameter.name, int(parameter.kind), annotation, True, default)
    return Argument(parameter.name, int(parameter.kind), annotation, True, None, repr(default))


def _annotation(annotation: object) -> str | None:
    if annotation is inspect.Signature.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _arguments_of_script(forward: Any) -> tuple[Argument, ...]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    schema = getattr(forward, "schema", None)
    if schema is None:
        star, stars = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        return Argument("args", int(star)), Argument("kwargs", int(stars))
    found = []
    for each in schema.arguments[1:]:  # the first is self
        value = each.default_value if each.has_default_value() else inspect.Parameter.empty
        found.append(_argument(inspect.Parameter(each.name, kind, default=value, annotation=str(each.type))))
    return tuple(found)


class Methods:
    """The `forward` and `forward_async` of one RemoteModule, as functions. It travels as its description.

    Arguments:
        description: of the module's own `forward`.
        interface: the interface that the RemoteModule was given.
    """

    def __init__(self, description: Description, interface: Any = None) -> None:
        self.description, self.interface = description, interface
        if interface is not None:
            description = _narrowed(description, interface)
        returns = description.returns
        runs, future = f"Runs the {description.module} on its owner", f"Future[{returns or 'Any'}]"
        self.forward = _function(description, "forward", "rpc_sync", returns, f"{runs}, waits, and returns its result.")
        self.forward_async = _function(
            description, "forward_async", "rpc_async", future, f"{runs}, and returns a Future of its result at once."
        )
        if interface is not None:
            self.forward, self.forward_async = (_filling(f, interface) for f in (self.forward, self.forward_async))

    def __reduce__(self) -> Any:
        return Methods, (self.description, self.interface)


def _narrowed(description: Description, interface: Any) -> Description:
    signature = interfaces.signature_of(interface)
    arguments = tuple(map(_argument, signature.parameters.values()))
    return description._replace(arguments=arguments, returns=_annotation(signature.return_annotation))


def _filling(function: Callable[..., Any], interface: Any) -> Callable[..., Any]:
    signature = interfaces.signature_of(interface)

    @functools.wraps(function)
    def filled(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(self, *bound.args, **bound.kwargs)

    return filled


def _function(description: Description, name: str, verb: str, returns: str | None, doc: str) -> Callable[..., Any]:
    def function(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(verb, args, kwargs)

    function.__name__, function.__qualname__ = name, f"RemoteModule.{name}"
    function.__doc__ = f"{doc}\n\n{description.doc}".rstrip()
    parameters = [_SELF, *map(_parameter, description.arguments)]
    annotation = inspect.Signature.empty if returns is None else _Shown(returns)
    function.__signature__ = inspect.Signature(parameters, return_annotation=annotation)  # type: ignore[attr-defined]
    return function


def _parameter(argument: Argument) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if argument.has_default:
        default = argument.default if argument.shown is None else _Shown(argument.shown)
    annotation = inspect.Parameter.empty if argument.annotation is None else _Shown(argument.annotation)
    return inspect.Parameter(
        argument.name, inspect._ParameterKind(argument.kind), default=default, annotation=annotation
    )


class Generated:
    """A method that a RemoteModule has in its `Methods`. As an attribute of the class, so that subclasses may override.

    Arguments:
        doc: what `help` shows of the class's.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self
        function: Any = getattr(module.generated_methods, self._name)
        return function.__get__(module)

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls it as a function of the class: `RemoteModule.forward(self, x)`."""
        return self.__get__(module)(*args, **kwargs)
