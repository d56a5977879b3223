"""`async def` methods and functions, and `await` on futures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.autograd import backward as dist_backward
from actorrpc.autograd import context, get_gradients
from tests.checks import options
from tests.worlds import World, inside, run_world, until

OTHER = "worker1"


# --- actors and functions for the other worker ------------------------------------------------------------------------


class Meeting(rpc.Actor, concurrency=3):
    """Its coroutines wait for each other."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.all_here: asyncio.Event | None = None

    async def meet(self, how_many: int) -> str:
        if self.all_here is None:
            self.all_here = asyncio.Event()
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside == how_many:
            self.all_here.set()
        await self.all_here.wait()
        self.inside -= 1
        return threading.current_thread().name

    def greatest(self) -> int:
        return self.most


class Single(rpc.Actor):
    """One message at a time, though it has coroutines."""

    def __init__(self) -> None:
        self.inside = 0
        self.notes: list[object] = []

    async def alone(self) -> None:
        self.inside += 1
        for _ in range(3):
            await asyncio.sleep(0.001)
            assert self.inside == 1, "another message began"
        self.inside -= 1

    def plain(self, what: object) -> str:
        self.inside += 1
        time.sleep(0.0005)
        assert self.inside == 1, "another message began"
        self.inside -= 1
        self.notes.append(what)
        return threading.current_thread().name

    async def note(self, what: object) -> object:
        await asyncio.sleep(0)
        self.notes.append(what)
        return what

    def take(self) -> list[object]:
        notes, self.notes = self.notes, []
        return notes

    async def ask(self, other: rpc.RRef[Any], name: str, *args: object) -> object:
        return await getattr(other.rpc_async(), name)(*args)

    async def call_back(self, other: rpc.RRef[Single], depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + int(await other.rpc_async().call_back(self.rref, depth - 1))

    async def call_back_side_by_side(self, other: rpc.RRef[Single]) -> list[int]:
        async def one(depth: int) -> int:
            return int(await other.rpc_async().call_back(self.rref, depth))

        return list(await asyncio.gather(one(1), one(3), asyncio.create_task(one(2))))

    async def call_back_from_a_thread(self, other: rpc.RRef[Single]) -> object:
        return await asyncio.to_thread(other.rpc_sync().call_back, self.rref, 3)

    async def hear(self, other: rpc.RRef[Single], times: int) -> list[object]:
        """Has the other one tell it things, and looks for them as soon as the call has returned."""
        self.take()
        await other.rpc_async().tell_many(self.rref, times)
        return list(self.notes)

    async def hear_what_is_there(self, other: rpc.RRef[Single], times: int) -> list[object]:
        """The answer is there before it is awaited, and so is what was told; nobody else had a turn meanwhile."""
        self.take()
        future = other.rpc_async().tell_many(self.rref, times)
        until(future.done)
        await future
        return list(self.notes)

    async def hear_side_by_side(self, other: rpc.RRef[Single], times: int) -> list[object]:
        self.take()
        await asyncio.gather(other.rpc_async().tell_many(self.rref, times))
        return list(self.notes)

    async def tell_many(self, target: rpc.RRef[Single], times: int) -> None:
        for i in range(times):
            target.tell().plain(i)

    async def stay(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def fail(self) -> None:
        raise ValueError("told to fail")

    async def fail_later(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    async def block(self, how: str) -> object:
        if how == "rpc_sync":
            return rpc.rpc_sync(0, abs, args=(-1,))
        if how == "proxy":
            return rpc.remote(0, list).rpc_sync().__len__()
        if how == "to_here":
            return rpc.remote(0, list).to_here()
        if how == "in a task":
            return await asyncio.create_task(self.block("wait"))
        return rpc.rpc_async(0, time.sleep, args=(0.2,)).wait()

    async def wait_for_what_is_done(self) -> object:
        future = rpc.rpc_async(0, abs, args=(-1,))
        await future
        return future.wait()


class Patient(rpc.Actor, concurrency=2):
    """Waits until it is cancelled, and counts that."""

    def __init__(self) -> None:
        self.begun = self.cancelled = self.ended = 0

    async def wait(self) -> None:
        self.begun += 1
        try:
            await asyncio.sleep(60)
            self.ended += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def counts(self) -> tuple[int, int, int]:
        return self.begun, self.cancelled, self.ended


class Weight:
    def __init__(self) -> None:
        self.value = torch.ones(2, requires_grad=True)

    async def times(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0.001)
        return self.value * x

    async def times_by_another(self, helper: rpc.RRef[Weight], x: torch.Tensor) -> torch.Tensor:
        (halves,) = await asyncio.gather(helper.rpc_async().times(x))
        product: torch.Tensor = self.value * halves
        return product

    async def records(self) -> bool:
        return torch.is_grad_enabled()

    async def stay_without_grad(self) -> bool:
        with torch.no_grad():
            for _ in range(30):
                await asyncio.sleep(0.001)
            return torch.is_grad_enabled()


async def add(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


async def name_there() -> str:
    return str(await rpc.rpc_async(0, name_of_thread))


def name_of_thread() -> str:
    return threading.current_thread().name


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


# --- methods ----------------------------------------------------------------------------------------------------------


@inside
def test_as_many_coroutines_of_an_actor_interleave_as_its_class_says() -> None:
    actor = Meeting.spawn(1)
    futures = [actor.rpc_async(timeout=20).meet(3) for _ in range(9)]
    assert {future.wait() for future in futures} == {f"{OTHER}-loop"}
    assert actor.rpc_sync().greatest() == 3


@inside
def test_no_more_interleave_than_its_class_says() -> None:
    actor = Meeting.spawn(1)
    futures = [actor.rpc_async(timeout=0.5).meet(4) for _ in range(4)]
    for future in futures:
        with pytest.raises(rpc.RPCTimeoutError):
            future.wait()
    rpc.rpc_sync(1, _stop_meetings)


def _stop_meetings() -> None:
    from actorrpc.services.loop import Loop
    from actorrpc.session import current

    worker = current().worker
    loop: Loop = worker.services[Loop]
    for message in list(loop._answering):
        loop.cancel(message)


@inside
def test_an_async_method_does_not_change_how_the_others_run() -> None:
    actor: rpc.RRef[Any] = Single.spawn(1)
    futures: list[rpc.Future[Any]] = []
    for i in range(30):
        futures.append(actor.rpc_async().alone())
        futures.append(actor.rpc_async().plain(i))
    threads = {str(future.wait()) for future in futures[1::2]}
    assert not any("loop" in thread for thread in threads)
    for future in futures:
        future.wait()
    assert actor.rpc_sync().take() == list(range(30))


@inside
def test_messages_begin_in_their_order_whatever_they_are() -> None:
    actor: rpc.RRef[Any] = Single.spawn(1)
    for i in range(40):
        (actor.tell().note if i % 3 else actor.tell().plain)(i)
    assert actor.rpc_sync().take() == list(range(40))


@inside
def test_actors_call_each_other_back_while_they_await() -> None:
    here: rpc.RRef[Any] = Single.spawn(0)
    there: rpc.RRef[Any] = Single.spawn(1)
    assert there.rpc_sync(timeout=20).call_back(here, 4) == 4
    assert there.rpc_sync(timeout=20).call_back_side_by_side(here) == [1, 3, 2]
    assert there.rpc_sync(timeout=20).call_back_from_a_thread(here) == 3


@inside
def test_a_coroutine_that_awaits_admits_no_other_chain() -> None:
    here: rpc.RRef[Any] = Single.spawn(0)
    there: rpc.RRef[Any] = Single.spawn(1)
    future = there.rpc_async().ask(here, "stay", 0.3)
    until(lambda: rpc.rpc_sync(1, _answering) == 1)
    assert there.rpc_sync().plain("later")  # which asserts that nobody else is inside
    assert future.done()


def _answering() -> int:
    from actorrpc.services.loop import Loop
    from actorrpc.session import current

    loop = current().worker.services.get(Loop)
    return 0 if loop is None else len(loop._answering)


@inside
def test_an_answer_does_not_overtake_what_was_told_before_it() -> None:
    here: rpc.RRef[Any] = Single.spawn(0)
    there: rpc.RRef[Any] = Single.spawn(1)
    for _ in range(10):
        assert there.rpc_sync().hear(here, 5) == list(range(5))
        assert there.rpc_sync().hear_what_is_there(here, 5) == list(range(5))
        assert there.rpc_sync().hear_side_by_side(here, 5) == list(range(5))


@inside
def test_what_a_coroutine_raises_is_the_callers_error() -> None:
    actor: rpc.RRef[Any] = Single.spawn(1)
    with pytest.raises(ValueError, match="late") as caught:
        actor.rpc_sync().fail_later(ValueError("late"))
    assert "in fail_later" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="told to fail"):
        actor.rpc_sync().ask(Single.spawn(0), "fail")
    for error in (SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()):
        with pytest.raises(rpc.RemoteError, match=type(error).__name__):
            actor.rpc_sync().fail_later(error)
    assert actor.rpc_sync().note("goes on") == "goes on"


@inside
def test_an_exit_in_a_task_of_a_coroutine_does_not_end_the_loop() -> None:
    rpc.rpc_sync(1, _a_task_exits)
    assert rpc.rpc_sync(1, add, args=(1, 2), timeout=10) == 3


async def _a_task_exits() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    logging.disable(logging.CRITICAL)
    try:
        task = asyncio.create_task(leave())
        await asyncio.wait([task])
        assert isinstance(task.exception(), SystemExit)
    finally:
        logging.disable(logging.NOTSET)


# --- waits that would block -------------------------------------------------------------------------------------------


@inside
def test_a_coroutine_is_cancelled_with_its_call() -> None:
    patient: rpc.RRef[Any] = Patient.spawn(OTHER)
    future = patient.rpc_async().wait()
    until(lambda: patient.rpc_sync().counts() == (1, 0, 0), 20)
    assert future.cancel()
    with pytest.raises(rpc.CancelledError):
        future.wait()
    until(lambda: patient.rpc_sync().counts() == (1, 1, 0), 20)

    with pytest.raises(rpc.RPCTimeoutError):
        patient.rpc_sync(timeout=0.3).wait()
    until(lambda: patient.rpc_sync().counts() == (2, 2, 0), 20)


def test_a_coroutine_whose_caller_is_lost_is_cancelled() -> None:
    with World(3, strict=False) as world:
        world.on(0, _lend_a_patient)
        world.on(2, _wait_there)
        until(lambda: world.on(0, _patients_counts) == (1, 0, 0), 20)
        world.kill(2)
        until(lambda: world.on(0, _patients_counts) == (1, 1, 0), 20)


def _lend_a_patient() -> None:
    Patient.spawn(OTHER, name="patient")


def _wait_there() -> None:
    rpc.get_actor("patient").rpc_async().wait()


def _patients_counts() -> Any:
    return rpc.get_actor("patient").rpc_sync().counts()


@inside
def test_a_wait_in_a_coroutine_is_an_error_that_says_to_await() -> None:
    actor: rpc.RRef[Any] = Single.spawn(1)
    for how in ("rpc_sync", "proxy", "wait", "to_here", "in a task"):
        with pytest.raises(rpc.BlockingWaitError, match=r"`await` the future"):
            actor.rpc_sync(timeout=10).block(how)
    assert actor.rpc_sync().wait_for_what_is_done() == 1


# --- what follows the coroutine ---------------------------------------------------------------------------------------


class AsksByName(rpc.Actor):
    async def ask(self) -> Any:
        reference = rpc.named("nobody yet", gap=20)
        with pytest.raises(rpc.BlockingWaitError, match=r"who has the name 'nobody yet'.*was not sent"):
            reference.rpc_async().greatest()
        with pytest.raises(rpc.BlockingWaitError, match=r"to_thread\(reference\.now\)"):
            reference.stream().greatest()
        waiting = asyncio.create_task(asyncio.to_thread(reference.now))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(Meeting.spawn, 0, name="nobody yet")
        await waiting
        return await reference.rpc_async().greatest()


@inside
def test_a_name_that_nobody_has_is_awaited_in_a_thread_and_else_an_error_that_says_so() -> None:
    asking: Any = AsksByName.spawn(OTHER).rpc_sync(timeout=20)
    assert asking.ask() == 0


@inside
def test_the_autograd_context_follows_the_coroutine() -> None:
    there, helper = rpc.remote(1, Weight), rpc.remote(0, Weight)
    weight: Any = there.rpc_sync()
    other = helper.local_value()

    def train(scale: float) -> None:
        with context() as number:
            x = torch.full((2,), scale, requires_grad=True)
            futures = [there.rpc_async().times_by_another(helper, x) for _ in range(3)]
            dist_backward(number, [torch.stack([future.wait() for future in futures]).sum()])
            assert get_gradients(number)[x].tolist() == [3.0, 3.0]
            assert get_gradients(number)[other.value].tolist() == [3 * scale, 3 * scale]
            done.append(scale)

    done: list[float] = []
    threads = [threading.Thread(target=train, args=(scale,)) for scale in (2.0, 3.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == [2.0, 3.0, 5.0]
    assert weight.times(torch.ones(2)).tolist() == [1.0, 1.0]


@inside
def test_grad_mode_is_the_coroutines_own() -> None:
    weight = rpc.remote(1, Weight)
    without = weight.rpc_async().stay_without_grad()
    assert all(weight.rpc_sync().records() for _ in range(10))
    assert without.wait() is False


# --- functions --------------------------------------------------------------------------------------------------------


@inside
def test_async_functions_are_called_like_others() -> None:
    assert rpc.rpc_sync(1, add, args=(1, 2)) == 3
    assert rpc.rpc_async(1, add, args=(1,), kwargs={"y": 3}).wait() == 4
    assert rpc.remote(1, add, args=(1, 5)).to_here() == 6
    assert "hand" in rpc.rpc_sync(1, name_there)
    with pytest.raises(TypeError, match="unsupported operand"):
        rpc.rpc_sync(1, add, args=(1, "b"))
    with pytest.raises(TypeError, match="unsupported operand"):
        rpc.remote(1, add, args=(1, "b")).to_here()


# --- await ------------------------------------------------------------------------------------------------------------


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


@inside
def test_any_future_can_be_awaited_on_any_loop() -> None:
    async def body() -> None:
        assert await rpc.rpc_async(1, abs, args=(-1,)) == 1
        assert await rpc.rpc_async(1, add, args=(1, 2)).then(lambda done: done.wait() * 2) == 6
        done = rpc.rpc_async(1, abs, args=(-2,))
        done.wait()
        assert await done == await done == 2
        with pytest.raises(ZeroDivisionError) as caught:
            await rpc.rpc_async(1, divmod, args=(1, 0))
        assert "worker1" in str(caught.value.__cause__)
        with pytest.raises(rpc.RPCTimeoutError):
            await rpc.rpc_async(1, time.sleep, args=(0.5,), timeout=0.05)
        assert await asyncio.gather(*(rpc.rpc_async(1, abs, args=(-i,)) for i in range(20))) == list(range(20))

    run(body())
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(run(body())))
    thread.start()
    thread.join(20)
    assert other == [None]


@inside
def test_a_future_of_ones_own_wakes_who_awaits_it_from_any_thread() -> None:
    async def body() -> None:
        for complete in (True, False):
            future: rpc.Future[int] = rpc.Future()
            waiting = asyncio.ensure_future(future)
            await asyncio.sleep(0.01)
            if complete:
                threading.Thread(target=future.set_result, args=(7,)).start()
                assert await waiting == 7
            else:
                threading.Thread(target=future.set_exception, args=(KeyError("x"),)).start()
                with pytest.raises(KeyError):
                    await waiting

    run(body())


@inside
def test_a_task_that_stops_waiting_leaves_the_future_as_it_is() -> None:
    async def body() -> None:
        future = rpc.rpc_async(1, time.sleep, args=(0.2,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.02)
        assert not future._core.waiters
        both = [asyncio.ensure_future(future) for _ in range(2)]
        await asyncio.sleep(0)
        both[0].cancel()
        await both[1]
        assert both[0].cancelled()
        assert future.wait() is None

    run(body())


@inside
def test_a_reference_in_an_answer_that_nobody_awaits_any_more_is_given_back() -> None:
    async def body() -> None:
        task = asyncio.ensure_future(rpc.rpc_async(1, _own_list))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for _ in range(20):
        run(body())  # the world of the test must hold no references afterwards


def _own_list() -> rpc.RRef[Any]:
    return rpc.RRef([1])


@inside
def test_a_task_group_awaits_calls() -> None:
    group = getattr(asyncio, "TaskGroup", None)
    if group is None:
        pytest.skip("this Python has no TaskGroup")

    async def call(number: int) -> Any:
        return await rpc.rpc_async(1, abs, args=(-number,))

    async def fail() -> Any:
        return await rpc.rpc_async(1, divmod, args=(1, 0))

    async def body() -> None:
        async with group() as tasks:
            found = [tasks.create_task(call(i)) for i in range(5)]
        assert [task.result() for task in found] == list(range(5))
        with pytest.raises(BaseException, match="unhandled errors") as caught:
            await one_fails()
        assert isinstance(caught.value.exceptions[0], ZeroDivisionError)  # type: ignore[attr-defined]

    async def one_fails() -> None:
        async with group() as tasks:
            tasks.create_task(call_slow())
            tasks.create_task(fail())

    async def call_slow() -> Any:
        return await rpc.rpc_async(1, time.sleep, args=(0.3,))

    run(body())


@inside
def test_a_groups_future_can_be_awaited() -> None:
    group = rpc.Group([rpc.remote(rank, Weight) for rank in (0, 1)])

    async def body() -> None:
        assert await group.rpc_async().records() == [True, True]
        assert await group.any().rpc_async().records() is True
        with pytest.raises(rpc.GroupError, match="2 of 2"):
            await group.rpc_async().no_such_method()

    run(body())


@inside
def test_await_outside_of_a_loop_is_an_error() -> None:
    future: rpc.Future[None] = rpc.Future()
    with pytest.raises(RuntimeError, match="no running event loop"):
        future.__await__().send(None)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_what_nobody_awaits_must_not_be_async() -> None:
    for name in ("on_start", "on_stop"):
        with pytest.raises(TypeError, match=f"{name} is called where nothing can await it"):
            type("Wrong", (rpc.Actor,), {name: wait_for_ever})


class AsyncDriver(rpc.Actor):
    def __init__(self) -> None:
        self.touched: list[int] = []
        self.inside = False

    async def main(self) -> Any:
        self.inside = True
        for i in range(5):
            assert await self.world.member[0].rpc_async().touch(self.rref, i) == [i] * 3
        self.inside = False
        with pytest.raises(rpc.BlockingWaitError):
            self.world.member.rpc_sync().touch(self.rref, 0)
        return self.touched

    def touch(self, what: int) -> int:
        assert self.inside
        self.touched.append(what)
        return what


class Member(rpc.Actor):
    async def touch(self, driver: rpc.RRef[AsyncDriver], what: int) -> list[int]:
        return list(await asyncio.gather(*(driver.rpc_async().touch(what) for _ in range(3))))


class FailingDriver(rpc.Actor):
    async def main(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("from main")


def test_main_may_be_async_and_admits_messages_while_it_awaits() -> None:
    touched = rpc.launch(options=options(), driver=AsyncDriver, member=Member)
    assert touched == sorted([0, 1, 2, 3, 4] * 3)


def test_what_an_async_main_raises_ends_the_launch() -> None:
    with pytest.raises(rpc.MemberDiedError, match=r"raised KeyError: 'from main'"):
        rpc.launch(options=options(), driver=FailingDriver)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_graceful_end_waits_for_coroutines_that_were_only_told(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            actor = Writer.spawn(1)
            for i in range(3):
                actor.tell().write(str(tmp_path / str(i)))

    run_world(program, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


class Writer(rpc.Actor):
    async def write(self, path: str) -> None:
        await asyncio.sleep(0.1)
        Path(path).touch()


def test_an_abrupt_end_cancels_coroutines_and_leaves_no_thread(tmp_path: Path) -> None:
    """The world itself looks for threads and descriptors that are left."""

    def begin() -> None:
        rpc.rpc_async(1, _note_the_end, args=(str(tmp_path / "ended"), str(tmp_path / "begun")), timeout=0)
        until((tmp_path / "begun").exists)

    with World(2) as world:
        world.on(0, begin)
        world.everywhere(rpc.shutdown, False)
    assert (tmp_path / "ended").read_text() == "CancelledError"


async def _note_the_end(ended: str, begun: str) -> None:
    Path(begun).touch()
    try:
        await wait_for_ever()
    except BaseException as e:
        Path(ended).write_text(type(e).__name__)
        raise


class Endless(rpc.Actor, concurrency=3):
    """Makes items, and has the other one take them, for as long as the world lasts."""

    async def items(self) -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(0.01)
                yield 1
        finally:
            print("closed", self.name, flush=True)

    async def take(self, name: str) -> None:
        async for _ in rpc.named(name).stream().items():
            self.taken = True

    def has_taken(self) -> bool:
        return hasattr(self, "taken")


class EndsFirst(rpc.Actor):
    def main(self) -> None:
        one, two = self.world.endless
        one.tell().take(two.owner_name())
        until(one.rpc_sync().has_taken)


def test_what_goes_on_until_the_end_of_the_world_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    rpc.launch(options=options(), driver=EndsFirst, endless=rpc.Role(Endless, 2))
    out, err = capfd.readouterr()
    assert "closed endless:1" in out
    assert err == ""


def test_a_worker_that_closes_itself_in_a_coroutine_does_not_hang() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            with pytest.raises((rpc.WorkerLostError, rpc.NotAMemberError)):
                rpc.rpc_sync(1, _leave, timeout=20)
        else:
            until(lambda: not session.is_available(), 20)

    run_world(program, 2, graceful=False)


async def _leave() -> None:
    rpc.shutdown(graceful=False)
