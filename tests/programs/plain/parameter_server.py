"""A convolutional net that lives on a parameter server; trainers send it batches, and have its gradients applied there.

Each rank may be started by itself (`--rank`), or all of them from here. One trainer gives the same results every time.
Of several, one may find that another's step has changed the weights that its backward pass needs, which is an error.

MASTER_ADDR=localhost MASTER_PORT=29500 python parameter_server.py --world_size 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer

SERVER, TRAINER = "parameter_server", "trainer_{}"
SIDE, CLASSES, BATCH = 12, 4, 16


class Net(nn.Module):
    """Two convolutions and two dense layers, for pictures of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def call_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `method` on the owner of `rref`, with the object there."""
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class ParameterServer(nn.Module):
    """Has the net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out.to("cpu")

    def get_dist_gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """This worker's gradients of a context, for a trainer to look at."""
        gradients = dist_autograd.get_gradients(context_id)
        return {key.to("cpu"): value.to("cpu") for key, value in gradients.items()}

    def get_param_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def get_param_sums(self) -> list[float]:
        return [p.detach().double().abs().sum().item() for p in self.model.parameters()]


_server: ParameterServer | None = None
_lock = Lock()


def get_parameter_server() -> ParameterServer:
    """The one net of this process, which the first trainer to ask makes."""
    global _server
    with _lock:
        if _server is None:
            _server = ParameterServer()
        return _server


class TrainerNet(nn.Module):
    """A net like any other to the training loop; each forward pass is a call."""

    def __init__(self) -> None:
        super().__init__()
        self.server = rpc.remote(SERVER, get_parameter_server)

    def get_global_param_rrefs(self) -> Any:
        return remote_method(ParameterServer.get_param_rrefs, self.server)

    def forward(self, x: Tensor) -> Any:
        return remote_method(ParameterServer.forward, self.server, x)


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise, with a bright bar in one of CLASSES places."""
    target = torch.randint(CLASSES, (BATCH,), generator=generator)
    pictures = torch.randn(BATCH, 1, SIDE, SIDE, generator=generator) * 0.3
    for picture, place in zip(pictures, target.tolist(), strict=True):
        picture[0, place * 3 : place * 3 + 3] += 1.0
    return pictures, target


def run_training_loop(rank: int, world_size: int, steps: int) -> None:
    net = TrainerNet()
    rrefs = net.get_global_param_rrefs()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses, gradients = [], 0
    for _ in range(steps):
        data, target = batch(generator)
        with dist_autograd.context() as context_id:
            loss = F.nll_loss(net(data), target)
            dist_autograd.backward(context_id, [loss])
            there: dict[Tensor, Tensor] = remote_method(ParameterServer.get_dist_gradients, net.server, context_id)
            assert there != {}, "the server has no gradients"
            optimizer.step(context_id)
        losses.append(loss.item())
        gradients = len(there)
    print(f"trainer {rank} losses {losses[0]:.4f} ... {losses[-1]:.4f}", flush=True)

    right, tried = 0, 0
    with torch.no_grad():
        for _ in range(4):
            data, target = batch(generator)
            guess = net(data).max(1)[1]
            right += int(guess.eq(target).sum())
            tried += len(target)
    print(f"trainer {rank} accuracy {right / tried}", flush=True)

    print(f"result rref_owners_{rank}={sorted({r.owner_name() for r in rrefs})}")
    print(f"result gradients_{rank}={gradients}")
    if world_size == 2:
        print(f"result losses={losses}")
        print(f"result accuracy={right / tried}")
        print(f"result weights={remote_method(ParameterServer.get_param_sums, net.server)}")


def run_parameter_server(rank: int, world_size: int) -> None:
    rpc.init_rpc(name=SERVER, rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    rpc.shutdown()  # serves until all trainers are done
    print(f"result net_was_made={_server is not None}", flush=True)


def run_worker(rank: int, world_size: int, steps: int) -> None:
    rpc.init_rpc(name=TRAINER.format(rank), rank=rank, world_size=world_size)
    print(f"library {rpc.init_rpc.__module__}", flush=True)
    run_training_loop(rank, world_size, steps)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_size", type=int, default=2, help="a server and trainers")
    parser.add_argument("--rank", type=int, help="start this one only; 0 is the server")
    parser.add_argument("--steps", type=int, default=20, help="batches of each trainer")
    parser.add_argument("--start_method", choices=["fork", "spawn", "forkserver"], default="fork")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    ranks = range(options.world_size) if options.rank is None else [options.rank]
    context = mp.get_context(options.start_method)
    processes = []
    for rank in ranks:
        if rank == 0:
            process = context.Process(target=run_parameter_server, args=(0, options.world_size))
        else:
            process = context.Process(target=run_worker, args=(rank, options.world_size, options.steps))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
