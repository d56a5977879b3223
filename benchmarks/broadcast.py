"""What it costs a learner to send its weights to a group of actors on its own host."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Generator
from typing import Any

import torch

from benchmarks.pairs import OURS, Lane, Measure, Measures, Plan, compare, latency, rpc_world, say
from benchmarks.rows import Result, Row, results_of

SIZE = 64 << 20
GROUPS = (2, 8, 16)
LIMITS = {"copy": "x one warm copy", "ray": "x ray's put and get"}


def _milliseconds(measure: Measure) -> Measure:
    return lambda seconds: measure(seconds) / 1000


@contextlib.contextmanager
def broadcasting(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """A learner, which is rank 0, and one actor on each other worker."""
    from benchmarks.actors import Player

    with rpc_world(lane, rank, port) as rpc:
        if rank:
            yield {}
            return
        weights = torch.ones(SIZE // 4)
        group = rpc.Group([Player.spawn(f"w{i}") for i in range(1, lane.size)])
        yield {"*": _milliseconds(latency(lambda: group.rpc_sync().load(weights), 1))}


@contextlib.contextmanager
def by_ray(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """The same with Ray: the weights are put into its object store, and all actors get them from there."""
    ray: Any = importlib.import_module("ray")
    weights = torch.ones(SIZE // 4).numpy()

    class Player:
        def load(self, weights: Any) -> None:
            self.weights = weights

    ray.init(num_cpus=lane.size, include_dashboard=False, log_to_driver=False)
    try:
        players = [ray.remote(Player).remote() for _ in range(lane.size - 1)]

        def send() -> None:
            handle = ray.put(weights)
            ray.get([player.load.remote(handle) for player in players])

        yield {"*": _milliseconds(latency(send, 1))}
    finally:
        ray.shutdown()


@contextlib.contextmanager
def copying(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """One copy of the weights within the process."""
    torch.set_num_threads(1)
    source, target = torch.ones(SIZE // 4), torch.zeros(SIZE // 4)
    yield {"*": _milliseconds(latency(lambda: target.copy_(source), 1))}


def broadcast(plan: Plan) -> list[Result]:
    """What a broadcast costs, by the number of actors."""
    found: list[Result] = []
    with_ray = importlib.util.find_spec("ray") is not None
    if not with_ray:
        say("ray is not installed; its rows are left out")
    for number in GROUPS:
        row = Row(f"broadcast {number}", f"64 MiB of weights to {number} actors", "ms")
        lanes = [Lane("ours", broadcasting, OURS, number + 1), Lane("copy", copying, size=1, share=0.3)]
        if with_ray:
            lanes.append(Lane("ray", by_ray, size=1))
        found += results_of([row], compare(lanes, [row.key], plan, row.key), LIMITS)
    return found
