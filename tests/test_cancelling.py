"""Deadlines that travel with calls, and calls that are cancelled: what has not begun is never run.

On a virtual clock but for the last ones. Executions are counted in a list of this module, which all workers of a
simulated world share.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import functions
from actorrpc.runtime.completion import Completion
from actorrpc.session import current
from actorrpc.testing import SimWorld
from tests.worlds import World, no_references, until

SEEDS = range(12)
ran: list[Any] = []
kept: list[rpc.Future[Any]] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    ran.clear()
    kept.clear()


def rest(seconds: float) -> None:
    """Lets the present worker's time pass."""
    worker = current().worker
    worker.wait(Completion(), worker.clock.now() + seconds)


def sleep(seconds: float) -> None:
    """The same, but for the mailbox of the actor that does: it admits nothing meanwhile."""
    current().worker.clock.gate().wait(seconds)


def work(what: Any, seconds: float = 0.0) -> Any:
    ran.append(what)
    rest(seconds)
    return what


def watch(what: Any, seconds: float) -> None:
    """Works in small steps for as long as somebody waits for it."""
    ran.append(what)
    call = rpc.current_call()
    for _ in range(int(seconds / 0.05)):
        if call.cancelled:
            ran.append(f"{what} saw it")
            return
        sleep(0.05)
    ran.append(f"{what} ended")


@functions.async_execution
def work_later(what: Any) -> rpc.Future[Any]:
    ran.append(what)
    done: rpc.Future[Any] = rpc.Future()
    done.set_result(what)
    return done


class Server(rpc.Actor):
    """Serves one message at a time."""

    def work(self, what: Any, seconds: float = 0.0) -> Any:
        return work(what, seconds)

    def watch(self, what: Any, seconds: float) -> None:
        watch(what, seconds)


def in_worlds(program: Callable[[], Any], *, size: int = 3, threads: int = 4, seeds: Any = SEEDS) -> list[Any]:
    """Runs a program on rank 0 of simulated worlds; returns what it returned in each."""
    results = []
    for seed in seeds:
        ran.clear()
        with SimWorld(size=size, seed=seed, threads=threads) as world:
            results.append(world.run(program)[0])
            for session in world.sessions:
                worker = session.worker
                assert not worker.calls.pending, seed
                assert not worker.serving.requests, (seed, worker.serving.requests)
    return results


# -- deadlines


def remaining_here() -> float | None:
    return rpc.current_call().remaining()


def remaining_there(timeout: float) -> Any:
    return rpc.rpc_sync(2, remaining_here, timeout=timeout)


def test_a_handler_knows_how_long_its_caller_waits() -> None:
    def program() -> Any:
        return [rpc.rpc_sync(1, remaining_here, timeout=timeout) for timeout in (50.0, 0)]

    for seconds, forever in in_worlds(program):
        assert 40 < seconds <= 50
        assert forever is None


@pytest.mark.parametrize("timeout", [0, 100.0, -1], ids=["for ever", "longer", "default"])
def test_a_nested_call_has_no_longer_than_its_handler(timeout: float) -> None:
    for seconds in in_worlds(lambda: rpc.rpc_sync(1, remaining_there, args=(timeout,), timeout=50.0)):
        assert 40 < seconds <= 50


def test_a_nested_calls_own_shorter_limit_holds() -> None:
    for seconds in in_worlds(lambda: rpc.rpc_sync(1, remaining_there, args=(20.0,), timeout=50.0)):
        assert 10 < seconds <= 20


def nest_too_long(way: str) -> str:
    try:
        if way == "rpc_sync":
            rpc.rpc_sync(2, rest, args=(50.0,), timeout=100.0)
        elif way == "rpc_async":
            rpc.rpc_async(2, rest, args=(50.0,), timeout=0).wait()
        elif way == "remote":
            rpc.remote(2, rest, args=(50.0,), timeout=0).to_here(timeout=0)
        elif way == "proxy":
            kept_server().rpc_sync(timeout=100.0).work("x", 50.0)
        else:
            kept_server().remote(timeout=0).work("x", 50.0).to_here(timeout=0)
    except rpc.RPCTimeoutError as e:
        ran.append(str(e))
    return "came too late"


