"""Optimizers for parameters on other workers; the names of `torch.distributed.optim`, and clipping beside them.

    optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs, lr=0.05)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss()])
        optimizer.step(context_id)
"""

from actorrpc.optim.clipping import clip_grad_norm_
from actorrpc.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]
