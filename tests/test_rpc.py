"""Calls between real processes: what can be called, timeouts, errors, bad input. The world must go on after each."""

from __future__ import annotations

import functools
import gc
import math
import operator
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.errors import RemoteTraceback
from tests.worlds import inside, raised_within, run_processes, run_world, until

OTHER = "worker1"
VERBS: list[Any] = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


def add(a: Any, b: Any = 0) -> Any:
    return a + b


def keywords(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def name_here() -> str:
    return rpc.get_worker_info().name


def nothing() -> None:
    pass


def rest(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


class Counter:
    """One that lives in its process."""

    runs = 0

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def plus(self, k: int) -> int:
        return self.n + k

    @staticmethod
    def static(k: int) -> int:
        return 2 * k

    @classmethod
    def of(cls, k: int) -> Counter:
        return cls(k)

    def __call__(self, k: int) -> int:
        return self.n * k


def count_up() -> None:
    Counter.runs += 1


def runs() -> int:
    return Counter.runs


# -- what can be called


@inside
def test_functions_builtins_and_classes_can_be_called() -> None:
    one = torch.ones(2)
    assert rpc.rpc_sync(OTHER, add, args=(1, 2)) == 3
    assert rpc.rpc_sync(OTHER, min, args=(3, 2)) == 2
    assert rpc.rpc_sync(OTHER, operator.add, args=(3, 2)) == 5
    assert rpc.rpc_sync(OTHER, math.sqrt, args=(4,)) == 2
    assert rpc.rpc_sync(OTHER, torch.add, args=(one, 3)).tolist() == [4, 4]
    assert rpc.rpc_sync(OTHER, torch.add, args=(one,), kwargs={"other": one, "alpha": 2}).tolist() == [3, 3]
    assert rpc.rpc_sync(OTHER, torch.Tensor.sum, args=(one,)) == 2
    assert rpc.rpc_sync(OTHER, one.add, args=(1,)).tolist() == [2, 2]
    assert rpc.rpc_sync(OTHER, Counter, args=(5,)).n == 5
    assert rpc.rpc_sync(OTHER, dict, kwargs={"a": 1}) == {"a": 1}


@inside
def test_static_class_and_bound_methods_and_callable_objects_can_be_called() -> None:
    assert rpc.rpc_sync(OTHER, Counter.static, args=(4,)) == 8
    assert rpc.rpc_sync(OTHER, Counter.of, args=(4,)).n == 4
    assert rpc.rpc_sync(OTHER, Counter(3).plus, args=(4,)) == 7
    assert rpc.rpc_sync(OTHER, Counter(3), args=(4,)) == 12
    assert rpc.rpc_sync(OTHER, "a-b".split, args=("-",)) == ["a", "b"]


@inside
def test_lambdas_closures_local_classes_and_partials_can_be_called() -> None:
    kept = torch.arange(3)

    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    @functools.wraps(add)
    def decorated(x: int) -> int:
        return x + 1

    assert rpc.rpc_sync(OTHER, lambda: os.getpid()) != os.getpid()
    assert rpc.rpc_sync(OTHER, lambda x: (x + kept).tolist(), args=(1,)) == [1, 2, 3]
    assert rpc.rpc_sync(OTHER, Local, args=(4,)).x == 4
    assert rpc.rpc_sync(OTHER, functools.partial(add, 1), args=(2,)) == 3
    assert rpc.rpc_sync(OTHER, functools.partial(lambda a, b: a * b, 2), args=(3,)) == 6
    assert rpc.rpc_sync(OTHER, lambda f: f(2), args=(lambda x: x**3,)) == 8
    assert rpc.rpc_sync(OTHER, decorated, args=(2,)) == 3


@inside
def test_a_worker_is_named_by_name_rank_or_info_also_oneself() -> None:
    for to in (OTHER, 1, rpc.get_worker_info(OTHER)):
        assert rpc.rpc_sync(to, name_here) == OTHER
        assert rpc.rpc_async(to, name_here).wait() == OTHER
        assert rpc.remote(to, name_here).to_here() == OTHER
    for to in ("worker0", 0, rpc.get_worker_info()):
        assert rpc.rpc_sync(to, name_here) == "worker0"
        assert rpc.rpc_async(to, name_here).wait() == "worker0"
        assert rpc.remote(to, name_here).to_here() == "worker0"


@inside
def test_arguments_and_keywords_arrive_as_given() -> None:
    assert rpc.rpc_sync(OTHER, keywords, args=(1, "a"), kwargs={"b": [2], "self": 3, "func": 4}) == (
        (1, "a"), {"b": [2], "self": 3, "func": 4},
    )  # fmt: skip
    assert rpc.rpc_sync(OTHER, keywords, args=[1, 2]) == ((1, 2), {})
    assert rpc.rpc_sync(OTHER, keywords) == ((), {})
    assert rpc.rpc_sync(OTHER, nothing) is None


@inside
def test_a_call_to_oneself_copies_its_arguments_and_its_result() -> None:
    items, tensor = [1], torch.zeros(3)
    got = rpc.rpc_sync(0, keywords, args=(items, tensor))[0]
    assert got[0] == items
    assert got[0] is not items
    assert got[1].data_ptr() != tensor.data_ptr()
    tensor.add_(1)
    assert got[1].tolist() == [0, 0, 0]


@inside
def test_large_tensors_come_back_equal_and_writable() -> None:
    for to in (OTHER, 0):
        for n in (1 << 18, 1 << 24):  # 1 and 64 MiB
            tensor = torch.arange(n, dtype=torch.float32)
            back = rpc.rpc_sync(to, add, args=(tensor, 1))
            assert torch.equal(back, tensor + 1)
            back.zero_()


@inside
def test_a_thousand_calls_at_once_are_all_answered() -> None:
    futures = [rpc.rpc_async(OTHER, add, args=(i, 1)) for i in range(1000)]
    assert [future.wait() for future in futures] == list(range(1, 1001))


@inside
def test_handlers_run_with_a_clean_torch_state_and_leave_none_behind() -> None:
    def state() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def spoil() -> None:
        torch.set_grad_enabled(False)

    for _ in range(5):
        rpc.rpc_sync(OTHER, spoil)
    with torch.no_grad():
        assert rpc.rpc_sync(OTHER, state) == (True, False)
        assert rpc.rpc_sync(0, state) == (True, False)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert rpc.rpc_sync(OTHER, state) == (True, False)
        back = rpc.rpc_sync(OTHER, add, args=(torch.ones(2), 1))
    assert not back.is_inference()
    back.add_(1)


MAIN = """
    import faulthandler, sys
    faulthandler.dump_traceback_later(90, exit=True)  # in every process of it: none stays, and a hang shows where
    import torch.multiprocessing as mp
    import actorrpc as rpc

    class Box:
        def __init__(self, x): self.x = x
        def double(self): return 2 * self.x

    class Unhappy(Exception):
        def __init__(self, a, b): super().__init__(f"{a}+{b}"); self.a = a

    def triple(box): return Box(3 * box.x)
    def fail(): raise Unhappy(1, 2)

    def program(rank, path):
        options = rpc.RpcBackendOptions(init_method=f"file://{path}", init_timeout=30)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        other = 1 - rank
        assert rpc.rpc_sync(other, triple, args=(Box(2),)).double() == 12
        assert rpc.rpc_async(other, triple, args=(Box(2),)).wait().x == 6
        ref = rpc.remote(other, Box, args=(4,))
        assert ref.rpc_sync().double() == 8
        assert ref.to_here().x == 4
        assert rpc.rpc_sync(other, lambda: triple(Box(1)).x) == 3
        try:
            rpc.rpc_sync(other, fail)
        except Exception as e:
            assert type(e).__name__ == "Unhappy" and e.a == 1, repr(e)
        else:
            raise AssertionError("no error")
        rpc.shutdown()
        print(f"fine {rank}\\n", end="", flush=True)  # in one piece: both write to one pipe

    def program_of_child(_, path):
        program(1, path)

    if __name__ == "__main__":
        path = sys.argv[1]
        if sys.argv[2] == "children":
            child = mp.spawn(program, args=(path,), nprocs=2, join=False)
        else:  # rank 0 is the process whose main module is __main__, rank 1's is __mp_main__
            child = mp.spawn(program_of_child, args=(path,), nprocs=1, join=False)
            program(0, path)
        while not child.join():
            pass
"""


@pytest.mark.parametrize("where", [pytest.param("children", marks=pytest.mark.slow), "parent"])
def test_things_of_the_main_module_go_both_ways_under_spawn(where: str, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(MAIN))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meet"), where],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["fine 0", "fine 1"]


# -- timeouts


@inside
def test_an_explicit_timeout_ends_the_call_with_torchs_words() -> None:
    for to in (OTHER, 0):
        with raised_within(1.5), pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than") as caught:
            rpc.rpc_sync(to, rest, args=(0.6,), timeout=0.1)
        assert isinstance(caught.value, (RuntimeError, TimeoutError))
        assert "worker" in str(caught.value)
        future = rpc.rpc_async(to, rest, args=(0.6,), timeout=0.1)
        with raised_within(1.5), pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            future.wait()
        assert future.done()
    time.sleep(0.7)  # the late answers come in, and nothing happens


@inside
def test_a_timeout_completes_a_future_that_nobody_waits_for() -> None:
    seen: list[type] = []

    def note(future: rpc.Future[Any]) -> None:
        try:
            future.wait()
        except Exception as e:
            seen.append(type(e))

    future = rpc.rpc_async(OTHER, rest, args=(0.5,), timeout=0.1)
    future.add_done_callback(note)
    until(lambda: seen, 2.0)
    assert seen == [rpc.RPCTimeoutError]


@inside
def test_zero_means_no_limit_and_below_zero_means_the_default() -> None:
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(0.1)
    try:
        assert rpc.get_rpc_timeout() == pytest.approx(0.1)
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync(OTHER, rest, args=(0.4,))
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync(OTHER, rest, args=(0.4,), timeout=-1)
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.remote(OTHER, nothing).rpc_async().x(rpc.rpc_sync(OTHER, rest, args=(0.4,)))
        assert rpc.rpc_sync(OTHER, rest, args=(0.4,), timeout=0) == "rested"
        assert rpc.rpc_async(OTHER, rest, args=(0.4,), timeout=0).wait() == "rested"
        rpc._set_rpc_timeout(0)
        assert rpc.rpc_sync(OTHER, rest, args=(0.4,)) == "rested"
    finally:
        rpc._set_rpc_timeout(60)


def test_a_call_that_timed_out_before_it_began_is_not_run() -> None:
    def program(rank: int) -> int:
        if rank == 1:
            return 0
        busy = [rpc.rpc_async(1, time.sleep, args=(0.03,)) for _ in range(30)]
        with pytest.raises(rpc.RPCTimeoutError):
            rpc.rpc_sync(1, count_up, timeout=0.02)
        for future in busy:
            future.wait()
        return int(rpc.rpc_sync(1, runs))

    assert run_world(program, 2, options={"num_worker_threads": 1}) == [0, 0]


# -- errors of the callee


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class Unloadable(Exception):
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("it does not load")


def raise_two() -> None:
    raise TwoArguments(1, 2)


def raise_with_lock() -> None:
    e = ValueError("has a lock")
    e.lock = threading.Lock()  # type: ignore[attr-defined]
    e.number = 5  # type: ignore[attr-defined]
    raise e


def raise_unloadable() -> None:
    raise Unloadable("some text")


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("of a function")


def raise_chained() -> None:
    try:
        _refuse()
    except OSError as e:
        raise LookupError("outer", 7) from e


@inside
def test_a_remote_exception_keeps_type_arguments_worker_and_traceback() -> None:
    for to, name in ((OTHER, OTHER), (0, "worker0")):
        for call in (
            lambda to=to: rpc.rpc_sync(to, raise_chained),
            lambda to=to: rpc.rpc_async(to, raise_chained).wait(),
            lambda to=to: rpc.remote(to, raise_chained).to_here(),
        ):
            with pytest.raises(LookupError) as caught:
                call()  # type: ignore[no-untyped-call]
            assert caught.value.args == ("outer", 7)
            if to == 0 and caught.value.__cause__.__class__ is OSError:
                continue  # local_value of one's own reference raises the very exception
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteTraceback)
            assert f'"{name}"' in str(cause)
            assert "in raise_chained" in str(cause)
            assert "it does not load" in str(cause)


@inside
def test_exceptions_that_pickle_badly_still_arrive() -> None:
    with pytest.raises(TwoArguments) as two:
        rpc.rpc_sync(OTHER, raise_two)
    assert (two.value.a, two.value.b, str(two.value)) == (1, 2, "1 and 2")
    with pytest.raises(ValueError, match="has a lock") as lock:
        rpc.rpc_sync(OTHER, raise_with_lock)
    assert lock.value.number == 5  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="some text"):
        rpc.rpc_sync(OTHER, raise_unloadable)
    with pytest.raises(Exception, match="of a function") as local:
        rpc.rpc_sync(OTHER, raise_local)
    assert type(local.value).__name__ in ("Local", "RemoteError")


