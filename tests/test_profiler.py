"""`profile_world`: what is in the file, and what the file says of what is not. Real processes."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

import actorrpc as rpc
from actorrpc import autograd as dist_autograd
from actorrpc import profiler, session
from actorrpc.merging import best_of
from actorrpc.runtime.message import Message
from actorrpc.services import tracing, witness
from actorrpc.services.taps import Taps
from tests.joining import options
from tests.worlds import World, until

Event = dict[str, Any]
ROUNDING = 0.01


@pytest.fixture
def trio(standing_trio: World) -> World:
    return standing_trio


# -- what workers do


def work(x: torch.Tensor) -> torch.Tensor:
    with record_function("block"):
        return x.mul(2)


def pass_on(x: torch.Tensor, to: str) -> Any:
    return rpc.rpc_sync(to, work, args=(x,))


def fail() -> None:
    raise KeyError("as it was")


class Box(rpc.Actor):
    def work(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)

    def items(self, count: int) -> Iterator[int]:
        for number in range(count):
            time.sleep(0.01)
            yield number

    async def later(self, x: torch.Tensor) -> Any:
        return await rpc.rpc_async("worker2", work, args=(x,))


def calls() -> None:
    x = torch.ones(2)
    rpc.rpc_sync("worker1", pass_on, args=(x, "worker2"))
    rpc.rpc_async("worker1", work, args=(x,)).wait()
    rpc.remote("worker1", work, args=(x,)).to_here()
    box = Box.spawn("worker1")
    box.rpc_sync().work(x)
    box.rpc_async().later(x).wait()
    box.tell().work(x)
    box.rpc_sync().work(x)
    with pytest.raises(KeyError):
        rpc.rpc_sync("worker1", fail)


def stream() -> None:
    assert list(Box.spawn("worker1").stream().items(6)) == list(range(6))


def recorded(path: str, what: str = "calls", **settings: Any) -> profiler.WorldProfile:
    """Records what a function of this module does."""
    with profiler.profile_world(path, **settings) as found:
        globals()[what]()
    return found


def watched() -> list[str]:
    """Returns what is around this worker's functions, for somebody who looks on at calls."""
    worker = session.current().worker
    taps: Taps | None = worker.services.get(Taps)
    names = [] if taps is None else [name for _, name in taps._layers if name != "stop"]
    return names + ([] if worker.message_class is Message else ["message_class"])


# -- what is in a file


def read(path: str | Path) -> tuple[list[Event], Event]:
    data = json.loads(Path(path).read_text())
    return data["traceEvents"], data["otherData"]


def named(events: list[Event], name: str, row: int, kind: str = "") -> Event:
    found = [e for e in events if (e["name"], e["pid"], e["ph"]) == (name, row, "X") and (not kind or e["cat"] == kind)]
    assert len(found) == 1, (name, row, sorted({e["name"] for e in events}))
    return found[0]


def named_thread(events: list[Event]) -> int:
    """Returns the thread of worker0 that made most of its calls."""
    threads: list[int] = [
        event["tid"] for event in events if (event["ph"], event["pid"], event.get("cat")) == ("X", 1, "call")
    ]
    return max(threads, key=threads.count)


def lies_within(inner: Event, outer: Event) -> bool:
    begun, ended = inner["ts"], inner["ts"] + inner.get("dur", 0)
    return bool(outer["ts"] - ROUNDING <= begun and ended <= outer["ts"] + outer["dur"] + ROUNDING)


