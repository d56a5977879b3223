"""Torch's legacy profiler and calls: what is in a profile, where it stands, and that calls are as they are without one.

Workers 0 and 1 have the profiler's part of the stand-in, worker 2 has nothing of it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.profiler import record_function

import actorrpc as rpc
from actorrpc import autograd as dist_autograd
from actorrpc import session
from actorrpc.compat import calls, profiler, recorder
from tests.worlds import World, until

_legacy: Any = profiler_legacy
REMOTE = "#remote_op: "


def profile(**settings: bool) -> Any:
    return _legacy.profile(**settings)


def prepare(rank: int) -> None:
    if rank < 2 and profiler.is_wanted is not rpc.profiling.is_wanted:
        profiler.install()


@pytest.fixture
def trio(standing_trio: World) -> World:
    standing_trio.everywhere(prepare, ranked=True)
    return standing_trio


def inside(body: Callable[[], None]) -> Callable[[World], None]:
    """Makes a test of a function that runs on worker 0."""

    def test(trio: World) -> None:
        trio.on(0, run, body.__qualname__)

    test.body = body  # type: ignore[attr-defined]
    test.__name__ = body.__name__
    return test


def run(name: str) -> None:
    getattr(sys.modules[__name__], name).body()


# -- what callees do


def work(x: torch.Tensor, _: object = None) -> torch.Tensor:
    with record_function("block"):
        return x.mul(2).relu()


def fail(x: torch.Tensor) -> None:
    x.mul(2)
    raise KeyError("as it was")


def doze(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.ones(1).neg()


def pass_on(x: torch.Tensor, to: str) -> Any:
    return calls.rpc_sync(to, torch.mul, args=(x, 3))


@rpc.functions.async_execution
def pass_on_later(x: torch.Tensor, to: str) -> Any:
    return calls.rpc_async(to, torch.mul, args=(x, 3)).then(lambda future: future.wait().neg())


@rpc.functions.async_execution
def pass_on_when_done(x: torch.Tensor, to: str) -> Any:
    future = calls.rpc_async(to, torch.mul, args=(x, 3))
    future.wait()
    return future.then(lambda done: done.wait().neg())


class Box:
    def work(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)

    @rpc.functions.async_execution
    def later(self, x: torch.Tensor) -> Any:
        return calls.rpc_async("worker2", torch.mul, args=(x, 3))


class Keeper(rpc.Actor):
    def work(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)


class SlowToRead:
    """Takes the receiver 50 ms."""

    def __reduce__(self) -> Any:
        return time.sleep, (0.05,)


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("stays here")


def kept_runs() -> int:
    runs = session.current().worker.services.get(recorder._Runs)
    return len(runs._runs) + len(runs._unwanted) if runs is not None else 0


def names(events: Any) -> list[str]:
    return [event.name for event in events]


def named(events: Any, name: str) -> Any:
    found = [event for event in events if event.name == name]
    assert len(found) == 1, (name, names(events))
    return found[0]


def lies_within(inner: Any, outer: Any) -> bool:
    return bool(outer.time_range.start <= inner.time_range.start <= inner.time_range.end <= outer.time_range.end)


# -- what is in a profile


@inside
def test_what_a_callee_does_is_in_the_callers_profile_under_the_calls_name() -> None:
    x = torch.ones(2)
    ways: dict[str, Callable[[str], torch.Tensor]] = {
        "rpc_sync": lambda to: calls.rpc_sync(to, work, args=(x,)),
        "rpc_async": lambda to: calls.rpc_async(to, work, kwargs={"x": x}).wait(),
        "rpc_remote": lambda to: calls.remote(to, work, args=(x,)).to_here(),
    }
    for verb, way in ways.items():
        for rank in range(3):
            with profile() as prof:
                assert way(f"worker{rank}").equal(x * 2)
            key = f"{verb}#work(worker0 -> worker{rank})"
            span, block = named(prof.function_events, key), named(prof.function_events, f"{key}{REMOTE}block")
            product = named(prof.function_events, f"{key}{REMOTE}aten::mul")
            assert block.is_remote
            assert block.node_id == rank
            assert not span.is_remote
            assert product in block.cpu_children
            assert not span.cpu_children
            assert verb == "rpc_remote" or lies_within(block, span)


@inside
def test_operators_and_scripted_functions_are_named_as_torch_names_them() -> None:
    from tests.reference.scripted import scale

    with profile() as prof:
        calls.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        calls.rpc_sync("worker2", scale, args=(torch.ones(1),))
    added = f"rpc_sync#aten::add(worker0 -> worker1){REMOTE}aten::add"
    scripted = f"rpc_sync#{scale.qualified_name}(worker0 -> worker2){REMOTE}aten::mul"
    assert {added, scripted} <= set(names(prof.function_events))


@inside
def test_shapes_and_memory_are_recorded_where_they_are_asked_for() -> None:
    def product(**settings: bool) -> Any:
        with profile(**settings) as prof:
            calls.rpc_sync("worker1", torch.mul, args=(torch.ones(3, 2), torch.ones(2)))
        return named(prof.function_events, f"rpc_sync#aten::mul(worker0 -> worker1){REMOTE}aten::mul")

    assert product(record_shapes=True).input_shapes == [[3, 2], [2]]
    assert product(profile_memory=True).cpu_memory_usage == 24
    plain = product()
    assert not plain.input_shapes
    assert plain.cpu_memory_usage == 0


@inside
def test_the_span_of_a_call_lasts_until_its_answer() -> None:
    with profile() as prof, record_function("outer"):
        future = calls.rpc_async("worker1", doze, args=(0.05,))
        future.wait()
    key = "rpc_async#doze(worker0 -> worker1)"
    span, outer = named(prof.function_events, key), named(prof.function_events, "outer")
    assert span.cpu_time_total >= 50_000
    assert span.is_async
    assert lies_within(span, outer)
    last = named(prof.function_events, f"{key}{REMOTE}aten::neg")
    assert lies_within(last, span)
    assert last.time_range.start >= span.time_range.start + 50_000
    assert names(prof.function_events).index("outer") < names(prof.function_events).index(key)


@inside
def test_what_a_callee_does_stands_where_it_was_done() -> None:
    with profile() as prof:
        calls.rpc_sync("worker1", work, args=(torch.ones(1),), kwargs={"_": SlowToRead()})
    key = "rpc_sync#work(worker0 -> worker1)"
    block, span = named(prof.function_events, f"{key}{REMOTE}block"), named(prof.function_events, key)
    assert block.time_range.start >= span.time_range.start + 50_000
    assert lies_within(block, span)


@inside
def test_calls_that_a_callee_makes_are_in_the_profile_under_both_names() -> None:
    with profile() as prof:
        calls.rpc_sync("worker1", pass_on, args=(torch.ones(1), "worker2"))
    outer, inner = "rpc_sync#pass_on(worker0 -> worker1)", "rpc_sync#aten::mul(worker1 -> worker2)"
    span = named(prof.function_events, f"{outer}{REMOTE}{inner}")
    product = named(prof.function_events, f"{outer}{REMOTE}{inner}{REMOTE}aten::mul")
    assert (span.node_id, product.node_id) == (1, 2)
    assert lies_within(span, named(prof.function_events, outer))
    assert lies_within(product, span)


@inside
def test_a_function_that_answers_later_is_recorded_with_its_calls_and_callbacks() -> None:
    with profile() as prof:
        assert calls.rpc_async("worker1", pass_on_later, args=(torch.ones(1), "worker2")).wait() == -3
    outer, inner = "rpc_async#pass_on_later(worker0 -> worker1)", "rpc_async#aten::mul(worker1 -> worker2)"
    product = named(prof.function_events, f"{outer}{REMOTE}{inner}{REMOTE}aten::mul")
    negation = named(prof.function_events, f"{outer}{REMOTE}aten::neg")
    assert (product.node_id, negation.node_id) == (2, 1)
    assert lies_within(negation, named(prof.function_events, outer))
    assert negation.time_range.start >= product.time_range.end


@inside
def test_a_callback_that_runs_at_once_is_recorded_once() -> None:
    with profile() as prof:
        assert calls.rpc_async("worker1", pass_on_when_done, args=(torch.ones(1), "worker2")).wait() == -3
    negation = "rpc_async#pass_on_when_done(worker0 -> worker1)#remote_op: aten::neg"
    assert names(prof.function_events).count(negation) == 1


@inside
def test_callbacks_of_futures_are_recorded_on_the_callers_side() -> None:
    with profile() as prof:
        first = calls.rpc_async("worker1", doze, args=(0.02,))
        second = first.then(lambda future: future.wait().sin()).then(lambda future: future.wait().cos())
        second.wait()
    sine, cosine = named(prof.function_events, "aten::sin"), named(prof.function_events, "aten::cos")
    assert not sine.is_remote
    assert sine.time_range.start >= 20_000
    assert cosine.time_range.start >= sine.time_range.end


@inside
def test_what_hangs_on_torchs_part_of_a_future_has_run_when_it_was_waited_for() -> None:
    for _ in range(20):
        with profile():
            future = calls.rpc_async("worker1", abs, args=(-1,))
            both = torch.futures.collect_all([future])
            assert future.wait() == 1
            assert both.done()


@inside
def test_methods_that_are_called_through_references_are_recorded() -> None:
    x = torch.ones(1)
    for kind in (Box, Keeper):
        ref = calls.remote("worker1", kind)
        with profile() as prof:
            assert ref.rpc_sync().work(x) == 2
            assert ref.rpc_async().work(x).wait() == 2
            assert ref.remote().work(x).to_here() == 2
        for verb in ("rpc_sync", "rpc_async", "rpc_remote"):
            product = named(prof.function_events, f"{verb}#work(worker0 -> worker1){REMOTE}aten::mul")
            assert product.node_id == 1
    with profile() as prof:
        assert calls.remote("worker1", Box).rpc_sync().later(x) == 3
    outer, inner = "rpc_sync#later(worker0 -> worker1)", "rpc_async#aten::mul(worker1 -> worker2)"
    assert named(prof.function_events, f"{outer}{REMOTE}{inner}{REMOTE}aten::mul").node_id == 2


@inside
def test_threads_that_profile_at_the_same_time_have_each_their_own() -> None:
    found: dict[int, list[str]] = {}
    both = threading.Barrier(2)

    def trace(rank: int) -> None:
        with profile() as prof:
            both.wait(10)
            for _ in range(3):
                calls.rpc_sync(rank, work, args=(torch.ones(1),))
            both.wait(10)
        found[rank] = [name for name in names(prof.function_events) if name.endswith("aten::mul")]

    threads = [threading.Thread(target=trace, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {rank: [f"rpc_sync#work(worker0 -> worker{rank}){REMOTE}aten::mul"] * 3 for rank in (1, 2)}


@inside
def test_tables_and_traces_are_made_of_the_whole_profile() -> None:
    with profile(profile_memory=True) as prof:
        calls.rpc_sync("worker1", work, args=(torch.ones(1),))
    key = f"rpc_sync#work(worker0 -> worker1){REMOTE}aten::mul"
    assert key in {row.key for row in prof.key_averages()}
    assert key in prof.key_averages().table(max_name_column_width=200)
    path = Path(f"{os.environ['TMPDIR']}/trace.json")
    prof.export_chrome_trace(str(path))
    assert key in {event["name"] for event in json.loads(path.read_text())}


# -- calls are as they are without a profiler


@inside
def test_errors_come_as_they_do_without_a_profiler() -> None:
    def outcome(call: Callable[[], Any]) -> tuple[type, str]:
        try:
            call()
        except Exception as e:
            return type(e), str(e)
        raise AssertionError("it did not fail")

    x = torch.ones(1)
    attempts: list[Callable[[], Any]] = [
        lambda: calls.rpc_sync("worker1", fail, args=(x,)),
        lambda: calls.rpc_async("worker1", fail, args=(x,)).wait(),
        lambda: calls.remote("worker1", fail, args=(x,)).to_here(),
        lambda: calls.rpc_sync("worker7", work, args=(x,)),
        lambda: calls.rpc_sync("worker1", 7),
        lambda: calls.rpc_sync("worker1", work, args=x),
        lambda: calls.rpc_sync("worker1", work, args=(Unsendable(),)),
        lambda: calls.rpc_sync("worker1", doze, args=(0.5,), timeout=0.05),
        lambda: calls.remote("worker1", Box).rpc_sync().missing(),
    ]
    for attempt in attempts:
        plain = outcome(attempt)
        with profile():
            profiled = outcome(attempt)
        assert profiled == plain
    with profile() as prof:
        outcome(attempts[0])
    assert named(prof.function_events, f"rpc_sync#fail(worker0 -> worker1){REMOTE}aten::mul").node_id == 1


@inside
def test_a_call_that_could_not_leave_shifts_nothing_to_the_next_one() -> None:
    with profile() as prof:
        for _ in range(2):
            with pytest.raises(rpc.SerializationError):
                calls.rpc_sync("worker1", doze, args=(Unsendable(),))
        calls.rpc_sync("worker1", doze, args=(0.05,))
    key = "rpc_sync#doze(worker0 -> worker1)"
    spans = [event for event in prof.function_events if event.name == key]
    assert [span.cpu_time_total >= 50_000 for span in spans] == [False, False, True]
    assert lies_within(named(prof.function_events, f"{key}{REMOTE}aten::neg"), spans[-1])


@inside
def test_gradients_are_the_same_under_a_profile() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id, profile():
        loss = calls.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [3, 3]


def test_what_was_recorded_goes_when_the_profile_ends(trio: World) -> None:
    def leave_one() -> None:
        with profile():
            calls.rpc_sync("worker1", work, args=(torch.ones(1),))
            began = calls.rpc_async("worker1", doze, args=(0.2,))
            waits = calls.rpc_async("worker1", work, args=(torch.ones(1), SlowToRead()))
        assert (began.wait(), waits.wait()) == (-1, 2)

    trio.on(0, leave_one)
    trio.on(1, until, lambda: kept_runs() == 0)


@inside
def test_a_profile_does_not_wait_for_answers() -> None:
    with profile() as prof:
        future = calls.rpc_async("worker1", doze, args=(0.5,))
        assert not future.done()
    assert not future.done()
    assert not [event for event in prof.function_events if event.is_remote]
    future.wait()


def test_nothing_is_recorded_outside_of_a_profile(trio: World) -> None:
    def call() -> None:
        with profile():
            pass
        calls.rpc_sync("worker1", work, args=(torch.ones(1),))
        calls.remote("worker1", Box).rpc_sync().work(torch.ones(1))

    trio.on(0, call)
    assert trio.on(1, kept_runs) == 0


@inside
def test_the_newer_profilers_see_no_calls_as_in_torch() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        calls.rpc_sync("worker1", work, args=(torch.ones(1),))
    assert not [event.key for event in prof.key_averages() if "worker0 ->" in event.key]


def test_a_lost_callee_costs_a_profile_only_its_own_events() -> None:
    def trace() -> list[str]:
        profiler.install()
        logging.getLogger("actorrpc").setLevel(logging.CRITICAL)
        with profile() as prof:
            for to in ("worker1", "worker2"):
                calls.rpc_sync(to, work, args=(torch.ones(1),))
            with pytest.raises(rpc.WorkerLostError):
                calls.rpc_sync("worker1", os._exit, args=(0,))
        return names(prof.function_events)

    with World(3) as world:
        world.let_die(1)
        found = world.on(0, trace)
    assert f"rpc_sync#work(worker0 -> worker2){REMOTE}aten::mul" in found
    assert "rpc_sync#work(worker0 -> worker1)" in found
    assert f"rpc_sync#work(worker0 -> worker1){REMOTE}aten::mul" not in found


def refuse(*_: Any) -> Any:
    raise RuntimeError("not today")


def refuse_to_tell(refusing: bool) -> None:
    runs: Any = recorder._Runs
    if refusing:
        runs.plain_take, runs.take = runs.take, refuse
    else:
        runs.take = runs.plain_take


def test_a_callee_that_cannot_tell_costs_a_profile_only_its_own_events(trio: World) -> None:
    def trace() -> list[str]:
        with profile() as prof:
            for to in ("worker1", "worker2"):
                assert calls.rpc_sync(to, work, args=(torch.ones(1),)) == 2
        return names(prof.function_events)

    trio.on(1, refuse_to_tell, True)
    found = trio.on(0, trace)
    trio.on(1, refuse_to_tell, False)
    assert f"rpc_sync#work(worker0 -> worker2){REMOTE}aten::mul" in found
    assert f"rpc_sync#work(worker0 -> worker1){REMOTE}aten::mul" not in found


later = rpc.Future()  # type: ignore[var-annotated]


@rpc.functions.async_execution
def answer_later() -> Any:
    return later


def run_and_answer() -> list[bool]:
    worker = session.current().worker
    recorder.Recorded(answer_later, "f", (worker.id, -1), {})()
    run = recorder._runs_of(worker)._runs.pop((worker.id, -1))
    ended = [run.ended > 0]
    later.set_result(1)
    return [*ended, run.ended > 0]


@inside
def test_a_function_that_answers_later_has_run_when_it_has_answered() -> None:
    assert calls.rpc_sync("worker1", run_and_answer) == [False, True]


# -- all that a process does for others


def begin_profile(box: list[Any]) -> None:
    torch_rpc: Any = importlib.import_module("torch.distributed.rpc")
    box.append(torch_rpc._server_process_global_profile().__enter__())


PROFILES: list[Any] = []


def enter_one() -> None:
    begin_profile(PROFILES)


def leave_one() -> list[str]:
    prof = PROFILES.pop()
    prof.__exit__(None, None, None)
    assert len(prof.key_averages()) > 0
    return [events[0].name for events in prof.process_global_function_events]


@inside
def test_a_server_process_records_what_it_does_for_others_in_all_open_profiles() -> None:
    x, ref = torch.ones(1), calls.remote("worker1", Box)
    calls.rpc_sync("worker1", enter_one)
    calls.rpc_sync("worker1", torch.add, args=(x, 1))
    calls.rpc_sync("worker1", enter_one)
    ref.rpc_sync().work(x)
    with profile() as prof:  # which takes nothing away from the others
        calls.rpc_sync("worker1", torch.sub, args=(x, 1))
    inner = calls.rpc_sync("worker1", leave_one)
    calls.rpc_sync("worker1", torch.neg, args=(x,))
    outer = calls.rpc_sync("worker1", leave_one)
    calls.rpc_sync("worker1", torch.neg, args=(x,))
    assert sorted(inner) == ["aten::mul", "aten::sub"]
    assert sorted(outer) == ["aten::add", "aten::mul", "aten::neg", "aten::sub"]
    named(prof.function_events, f"rpc_sync#aten::sub(worker0 -> worker1){REMOTE}aten::sub")


# -- clocks


def test_events_are_placed_by_a_common_clock_or_amid_the_round_trip() -> None:
    sent, ended = 1_000, 2_000
    assert recorder._offset(recorder.Heard(1_300, 1_500, []), sent, ended) == 300
    for stranger in (900, 1_900, 77_000_000):  # begins before the call, or ends after it
        assert recorder._offset(recorder.Heard(stranger, stranger + 200, []), sent, ended) == 400
    assert recorder._offset(recorder.Heard(0, 5_000, []), sent, ended) == 0
