"""Things of `__main__`: by name between workers whose main modules are the same, else by value from the start."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from actorrpc.wire import names
from actorrpc.wire.envelope import Flag
from actorrpc.wire.names import identity_of_main
from tests.worlds import Plan, World, join

DEFINITIONS = """
SCALE = 3

class Box:
    def __init__(self, x): self.x = x
    def scaled(self): return SCALE * self.x

class Sad(Exception):
    def __init__(self, a, b): super().__init__(f"{a} and {b}"); self.a = a

def triple(box): return Box(SCALE * box.x)
def is_box(box): return type(box) is Box
def fail(): raise Sad(1, 2)
"""
OTHERS = DEFINITIONS
for _a, _b in (("Box", "Case"), ("Sad", "Bad"), ("triple", "thrice"), ("is_box", "is_case"), ("fail", "flunk")):
    OTHERS = OTHERS.replace(_a, _b)
"""The same under other names."""


def become(source: str, file: Path | None) -> types.ModuleType:
    """Makes a main module for this process, as if it ran a script, or code without a file."""
    main = types.ModuleType("__main__")
    if file is not None:
        file.write_text(source)
        main.__file__ = str(file)
    else:
        names._DRAWN = uuid.uuid4().hex  # type: ignore[misc]  # as in a process that was started, and not forked
    sys.modules["__main__"] = main
    exec(compile(source, str(file), "exec"), vars(main))
    return main


def resends() -> list[int]:
    """Watches for answers that ask for a message by value; counts them from here on."""
    calls = session.current().worker.calls
    answered, seen = calls.answered, []

    def watched(number: int, caller: int, failed: bool, flags: int, *rest: Any) -> Any:
        if failed and flags & Flag.NEEDS_VALUE:
            seen.append(number)
        return answered(number, caller, failed, flags, *rest)

    calls.answered = watched  # type: ignore[method-assign, assignment]
    return seen


def run_mains(program: Any, *mains: tuple[str, Path | None]) -> list[Any]:
    """Runs a program on workers with main modules of their own, of source text and file; returns its results."""
    with World(len(mains), join=False) as world:

        def live(rank: int, plan: Plan) -> Any:
            main = become(*mains[rank])
            join(rank, plan)
            value = program(rank, main)
            rpc.shutdown()
            return value

        for rank in range(world.size):
            world.start(rank, live, rank, world.plan)
        return world.results()


class Boxes(rpc.Actor):
    def __init__(self) -> None:
        self.boxes: list[Any] = []

    def add(self, box: Any) -> None:
        self.boxes.append(box)

    def all(self) -> list[Any]:
        return self.boxes


def both_ways(rank: int, main: Any) -> list[int]:
    """Does all that there is with things of the main module; returns which calls had to be sent again."""
    make, sad, triple, is_made, fail = [thing for name, thing in vars(main).items() if callable(thing)]
    other, asked = 1 - rank, resends()
    boxes = Boxes.spawn(other)
    for i in range(1, 10):  # the very first message that needs it, and one that nobody answers
        boxes.tell().add(make(i))
    back = boxes.rpc_sync().all()
    assert [box.x for box in back] == list(range(1, 10))
    assert all(map(is_made, back))  # what has come home is of the same class as before
    assert rpc.rpc_sync(other, triple, args=(make(2),)).scaled() == 18
    assert rpc.rpc_async(other, triple, args=(make(2),)).wait().x == 6
    assert rpc.remote(other, make, args=(4,)).rpc_sync().scaled() == 12
    assert rpc.rpc_sync(other, lambda: triple(make(1)).x) == 3
    with pytest.raises(sad, match="1 and 2") as caught:
        rpc.rpc_sync(other, fail)
    assert caught.value.a == 1
    return asked


@pytest.mark.parametrize("files", [("a.py", "b.py"), ("a.py", None), (None, None)], ids=str)
def test_another_main_module_gets_things_by_value_in_the_first_message(
    files: tuple[str | None, str | None], tmp_path: Path
) -> None:
    """The others run another script, or none: a notebook, a prompt, `-c`, stdin."""
    a, b = [tmp_path / file if file else None for file in files]
    assert run_mains(both_ways, (DEFINITIONS, a), (OTHERS, b)) == [[], []]


def test_the_same_script_in_two_places_is_the_same_main_module(tmp_path: Path) -> None:
    def program(rank: int, main: Any) -> list[int]:
        assert rpc.rpc_sync(1 - rank, main.is_box, args=(main.Box(1),))
        return both_ways(rank, main)

    assert run_mains(program, (DEFINITIONS, tmp_path / "x.py"), (DEFINITIONS, tmp_path / "y.py")) == [[], []]


HELD = """
def held(): return Box(5)
def fails(): fail()
"""


def call_of_main(name: str) -> Any:
    """What the callee's own main module gives, to a caller that has never seen it."""
    return getattr(sys.modules["__main__"], name)()