def test_a_call_is_in_the_rows_of_its_caller_and_its_callee_under_one_name(trio: World, tmp_path: Path) -> None:
    found = trio.on(0, recorded, f"{tmp_path}/trace.json")
    assert (found.workers, found.late, found.missing) == (["worker0", "worker1", "worker2"], {}, {})
    assert "ui.perfetto.dev" in str(found)
    events, about = read(tmp_path / "trace.json")
    assert about["workers"] == found.workers
    for key, caller, callee in (
        ("rpc_sync#pass_on(worker0 -> worker1)", 1, 2),
        ("rpc_sync#work(worker1 -> worker2)", 2, 3),
        ("rpc_async#work(worker0 -> worker1)", 1, 2),
        ("rpc_remote#work(worker0 -> worker1)", 1, 2),
        ("to_here#(worker0)->(worker1)", 1, 2),
        ("rpc_async#later(worker0 -> worker1)", 1, 2),
        ("rpc_async#work(worker1 -> worker2)", 2, 3),
        ("tell#work(worker0 -> worker1)", 1, 2),
        ("rpc_sync#fail(worker0 -> worker1)", 1, 2),
    ):
        sent, served = named(events, key, caller, "call"), named(events, key, callee, "serve")
        assert sent["args"]["call"] == served["args"]["call"]
        assert served["ts"] >= sent["ts"]
        assert sent["args"].get("failed", False) is ("fail" in key)
    outer = named(events, "rpc_sync#pass_on(worker0 -> worker1)", 1)
    handled = named(events, "rpc_sync#pass_on(worker0 -> worker1)", 2)
    inner = named(events, "rpc_sync#work(worker1 -> worker2)", 2)
    assert lies_within(inner, handled)
    assert inner["tid"] == handled["tid"]
    begins = named(events, "rpc_sync#work(worker1 -> worker2)", 3)["ts"]  # its thread may end later than its answer
    assert outer["ts"] <= begins <= outer["ts"] + outer["dur"]
    assert (
        named(events, "rpc_async#work(worker1 -> worker2)", 2)["args"]["within"]
        == (named(events, "rpc_async#later(worker0 -> worker1)", 2)["args"]["call"])
    )


