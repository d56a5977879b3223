"""Names in messages: what goes by reference, how it is found on the reader, and which one was missing.

In a process that `multiprocessing` spawned, the main module is called `__mp_main__` (and `__main__` is an alias of it);
in its parent there is only `__main__`. So either name in a message means the reader's own main module.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import operator
import pickle
import pickletools
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from actorrpc.errors import SerializationError, UnknownNameError

MAINS: Final = ("__main__", "__mp_main__")
_MAIN = re.compile(rb"__(?:mp_)?main__")
_MP_MAIN = re.compile(rb"__mp_main__")
_COPIED = 1 << 20


_DRAWN: Final = uuid.uuid4().hex


def identity_of_main() -> str:
    """Says what this process's main module is made of: where two say the same, names of it mean the same to both.

    It is a hash of the file that the module was read from. In a notebook or at a prompt, or where there is no file
    (`-c`, stdin), it is drawn anew in each process, and inherited by its forks.
    """
    main = sys.modules.get("__main__")
    if not hasattr(sys, "ps1"):
        with contextlib.suppress(OSError, TypeError):
            return hashlib.sha256(Path(getattr(main, "__file__", None)).read_bytes()).hexdigest()[:32]  # type: ignore[arg-type]
        if (spec := getattr(main, "__spec__", None)) is not None:  # out of a zip file, say
            return str(spec.name)
    return _DRAWN


def mentions_main(data: Any) -> bool:
    """Whether a pickle (anything bytes-like) may refer to a main module. It may say yes wrongly, never no."""
    if type(data) is bytes and b"main__" not in data:
        return False
    return _MAIN.search(data) is not None


def needs_alias(data: Any) -> bool:
    """Whether a pickle may refer to `__mp_main__` while this process has no such module."""
    if "__mp_main__" in sys.modules:
        return False
    if type(data) is not bytes:
        if len(data) > _COPIED:
            return _MP_MAIN.search(data) is not None
        data = bytes(data)  # in which it is found much faster
    return b"__mp_main__" in data


class AliasUnpickler(pickle.Unpickler):
    """An unpickler for which `__mp_main__` is this process' main module."""

    def find_class(self, module: str, name: str, /) -> Any:
        """As the base class; `module` may be the name that a spawned process gives to its main module."""
        return super().find_class(here(module), name)


def load_aliased(data: Any, buffers: Any) -> Any:
    """`pickle.loads` through an `AliasUnpickler`."""
    return AliasUnpickler(io.BytesIO(data), buffers=buffers).load()


def here(module: str) -> str:
    """The name under which this process has that module."""
    return "__main__" if module == "__mp_main__" and module not in sys.modules else module


def resolve(module: str, name: str) -> Any:
    """Imports a module and returns what it holds under a qualified name ("" means the module).

    Raises:
        UnknownNameError: if there is no such module or name here.
    """
    try:
        found = importlib.import_module(here(module))
        return operator.attrgetter(name)(found) if name else found
    except (ImportError, AttributeError) as error:
        raise unknown(module, name, error) from error


def lacks_main(error: BaseException) -> bool:
    """Returns whether a name of `__main__` is missing, so that the message may be read when it comes by value."""
    return isinstance(error, UnknownNameError) and error.module in ("__main__", "__mp_main__")


def unknown(module: str, name: str, error: BaseException | None, where: str = "here") -> UnknownNameError:
    """The error for a name that is missing in this process, of which `where` speaks; `error` is what importing said."""
    if name and not isinstance(error, ImportError):
        what = f"the module {module!r} has no {name!r} {where}"
    else:
        what = f"the module {module!r} cannot be imported {where}" + (f" ({name!r} was asked of it)" if name else "")
    return UnknownNameError(
        f"{what}: {error}. RPC pickler does not serialize the code of what can be imported, only its name, so that it "
        f"must be importable in the process that reads the message: "
        f"install the module there, or put its folder on the PYTHONPATH of all workers.",
        module=module,
        name=name,
    )


def missing(data: Any, error: BaseException) -> UnknownNameError | None:
    """Finds out whether loading a pickle failed for want of a name.

    Loading again would run constructors twice, so the pickle is only scanned for names, and these are looked up.

    Args:
        data: the pickle.
        error: what loading it raised, an ImportError or AttributeError.
    """
    try:
        asked = list(globals_of(data))
    except Exception:  # not a pickle from end to end
        asked = []
    for module, name in asked:
        try:
            resolve(module, name)
        except UnknownNameError as found:
            return found
        except Exception:  # the module breaks while it is imported, which `error` is about, too
            continue
    if isinstance(error, ModuleNotFoundError) and error.name:
        return unknown(error.name, "", error)
    return None


def globals_of(data: Any) -> Iterator[tuple[str, str]]:
    """Yields the (module, qualified name) pairs that a pickle refers to, without loading it."""
    memo: list[object] = []
    strings: list[object] = []
    for opcode, argument, _ in pickletools.genops(bytes(data)):
        kind = opcode.name
        if kind in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            strings.append(argument)
        elif kind in ("BINGET", "LONG_BINGET"):
            strings.append(memo[argument] if isinstance(argument, int) and argument < len(memo) else None)
        elif kind == "MEMOIZE":
            memo.append(strings[-1] if strings else None)
        elif kind == "STACK_GLOBAL":
            module, name = strings[-2:]
            if isinstance(module, str) and isinstance(name, str):
                yield module, name
            strings.append(None)
        elif kind not in ("FRAME", "PROTO"):
            strings.append(None)


def reduce_script_function(function: Any) -> tuple[Any, ...]:
    """The reducer of scripted functions: module and qualified name; scripted again on a reader that has the plain one.

    Raises:
        SerializationError: if that name does not lead back to the function here.
    """
    path = str(function.qualified_name).removeprefix("__torch__.")
    module, _, name = path.rpartition(".")
    for candidate in (module,) if module else MAINS:
        found = sys.modules.get(candidate)
        if found is None:
            continue
        if getattr(found, name, None) is function:
            return resolve_script_function, (candidate, name)
        for other, value in list(vars(found).items()):
            if value is function:
                return resolve_script_function, (candidate, other)
        if callable(plain := getattr(found, name, None)) and getattr(function, "_torchdynamo_inline", None) is plain:
            return resolve_script_function, (candidate, name)
    raise SerializationError(
        f"the scripted function {path!r} goes by name, and no module here holds it under one; "
        "define it at the top level of a module that the reader can import"
    )


def resolve_script_function(module: str, name: str) -> Any:
    """The reader's side of `reduce_script_function`."""
    found = resolve(module, name)
    return found if isinstance(found, torch.jit.ScriptFunction) else torch.jit.script(found)


def reduce_script_module(module: Any) -> tuple[Any, ...]:
    """The reducer of scripted modules: what `torch.jit.save` writes."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return load_script_module, (file.getvalue(),)


def load_script_module(data: bytes) -> Any:
    """The reader's side of `reduce_script_module`."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]