def test_results_and_errors_of_the_callees_main_module_arrive_at_another_script(tmp_path: Path) -> None:
    def program(rank: int, main: Any) -> None:
        if rank == 1:
            box = rpc.rpc_sync(0, call_of_main, args=("held",))
            assert (type(box).__name__, box.scaled()) == ("Box", 15)
            assert rpc.remote(0, call_of_main, args=("held",)).to_here().x == 5
            with pytest.raises(Exception, match="1 and 2") as caught:
                rpc.rpc_sync(0, call_of_main, args=("fails",))
            assert (type(caught.value).__name__, caught.value.a) == ("Sad", 1)  # type: ignore[attr-defined]

    run_mains(program, (DEFINITIONS + HELD, tmp_path / "a.py"), ("x = 1", tmp_path / "b.py"))


def test_a_name_that_only_the_callers_run_of_the_script_has_goes_again_by_value(tmp_path: Path) -> None:
    """What stands under `if __name__ == "__main__"`, say, which spawned children do not run."""

    def program(rank: int, main: Any) -> list[int]:
        asked = resends()
        if rank == 0:
            exec("def late(x): return triple(Box(x))", vars(main))
            assert rpc.rpc_sync(1, main.late, args=(1,)).x == 3
            assert rpc.rpc_sync(1, main.late, args=(1,)).x == 3
        return asked

    (asked, _) = run_mains(program, (DEFINITIONS, tmp_path / "a.py"), (DEFINITIONS, tmp_path / "b.py"))
    assert len(asked) == 1, asked  # known from then on


LOCKED = DEFINITIONS + """
import threading
lock = threading.Lock()
"""
LATE = """
def late(x):
    with lock:
        return x
"""


