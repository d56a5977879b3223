"""Pickles that ask for too much memory: five bytes of one have Python's unpickler make room for billions of objects.

They tell it to keep an object under a number of their choice, and it makes its table as long as that. What picklers
write has no number beyond how many objects there are; broken bytes may. To find that out takes a walk over the pickle.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Final

_LINE: Final = pickletools.UP_TO_NEWLINE
_WIDTHS: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_SIZES: Final = {ord(op.code): 0 if op.arg is None else op.arg.n for op in pickletools.opcodes}
_PAIRS: Final = frozenset(b"ci")
"""Opcodes that two lines follow."""
_PUT, _LONG_PUT, _STOP = pickle.PUT[0], pickle.LONG_BINPUT[0], pickle.STOP[0]


def asks_too_much(data: bytes | bytearray | memoryview) -> bool:
    """Returns whether a pickle, which may be broken, has an object kept under a number higher than it has bytes."""
    data = bytes(data)
    at, end = 0, len(data)
    while at < end:
        op = data[at]
        size = _SIZES.get(op)
        if size is None or op == _STOP:
            return False
        at += 1
        if size >= 0:
            if op == _LONG_PUT and int.from_bytes(data[at : at + 4], "little") > end:
                return True
            at += size
        elif size == _LINE:
            line = data.find(b"\n", at)
            if op == _PUT and line - at > len(str(end)):
                return True
            at = line + 1 if line >= 0 else end
            if op in _PAIRS:
                at = data.find(b"\n", at) + 1 or end
        else:
            width = _WIDTHS[size]
            at += width + int.from_bytes(data[at : at + width], "little")
    return False