def kept_server() -> rpc.RRef[Server]:
    return Server.spawn(2)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote", "proxy", "remote of a method"])
def test_the_error_of_a_nested_call_says_whose_deadline_it_was(way: str) -> None:
    def program() -> Any:
        with pytest.raises(rpc.RPCTimeoutError, match="more than set timeout \\(1000 ms\\)"):
            rpc.rpc_sync(1, nest_too_long, args=(way,), timeout=1.0)
        rest(0.5)
        (text,) = [entry for entry in ran if entry != "x"]
        assert 'a handler that worker "w0" (rank 0' in text, text
        rest(60.0)

    in_worlds(program, seeds=range(4))


def tell_on() -> None:
    server = kept_server()
    server.tell().watch("told", 3.0)


def test_a_tell_in_a_handler_has_no_limit_and_neither_has_what_it_calls() -> None:
    def program() -> None:
        rpc.rpc_sync(1, tell_on, timeout=1.0)
        rest(5.0)
        assert ran == ["told", "told ended"]

    in_worlds(program, seeds=range(4))


def test_outside_of_a_handler_there_is_no_call_and_nothing_is_cancelled() -> None:
    call = rpc.current_call()
    assert (call.caller, call.remaining(), call.cancelled) == (None, None, False)

    def program() -> None:
        call = rpc.current_call()
        assert (call.caller, call.remaining(), call.cancelled) == (None, None, False)
        assert repr(call) == "CurrentCall(none)"

    in_worlds(program, seeds=[0])


def who_calls() -> Any:
    return rpc.current_call().caller, repr(rpc.current_call())


def test_a_handler_knows_its_caller() -> None:
    for caller, shown in in_worlds(lambda: rpc.rpc_sync(1, who_calls), seeds=[0]):
        assert caller == rpc.WorkerInfo("w0", 0)
        assert shown == "CurrentCall(from 'w0')"


@pytest.mark.parametrize("target", ["functions", "an actor", "oneself"])
def test_of_queued_calls_those_whose_time_has_run_out_are_never_run(target: str) -> None:
    def program() -> None:
        call = calls_of(target)
        first = call(0.0)("first", 2.0)
        rest(0.1)
        late = [call(1.0)(f"late {n}") for n in range(20)]
        last = call(0.0)("last")
        for future in late:
            with pytest.raises(rpc.RPCTimeoutError):
                future.wait()
        assert (first.wait(), last.wait()) == ("first", "last")
        assert ran == ["first", "last"]

    in_worlds(program, threads=1)


def calls_of(target: str) -> Callable[[float], Callable[..., rpc.Future[Any]]]:
    """Returns what calls `work` of something, given a timeout. With functions, rank 1 has one thread."""
    if target == "functions":
        return lambda timeout: lambda what, seconds=0.0: rpc.rpc_async(
            1, block if seconds else work, args=(what, seconds), timeout=timeout
        )
    server = Server.spawn(0 if target == "oneself" else 1)
    return lambda timeout: server.rpc_async(timeout=timeout).work


def block(what: Any, seconds: float) -> Any:
    """Works without lending its thread."""
    ran.append(what)
    worker = current().worker
    gate, end = worker.clock.gate(), worker.clock.now() + seconds
    # Others must see an end now and then, or they would take it for a standstill and start more threads.
    while worker.clock.now() < end:
        gate.wait(0.01)
        worker.crew._lanes.ended[2] += 1
    return what


# -- cancelling


@pytest.mark.parametrize("target", ["functions", "an actor", "oneself"])
def test_of_queued_calls_those_that_are_cancelled_are_never_run(target: str) -> None:
    def program() -> None:
        call = calls_of(target)
        first = call(0.0)("first", 2.0)
        rest(0.1)
        futures = [call(0.0)(n) for n in range(100)]
        assert all(future.cancel() for future in futures[::2])
        for future in futures[::2]:
            assert future.done()
            assert future.cancelled()
            assert not future.cancel()
            with pytest.raises(rpc.CancelledError, match="was cancelled"):
                future.wait()
        assert first.wait() == "first"
        assert [future.wait() for future in futures[1::2]] == list(range(1, 100, 2))
        assert ran[0] == "first"
        assert sorted(ran[1:]) == list(range(1, 100, 2))
        rest(0.1)

    in_worlds(program, threads=1, seeds=range(4))