def raise_exit(code: int) -> None:
    sys.exit(code)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@inside
def test_exit_and_interrupt_of_a_handler_end_the_call_and_not_the_worker() -> None:
    with pytest.raises(rpc.RemoteError, match=r"SystemExit\(3\)"):
        rpc.rpc_sync(OTHER, raise_exit, args=(3,))
    with pytest.raises(rpc.RemoteError, match="KeyboardInterrupt"):
        rpc.rpc_async(OTHER, raise_interrupt).wait()


def give_lock() -> Any:
    return threading.Lock()


def give_unloadable() -> Any:
    return Unloadable()


def generate() -> Iterator[int]:
    yield 1


@inside
def test_results_that_cannot_be_written_or_read_end_the_call_soon() -> None:
    lock = threading.Lock()
    with raised_within(2.0):
        with pytest.raises(rpc.SerializationError, match=r"_thread\.lock at result \(TypeError"):
            rpc.rpc_sync(OTHER, give_lock)
        for args, kwargs, place in (((1, [lock]), {}, r"args\[1\]\[0\]"), ((), {"x": lock}, r"kwargs\['x'\]")):
            with pytest.raises(rpc.SerializationError, match=place):
                rpc.rpc_sync(OTHER, abs, args=args, kwargs=kwargs)
        with pytest.raises(rpc.SerializationError, match=r"generator.*stream\(\)"):
            rpc.rpc_sync(OTHER, generate)
        with pytest.raises(rpc.DeserializationError, match="it does not load") as caught:
            rpc.rpc_sync(OTHER, give_unloadable)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(rpc.DeserializationError):
            rpc.rpc_async(OTHER, give_unloadable).wait()


