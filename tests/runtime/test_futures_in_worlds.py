"""Futures of real calls, and futures of the user's own, waited for in handlers and in user threads."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.worlds import World, inside, raised_within, until

OTHER = "worker1"


def give(value: Any, seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return value


def fail(text: str, seconds: float = 0.0) -> None:
    time.sleep(seconds)
    raise ValueError(text)


@inside
def test_wait_with_a_bound_gives_up_and_a_later_wait_gets_the_result() -> None:
    for to in (OTHER, 0):
        future = rpc.rpc_async(to, give, args=(7, 0.4))
        with raised_within(0.35), pytest.raises(rpc.RPCTimeoutError, match="still under way"):
            future.wait(0.05)
        assert not future.done()
        with pytest.raises(RuntimeError):
            future.value()
        assert future.wait() == 7
        assert future.wait(0.01) == 7
        assert future.done()
        assert future.value() == 7


@inside
def test_the_calls_own_limit_holds_where_it_is_nearer_than_the_waits() -> None:
    future = rpc.rpc_async(OTHER, give, args=(7, 0.5), timeout=0.1)
    with raised_within(0.45), pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
        future.wait(5)
    with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
        future.wait()


@inside
def test_an_error_is_raised_at_every_wait_and_by_value() -> None:
    future = rpc.rpc_async(OTHER, fail, args=("no",))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            future.wait()
        with pytest.raises(ValueError, match="no"):
            future.value()


@inside
def test_then_chains_give_our_futures_and_carry_errors() -> None:
    for to in (OTHER, 0):
        chain = rpc.rpc_async(to, give, args=(1, 0.05)).then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 10)
        assert isinstance(chain, rpc.Future)
        assert chain.wait() == 20
        done = rpc.rpc_async(to, give, args=(1,))
        done.wait()
        assert done.then(lambda f: f.wait() + 1).wait() == 2
        bad = rpc.rpc_async(to, fail, args=("no", 0.05)).then(lambda f: f.wait()).then(lambda f: f.wait())
        with pytest.raises(ValueError, match="no"):
            bad.wait()
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_async(to, give, args=(1,)).then(lambda f: f.wait() // 0).wait()
        late = rpc.rpc_async(to, give, args=(1, 0.3)).then(lambda f: f.wait())
        with pytest.raises(rpc.RPCTimeoutError):
            late.wait(0.05)
        assert late.wait() == 1


@inside
def test_callbacks_run_once_each_also_after_one_that_raises() -> None:
    seen: list[Any] = []

    def bad(_: Any) -> None:
        seen.append("bad")
        raise RuntimeError("of a callback")

    future = rpc.rpc_async(OTHER, give, args=(3, 0.1))
    future.add_done_callback(bad)
    future.add_done_callback(lambda f: seen.append(f.wait()))
    until(lambda: len(seen) == 2)
    future.add_done_callback(bad)
    future.add_done_callback(lambda f: seen.append(f.value()))
    assert seen == ["bad", 3, "bad", 3]


@inside
def test_a_callback_may_call_and_wait() -> None:
    seen: list[Any] = []
    future = rpc.rpc_async(OTHER, give, args=(3, 0.05))
    future.add_done_callback(lambda f: seen.append(rpc.rpc_sync(OTHER, give, args=(f.wait() + 1,))))
    until(lambda: seen)
    assert seen == [4]


@inside
def test_callbacks_never_run_on_the_stack_of_a_waiting_caller() -> None:
    lock = threading.Lock()  # held by the waiting thread and wanted by the callback
    ran = threading.Event()

    def callback(_: Any) -> None:
        with lock:
            ran.set()

    with lock:
        future = rpc.rpc_async(OTHER, give, args=(1, 0.05))
        future.add_done_callback(callback)
        assert future.wait() == 1
        assert rpc.rpc_sync(OTHER, give, args=(2,)) == 2
    assert ran.wait(5)


@inside
def test_torchs_wait_all_and_collect_all_take_our_futures() -> None:
    for to in (OTHER, 0):
        futures: list[torch.futures.Future[Any]] = [rpc.rpc_async(to, give, args=(i, 0.01)) for i in range(20)]
        assert torch.futures.wait_all(futures) == list(range(20))
        futures = [rpc.rpc_async(to, give, args=(i, 0.01)) for i in range(20)]
        assert [f.wait() for f in torch.futures.collect_all(futures).wait()] == list(range(20))
        done: list[torch.futures.Future[Any]] = [rpc.rpc_async(to, give, args=(i,)) for i in range(20)]
        for future in done:
            future.wait()
        assert torch.futures.wait_all(done) == list(range(20))


@inside
def test_collect_all_works_over_futures_that_nobody_else_holds() -> None:
    for _ in range(20):
        got = torch.futures.collect_all([rpc.rpc_async(OTHER, give, args=(i, 0.001)) for i in range(10)]).wait()
        assert [f.wait() for f in got] == list(range(10))
        one = torch.futures.collect_all([rpc.rpc_async(OTHER, give, args=(i,)) for i in range(3)])
        assert len(one.then(lambda f: f.wait()).wait()) == 3


@inside
def test_torch_hears_of_a_future_whose_wait_was_interrupted_as_its_answer_came() -> None:
    worker: Any = session.current().worker
    wait, future = worker.wait, rpc.rpc_async(OTHER, give, args=(7, 0.2))

    def interrupted(*args: Any) -> None:
        assert wait(*args)
        raise KeyboardInterrupt

    worker.wait = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            future.wait()
    finally:
        worker.wait = wait
    until(lambda: torch._C.Future.done(future))
    assert torch.futures.wait_all([future]) == [7]


def wait_while_the_world_ends() -> None:
    futures = [rpc.rpc_async(OTHER, give, args=(7, 20.0)) for _ in range(2)]
    told: list[BaseException] = []

    async def wait_for(future: rpc.Future[Any]) -> None:
        await future

    def wait(how: Any) -> None:
        try:
            how()
        except rpc.NotAMemberError as e:
            told.append(e)

    ways = futures[0].wait, lambda: asyncio.run(wait_for(futures[1]))
    threads = [threading.Thread(target=wait, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    until(lambda: all(future._core.waiters for future in futures))
    rpc.shutdown(graceful=False)
    for thread in threads:
        thread.join()
    assert len(told) == 2
    for future in futures:
        with pytest.raises(Exception, match="has shut down"):
            torch.futures.wait_all([future])


def test_torch_hears_of_a_future_whose_waiter_was_told_that_the_world_has_ended() -> None:
    with World(2, timeout=20, strict=False) as world:
        world.on(0, wait_while_the_world_ends)


@inside
def test_wait_all_raises_the_calls_error() -> None:
    with pytest.raises(ValueError, match="no"):
        torch.futures.wait_all([rpc.rpc_async(OTHER, give, args=(1,)), rpc.rpc_async(OTHER, fail, args=("no",))])
    with pytest.raises(ValueError, match="no"):
        torch.futures.wait_all([rpc.rpc_async(OTHER, fail, args=("no", 0.05)).then(lambda f: f.wait())])


@inside
def test_wait_all_ends_with_the_calls_timeout() -> None:
    with raised_within(2), pytest.raises(Exception, match="RPC ran for more than"):
        torch.futures.wait_all([rpc.rpc_async(OTHER, give, args=(1, 0.6), timeout=0.1)])


@inside
def test_a_future_is_completed_once() -> None:
    future: rpc.Future[int] = rpc.Future()
    assert not future.done()
    future.set_result(5)
    assert future.done()
    with pytest.raises(RuntimeError, match="once"):
        future.set_result(6)
    with pytest.raises(RuntimeError, match="once"):
        future.set_exception(ValueError("x"))
    assert future.wait() == 5
    bad: rpc.Future[int] = rpc.Future()
    bad.set_exception(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        bad.wait()
    call = rpc.rpc_async(OTHER, give, args=(1,))
    with pytest.raises(RuntimeError, match="call"):
        call.set_result(3)
    assert call.wait() == 1


def own_future(seconds: float, leading: bool) -> int:
    """Waits for a future that another thread completes."""
    future: rpc.Future[int] = rpc.Future()
    threading.Timer(seconds, future.set_result, (11,)).start()
    if leading:
        rpc.rpc_sync(rpc.get_worker_info().id, give, args=(1,))
    return future.wait()


@inside
def test_a_future_of_the_users_own_wakes_its_waiter_in_user_threads_and_handlers() -> None:
    with raised_within(3):
        assert own_future(0.1, True) == 11
        assert rpc.rpc_sync(OTHER, own_future, args=(0.1, True)) == 11
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(own_future(0.1, False))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3)
        assert got == [11] * 4


@inside
def test_a_future_of_the_users_own_wakes_waiters_promptly_whoever_completes_it() -> None:
    for _ in range(100):
        future: rpc.Future[float] = rpc.Future()
        starter = threading.Thread(target=lambda f=future: f.set_result(time.monotonic()))
        starter.start()
        future.wait(2)
        starter.join()
    before: rpc.Future[int] = rpc.Future()
    with pytest.raises(rpc.RPCTimeoutError):
        before.wait(0.05)
    before.set_result(1)
    assert before.wait() == 1


@inside
def test_then_of_a_users_own_future_can_be_waited_for() -> None:
    future: rpc.Future[int] = rpc.Future()
    chain = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 2)
    threading.Timer(0.05, future.set_result, (4,)).start()
    assert chain.wait() == 10
    collected = torch.futures.collect_all([chain, future]).wait()
    assert [f.wait() for f in collected] == [10, 4]


@inside
def test_several_threads_may_wait_for_one_future() -> None:
    for to in (OTHER, 0):
        for seconds in (0.0, 0.1):
            future = rpc.rpc_async(to, give, args=(9, seconds))
            got: list[int] = []
            threads = [threading.Thread(target=lambda f=future, got=got: got.append(f.wait())) for _ in range(8)]
            for thread in threads:
                thread.start()
            assert future.wait() == 9
            for thread in threads:
                thread.join(5)
            assert got == [9] * 8


@rpc.functions.async_execution
def later(to: str, value: int) -> Any:
    return rpc.rpc_async(to, give, args=(value, 0.02)).then(lambda f: f.wait() + 1)


@rpc.functions.async_execution
def plain_torch(value: int) -> Any:
    future: torch.futures.Future[int] = torch.futures.Future()
    threading.Timer(0.05, future.set_result, (value,)).start()
    return future


@rpc.functions.async_execution
def not_a_future() -> Any:
    return 3


@rpc.functions.async_execution
def later_fails() -> Any:
    return rpc.rpc_async(rpc.get_worker_info().id, fail, args=("later",))


class Server:
    @staticmethod
    @rpc.functions.async_execution
    def static(value: int) -> Any:
        return later("worker0", value)

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, value: int) -> Any:
        return later("worker0", value)

    @rpc.functions.async_execution
    def bound(self, value: int) -> Any:
        return later("worker0", value)


@inside
def test_async_execution_answers_with_its_futures_result() -> None:
    for to in (OTHER, 0):
        assert rpc.rpc_sync(to, later, args=("worker0", 3)) == 4
        assert rpc.rpc_async(to, later, args=(OTHER, 3)).wait() == 4
        assert rpc.remote(to, later, args=("worker0", 3)).to_here() == 4
        assert rpc.rpc_sync(to, plain_torch, args=(5,)) == 5
        assert rpc.rpc_sync(to, Server.static, args=(5,)) == 6
        assert rpc.rpc_sync(to, Server.of_class, args=(5,)) == 6
        ref = rpc.remote(to, Server)
        assert ref.rpc_sync().bound(6) == 7
        assert ref.rpc_async().of_class(6).wait() == 7
        assert ref.remote().static(6).to_here() == 7
        with pytest.raises(
            TypeError, match=r"must return a torch\.futures\.Future object, but not_a_future returned int"
        ):
            rpc.rpc_sync(to, not_a_future)
        with pytest.raises(ValueError, match="later"):
            rpc.rpc_sync(to, later_fails)
        with pytest.raises(ValueError, match="later"):
            rpc.remote(to, later_fails).to_here()


def test_a_finalizer_may_complete_a_future_in_the_midst_of_its_completion() -> None:
    future: rpc.Future[int] = rpc.Future()
    came: list[BaseException] = []

    class Interrupted(ValueError):
        """The collector may run where it is looked at."""

        @property
        def __traceback__(self) -> None:  # type: ignore[override]
            if not came:
                try:
                    future.set_exception(KeyError("dropped without a result"))
                except RuntimeError as e:
                    came.append(e)

    thread = threading.Thread(target=lambda: future.set_exception(Interrupted("first")), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "a thread waits for itself"
    assert "only be marked completed once" in str(came[0])
    with pytest.raises(ValueError, match="first"):
        future.wait(1)
