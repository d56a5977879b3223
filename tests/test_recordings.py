"""An actor that is recorded in a world, and run again from the file without one."""

from __future__ import annotations

import contextlib
import functools
import io
import pdb  # noqa: T100  what is tested
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.services.taps import Taps
from tests.worlds import World, until


class Helper(rpc.Actor):
    def __init__(self, step: int) -> None:
        self.step = step

    def next(self, n: int) -> int:
        return n + self.step

    def call_back(self, ref: rpc.RRef[Any], n: int) -> int:
        ref.tell().note(n)
        value: int = ref.rpc_sync().nested(n)
        return value + 1

    def fail(self) -> None:
        raise LookupError("there is none")


def draw() -> int:
    return int(torch.randint(1 << 40, ()).item())


class Subject(rpc.Actor):
    """Does all that can be replayed."""

    def __init__(self, helper: rpc.RRef[Any], start: torch.Tensor) -> None:
        self.helper, self.total = helper, start.clone()
        self.log: list[Any] = [helper.rpc_sync().next(0)]

    def on_start(self) -> None:
        self.log.append(("started", self.name, rpc.rpc_sync("worker0", draw)))

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.total += tensor
        self.log.append(self.helper.rpc_async().next(1).wait())
        return self.total

    def there_and_back(self, n: int) -> int:
        value: int = self.helper.rpc_sync().call_back(self.rref, n)
        self.log.append(("back", value))
        return value

    def nested(self, n: int) -> int:
        self.log.append(("nested", n))
        return 10 * n

    def note(self, n: int) -> None:
        self.log.append(("note", n))

    def then(self) -> int:
        value: int = rpc.rpc_async("worker1", draw).then(lambda future: future.wait() + 1).wait()
        self.log.append(value)
        return value

    def broken(self) -> None:
        with contextlib.suppress(LookupError):
            self.helper.rpc_sync().fail()
            self.log.append("no error")
        raise ZeroDivisionError("always")

    def state(self) -> tuple[Any, list[Any]]:
        return self.total, self.log


class Other(Subject):
    """Makes another call than the recorded class."""

    def then(self) -> int:
        return int(rpc.rpc_sync("worker1", abs, args=(-1,)))


class Fixed(Subject):
    def broken(self) -> None:
        with contextlib.suppress(LookupError):
            self.helper.rpc_sync().fail()


class Soon(rpc.Actor):
    async def soon(self) -> int:
        return 1


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout=60) as world:
        yield world


def record(path: str) -> tuple[Any, list[Any]]:
    helper = Helper.spawn("worker0", 5)
    ref = rpc.debug.Recorder(path).spawn(Subject, "worker1", helper, torch.ones(3))
    ref.rpc_sync().add(torch.arange(3.0))
    assert ref.rpc_sync().there_and_back(4) == 41
    ref.tell().note(8)
    ref.rpc_sync().then()
    with pytest.raises(ZeroDivisionError):
        ref.rpc_sync().broken()
    state: tuple[Any, list[Any]] = ref.rpc_sync().state()
    return state


@pytest.fixture(scope="module")
def recorded(pair: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[Any]]:
    path = tmp_path_factory.mktemp("recordings") / "subject"
    return (path, *pair.on(0, record, str(path)))


def test_a_replay_comes_to_the_same_state_without_a_world(recorded: tuple[Path, Any, list[Any]]) -> None:
    path, total, log = recorded
    found = rpc.debug.replay(path)
    assert not session.is_available()
    assert torch.equal(found.actor.total, total)
    assert found.actor.log == log
    assert log[1][1].startswith("worker1/")
    methods = [step.method for step in found.steps]
    assert methods[:8] == ["add", "there_and_back", "note", "nested", "note", "then", "broken", "state"]
    assert methods[8:] in ([], ["on_stop"])  # its last reference may have gone by now
    assert {step.caller for step in found.steps[:8]} == {"worker0"}
    assert [type(step.error) for step in found.steps if step.error is not None] == [ZeroDivisionError]
    assert found.steps[1].value == 41


def test_a_replay_stops_at_an_error_where_it_is_told_to(recorded: tuple[Path, Any, list[Any]]) -> None:
    with pytest.raises(ZeroDivisionError, match="always"):
        rpc.debug.replay(recorded[0], stop=True)


def test_a_replay_runs_a_class_with_a_fix(recorded: tuple[Path, Any, list[Any]]) -> None:
    found = rpc.debug.replay(recorded[0], Fixed, stop=True)
    assert all(step.error is None for step in found.steps)


