"""Machin's World: groups, paired values, services, errors, a server of model versions; on three processes."""

from __future__ import annotations

import argparse
import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

warnings.filterwarnings("ignore")
os.environ["GYM_DISABLE_WARNINGS"] = "1"
for kind in ("broadcast", "all_reduce", "reduce", "all_gather"):  # torch had them when Machin was written
    setattr(dist, f"{kind}_multigpu", getattr(dist, kind))

from machin.parallel.distributed import RpcGroup, World, get_cur_name  # noqa: E402
from machin.parallel.server import OrderedServerSimpleImpl, PushPullModelServer  # noqa: E402

NAMES = ["a", "b", "c"]


def scale(x: torch.Tensor, by: float = 1.0) -> tuple[str, torch.Tensor]:
    return get_cur_name(), x * by


def refuse() -> None:
    raise ValueError("no")


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def listed(answer: tuple[str, torch.Tensor]) -> list[object]:
    return [answer[0], *answer[1].tolist()]


def ask(group: RpcGroup) -> None:
    x = torch.arange(4.0)
    show("sync", listed(group.rpc_sync("b", scale, args=(x,), kwargs={"by": 2.0})))
    futures = [group.rpc_async(name, scale, timeout=20, args=(x, 3.0)) for name in NAMES]
    show("async", [listed(future.wait()) for future in futures])
    show("remote", listed(group.remote("c", scale, args=(x, 4.0)).to_here()))
    show("paired", [group.is_paired("table"), group.get_paired("table").to_here()])
    show("service", [group.registered_sync("add", args=(n,)) for n in range(3)])
    show("service later", group.registered_async("add", (5,)).wait())
    show("service by reference", group.registered_remote("add", (7,)).to_here())
    try:
        group.rpc_sync("c", refuse)
    except RuntimeError as error:  # what torch makes of Machin's own RpcException
        show("error", "ValueError: no" in str(error))
    try:
        group.get_paired("nothing")
    except KeyError as error:
        show("unknown", str(error.args[0]))
    server = PushPullModelServer("model", group.get_paired("versions").to_here())
    mine, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        mine.weight.fill_(0.5)
        other.weight.fill_(9.0)
    show("push", server.push(mine))
    show("pull", [server.pull(other), other.weight.tolist()])
    show("stale", server.push(nn.Linear(2, 1, bias=False)))


def show(name: str, value: object) -> None:
    print(f"result {name}={value!r}", flush=True)


def run(rank: int, port: str) -> None:
    world = World(
        NAMES[rank],
        rank,
        len(NAMES),
        dist_init_method=f"tcp://localhost:{port}",
        rpc_init_method=f"tcp://localhost:{int(port) + 1}",
    )
    group = world.create_rpc_group("all", NAMES)
    counter = Counter()
    if rank == 1:
        group.pair("table", {"x": [1.5, 2.5]})
        group.register("add", counter.add)
        kept = OrderedServerSimpleImpl("versions", group)  # noqa: F841
        group.pair("ready", True)
    if rank == 0:
        while not group.is_paired("ready"):  # Machin's barrier may miss that it is over
            time.sleep(0.01)
        print("library", rpc.init_rpc.__module__, flush=True)
        ask(group)
    world.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="29500")
    mp.spawn(run, args=(parser.parse_args().port,), nprocs=len(NAMES))