def test_arrows_lead_from_slice_to_slice_there_and_back(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json")
    events, _ = read(tmp_path / "trace.json")
    ends: dict[str, dict[str, Event]] = {}
    for event in events:
        if event["ph"] in "sf" and event["cat"] == "call":
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event
    assert len(ends) > 16
    slices = [e for e in events if e["ph"] == "X" and e["cat"] in ("call", "serve", "part")]
    for flow, pair in ends.items():
        assert set(pair) == {"s", "f"}, flow
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for event in pair.values():
            here = [s for s in slices if (s["pid"], s["tid"]) == (event["pid"], event["tid"])]
            assert any(lies_within(event, one) for one in here), event
    caller, number = map(int, named(events, "tell#work(worker0 -> worker1)", 1)["args"]["call"].split("."))
    assert tracing.flow_id(caller, number) in ends
    assert tracing.flow_id(caller, number, back=True) not in ends


def test_perfetto_takes_the_ids_of_all_arrows(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json", "step")
    events, _ = read(tmp_path / "trace.json")
    arrows = [event for event in events if event["ph"] in "stf"]
    assert {"call", "fwdbwd"} <= {event["cat"] for event in arrows}
    for event in arrows:
        assert int(event["id"], 16) < 2**64, event  # others are `flow_invalid_id` to it, and not drawn


def test_what_lasts_beyond_its_thread_belongs_to_its_worker(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json")
    events, _ = read(tmp_path / "trace.json")
    lasting = [event for event in events if event["ph"] in "be" and event["cat"] == "lasting"]
    assert {event["pid"] for event in lasting if "#later(" in event["name"]} == {1, 2}
    assert not [event for event in lasting if "id" in event]  # Perfetto would show it under no worker
    ends = [(event["pid"], event["id2"]["local"], event["ph"]) for event in lasting]
    assert len(ends) == len(set(ends))
    assert {(row, which, "e") for row, which, phase in ends if phase == "b"} == {one for one in ends if one[2] == "e"}


def test_the_items_of_a_stream_that_are_under_way_together_do_not_overlap_in_a_row(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json", "stream")
    events, _ = read(tmp_path / "trace.json")
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert sum("items(worker0 -> worker1)" in event["name"] for event in rows[1, named_thread(events)]) > 6
    for row in rows.values():
        for one, other in itertools.combinations(sorted(row, key=lambda e: (e["ts"], -e["dur"])), 2):
            assert other["ts"] >= one["ts"] + one["dur"] - ROUNDING or lies_within(other, one), (one, other)


def test_torchs_operators_lie_within_the_calls_that_run_them(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json")
    events, _ = read(tmp_path / "trace.json")
    served = named(events, "rpc_sync#work(worker1 -> worker2)", 3)
    inside = [e for e in events if e["ph"] == "X" and e["pid"] == 3 and e["tid"] == served["tid"]]
    assert {"block", "aten::mul"} <= {e["name"] for e in inside if lies_within(e, served)}


def test_rows_are_named_after_workers_and_threads(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json")
    events, _ = read(tmp_path / "trace.json")
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "worker0"), (2, "worker1"), (3, "worker2")}
    (labels,) = [e["args"]["labels"] for e in events if e["name"] == "process_labels" and e["pid"] == 2]
    assert f"pid {trio.pid(1)}" in labels
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= set(threads)
    assert "MainThread" in threads.values()
    assert any(name.startswith("worker1-hand") for name in threads.values())


def step() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", pass_on, args=(x, "worker2")).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [2, 2]


def test_a_backward_pass_is_on_every_worker_that_takes_part(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json", "step")
    events, _ = read(tmp_path / "trace.json")
    name = witness.BACKWARD
    root = named(events, name, 1)
    begun = named(events, f"rpc_async#{name}(worker0 -> worker1)", 1)
    assert lies_within(begun, root)
    part = named(events, f"rpc_async#{name}(worker0 -> worker1)", 2)
    last = named(events, f"rpc_async#{name}(worker1 -> worker2)", 3)
    assert lies_within(named(events, f"rpc_async#{name}(worker1 -> worker2)", 2), part)
    done = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 3 and lies_within(e, last)]
    assert any("MulBackward" in one for one in done), done


def test_a_name_that_ends_in_gz_has_it_packed(trio: World, tmp_path: Path) -> None:
    trio.on(0, recorded, f"{tmp_path}/trace.json.gz")
    data = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert named(data["traceEvents"], "rpc_sync#pass_on(worker0 -> worker1)", 2)


# -- bounds


def test_nothing_is_left_around_calls_afterwards(trio: World, tmp_path: Path) -> None:
    before = trio.everywhere(watched)
    assert before == [[], [], []]
    trio.on(0, recorded, f"{tmp_path}/trace.json")
    assert trio.everywhere(watched) == before
    assert not list(Path(trio.folder).glob("actorrpc-trace-*"))


def test_what_was_left_out_is_said(trio: World, tmp_path: Path) -> None:
    found = trio.on(0, lambda path: recorded(path, max_calls=4, max_operators=3), f"{tmp_path}/trace.json")
    events, about = read(tmp_path / "trace.json")
    assert len([e for e in events if e["ph"] == "X" and e["cat"] in ("call", "serve") and e["pid"] == 2]) == 4
    assert len([e for e in events if e["ph"] == "X" and e["cat"] == "cpu_op" and e["pid"] == 2]) <= 3
    calls_note, events_note = about["left out"]["worker1"]
    assert "calls were left out after the first 4 (max_calls)" in calls_note
    assert "of torch's events there are only the first 3" in events_note
    assert calls_note in str(found)


def work_until_ended() -> None:
    """Works until torch's profiler has been ended in this process."""
    until(lambda: not torch.autograd.profiler._is_profiler_enabled)
    calls()


def test_torchs_profiler_is_ended_early_where_it_lasts_too_long(trio: World, tmp_path: Path) -> None:
    trio.on(0, lambda path: recorded(path, "work_until_ended", max_seconds=0.1), f"{tmp_path}/trace.json")
    events, about = read(tmp_path / "trace.json")
    assert "torch's operators are missing after the first" in about["left out"]["worker0"][0]
    assert named(events, "rpc_sync#pass_on(worker0 -> worker1)", 2)


class Held:
    """What a worker has begun by itself."""

    profile: Any = None


def begin_own() -> None:
    Held.profile = torch.autograd.profiler.profile()
    Held.profile.__enter__()


def end_own() -> None:
    Held.profile.__exit__(None, None, None)


def test_a_worker_that_profiles_by_itself_is_recorded_without_operators(trio: World, tmp_path: Path) -> None:
    trio.on(1, begin_own)
    try:
        trio.on(0, recorded, f"{tmp_path}/trace.json")
    finally:
        trio.on(1, end_own)
    events, about = read(tmp_path / "trace.json")
    assert "in use there already" in about["left out"]["worker1"][0]
    assert named(events, "rpc_sync#pass_on(worker0 -> worker1)", 2)
    assert not [e for e in events if e["pid"] == 2 and e.get("cat") == "cpu_op"]
    assert [e for e in events if e["pid"] == 3 and e.get("cat") == "cpu_op"]


def test_a_file_that_cannot_be_written_is_said_before_anything_is_recorded(trio: World, tmp_path: Path) -> None:
    def attempt(path: str) -> list[str]:
        with pytest.raises(FileNotFoundError):
            recorded(path)
        return watched()

    assert trio.on(0, attempt, f"{tmp_path}/nowhere/trace.json") == []


def test_an_error_of_the_block_goes_on_and_the_file_is_there(trio: World, tmp_path: Path) -> None:
    def attempt(path: str) -> None:
        with pytest.raises(KeyError), profiler.profile_world(path, operators=False):
            rpc.rpc_sync("worker1", fail)

    trio.on(0, attempt, f"{tmp_path}/trace.json")
    assert named(read(tmp_path / "trace.json")[0], "rpc_sync#fail(worker0 -> worker1)", 2)


def record_twice(path: str) -> profiler.WorldProfile:
    with profiler.profile_world(path, operators=False) as found:
        rpc.rpc_sync("worker1", abs, args=(-1,))
        with pytest.raises(FileExistsError, match="another recording is being written to it"):
            recorded(path)
        rpc.rpc_sync("worker1", abs, args=(-1,))
    return found


def test_a_second_recording_into_the_same_file_is_refused_while_the_first_lasts(trio: World, tmp_path: Path) -> None:
    for _ in range(2):  # and not afterwards
        found = trio.on(0, record_twice, f"{tmp_path}/trace.json")
        assert len(found.workers) == 3
        events, _ = read(tmp_path / "trace.json")
        assert sum(e["name"] == "rpc_sync#abs(worker0 -> worker1)" and e["ph"] == "X" for e in events) == 4


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"max_calls": -1}, {"max_seconds": -1.0}])
def test_bounds_that_are_none_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout must be"), profiler.profile_world(tmp_path / "t", **wrong):
        pass
    assert not (tmp_path / "t").exists()


def test_outside_of_a_world_there_is_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(rpc.NotAMemberError), profiler.profile_world(tmp_path / "t"):
        pass


# -- workers that come and go


def come(rank: int, method: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options(method))


def call_when_there(path: str, flag: str) -> profiler.WorldProfile:
    with profiler.profile_world(path, operators=False) as found:
        Path(flag).touch()
        until(lambda: "w2" in found.late, 20)
        rpc.rpc_sync("w2", abs, args=(-1,))
    return found


def test_a_worker_that_joins_later_is_in_the_file_and_named(meet: str, tmp_path: Path) -> None:
    path, flag = f"{tmp_path}/trace.json", f"{tmp_path}/begun"
    with World(3, join=False, timeout=60) as world:
        for rank in (0, 1):
            world.on(rank, come, rank, meet)
        world.start(0, call_when_there, path, flag)
        until(Path(flag).exists, 20)
        world.start(2, come, 2, meet)
        found = world.result(0)
        world.result(2)
        assert list(found.late) == ["w2"]
        assert found.late["w2"] > 0
        events, about = read(path)
        assert about["joined late (seconds)"] == found.late
        assert named(events, "rpc_sync#abs(w0 -> w2)", named_row(events, "w2"), "serve")
        for rank in (2, 1, 0):
            world.on(rank, rpc.shutdown, False)


def named_row(events: list[Event], name: str) -> int:
    (row,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == name]
    return int(row)


def is_lost(name: str) -> bool:
    try:
        rpc.rpc_sync(name, abs, args=(-1,))
    except rpc.WorkerLostError:
        return True
    return False


def kill_in_between(path: str, pid: int) -> profiler.WorldProfile:
    with profiler.profile_world(path, operators=False) as found:
        assert rpc.rpc_sync("worker2", abs, args=(-1,)) == 1
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_lost("worker2"), 20)
        rpc.rpc_sync("worker1", abs, args=(-1,))
    return found