def test_one_error_serves_those_who_catch_either_kind() -> None:
    assert issubclass(rpc.CancelledError, rpc.ActorRPCError)
    assert issubclass(rpc.CancelledError, concurrent.futures.CancelledError)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("target", ["a function", "an actor"])
def test_a_call_that_runs_can_see_that_it_was_cancelled_or_that_time_has_run_out(how: str, target: str) -> None:
    def program() -> None:
        timeout = 0.0 if how == "cancelled" else 0.3
        if target == "a function":
            future = rpc.rpc_async(1, watch, args=("it", 5.0), timeout=timeout)
        else:
            future = Server.spawn(1).rpc_async(timeout=timeout).watch("it", 5.0)
        rest(0.2)
        if how == "cancelled":
            assert future.cancel()
        with pytest.raises(rpc.CancelledError if how == "cancelled" else rpc.RPCTimeoutError):
            future.wait()
        rest(0.5)
        assert ran == ["it", "it saw it"]

    in_worlds(program)


def test_a_timeout_is_told_to_the_callee_whose_clock_may_be_behind() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, look, timeout=0.2)
        with pytest.raises(rpc.RPCTimeoutError):
            future.wait()
        rest(1.0)
        assert ran == ["was told"]

    in_worlds(program, seeds=[0])


def look() -> None:
    message = rpc.current_call()._message
    assert message is not None
    for _ in range(100):
        rest(0.05)
        if message.cancelled:
            ran.append("was told")
            return


def test_cancelling_what_is_done_changes_nothing() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, work, args=("it",))
        assert future.wait() == "it"
        assert not future.cancel()
        assert not future.cancelled()
        assert future.wait() == "it"

    in_worlds(program)


def test_a_call_is_cancelled_or_run_or_both_but_its_future_says_one_thing() -> None:
    """At every moment of its way."""
    both = 0
    for seed in range(150):
        ran.clear()
        with SimWorld(size=2, seed=seed) as world:

            def program() -> Any:
                server = Server.spawn(1)
                server.rpc_sync().work("there")
                ran.clear()
                future = server.rpc_async().work("it")
                rest(current().worker.clock.random.random() * 600e-6)  # type: ignore[attr-defined]
                took_effect = future.cancel()
                if took_effect:
                    with pytest.raises(rpc.CancelledError):
                        future.wait()
                else:
                    assert future.wait() == "it"
                rest(0.1)
                assert ran in ([], ["it"])
                assert took_effect or ran == ["it"]
                assert server.rpc_sync().work("after") == "after"
                return took_effect and len(ran) == 2

            both += world.run(program)[0]
            assert not world.sessions[1].worker.serving.requests
    assert 0 < both < 150


def test_who_waits_is_woken_by_another_threads_cancel_and_callbacks_run() -> None:
    def program() -> None:
        future = Server.spawn(1).rpc_async(timeout=0).work("it", 100.0)
        called: list[bool] = []
        future.add_done_callback(lambda done: called.append(done.cancelled()))
        child = future.then(lambda done: done.cancelled())
        clock = current().worker.clock

        def cancel() -> None:
            clock.gate().wait(0.5)
            assert future.cancel()

        thread = clock.start(cancel, "canceller")
        begun = clock.now()
        with pytest.raises(rpc.CancelledError):
            future.wait()
        assert clock.now() - begun < 1.0
        assert child.wait() is True
        assert called == [True]
        thread.join(1.0)
        rest(101.0)

    in_worlds(program, size=2, seeds=range(4))


def test_a_future_of_ones_own_can_be_cancelled() -> None:
    future: rpc.Future[int] = rpc.Future()
    child = future.then(lambda done: done.cancelled())
    assert future.cancel()
    assert not future.cancel()
    assert future.cancelled()
    with pytest.raises(rpc.CancelledError):
        future.wait()
    assert child.wait() is True
    with pytest.raises(RuntimeError, match="only be marked completed once"):
        future.set_result(1)