def test_a_replay_that_goes_another_way_says_so(recorded: tuple[Path, Any, list[Any]]) -> None:
    said = "message 6 calls abs on worker1 where in the recording it was draw"
    with pytest.raises(rpc.debug.ReplayError, match=said):
        rpc.debug.replay(recorded[0], Other)


def test_a_recording_that_was_cut_off_is_replayed_up_to_there(
    recorded: tuple[Path, Any, list[Any]], tmp_path: Path
) -> None:
    data = recorded[0].read_bytes()
    (tmp_path / "cut").write_bytes(data[:-3])
    assert [step.method for step in rpc.debug.replay(tmp_path / "cut").steps][:2] == ["add", "there_and_back"]
    for name, rest in (("empty", b""), ("other", pickle.dumps(("something else",))), ("noise", b"noise")):
        (tmp_path / name).write_bytes(rest)
        with pytest.raises(rpc.debug.ReplayError):
            rpc.debug.replay(tmp_path / name)


def test_a_replay_runs_under_pdb(recorded: tuple[Path, Any, list[Any]]) -> None:
    line = Subject.nested.__code__.co_firstlineno + 1
    commands, shown = io.StringIO(f"b {__file__}:{line}\nc\np n * 1000\nc\n"), io.StringIO()
    debugger = pdb.Pdb(stdin=commands, stdout=shown, nosigint=True, readrc=False)
    found = debugger.runcall(rpc.debug.replay, recorded[0])
    assert found is not None
    assert "(Pdb) 4000" in shown.getvalue()
    assert found.steps[1].value == 41


def record_soon(path: str) -> int:
    value: int = rpc.debug.Recorder(path).spawn(Soon, "worker1").rpc_sync().soon()
    return value


def test_an_async_method_is_recorded_but_its_replay_refused(pair: World, tmp_path: Path) -> None:
    assert pair.on(0, record_soon, str(tmp_path / "soon")) == 1
    with pytest.raises(rpc.debug.ReplayError, match="soon, which is async"):
        rpc.debug.replay(tmp_path / "soon")


def record_nowhere(path: str) -> None:
    with pytest.raises(TypeError, match="no subclass of Actor"):
        rpc.debug.Recorder(path).spawn(dict, "worker1")  # type: ignore[arg-type]
    ref = rpc.debug.Recorder(path).spawn(Soon, "worker1")
    with pytest.raises(FileNotFoundError):
        ref.rpc_sync().soon()


def test_a_file_that_cannot_be_written_is_an_error_of_the_actor(pair: World, tmp_path: Path) -> None:
    pair.on(0, record_nowhere, str(tmp_path / "nowhere" / "soon"))


def record_again(path: str) -> list[int]:
    recorder = rpc.debug.Recorder(path)
    first = recorder.spawn(Helper, "worker1", 1)
    assert first.rpc_sync().next(1) == 2
    with pytest.raises(FileExistsError, match="another recording is being written to it"):
        recorder.spawn(Helper, "worker1", 2).rpc_sync().next(1)
    assert first.rpc_sync().next(2) == 3
    steps = [step.method for step in rpc.debug.replay(path).steps]
    del first
    until(functools.partial(is_free, recorder), 20)
    return [steps.count("next"), [step.method for step in rpc.debug.replay(path).steps].count("next")]


def is_free(recorder: rpc.debug.Recorder) -> bool:
    try:
        return bool(recorder.spawn(Helper, "worker1", 3).rpc_sync().next(1) == 4)
    except FileExistsError:
        return False


def test_the_recording_of_a_living_actor_is_not_written_over(pair: World, tmp_path: Path) -> None:
    assert pair.on(0, record_again, str(tmp_path / "helper")) == [2, 1]


class Never(rpc.Actor):
    """Is never there."""

    def __init__(self, where: str) -> None:
        if where == "__init__":
            raise LookupError(where)

    def on_start(self) -> None:
        raise LookupError("on_start")


def fail_to_record(path: str) -> None:
    for where in ("__init__", "on_start"):
        recorder = rpc.debug.Recorder(f"{path}-{where}")
        with pytest.raises(LookupError, match=where):
            recorder.spawn(Never, "worker1", where).to_here()
        until(functools.partial(is_free, recorder), 20)


def watching() -> int:
    """Returns how much is put around functions of this worker."""
    taps: Taps | None = session.current().worker.services.get(Taps)
    return 0 if taps is None else len(taps._layers)


def test_nothing_is_kept_for_an_actor_that_is_gone_or_was_never_made(pair: World, tmp_path: Path) -> None:
    pair.on(0, fail_to_record, str(tmp_path / "never"))
    pair.on(1, until, lambda: watching() == 0, 20)
