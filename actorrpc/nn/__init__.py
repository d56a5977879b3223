"""Modules on other workers; the name of `torch.distributed.nn`.

    remote = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
    y = remote(x)                             # runs there; waits
    future = remote.forward_async(x)          # does not
    parameters = remote.remote_parameters()   # references to them, for an optimizer
"""

from actorrpc.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