def test_the_future_of_then_is_cancelled_alone() -> None:
    future: rpc.Future[int] = rpc.Future()
    called: list[int] = []
    child = future.then(lambda done: called.append(done.wait()))
    assert child.cancel()
    future.set_result(3)
    assert future.wait() == 3
    assert called == []
    with pytest.raises(rpc.CancelledError):
        child.wait()


@functions.async_execution
def later() -> rpc.Future[Any]:
    ran.append("began")
    future: rpc.Future[Any] = rpc.Future()
    kept.append(future)
    return future


def test_a_call_that_is_answered_later_is_given_up_when_it_is_cancelled() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, later, timeout=0)
        rest(0.1)
        assert future.cancel()
        rest(0.1)
        assert ran == ["began"]
        assert rpc.rpc_sync(1, requests) == 1  # this one
        kept[-1].set_result(1)  # nobody minds

    in_worlds(program)


def pass_on(ref: rpc.RRef[Any], what: Any) -> None:
    ran.append(what)


def test_references_in_cancelled_calls_are_given_back() -> None:
    for seed in range(30):
        with SimWorld(size=3, seed=seed, threads=1) as world:

            def program() -> None:
                ref = rpc.RRef([1])
                far: rpc.RRef[list[int]] = rpc.remote(2, list, args=((1,),))
                first = rpc.rpc_async(1, block, args=("first", 0.5), timeout=0)
                futures = [rpc.rpc_async(1, pass_on, args=(r, n), timeout=0) for n in range(5) for r in (ref, far)]
                for future in futures:
                    assert future.cancel()
                first.wait()

            world.run(program)
            world.settle(20.0)
            for session in world.sessions:
                assert not any(session.objects.statistics().values()), (seed, session.objects.statistics())


def test_an_object_whose_making_was_given_up_before_it_began_is_never_made() -> None:
    def program() -> None:
        server = Server.spawn(1)
        first = server.rpc_async(timeout=0).work("first", 2.0)
        ref = server.remote(timeout=0.5).work("object")
        with pytest.raises(rpc.RPCTimeoutError):
            ref.to_here()
        first.wait()
        assert ran == ["first"]

    in_worlds(program, size=2)


def nest_and_wait(what: str) -> None:
    ran.append(what)
    rpc.rpc_sync(2, watch, args=("nested", 2.0), timeout=0)
    ran.append(f"{what} ended")


def test_what_a_cancelled_handler_has_called_goes_on() -> None:
    def program() -> None:
        future = rpc.rpc_async(1, nest_and_wait, args=("handler",), timeout=0)
        rest(0.5)
        assert future.cancel()
        rest(3.0)
        assert ran == ["handler", "nested", "nested ended", "handler ended"]

    in_worlds(program, seeds=range(4))


def ask(server: rpc.RRef[Server]) -> None:
    kept.extend(server.rpc_async(timeout=0).watch(n, 3.0) for n in ("runs", "waits"))


def test_what_a_lost_caller_had_asked_for_is_not_begun_and_what_runs_can_see_it() -> None:
    for seed in SEEDS:
        ran.clear()
        with SimWorld(size=3, seed=seed) as world:

            def program() -> None:
                rpc.rpc_sync(2, ask, args=(Server.spawn(1),), timeout=0)
                rest(0.2)

            world.run(program)
            world.kill(2)
            world.settle(10.0)
            assert ran == ["runs", "runs saw it"], seed
            kept.clear()


# -- groups


class Member(rpc.Actor):
    def main(self) -> Any:
        raise NotImplementedError

    def watch(self, seconds: float) -> str:
        watch(self.name, seconds)
        return self.name

    def uneven(self, seconds: list[float]) -> str:
        return self.watch(seconds[self.index])


class Chief(rpc.Actor):
    def main(self) -> Any:
        ran.clear()
        return program_of_chief[0](self)


program_of_chief: list[Callable[[Chief], Any]] = []


class Quiet(Member):
    main = None  # type: ignore[assignment]


def with_group(program: Callable[[Chief], Any], seeds: Any = range(6)) -> None:
    program_of_chief[:] = [program]
    for seed in seeds:
        with SimWorld.of_roles(seed, chief=Chief, member=rpc.Role(Quiet, 4)) as world:
            world.play()


