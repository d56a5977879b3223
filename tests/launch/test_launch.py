"""`launch` as scripts use it: real processes, each script in a session of its own. Bounds are generous."""

from __future__ import annotations

import ast
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed.rpc

import actorrpc as rpc
from tests.checks import options, until

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# --- roles ------------------------------------------------------------------------------------------------------------


class Idle(rpc.Actor):
    """Has no `main`."""


class Waits(rpc.Actor):
    def main(self) -> None:
        self.serve()


class Dies(rpc.Actor):
    """Dies in a handler, in the way that it is told."""

    def exit_hard(self) -> None:
        os._exit(7)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Calls(rpc.Actor):
    """A driver that has the other one do something, and waits for it."""

    def __init__(self, method: str) -> None:
        self.method = method

    def main(self) -> Any:
        return getattr(self.world.other.rpc_sync(), self.method)()


class FailsToStart(rpc.Actor):
    def __init__(self) -> None:
        raise ValueError(f"{self.name} cannot start")


class FailsInOnStart(rpc.Actor):
    def on_start(self) -> None:
        raise ValueError(f"{self.name} fails in on_start")


class FailsInMain(rpc.Actor):
    def main(self) -> None:
        raise ValueError(f"{self.name} fails in main")


class UsesAnother(rpc.Actor):
    """A driver that only learns of another's failure by its calls."""

    def main(self) -> None:
        while True:
            self.world.other[0].rpc_sync().anything()


def look_around() -> dict[str, Any]:
    return {
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "name": rpc.get_worker_info(),
        "abs": rpc.rpc_sync("nothing:0", abs, args=(-3,)),
        "third": [rpc.rpc_sync(f"third:{i}", os.getpid) for i in range(2)],
        "pid": os.getpid(),
    }


def write_pid(folder: Path, name: str = "") -> None:
    (folder / (name or rpc.get_worker_info().name)).write_text(str(os.getpid()))


# --- what launch returns ----------------------------------------------------------------------------------------------


def test_functions_and_none_are_roles_and_the_first_functions_value_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    value = rpc.launch(options=options(), first=look_around, nothing=None, third=rpc.Role(write_pid, 2, tmp_path))
    assert value["threads"] == "1"
    assert value["name"] == rpc.WorkerInfo("first:0", 0)
    assert value["abs"] == 3
    pids = [int((tmp_path / f"third:{i}").read_text()) for i in range(2)]
    assert value["third"] == pids
    assert len({*pids, value["pid"], os.getpid()}) == 4
    assert not any(psutil.pid_exists(pid) for pid in (*pids, value["pid"]))


def test_launch_leaves_the_options_that_it_was_given_as_they_were() -> None:
    given = rpc.RpcBackendOptions(init_timeout=30)
    before = dict(vars(given))
    rpc.launch(options=given, only=os.getpid)
    assert vars(given) == before


