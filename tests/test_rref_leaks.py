"""The report of references that are left at a graceful shutdown: who holds what of whom, and where it was made."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from tests import worlds
from tests.worlds import Options, Outcome, World

HERE = Path(__file__).name
KEPT: list[Any] = []


class Thing:
    pass


class Worker(rpc.Actor):
    def get(self) -> int:
        return 1


def keep(value: Any) -> None:
    KEPT.append(value)


def make_ref() -> Any:
    return rpc.RRef(Thing())


def line_of(text: str) -> int:
    """The number of the one line of this file that ends with a mark."""
    (found,) = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}")]
    return found


def play(program: Any, options: Options | list[Options], environment: str = "", size: int = 2) -> list[Outcome]:
    with World(size, options=options, join=False) as world:
        for rank in range(size):
            world.start(rank, _run, program, rank, world.plan, environment)
        outcomes = world.outcomes()
    assert [o.traceback for o in outcomes] == [""] * size, [o.traceback for o in outcomes]
    return outcomes


def _run(program: Any, rank: int, plan: Any, environment: str) -> None:
    if environment:
        os.environ["ACTORRPC_REPORT_LEAKS"] = environment
    worlds.join(rank, plan)
    program(rank)
    rpc.shutdown()


def leak(rank: int) -> None:
    if rank == 0:
        KEPT.append(rpc.remote(1, Thing))  # the leak
        KEPT.append(rpc.rpc_sync(1, make_ref))
        KEPT[0].to_here()


@pytest.mark.parametrize("way", ["option", "environment"])
def test_references_held_at_shutdown_are_listed_with_where_they_were_made(way: str) -> None:
    mine, theirs = play(leak, {"report_leaks": True} if way == "option" else {}, "1" if way == "environment" else "")
    assert mine.stderr.count("at shutdown") == 1
    assert "2 references to others' objects are still held here" in mine.stderr
    assert "others hold 0 of its own" in mine.stderr
    held = [line for line in mine.stderr.splitlines() if "held: " in line]
    assert len(held) == 2
    made, came = sorted(held, key=lambda line: "in a message" in line)
    assert "Thing on worker1, made at" in made
    assert made.endswith(f"{HERE}:{line_of('the leak')}")
    assert "an object of worker1, came in a message from worker1, read at" in came
    assert theirs.stderr.count("at shutdown") == 1
    assert "others hold 2 of its own" in theirs.stderr
    owned = [line for line in theirs.stderr.splitlines() if "owned: " in line]
    assert len(owned) == 2
    assert all("Thing, held by worker0, made" in line for line in owned)
    assert sum("by a call of worker0" in line for line in owned) == 1


def give_away(rank: int) -> None:
    if rank == 0:
        ref = rpc.RRef(Thing())  # given away
        KEPT.append(ref)
        for other in (1, 2):
            rpc.rpc_sync(other, keep, args=(ref,))


def test_the_owner_lists_who_holds_its_objects_and_where_it_made_them() -> None:
    outcomes = play(give_away, [{"report_leaks": True}, {}, {}], size=3)
    (line,) = [line for line in outcomes[0].stderr.splitlines() if "owned: " in line]
    assert "Thing, held by worker1, worker2, made at" in line
    assert line.endswith(f"{HERE}:{line_of('given away')}")
    assert [o.stderr for o in outcomes[1:]] == ["", ""]  # each worker's own option


def type_is_known(rank: int) -> None:
    if rank == 0:
        KEPT.append(rpc.rpc_sync(1, make_ref))
        KEPT[0]._get_type()


def test_the_type_is_named_where_it_is_known() -> None:
    mine, _ = play(type_is_known, {"report_leaks": True})
    assert "held: Thing on worker1" in mine.stderr


def clean(rank: int) -> None:
    refs: list[Any] = [rpc.remote(1 - rank, Thing), rpc.remote(rank, Thing), rpc.RRef(Thing()), Worker.spawn(1 - rank)]
    refs[3].rpc_sync().get()
    rpc.rpc_sync(1 - rank, str, args=(refs[2:],))
    KEPT.append(refs[1:3])  # its own objects, which nobody else holds
    ring: list[Any] = [refs[0]]
    ring.append(ring)
    gc.disable()
    del refs, ring  # dropped right before the end, partly in a cycle


def test_what_is_dropped_or_only_garbage_or_held_by_its_owner_alone_is_no_leak() -> None:
    for _ in range(3):
        assert [o.stderr for o in play(clean, {"report_leaks": True})] == ["", ""]


def test_the_environments_zero_and_the_options_false_are_off() -> None:
    assert [o.stderr for o in play(leak, {}, "0")] == ["", ""]
    assert [o.stderr for o in play(leak, {"report_leaks": False}, "1")] == ["", ""]