def test_cancelling_a_groups_future_cancels_all_members_calls() -> None:
    def program(chief: Chief) -> None:
        future = chief.world.member.rpc_async(timeout=0).watch(5.0)
        rest(0.2)
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(rpc.CancelledError):
            future.wait()
        rest(0.5)
        assert sorted(ran) == sorted(f"member:{n}{end}" for n in range(4) for end in ("", " saw it"))

    with_group(program)


def test_the_first_answer_of_any_cancels_the_others() -> None:
    def program(chief: Chief) -> None:
        assert chief.world.member.any().rpc_sync(timeout=0).uneven([5.0, 0.1, 5.0, 5.0]) == "member:1"
        rest(0.5)
        assert sorted(e for e in ran if " " in e) == ["member:0 saw it", "member:1 ended", "member:2 saw it",
                                                       "member:3 saw it"]  # fmt: skip

    with_group(program)


# -- arguments that take long to read


class Heavy:
    """Takes seconds to be read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> Any:
        return read_slowly, (self.seconds,)


def read_slowly(seconds: float) -> str:
    sleep(seconds)
    return "read"


@pytest.mark.parametrize("how", ["its time runs out", "it is cancelled"])
@pytest.mark.parametrize("verb", ["function", "method", "async"])
def test_a_call_that_is_given_up_while_its_arguments_are_read_is_never_run(verb: str, how: str) -> None:
    limit = 1.0 if how == "its time runs out" else 0

    def program() -> str:
        server = Server.spawn(1)
        if verb == "method":
            future: Any = server.rpc_async(timeout=limit).work(Heavy(3.0))
        else:
            function = {"function": work, "async": work_later}[verb]
            future = rpc.rpc_async(1, function, args=(Heavy(3.0),), timeout=limit)
        rest(2.0)
        if not limit:
            assert future.cancel()
        with pytest.raises(rpc.RPCTimeoutError if limit else rpc.CancelledError):
            future.wait()
        rest(3.0)
        assert server.rpc_sync().work("next") == "next"  # its turn has ended
        return ",".join(map(str, ran))

    assert set(in_worlds(program)) == {"next"}


def test_an_object_whose_making_is_given_up_while_its_arguments_are_read_is_never_made() -> None:
    def program() -> str:
        made = rpc.remote(1, work, args=(Heavy(3.0),), timeout=1.0)
        rest(4.0)
        with pytest.raises(rpc.RPCTimeoutError):
            made.to_here()
        return ",".join(map(str, ran))

    assert set(in_worlds(program)) == {""}


def test_a_tell_whose_arguments_take_long_to_read_is_run() -> None:
    def program() -> str:
        server = Server.spawn(1)
        server.tell().work(Heavy(100.0))
        rest(200.0)
        return ",".join(map(str, ran))

    assert set(in_worlds(program)) == {"read"}


# -- over processes

_gate = threading.Event()


def held(what: Any) -> Any:
    ran.append(what)
    _gate.wait(20)
    return what


def note(what: Any) -> None:
    ran.append(what)


def what_ran() -> list[Any]:
    return ran


def open_gate() -> None:
    _gate.set()


class Held(rpc.Actor):
    def held(self, what: Any) -> Any:
        return held(what)


def test_calls_between_processes_are_cancelled_before_they_begin(pair: World) -> None:
    def program() -> None:
        server = Held.spawn(1)
        first = server.rpc_async(timeout=0).held("first")
        futures = [server.rpc_async(timeout=0).held(n) for n in range(200)]
        until(lambda: rpc.rpc_sync(1, what_ran) == ["first"])
        assert all(future.cancel() for future in futures)
        until(lambda: rpc.rpc_sync(1, requests) <= 2)  # `first` and this call itself
        rpc.rpc_sync(1, open_gate)
        assert first.wait() == "first"
        assert server.rpc_sync().held("last") == "last"
        assert rpc.rpc_sync(1, what_ran) == ["first", "last"]
        del server
        no_references()

    pair.on(0, program)


def requests() -> int:
    return len(current().worker.serving.requests)