def test_launch_takes_options_made_by_torch() -> None:
    theirs: Any = torch.distributed.rpc
    assert rpc.launch(options=theirs.TensorPipeRpcBackendOptions(rpc_timeout=7), only=rpc.get_rpc_timeout) == 7.0
    with pytest.raises(TypeError, match=r"for BackendType\.TENSORPIPE; not"):
        rpc.launch(options={"rpc_timeout": 7}, only=os.getpid)  # type: ignore[arg-type]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_role_is_checked_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="a role is an Actor class, a function or None, not 3"):
        rpc.Role(3)  # type: ignore[arg-type]
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"a role has at least one worker, not {count}"):
            rpc.Role(Idle, count)
    with pytest.raises(TypeError, match=r"count.*int"):
        rpc.Role(Idle, "4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"count.*int"):
        rpc.Role(Idle, 2.0)  # type: ignore[arg-type]
    assert repr(rpc.Role(Idle, 2)) == "Role(Idle, 2)"


def takes_all(**kwargs: int) -> None:
    """A role's function that takes whatever there is."""


def takes_one(rate: float) -> None:
    """A role's function that needs an argument."""


def test_a_function_may_have_arguments_of_any_name() -> None:
    role = rpc.Role(takes_all, 1, what=1, count=2, self=3)
    assert role.kwargs == {"what": 1, "count": 2, "self": 3}


def test_arguments_that_nobody_takes_are_refused_where_the_role_is_made() -> None:
    with pytest.raises(TypeError, match=r"do not fit Idle: .*'rate'"):
        rpc.Role(Idle, 1, rate=3)
    with pytest.raises(TypeError, match=r"without its name: Role\(Idle, 3\)"):
        rpc.Role(Idle, count=3)
    with pytest.raises(TypeError, match=r"do not fit takes_one: missing .*'rate'"):
        rpc.Role(takes_one)
    with pytest.raises(TypeError, match="do not fit None"):
        rpc.Role(None, 1, "x")
    with pytest.raises(TypeError, match="Idle has no __init__"):
        Idle(3)


FROM_STDIN = """
import actorrpc as rpc
class Echo(rpc.Actor):
    def echo(self, x):
        return x, self.name
class Driver(rpc.Actor):
    def main(self):
        try:
            rpc.shutdown()
        except RuntimeError as e:
            refused = "do not call shutdown" in str(e)
        return refused, self.world.echo.rpc_sync().echo(1), repr(self.world.echo[0]), repr(self), repr(self.world)
print(rpc.launch(driver=Driver, echo=rpc.Role(Echo, 2)))
"""


def test_a_program_from_standard_input_can_launch() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=FROM_STDIN, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused, echoes, *names = ast.literal_eval(done.stdout)
    assert refused, "launch ends the world itself"
    assert echoes == [(1, "echo:0"), (1, "echo:1")]
    assert names == ["UserRRef(its actor, owner='echo:0')", "<Driver 'driver:0'>", "World({'driver': 1, 'echo': 2})"]


@pytest.mark.parametrize("first", [None, Idle, rpc.Role(None, 2), rpc.Role(Idle)])
def test_a_first_role_that_cannot_drive_is_refused(first: Any) -> None:
    with pytest.raises(TypeError, match=r"the first role, 'first', drives the world: .* that drives comes first"):
        rpc.launch(first=first, second=Waits)


def test_a_class_that_is_no_actor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a role is an Actor class.*not <class '.*Path'>"):
        rpc.Role(Path)


@pytest.mark.parametrize("name", ["role", "roles", "workers"])
def test_a_role_that_could_not_be_looked_up_in_the_world_is_refused(name: str) -> None:
    roles: dict[str, Any] = {"first": Waits, name: None}
    with pytest.raises(ValueError, match=f"no role can be called '{name}'"):
        rpc.launch(**roles)


def test_no_role_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one role"):
        rpc.launch()


def test_what_is_no_role_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="a role is an Actor class, a function or None, not 3"):
        rpc.launch(first=Waits, second=3)  # type: ignore[arg-type]


def test_a_role_name_that_is_no_worker_name_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda self: pytest.fail("it started a process"))
    with pytest.raises(ValueError, match="näme:0"):
        rpc.launch(first=Waits, näme=None)


@pytest.mark.slow
def test_a_member_may_launch_a_world_of_its_own() -> None:
    assert rpc.launch(options=options(), only=launch_again) == [1, 2]


def launch_again() -> list[int]:
    inner: int = rpc.launch(options=options(), again=give_two)
    return [rpc.rpc_sync("only:0", abs, args=(-1,)), inner]


def give_two() -> int:
    return int(rpc.rpc_sync(0, abs, args=(-2,)))


# --- a member dies ----------------------------------------------------------------------------------------------------


def of_launch(**roles: Any) -> rpc.MemberDiedError:
    begun = time.monotonic()
    with pytest.raises(rpc.MemberDiedError) as e:
        rpc.launch(options=options(), **roles)
    assert time.monotonic() - begun < 30
    return e.value