@inside
def test_arguments_that_cannot_be_written_or_read_end_the_call_soon() -> None:
    with raised_within(2.0):
        for verb in VERBS:
            with pytest.raises(rpc.SerializationError, match="lock"):
                verb(OTHER, add, args=(threading.Lock(),))
            with pytest.raises(rpc.SerializationError):
                verb(OTHER, threading.Lock().acquire)
        with pytest.raises(rpc.DeserializationError, match="it does not load"):
            rpc.rpc_sync(OTHER, add, args=(Unloadable(),))
        with pytest.raises(rpc.DeserializationError):
            rpc.rpc_async(OTHER, add, args=(Unloadable(),)).wait()
        with pytest.raises(rpc.DeserializationError):
            rpc.remote(OTHER, add, args=(Unloadable(),)).to_here()


class Reader(rpc.Actor):
    """One whose methods fail to read something that is no message to them."""

    def __init__(self) -> None:
        self.runs = 0
        self.ref: Any = None

    def lacks_a_name(self, text: str) -> None:
        self.runs += 1
        raise rpc.UnknownNameError(f"in {text}", module="__main__", name="other")

    def keep(self, ref: Any) -> None:
        self.ref = ref
        raise rpc.DeserializationError("of something else")

    def count(self) -> int:
        return self.runs

    def ask(self) -> Any:
        return self.ref.to_here()