def error_of(function: Any, *args: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  whichever
        function(*args)
    return f"{type(caught.value).__name__}: {caught.value}"


def fetch(ref: rpc.RRef[Any]) -> str:
    return error_of(ref.to_here, 0.0)


@pytest.mark.parametrize("way", ["a function", "a method"])
def test_whoever_waits_for_an_object_that_cannot_be_sent_for_by_value_either_is_told(way: str, tmp_path: Path) -> None:
    """The callee has no such name, and the caller cannot write what it stands for: it holds a lock."""

    def program(rank: int, main: Any) -> tuple[list[str], list[int]]:
        asked = resends()
        if rank:
            return [], asked
        exec(LATE, vars(main))
        held: rpc.RRef[Any] = rpc.remote(1, dict)
        assert held.to_here() == {}
        ref = rpc.remote(1, main.late, args=(1,)) if way == "a function" else held.remote().setdefault(1, main.late)
        passed_on = rpc.rpc_async(2, fetch, args=(ref,))  # while nobody knows of it yet
        said = [fetch(ref), fetch(ref), passed_on.wait()]
        assert held.to_here() == {}
        return said, asked

    (said, asked), _, _ = run_mains(program, *[(LOCKED, tmp_path / f"{rank}.py") for rank in range(3)])
    assert len(asked) == 1
    assert len(said) == 3
    assert all(one.startswith("SerializationError: ") and "_thread.lock" in one for one in said), said


def by_name_only() -> Any:
    """Returns what goes by its name in `__main__`, also where the rest goes by value."""
    main: Any = sys.modules["__main__"]

    class ByName:
        def __reduce__(self) -> Any:
            return names.resolve, ("__main__", "no_such_thing")

    main.ByName = ByName
    return ByName()


def test_an_object_for_which_a_name_is_missing_by_value_too_is_told_to_be_missing(tmp_path: Path) -> None:
    def program(rank: int, main: Any) -> list[str]:
        if rank:
            return []
        ref = rpc.remote(1, rpc.RRef, args=(by_name_only(),))
        return [rpc.rpc_async(2, fetch, args=(ref,)).wait(), fetch(ref)]

    said, _, _ = run_mains(program, *[(DEFINITIONS + f"x = {n}", tmp_path / f"{n}.py") for n in range(3)])
    assert len(said) == 2
    assert all("has no 'no_such_thing'" in one for one in said), said


CACHED = """
import functools

@functools.lru_cache(maxsize=7)
def cached(x): return SCALE * x

class Lazy:
    @functools.cache
    def value(self): return SCALE
"""


def test_functions_with_a_cache_go_to_another_script_by_value(tmp_path: Path) -> None:
    """Of their own accord they would go by name, also within their classes."""

    def program(rank: int, main: Any) -> None:
        if rank == 0:
            cached = main.cached
            assert rpc.rpc_sync(1, cached, args=(4,)) == 12
            assert rpc.rpc_sync(1, lambda: cached.cache_parameters()["maxsize"]) == 7
            assert rpc.rpc_sync(1, main.Lazy().value) == 3
            assert rpc.rpc_sync(1, main.Lazy.value, args=(main.Lazy(),)) == 3

    run_mains(program, (DEFINITIONS + CACHED, tmp_path / "a.py"), ("x = 1", tmp_path / "b.py"))


def test_forks_of_a_process_without_a_file_share_its_main_module() -> None:
    before = identity_of_main()
    kept, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        drawn = identity_of_main()
        read, write = os.pipe()
        if not (pid := os.fork()):
            os.write(write, identity_of_main().encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100).decode() == drawn != before
        os.close(read)
        os.close(write)
    finally:
        sys.modules["__main__"] = kept


# -- real scripts, which takes seconds

SCRIPT = DEFINITIONS + """
import os
import subprocess
import actorrpc as rpc
from tests.test_main_module import Boxes

def is_own(box):
    import sys
    return type(box) is vars(sys.modules["__main__"])["Box"]

def program(rank, path, shared):
    options = rpc.RpcBackendOptions(init_method="file://" + path, init_timeout=90)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = 1 - rank
    boxes = Boxes.spawn(other)
    for i in range(5):
        boxes.tell().add(Box(i))
    back = boxes.rpc_sync().all()
    assert [b.x for b in back] == [0, 1, 2, 3, 4]
    assert all(map(is_box, back))
    assert rpc.rpc_sync(other, triple, args=(Box(2),)).scaled() == 18
    assert rpc.rpc_sync(other, is_own, args=(Box(2),)) is (shared == "shared")
    assert rpc.rpc_sync(other, lambda: triple(Box(1)).x) == 3
    try:
        rpc.rpc_sync(other, fail)
    except Sad as e:
        assert e.a == 1
    else:
        raise AssertionError("no error")
    rpc.shutdown()
    print(f"fine {rank}\\n", end="", flush=True)  # in one piece: under torchrun both write to one pipe

if __name__ == "__main__":
    import sys
    program(int(os.environ.get("RANK") or sys.argv[3]), sys.argv[1], sys.argv[2])
"""
ROOT = str(Path(__file__).parents[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "-c", "stdin", "torchrun"])
def test_things_of_the_main_module_go_both_ways(how: str, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    shared = "shared" if how in ("script", "torchrun") else "own"
    words = [str(tmp_path / "meet"), shared]
    run = {
        "script": [str(script)],
        "-c": ["-c", SCRIPT],
        "stdin": ["-"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
    }[how]
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    ranks = [""] if how == "torchrun" else ["0", "1"]
    processes = [
        subprocess.Popen(
            [sys.executable, *run, *words, *([rank] if rank else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in ranks
    ]  # fmt: skip
    said = []
    try:
        for process in processes:
            process.stdin.write(SCRIPT if how == "stdin" else "")  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
            process.stdin = None
        for process in processes:
            out, err = process.communicate(timeout=110)
            assert process.returncode == 0, err
            said += out.split("\n")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sorted(filter(None, said)) == ["fine 0", "fine 1"]