def test_a_worker_that_dies_is_named_and_the_others_are_in_the_file(tmp_path: Path) -> None:
    path = f"{tmp_path}/trace.json"
    with World(3, timeout=60) as world:
        world.let_die(2)
        found = world.on(0, kill_in_between, path, world.pid(2))
        assert found.workers == ["worker0", "worker1"]
        assert "lost while it was recorded" in found.missing["worker2"]
        events, about = read(path)
        assert about["not in the file, or not whole"] == found.missing
        assert named(events, "rpc_sync#abs(worker0 -> worker1)", 2)
        assert [e for e in events if e["name"] == "rpc_sync#abs(worker0 -> worker2)" and e["pid"] == 1]
        for rank in (0, 1):
            world.on(rank, rpc.shutdown, False)


def record_for_ever(path: str) -> None:
    with profiler.profile_world(path):
        time.sleep(60)


def test_nobody_goes_on_recording_for_one_who_is_gone(tmp_path: Path) -> None:
    with World(2, timeout=60) as world:
        world.let_die(0)
        world.start(0, record_for_ever, f"{tmp_path}/trace.json")
        world.on(1, until, lambda: watched() and torch.autograd.profiler._is_profiler_enabled, 20)
        world.kill(0)
        world.on(1, until, lambda: not watched() and not torch.autograd.profiler._is_profiler_enabled, 20)
        world.on(1, rpc.shutdown, False)