@inside
def test_a_handler_that_lacks_a_name_of_another_message_is_run_once_and_makes_room() -> None:
    reader = Reader.spawn(OTHER)
    for _ in range(3):
        with pytest.raises(rpc.UnknownNameError, match="in __main__"):
            reader.rpc_async().lacks_a_name("__main__").wait()
    assert reader.rpc_sync().count() == 3
    limits = session.current().worker.limits
    until(lambda: limits.statistics()["counted"] == 0)


@inside
def test_references_that_were_read_stay_though_their_handler_fails_to_read_something_else() -> None:
    reader, ref = Reader.spawn(OTHER), rpc.RRef([5])
    with pytest.raises(rpc.DeserializationError, match="of something else"):
        reader.rpc_sync().keep(ref)
    del ref
    gc.collect()
    assert reader.rpc_sync().ask() == [5]


@inside
def test_a_message_that_cannot_be_read_by_value_either_makes_room() -> None:
    with pytest.raises(rpc.UnknownNameError):
        rpc.rpc_async(OTHER, add, args=(Lacking("__main__"),)).wait()
    limits = session.current().worker.limits
    until(lambda: limits.statistics()["counted"] == 0)


class Lacking:
    """One that is read nowhere, for want of a name of the main module."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return lack, (self.text,)


def lack(text: str) -> None:
    raise rpc.UnknownNameError("it is nowhere", module=text, name="other")


@inside
def test_a_function_that_the_callee_does_not_know_is_named() -> None:
    module = types.ModuleType("only_here")
    exec("def f(): return 1", vars(module))
    sys.modules["only_here"] = module
    try:
        with raised_within(2.0):
            words = r"'only_here' cannot be imported on worker \"worker1\""
            with pytest.raises(rpc.UnknownNameError, match=words) as caught:
                rpc.rpc_sync(OTHER, module.f)
            assert (caught.value.module, caught.value.name) == ("only_here", "f")
            with pytest.raises(rpc.UnknownNameError, match="only_here"):
                rpc.remote(OTHER, module.f).to_here()
    finally:
        del sys.modules["only_here"]


def lone_module(name: str) -> Any:
    """Makes a module that no other process has, with a class in it."""
    module = sys.modules[name] = types.ModuleType(name)
    exec("class Lone:\n    class Inner: pass\nclass LoneError(Exception): pass", vars(module))
    return module


def lone_thing() -> Any:
    return [lone_module("only_there").Lone()]


def raise_lone() -> None:
    raise lone_module("only_there").LoneError("no luck")


@inside
def test_a_class_in_an_argument_that_the_callee_lacks_is_named_with_the_worker() -> None:
    module = lone_module("only_here")
    ref: rpc.RRef[list[Any]] = rpc.remote(OTHER, list)
    try:
        calls: list[Callable[[], Any]] = [
            lambda: rpc.rpc_sync(OTHER, len, args=([{"deep": module.Lone()}],)),
            lambda: rpc.rpc_async(OTHER, len, args=([module.Lone.Inner()],)).wait(),
            lambda: ref.rpc_sync().append(module.Lone()),
            lambda: rpc.remote(OTHER, list, args=([module.Lone],)).to_here(),
            lambda: rpc.rpc_sync(OTHER, lambda: module.Lone()),
        ]
        for call in calls:
            with pytest.raises(rpc.UnknownNameError, match=r"'only_here'.* on worker \"worker1\" \(rank 1") as caught:
                call()
            assert caught.value.module == "only_here"
        sys.modules["torch"].only_here = module.Lone  # type: ignore[attr-defined]
        module.Lone.__module__ = "torch"
        module.Lone.__qualname__ = "only_here"
        with pytest.raises(rpc.UnknownNameError, match=r"'torch' has no 'only_here' on worker \"worker1\""):
            rpc.rpc_sync(OTHER, len, args=([module.Lone()],))
    finally:
        del sys.modules["only_here"]
        vars(sys.modules["torch"]).pop("only_here", None)


@inside
def test_a_class_in_a_result_that_the_caller_lacks_is_named_with_the_caller() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync(OTHER, lone_thing),
        lambda: rpc.rpc_async(OTHER, lone_thing).wait(),
        lambda: rpc.remote(OTHER, lone_thing).to_here(),
    ]
    for call in calls:
        with pytest.raises(rpc.UnknownNameError, match=r"'only_there'.* on worker \"worker0\" \(rank 0") as caught:
            call()
        assert (caught.value.module, caught.value.name) == ("only_there", "Lone")
    with pytest.raises(rpc.RemoteError, match=r"only_there\.LoneError: no luck") as error:
        rpc.rpc_sync(OTHER, raise_lone)
    assert error.value.type_name == "only_there.LoneError"


# -- bad input


@inside
def test_wrong_types_are_named_at_once() -> None:
    for verb in VERBS:
        with pytest.raises(ValueError, match=r"3\.5"):
            verb(3.5, add)
        with pytest.raises(ValueError, match="worker"):
            verb(None, add)
        with pytest.raises(ValueError, match="worker"):
            verb(True, add)
        with pytest.raises(TypeError, match="args must be a tuple, not int"):
            verb(OTHER, add, args=5)
        with pytest.raises(TypeError, match="func must be callable, not 'x'"):
            verb(OTHER, "x")
        with pytest.raises(TypeError, match="kwargs must be a dict, not list"):
            verb(OTHER, add, kwargs=[])
        with pytest.raises(TypeError, match="timeout"):
            verb(OTHER, add, timeout="soon")
        with pytest.raises(rpc.NotAMemberError, match=r"nobody.*worker0, worker1"):
            verb("nobody", add)
        with pytest.raises(rpc.NotAMemberError, match="rank 7"):
            verb(7, add)
        with pytest.raises(rpc.NotAMemberError, match="rank -1"):
            verb(-1, add)
    with pytest.raises(rpc.NotAMemberError, match=r"nobody.*worker0, worker1"):
        rpc.get_worker_info("nobody")
    with pytest.raises(TypeError):
        rpc.rpc_sync(OTHER, add)


@inside
def test_a_second_init_is_refused_and_harmless() -> None:
    with pytest.raises(RuntimeError, match=r"already.*worker0.*shutdown"):
        rpc.init_rpc("again", rank=0, world_size=1)
    assert rpc.rpc_sync(OTHER, name_here) == OTHER


def test_before_init_and_after_shutdown_everything_says_so() -> None:
    def refuse_all() -> None:
        for attempt in (
            lambda: rpc.rpc_sync("x", add),
            lambda: rpc.rpc_async("x", add),
            lambda: rpc.remote("x", add),
            lambda: rpc.RRef(1),
            lambda: rpc.get_worker_info(),
            lambda: rpc.get_rpc_timeout(),
            lambda: rpc._set_rpc_timeout(1),
        ):
            with pytest.raises(rpc.NotAMemberError, match="init_rpc"):
                attempt()
        rpc.shutdown()

    def program(rank: int, folder: str) -> None:
        refuse_all()
        rpc.init_rpc(
            "a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{folder}/m")
        )
        own = rpc.RRef([1])
        other = rpc.remote("a", add, args=(1,))
        pending = rpc.rpc_async("a", rest, args=(0.2,))
        rpc.shutdown()
        refuse_all()
        assert pending.done()
        assert pending.wait() == "rested"
        assert own.is_owner()
        for verb in ("rpc_sync", "rpc_async", "remote"):
            with pytest.raises(rpc.NotAMemberError):
                getattr(other, verb)().bit_length()
        repr(own), repr(other)
        del own, other
        gc.collect()

    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = run_processes(program, 1, args=(folder,))
    assert not outcome.traceback, outcome.traceback
    assert outcome.problems == []


def test_bad_names_ranks_and_sizes_are_refused_before_anything_starts() -> None:
    def program(rank: int, folder: str) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{folder}/m")
        for name in ("", "a b", "a/b", "ä", "a\n", "x" * 128, "a."):
            with pytest.raises(ValueError, match="name"):
                rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
        with pytest.raises((ValueError, TypeError), match="name"):
            rpc.init_rpc(5, rank=0, world_size=1, rpc_backend_options=options)  # type: ignore[arg-type]
        for bad_rank, size in ((1, 1), (5, 2), (0, 0)):
            with pytest.raises(ValueError, match="rank"):
                rpc.init_rpc("a", rank=bad_rank, world_size=size, rpc_backend_options=options)
        for wrong in ({"rank": "0", "world_size": 1}, {"rank": None, "world_size": 1}, {"rank": 0, "world_size": 1.0}):
            with pytest.raises(TypeError, match=r"(rank|world_size) must be a whole number, not"):
                rpc.init_rpc("a", rpc_backend_options=options, **wrong)
        for number in ("RANK", "WORLD_SIZE"):
            os.environ.pop(number, None)
        with pytest.raises(ValueError, match="RANK"):
            rpc.init_rpc("a", world_size=1, rpc_backend_options=options)
        os.environ["RANK"] = "zero"
        with pytest.raises(ValueError, match="RANK='zero'"):
            rpc.init_rpc("a", world_size=1, rpc_backend_options=options)
        rpc.shutdown()
        rpc.init_rpc("x" * 127, rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("x" * 127, add, args=(1,)) == 1
        rpc.shutdown()

    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = run_processes(program, 1, args=(folder,))
    assert not outcome.traceback, outcome.traceback
    assert outcome.problems == []


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"rpc_timeout": -1}, {"num_worker_threads": 0}, {"init_timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.RpcBackendOptions(**wrong)  # type: ignore[arg-type]


@inside
def test_pending_calls_and_threads_stay_few() -> None:
    for _ in range(300):
        rpc.rpc_sync(OTHER, nothing)
    statistics = session.current().worker.statistics()
    assert statistics["pending"] == 0
    assert statistics["threads"] <= 24


class Server:
    """Gives its weights away and goes on changing them."""

    def __init__(self) -> None:
        self.weights, self.wrong = torch.zeros(2_000_000), 0

    def get(self) -> torch.Tensor:
        return self.weights

    def step(self) -> None:
        self.weights += 1

    def put(self, weights: torch.Tensor) -> None:
        self.wrong += int(weights.min() != weights.max())

    def mistakes(self) -> int:
        return self.wrong


class ServerActor(Server, rpc.Actor):
    """The same with a mailbox, so that `step` comes after `get`."""


@inside
def test_answers_and_tells_are_snapshots_of_their_tensors() -> None:
    server, mine = ServerActor.spawn(OTHER), torch.zeros(2_000_000)
    for _ in range(10):
        future = server.rpc_async().get()
        server.tell().step()
        weights = future.wait()
        assert weights.min() == weights.max()
        server.tell().put(mine)
        mine += 1
    assert server.rpc_sync().mistakes() == 0


@inside
def test_a_timeout_of_infinity_is_never_and_one_that_is_no_number_is_refused() -> None:
    for forever in (math.inf, 1e300):
        assert rpc.rpc_sync(OTHER, operator.add, args=(1, 2), timeout=forever) == 3
        assert rpc.rpc_async(OTHER, operator.add, args=(1, 2), timeout=forever).wait(forever) == 3
    with pytest.raises(ValueError, match="not NaN"):
        rpc.rpc_sync(OTHER, operator.add, args=(1, 2), timeout=math.nan)
