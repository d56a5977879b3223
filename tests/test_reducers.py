"""Reducers of the user's own, in real worlds: `register_reducer`, `copyreg`, `__reduce__`."""

from __future__ import annotations

import copyreg
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc.testing import SimWorld
from tests.worlds import Plan, World, inside, join

OTHER = 1


class Table:
    """Holds something that no pickler takes."""

    def __init__(self, name: str, way: str = "made") -> None:
        self.name, self.way, self.lock = name, way, threading.Lock()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


class Wide(Table):
    pass


def open_table(name: str) -> Table:
    return Table(name, "opened")


def reopen_table(name: str) -> Table:
    return Table(name, "reopened")


def reduce_table(table: Table) -> Any:
    return open_table, (table.name,)


def register() -> None:
    rpc.register_reducer(Table, reduce_table)


def unregister() -> None:
    rpc.register_reducer(Table, None)


@pytest.fixture
def registered(pair: World) -> Any:
    pair.everywhere(register)  # in sessions that are open
    yield
    pair.everywhere(unregister)


def give(name: str) -> Table:
    return Table(name)


def way_of(table: Table) -> str:
    return table.way


class Bad(Exception):
    def __init__(self, table: Table) -> None:
        super().__init__(table)


def fail_with(name: str) -> None:
    raise Bad(Table(name))


class Shelf:
    def __init__(self, table: Table | None = None) -> None:
        self.tables = [] if table is None else [table]

    def put(self, table: Table) -> Table:
        self.tables.append(table)
        return table

    def all(self) -> list[Table]:
        return self.tables


@inside
def _everything() -> None:
    assert rpc.rpc_sync(OTHER, way_of, args=(Table("a"),)) == "opened"
    assert rpc.rpc_sync(OTHER, way_of, kwargs={"table": Table("a")}) == "opened"
    back = rpc.rpc_sync(OTHER, give, args=("b",))
    assert (back, back.way) == (Table("b"), "opened")
    assert rpc.rpc_async(OTHER, give, args=("b",)).wait().way == "opened"
    with pytest.raises(Bad) as caught:
        rpc.rpc_sync(OTHER, fail_with, args=("c",))
    assert caught.value.args[0].way == "opened"
    assert rpc.remote(OTHER, give, args=("d",)).to_here().way == "opened"
    shelf = rpc.remote(OTHER, Shelf, args=(Table("e"),))
    assert shelf.rpc_sync().put(Table("f")).way == "opened"
    assert shelf.rpc_async().put(Table("f")).wait().way == "opened"
    shelf.remote().put(Table("f")).to_here()
    shelf.tell().put(Table("f"))
    assert rpc.rpc_sync(OTHER, lambda: [Table("g")])[0].way == "opened"  # by cloudpickle, in both directions
    table = Table("h")
    assert rpc.rpc_sync(OTHER, lambda: table.way) == "opened"
    assert rpc.rpc_sync(0, way_of, args=(Table("i"),)) == "opened"  # to oneself
    a, b = rpc.rpc_sync(OTHER, lambda x: x, args=([table, table],))
    assert a is b


def test_a_registered_reducer_writes_arguments_results_errors_and_what_references_hand_out(
    registered: None, pair: World
) -> None:
    _everything(pair)


@inside
def test_a_class_without_a_reducer_is_refused_and_the_error_says_which() -> None:
    with pytest.raises(rpc.SerializationError, match="lock"):
        rpc.rpc_sync(OTHER, way_of, args=(Table("a"),))
    with pytest.raises(rpc.SerializationError, match="lock"):
        rpc.rpc_sync(OTHER, give, args=("a",))


@inside
def test_the_error_of_a_reducer_names_its_class_and_not_what_the_object_is_made_of() -> None:
    def fails(table: Table) -> Any:
        raise KeyError("no such table")

    rpc.register_reducer(Table, fails)
    try:
        with pytest.raises(rpc.SerializationError, match=r"of type tests.test_reducers.Table at .*no such table"):
            rpc.rpc_sync(OTHER, type, args=({"key": [Table("x")]},))
    finally:
        unregister()


@inside
def test_a_registration_can_be_taken_back() -> None:
    copyreg.pickle(Table, reduce_table)
    try:
        rpc.register_reducer(Table, lambda table: (reopen_table, (table.name,)))
        assert rpc.rpc_sync(OTHER, way_of, args=(Table("a"),)) == "reopened"
        rpc.register_reducer(Table, None)
        rpc.register_reducer(Table, None)
        assert rpc.rpc_sync(OTHER, way_of, args=(Table("a"),)) == "opened"  # as copyreg says
    finally:
        del copyreg.dispatch_table[Table]