# -- clocks


def test_the_quickest_round_trip_tells_of_the_clock() -> None:
    clock = best_of([(0, 5_400, 1_000), (2_000, 7_110, 2_200), (3_000, 9_000, 5_000)])
    assert (clock.at, clock.offset, clock.within) == (7_110, 5_010, 100)


def test_a_clock_that_drifts_is_followed() -> None:
    clocks = tracing.Clocks(at=1_000, offset=100, later=3_000, offset_later=300, origin=500)
    assert clocks.microseconds(1_000) == 0.4
    assert clocks.microseconds(2_000) == 1.3
    assert clocks.microseconds(3_000) == 2.2


def shift_clock(seconds: int) -> None:
    """Has this worker note down by a clock that is ahead."""
    for module in (tracing, witness):
        shifted: Any = module
        shifted.monotonic_ns = lambda: time.monotonic_ns() + seconds * 10**9


def record_elsewhere(path: str) -> profiler.WorldProfile:
    """Takes worker1 for one of another host."""
    peer = session.current().worker.peers[1]
    here = peer.record
    peer.record = dataclasses.replace(here, boot="another")
    try:
        with profiler.profile_world(path, operators=False) as found:
            for _ in range(20):
                rpc.rpc_sync("worker1", abs, args=(-1,))
        return found
    finally:
        peer.record = here


def test_the_clocks_of_other_hosts_are_brought_together(trio: World, tmp_path: Path) -> None:
    trio.on(1, shift_clock, 5)
    try:
        trio.on(0, record_elsewhere, f"{tmp_path}/trace.json")
    finally:
        trio.on(1, shift_clock, 0)
    events, about = read(tmp_path / "trace.json")
    clock = about["clocks"]["worker1"]
    assert not clock["same_host"]
    assert abs(clock["offset_us"] - 5e6) <= clock["within_us"] + 1
    slack = 2 * clock["within_us"] + 1_000
    sent = {e["args"]["call"]: e for e in events if e["ph"] == "X" and e["cat"] == "call" and e["pid"] == 1}
    served = {e["args"]["call"]: e for e in events if e["ph"] == "X" and e["cat"] == "serve" and e["pid"] == 2}
    assert set(sent) == set(served)
    for call, one in sent.items():
        assert one["ts"] - slack <= served[call]["ts"] <= one["ts"] + one["dur"] + slack
