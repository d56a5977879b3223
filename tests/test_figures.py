"""What workers say of how much they have to do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc.runtime.peers import Standing
from actorrpc.services import figures
from actorrpc.services.figures import BOUNDS, Figures, WorldFigures, gather, quantile, rates
from actorrpc.session import current
from actorrpc.testing import SimWorld


def nap(seconds: float) -> None:
    time.sleep(seconds)


class Box(rpc.Actor):
    def nap(self, seconds: float) -> None:
        current().worker.wait(rpc_completion(), current().worker.clock.now() + seconds)


def rpc_completion() -> Any:
    from actorrpc.runtime.completion import Completion

    return Completion()


def looked(timeout: float = 5.0) -> WorldFigures:
    return gather(current().worker, timeout)


def in_a_world(program: Callable[[], Any], size: int = 2, **more: Any) -> Any:
    with SimWorld(size, 1, **more) as world:
        return world.run(program)[0]


def test_calls_and_tells_are_counted_where_they_come_from_and_where_they_go() -> None:
    def program() -> tuple[WorldFigures, WorldFigures]:
        before = looked()
        box = Box.spawn("w1")
        for _ in range(3):
            rpc.rpc_sync("w1", abs, args=(-1,))
        rpc.rpc_sync("w0", abs, args=(-1,))
        box.tell().nap(0.0)
        box.rpc_sync().nap(0.0)
        return before, looked()

    before, after = in_a_world(program)
    assert [w.name for w in after.workers] == ["w0", "w1"]
    assert [w.served for w in before.workers] == [0, 0]
    w0, w1 = after.workers
    assert (w0.served, w0.sent) == (1, 7)  # the creation counts as one
    assert (w1.served, w1.sent) == (6, 0)
    assert sum(w1.times) == 5  # a tell is not answered
    assert 0 < w1.bytes_in - w0.bytes_out < 100  # the question itself
    assert after.silent == after.lost == {}


def test_a_message_of_several_frames_is_counted_whole() -> None:
    def program() -> int:
        import torch

        rpc.rpc_sync("w1", torch.numel, args=(torch.zeros(10_000),))
        return looked().workers[1].bytes_in

    assert 40_000 < in_a_world(program) < 42_000


def test_queues_and_actors_at_work_are_shown() -> None:
    def program() -> WorldFigures:
        box = Box.spawn("w1")
        futures = [box.rpc_async().nap(1.0) for _ in range(4)]
        current().worker.wait(rpc_completion(), current().worker.clock.now() + 0.5)
        found = looked()
        for future in futures:
            future.wait()
        return found

    w0, w1 = in_a_world(program).workers
    assert w0.pending == 4
    assert (w1.waiting, w1.actors, w1.running) == (3, 1, 0)  # it waits
    (load,) = w1.loads
    assert (load.depth, load.running) == (3, 1)
    assert load.name.startswith("Box")


def test_rates_and_times_are_of_the_time_between_two_looks() -> None:
    def program() -> tuple[figures.Rates | None, figures.Rates | None]:
        worker = current().worker
        rpc.rpc_sync("w1", abs, args=(-1,))
        box, first = Box.spawn("w1"), looked().workers[1]
        for _ in range(10):
            box.rpc_sync().nap(0.1)
        second = looked().workers[1]
        worker.wait(rpc_completion(), worker.clock.now() + 1.0)
        return rates(first, second), rates(second, looked().workers[1])

    busy, idle = in_a_world(program)
    assert busy.served == pytest.approx(10, rel=0.2)
    assert busy.p50 == pytest.approx(0.1, rel=0.2)
    assert busy.p99 == pytest.approx(0.1, rel=0.2)
    assert (idle.served, idle.p50, idle.p99) == (0, None, None)


def test_times_are_measured_only_while_somebody_looks() -> None:
    def program() -> list[bool]:
        worker, seen = current().worker, []

        def look() -> None:
            seen.append(worker.meter is not None)

        look()
        for pause in (50.0, 50.0, 70.0):
            worker.services[Figures].here()
            worker.wait(rpc_completion(), worker.clock.now() + pause)
            look()
        worker.services[Figures].here()
        look()
        return seen

    assert in_a_world(program) == [False, True, True, False, True]


def test_who_does_not_answer_in_time_is_named() -> None:
    with SimWorld(3, 1) as world:
        world.simulation.freeze(2)
        found = world.run(lambda: looked(timeout=2.0))[0]
        world.simulation.thaw(2)
    assert [w.name for w in found.workers] == ["w0", "w1"]
    assert list(found.silent) == ["w2"]
    assert "2000 ms" in found.silent["w2"]


def test_lost_workers_are_named_until_they_come_again() -> None:
    def program(world: SimWorld) -> WorldFigures:
        world.kill(2)
        rpc.rpc_sync("w1", abs, args=(-1,))
        worker = current().worker
        worker.wait(rpc_completion(), worker.clock.now() + 1.0)
        return looked()

    with SimWorld(3, 1) as world:
        found = world.run(functools.partial(program, world))[0]
    assert found.lost == {"w2": "it was killed"}
    assert [w.name for w in found.workers] == ["w0", "w1"]
    assert all(w.lost == {"w2": "it was killed"} for w in found.workers)


def test_who_answers_is_not_lost_whatever_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_lost", lambda worker: {"w1": "it was here before", "w9": "it was killed"})
    assert in_a_world(looked).lost == {"w9": "it was killed"}


def test_a_guest_that_died_is_no_loss() -> None:
    def program() -> dict[str, str]:
        worker = current().worker
        worker.peers[1].record = replace(worker.peers[1].record, guest=True)
        worker.members.lose(1, "it was killed")
        return looked().lost

    assert in_a_world(program) == {}


def test_a_guest_is_not_among_the_workers() -> None:
    def program() -> list[str]:
        worker = current().worker
        worker.peers[1].record = replace(worker.peers[1].record, guest=True)
        return [w.name for w in looked().workers]

    assert in_a_world(program) == ["w0"]


def test_a_worker_of_the_same_name_has_no_rates_with_the_one_before() -> None:
    def program() -> figures.WorkerFigures:
        return looked().workers[0]

    one = in_a_world(program)
    later = replace(one, at=one.at + 1)
    assert rates(one, one) is None
    assert rates(one, later) is not None
    assert rates(one, replace(later, incarnation=99)) is None


def test_quantiles_lie_where_the_counts_are() -> None:
    counts = [0] * (len(BOUNDS) + 1)
    assert quantile(counts, 0.5) is None
    counts[20], counts[40] = 98, 2
    half, most = quantile(counts, 0.5), quantile(counts, 0.99)
    assert half is not None
    assert most is not None
    assert BOUNDS[19] <= half <= BOUNDS[20]
    assert BOUNDS[39] <= most <= BOUNDS[40]
    assert quantile([0] * len(BOUNDS) + [1], 0.5) == BOUNDS[-1]


def test_what_is_left_or_lost_is_told_apart() -> None:
    def program() -> dict[str, str]:
        worker = current().worker
        worker.members.lose(1, "it has left", Standing.LEFT)
        return looked().lost

    assert in_a_world(program) == {}