@pytest.mark.parametrize(
    "method, words",
    [
        pytest.param("exit_hard", "exited with code 7", marks=pytest.mark.slow),
        ("kill", "was killed by SIGKILL"),
        pytest.param("segfault", "was killed by SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_a_member_that_dies_in_a_handler_is_the_one_that_is_named(method: str, words: str) -> None:
    error = of_launch(driver=rpc.Role(Calls, 1, method), other=Dies, bystander=Waits)
    assert error.name == "other:0", str(error)
    assert words in str(error)


@pytest.mark.parametrize("what", [FailsToStart, pytest.param(FailsInOnStart, marks=pytest.mark.slow), FailsInMain])
def test_a_member_that_raises_is_named_with_its_own_traceback(what: type[rpc.Actor]) -> None:
    error = of_launch(driver=UsesAnother, other=rpc.Role(what, 2))
    assert error.name in ("other:0", "other:1"), str(error)
    assert isinstance(error.__cause__, ValueError)
    assert f"ValueError: {error.name}" in error.traceback
    assert str(error).count("Traceback") == 1


def test_a_driver_that_raises_is_named() -> None:
    error = of_launch(driver=FailsInMain, other=Waits)
    assert error.name == "driver:0"
    assert "driver:0 fails in main" in str(error)


# --- scripts ----------------------------------------------------------------------------------------------------------

HEAD = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
FOLDER = Path(sys.argv[1])
(FOLDER / f"up{os.getpid()}").touch()
import actorrpc as rpc

def here(name):
    (FOLDER / name).write_text(str(os.getpid()))

class Driver(rpc.Actor):
    def main(self):
        here(self.name)
        return self.work()
    def work(self):
        self.serve()
    def touched(self, what=None):
        return what

class Other(rpc.Actor):
    def on_start(self):
        here(self.name)
    def sleep(self, seconds):
        here("asleep")
        time.sleep(seconds)
    def compute(self):
        while True:
            sum(range(1000))
    def die(self, how):
        how()

"""

Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Starts scripts in sessions of their own; whatever a failed test leaves of them is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *prefix: str, **environment: str) -> subprocess.Popen[str]:
        path = tmp_path / "main.py"
        path.write_text(HEAD + textwrap.dedent(body))
        process = subprocess.Popen(
            [sys.executable, *prefix, str(path), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        left = members_of_session(process.pid)
        if process.poll() is None or left:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            print(process.communicate(timeout=20))


def members_of_session(session: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            pass
    return found


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def interrupt(process: subprocess.Popen[str], bound: float = 6.0) -> str:
    """Presses Ctrl-C; checks that all is over soon, quietly. Returns what was on stderr."""
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process, 30)
    took = time.monotonic() - begun
    assert code in (-signal.SIGINT, 130), (code, err)
    assert err.count("Traceback") <= 1, err
    assert "KeyboardInterrupt" in err
    until(lambda: not members_of_session(process.pid), 5)
    assert took < bound, err
    return err


def test_the_death_of_a_member_is_the_scripts_error_and_exit_code(script: Script) -> None:
    p = script(
        """
        class Kills(Driver):
            def work(self):
                return self.world.other[1].rpc_sync().die(lambda: os.kill(os.getpid(), signal.SIGKILL))

        if __name__ == "__main__":
            rpc.launch(driver=Kills, other=rpc.Role(Other, 2))
        """
    )
    code, out, err = finish(p)
    assert (code, out) == (1, "")
    last = err[err.rindex("MemberDiedError") :]
    assert 'member "other:1"' in last
    assert "was killed by SIGKILL" in last
    assert err.count("Traceback") == 1, err
    until(lambda: not members_of_session(p.pid), 5)


def test_the_return_value_reaches_the_script_with_types_of_its_own(script: Script) -> None:
    p = script(
        """
        class Result:
            def __init__(self, x): self.x = x

        class Returns(Driver):
            def work(self):
                assert self.world.other.rpc_sync().same(Result(4)) == [True, True]
                return Result(3)

        class Same(Other):
            def same(self, value): return type(value) is Result

        if __name__ == "__main__":
            value = rpc.launch(driver=Returns, other=rpc.Role(Same, 2))
            print(type(value) is Result, value.x)
        """
    )
    assert finish(p) == (0, "True 3\n", "")


@pytest.mark.slow
def test_mains_that_still_run_when_the_driver_returns_come_to_an_end(tmp_path: Path, script: Script) -> None:
    p = script(
        """
        class Returns(Driver):
            def work(self):
                self.started = 0
                while self.started < 3:
                    self.serve(0.05)
                return "value"
            def start(self):
                self.started += 1

        class Serves(rpc.Actor):
            def main(self):
                self.world.driver[0].rpc_sync().start()
                self.serve()
                here("serve has returned")
            def on_stop(self): here("served: on_stop")

        class Loops(rpc.Actor):
            def main(self):
                self.world.driver[0].rpc_sync().start()
                while True: self.world.driver[0].rpc_sync().touched()
            def on_stop(self): here("looped: on_stop")

        class Waits(rpc.Actor):
            def main(self):
                self.world.driver[0].rpc_sync().start()
                try:
                    self.world.loops[0].rpc_sync(timeout=0).never()
                finally:
                    here("wait has ended")

        class NeverAnswers(Loops):
            @rpc.functions.async_execution
            def never(self):
                self.kept = rpc.Future()
                return self.kept

        if __name__ == "__main__":
            begun = time.monotonic()
            print(rpc.launch(driver=Returns, serves=Serves, loops=NeverAnswers, waits=Waits))
        """
    )
    code, out, err = finish(p, 40)
    assert (code, out) == (0, "value\n"), err
    assert (tmp_path / "serve has returned").exists(), err
    assert (tmp_path / "served: on_stop").exists()
    assert (tmp_path / "looped: on_stop").exists()
    assert "Traceback" not in err
    until(lambda: not members_of_session(p.pid), 5)


@pytest.mark.slow
def test_a_main_that_computes_on_when_the_driver_returns_is_stopped(tmp_path: Path, script: Script) -> None:
    p = script(
        """
        class Returns(Driver):
            def work(self):
                while not (FOLDER / "computes").exists(): self.serve(0.05)
                self.world.polite[0].rpc_sync().touched()
                here("returned")
                return 5

        class Computes(rpc.Actor):
            def main(self):
                here("computes")
                while True: sum(range(1000))

        class Polite(rpc.Actor):
            def touched(self): pass
            def on_stop(self): here("polite: on_stop")

        if __name__ == "__main__":
            print(rpc.launch(driver=Returns, computes=Computes, polite=Polite))
        """
    )
    until((tmp_path / "returned").exists, 40)
    begun = time.monotonic()
    code, out, err = finish(p, 40)
    assert (code, out) == (0, "5\n"), err
    assert time.monotonic() - begun < 15
    assert (tmp_path / "polite: on_stop").exists()
    assert "computes:0" in err
    assert "Traceback" not in err
    until(lambda: not members_of_session(p.pid), 5)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

LATE = """
if "other:1" in multiprocessing.current_process().name:
    here("late")
    time.sleep(100)
"""
WORLD = """
if __name__ == "__main__":
    rpc.launch(driver=Driver, other=rpc.Role(Other, 2))
"""
CALLS = """
class Driver(Driver):
    def work(self):
        self.world.other[0].rpc_sync(timeout=0).sleep(100)
"""
COMPUTES = """
class Driver(Driver):
    def work(self):
        here("asleep")
        self.world.other[0].rpc_async(timeout=0).compute()
        while True:
            sum(range(1000))
"""
LOOPS = """
class Driver(Driver):
    def work(self):
        here("asleep")
        while True:
            [f.wait() for f in [ref.rpc_async().on_start() for ref in self.world.other]]
"""


@linux_only
@pytest.mark.parametrize("delay", [0.3, pytest.param(1.5, marks=pytest.mark.slow)])
def test_ctrl_c_while_members_import_ends_all_quietly(tmp_path: Path, script: Script, delay: float) -> None:
    p = script(WORLD)
    until(lambda: len(list(tmp_path.glob("up*"))) >= 2, 40)
    time.sleep(delay)
    interrupt(p)


@linux_only
def test_ctrl_c_while_members_join_ends_all_quietly(tmp_path: Path, script: Script) -> None:
    p = script(LATE + WORLD)
    until((tmp_path / "late").exists, 40)
    time.sleep(2.0)  # the other two wait for the third
    interrupt(p)


@linux_only
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(CALLS, id="waits in a call"),
        pytest.param(COMPUTES, id="computes", marks=pytest.mark.slow),
        pytest.param(LOOPS, id="calls in a loop", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_main_works_ends_all_quietly(tmp_path: Path, script: Script, work: str) -> None:
    p = script(work + WORLD)
    until((tmp_path / "asleep").exists, 40)
    time.sleep(0.3)
    err = interrupt(p)
    assert "left behind" not in err


@linux_only
@pytest.mark.slow
def test_ctrl_c_while_main_serves_ends_all_quietly(tmp_path: Path, script: Script) -> None:
    p = script(WORLD)
    until((tmp_path / "driver:0").exists, 40)
    interrupt(p)


@linux_only
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, script: Script) -> None:
    p = script(COMPUTES + WORLD)
    until((tmp_path / "asleep").exists, 40)
    p.kill()
    p.communicate(timeout=20)
    until(lambda: not members_of_session(p.pid), 10)


# --- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun(n: int) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return ["-m", "torch.distributed.run", f"--nproc-per-node={n}", f"--master-port={port}"]


TORCHRUN = """
class Returns(Driver):
    def work(self):
        names = self.world.other.rpc_sync().rank()
        return self.name, names, self.world.roles

class Ranked(Other):
    def rank(self): return self.name, int(os.environ["RANK"])
    def on_stop(self): here(f"stopped {self.name}")

if __name__ == "__main__":
    value = rpc.launch(driver=Returns, other=rpc.Role(Ranked, 2))
    if int(os.environ["RANK"]) == 0:
        print(value)
    else:
        assert value is None
"""


def test_under_torchrun_each_process_takes_the_part_of_its_rank(tmp_path: Path, script: Script) -> None:
    p = script(TORCHRUN, *torchrun(3))
    code, out, err = finish(p, 60)
    assert code == 0, err
    assert out == "('driver:0', [('other:0', 1), ('other:1', 2)], {'driver': 1, 'other': 2})\n"
    assert (tmp_path / "stopped other:0").exists()
    assert (tmp_path / "stopped other:1").exists()
    assert "Traceback" not in err
    until(lambda: not members_of_session(p.pid), 5)


def test_under_torchrun_the_number_of_processes_must_be_that_of_the_roles(script: Script) -> None:
    p = script(TORCHRUN, *torchrun(2))
    code, _, err = finish(p, 60)
    assert code == 1
    assert "ValueError: the roles make 3 workers, but torchrun started 2 processes" in err
    until(lambda: not members_of_session(p.pid), 5)


def test_under_torchrun_a_member_that_raises_ends_all(script: Script) -> None:
    p = script(
        """
        class Fails(rpc.Actor):
            def main(self):
                raise ValueError("no luck")

        if __name__ == "__main__":
            rpc.launch(driver=Driver, other=Other, fails=Fails)
        """,
        *torchrun(3),
    )
    code, _, err = finish(p, 60)
    assert code == 1
    assert "ValueError: no luck" in err
    until(lambda: not members_of_session(p.pid), 5)


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under", [pytest.param("launch", marks=pytest.mark.slow), "torchrun"])
def test_the_example_runs_both_ways(tmp_path: Path, under: str) -> None:
    way = torchrun(3) if under == "torchrun" else []
    p = subprocess.run(
        [
            *(sys.executable, *way, "-m", "examples.rl_cartpole"),
            *("--world-size", "3", "--max-episodes", "3", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert p.returncode == 0, p.stderr
    assert "Not solved in 3 episodes." in p.stdout
    assert (tmp_path / "episodes.csv").read_text().count("\n") == 4
    assert (tmp_path / "learning_curve.png").exists()
    assert "Traceback" not in p.stderr