@inside
def test_a_reducer_of_one_side_serves_what_that_side_sends() -> None:
    rpc.register_reducer(Table, reduce_table)
    try:
        assert rpc.rpc_sync(OTHER, way_of, args=(Table("a"),)) == "opened"
        with pytest.raises(rpc.SerializationError, match="lock"):
            rpc.rpc_sync(OTHER, give, args=("a",))
        with pytest.raises(rpc.SerializationError, match="lock"):
            rpc.rpc_sync(OTHER, way_of, args=(Wide("a"),))  # subclasses are not meant
    finally:
        rpc.register_reducer(Table, None)


class Reduced:
    def __init__(self, x: int) -> None:
        self.x, self.lock = x, threading.Lock()

    def __reduce__(self) -> Any:
        return Reduced, (self.x + 1,)


@inside
def test_reduce_and_copyreg_are_honoured() -> None:
    assert rpc.rpc_sync(OTHER, lambda r: r.x, args=(Reduced(1),)) == 2
    assert rpc.rpc_sync(OTHER, lambda r: r, args=(Reduced(1),)).x == 3
    copyreg.pickle(Table, reduce_table)
    try:
        assert rpc.rpc_sync(OTHER, way_of, args=(Table("a"),)) == "opened"
        assert rpc.rpc_sync(OTHER, lambda t: t.way, args=(Table("a"),)) == "opened"
    finally:
        del copyreg.dispatch_table[Table]
    rpc.register_reducer(Reduced, lambda r: (Reduced, (r.x * 10,)))
    try:
        assert rpc.rpc_sync(OTHER, lambda r: r.x, args=(Reduced(1),)) == 10  # it goes before the class's own
        assert pickle.loads(pickle.dumps(Reduced(1))).x == 2
    finally:
        rpc.register_reducer(Reduced, None)


class Weights(torch.Tensor):
    pass


def as_weights(data: torch.Tensor) -> Weights:
    return data.as_subclass(Weights)


@inside
def test_a_reducer_may_be_registered_for_a_subclass_of_tensor() -> None:
    def reduce_weights(weights: Weights) -> Any:
        return as_weights, (weights.as_subclass(torch.Tensor).to(torch.float16),)

    rpc.register_reducer(Weights, reduce_weights)
    try:
        there = rpc.rpc_sync(OTHER, lambda w: (type(w).__name__, w.dtype), args=(torch.ones(3).as_subclass(Weights),))
        assert there == ("Weights", torch.float16)
    finally:
        rpc.register_reducer(Weights, None)


def test_one_that_was_registered_before_the_world_began_holds_in_it_and_in_the_next() -> None:
    def live(rank: int, plan: Plan) -> None:
        register()
        for i in range(2):
            plan.init_method = f"file://{plan.folder}/meet{i}"
            join(rank, plan)
            assert rpc.rpc_sync(1 - rank, give, args=("a",)).way == "opened"
            rpc.shutdown()

    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, live, rank, world.plan)
        world.results()


def test_worlds_within_one_process_have_it_too() -> None:
    register()
    try:
        with SimWorld(2, seed=1) as world:
            assert world.run(lambda: rpc.rpc_sync(1, give, args=("a",)).way) == ["opened"]
            unregister()
            with pytest.raises(rpc.SerializationError):
                world.run(lambda: rpc.rpc_sync(1, give, args=("a",)))
    finally:
        unregister()


@pytest.mark.parametrize(
    "cls,reducer,words",
    [
        (3, reduce_table, "for a class"),
        (dict, reduce_table, "asks no reducer"),
        (types.FunctionType, reduce_table, "asks no reducer"),
        (type, reduce_table, "asks no reducer"),
        (torch.Tensor, reduce_table, "actorrpc itself"),
        (rpc.RRef, reduce_table, "actorrpc itself"),
        (Table, 3, "a function"),
    ],
)
def test_what_no_reducer_can_catch_is_refused(cls: Any, reducer: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        rpc.register_reducer(cls, reducer)


LAUNCHED = """
    import actorrpc as rpc
    from tests.test_reducers import Table, Bad, register

    register()

    class Server(rpc.Actor):
        def __init__(self, table): self.table = table
        def swap(self, table): old, self.table = self.table, table; return old

    class Driver(rpc.Actor):
        def __init__(self, table): self.table = table
        def main(self):
            server = self.world.server[0]
            assert self.table.way == server.rpc_sync().swap(Table("b")).way == "opened"
            assert server.rpc_sync().swap(Table("c")).name == "b"
            return self.table

    def fail(table): raise Bad(table)

    if __name__ == "__main__":
        back = rpc.launch(driver=rpc.Role(Driver, 1, Table("d")), server=rpc.Role(Server, 1, Table("a")))
        assert (back.name, back.way) == ("d", "opened")
        try:
            rpc.launch(driver=rpc.Role(fail, 1, Table("x")))
        except rpc.MemberDiedError as e:
            assert type(e.__cause__) is Bad, e.__cause__
            assert e.__cause__.args[0].name == "x"
        print("fine")
"""


@pytest.mark.slow
def test_launch_takes_and_returns_what_has_a_reducer(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr
