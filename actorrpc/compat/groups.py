"""The end of a process group, which in torch 2.13 may wait for itself.

A thread of gloo's that has done a collective drops its tensors, and needs the interpreter for one that Python has made.
The end of a group waits for these threads, and does not give the interpreter up meanwhile: where the last collective is
just over, as at the end of `DistributedDataParallel.join`, both wait for ever. It happens without any RPC, on a machine
with more to do than processors; a pause before the end lets the threads finish.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch.distributed

_PAUSE_SECONDS = 0.02


def install() -> None:
    """Has `torch.distributed.destroy_process_group` pause before it begins."""
    destroy: Any = torch.distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(_PAUSE_SECONDS)
        destroy(*args, **kwargs)

    torch.distributed.destroy_process_group = destroy_process_group
    torch.distributed.distributed_c10d.destroy_process_group = destroy_process_group
