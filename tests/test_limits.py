"""Limits on what is under way: who sends too much waits, and nobody else does.

On a virtual clock but for the last ones.
"""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import functions
from actorrpc.errors import BackpressureTimeoutError
from actorrpc.runtime import mailbox
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.handling import no_wait
from actorrpc.runtime.windows import Room
from actorrpc.session import chosen, current
from actorrpc.testing import SimWorld
from actorrpc.wire.envelope import size_of
from tests.worlds import World, run_processes, run_world, until

ran: list[Any] = []
most: dict[str, int] = {}
kept: list[Any] = []
current_world: list[SimWorld] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    ran.clear()
    most.clear()
    kept.clear()


def sleep(seconds: float) -> None:
    """Lets time pass, as code does that computes: nothing else is served by this thread, or its actor."""
    current().worker.clock.gate().wait(seconds)


def note(name: str, number: int) -> None:
    most[name] = max(most.get(name, 0), number)


class Server(rpc.Actor):
    """Takes its time, and notes how much waits in its mailbox."""

    def take(self, what: Any, seconds: float = 0.01, load: bytes = b"") -> Any:
        cell = self._at.entry.mailbox
        assert cell is not None
        queue = cell.mailbox._queue
        note("queued", len(queue) + 1)
        note("bytes", sum(sum(len(f) for f in message.frames) for _, _, message in list(queue)) + len(load))
        ran.append(what)
        if seconds:
            sleep(seconds)
        return what


class Narrow(Server, max_pending=3):
    """May have three calls under way."""


class Light(Server, max_pending_bytes=10_000):
    """May have 10,000 bytes under way."""


def worlds(
    program: Callable[[], Any], *, size: int = 3, calls: int = 40, most_bytes: int = 2**28, seeds: Any = range(8),
    threads: int = 4, timeout: float = 60.0,
) -> list[Any]:  # fmt: skip
    """Runs a program on rank 0 of simulated worlds with narrow limits; sees that no room is taken up at the end."""
    results = []
    for seed in seeds:
        ran.clear()
        with SimWorld(size=size, seed=seed, threads=threads, timeout=timeout) as world:
            current_world[:] = [world]
            for session in world.sessions:
                session.worker.limits.set(calls, most_bytes)
            results.append(world.run(program)[0])
            kept.clear()
            world.settle(3.0)
            for session in world.sessions:
                left = session.worker.limits.statistics()
                assert (left["counted"], left["held_up"], left["bytes"]) == (0, 0, 0), (seed, left)
    return results


# -- who sends too much


@pytest.mark.parametrize("to", [1, 0], ids=["another", "oneself"])
@pytest.mark.parametrize("verb", ["tell", "rpc_async", "remote"])
def test_a_fast_producer_waits_for_a_slow_actor(verb: str, to: int) -> None:
    def program() -> None:
        server = Server.spawn(to)
        server.rpc_sync().take("there")
        ran.clear()
        for n in range(100):
            made = getattr(server, verb)().take(n)
            if verb == "rpc_async":
                kept.append(made)
        server.rpc_sync().take("last")
        assert ran == [*range(100), "last"]

    worlds(program)
    assert 5 < most["queued"] <= 11  # a quarter of 40, and the last call, which waits for its answer


@pytest.mark.parametrize("verb", ["tell", "rpc_async"])
def test_bytes_count_as_well(verb: str) -> None:
    def program() -> None:
        server = Server.spawn(1)
        for n in range(60):
            kept.append(getattr(server, verb)().take(n, load=bytes(10_000)))
        server.rpc_sync().take("last")
        assert ran == [*range(60), "last"]

    worlds(program, calls=10_000, most_bytes=400_000)
    assert 50_000 < most["bytes"] <= 100_000


def test_a_message_larger_than_its_window_goes_alone() -> None:
    def program() -> None:
        server = Server.spawn(1)
        for n in range(6):
            server.tell().take(n, load=bytes(1000 if n % 2 else 300_000))
        server.rpc_sync().take("last")
        assert ran == [*range(6), "last"]

    worlds(program, most_bytes=400_000)
    assert most["bytes"] <= 302_000


@pytest.mark.parametrize("verb", ["tell", "rpc_async"])
def test_a_slow_actor_holds_up_its_own_callers_only(verb: str) -> None:
    def program() -> None:
        slow, quick = Server.spawn(1), Server.spawn(1)
        clock = current().worker.clock

        def flood() -> None:
            for n in range(30):
                kept.append(getattr(slow, verb)().take(n, 1.0))

        thread = in_session(flood)
        sleep(0.5)
        begun = clock.now()
        for n in range(50):
            kept.append(getattr(quick, verb)().take(("quick", n), 0.001))
            assert rpc.rpc_async(1, abs, args=(-n,)).wait() == n
        assert quick.rpc_sync().take("last") == "last"
        assert clock.now() - begun < 0.6
        assert len([what for what in ran if isinstance(what, int)]) < 5
        thread.join(100.0)
        slow.rpc_sync(timeout=0).take("end")

    worlds(program, seeds=range(4))


def in_session(body: Callable[[], None]) -> Any:
    """Runs something in another thread of the present worker's."""
    session = current()

    def run() -> None:
        with chosen(session):
            body()

    return session.worker.clock.start(run, "a thread of the user's")


def test_callers_share_an_actor_fairly() -> None:
    """Each worker has a window of its own: two who flood get the same, and who calls now and then is hardly later."""

    def flood(server: rpc.RRef[Server], who: str) -> None:
        for n in range(60):
            server.tell().take((who, n))

    def program() -> Any:
        server = Server.spawn(3)
        floods = [rpc.rpc_async(rank, flood, args=(server, f"{rank}"), timeout=0) for rank in (1, 2)]
        sleep(0.2)
        before = len(ran)
        server.rpc_sync(timeout=0).take("modest")
        place = ran.index("modest")
        half = ran[: place + 1]
        for future in floods:
            future.wait()
        server.rpc_sync(timeout=0).take("last")
        shares = [sum(what[0] == who for what in half if what != "modest") for who in "12"]
        return place - before, shares

    for waited, (one, two) in worlds(program, size=4, seeds=range(6)):
        assert waited <= 22  # what both may have under way
        assert abs(one - two) <= 10


def test_threads_that_wait_are_served_in_turn() -> None:
    def program() -> None:
        server = Server.spawn(1)
        order: list[int] = []

        def one(n: int) -> None:
            server.tell().take(n)
            order.append(n)

        for n in range(10):
            server.tell().take(n)
        threads = []
        for n in range(10, 16):
            threads.append(in_session(lambda n=n: one(n)))  # type: ignore[misc]
            sleep(0.001)
        for thread in threads:
            thread.join(10.0)
        assert order == sorted(order)
        server.rpc_sync().take("last")
        assert ran == [*range(16), "last"]

    worlds(program)


# -- how long they wait


def fill(server: rpc.RRef[Any], calls: int = 10, seconds: float = 100.0) -> None:
    for n in range(calls):
        kept.append(server.rpc_async(timeout=0).take(n, seconds if not n else 0.0))


@pytest.mark.parametrize("verb", ["tell", "rpc_async", "remote"])
def test_who_does_not_want_to_wait_is_told_so_and_nothing_was_sent(verb: str) -> None:
    def program() -> None:
        server = Server.spawn(1)
        fill(server, seconds=1.0)
        with rpc.no_wait():
            for _ in range(3):
                with pytest.raises(rpc.BackpressureError, match=r"take was not sent: 10 calls with \d+ bytes "):
                    getattr(server, verb)().take("refused")
            assert server.rpc_sync().take("waited") == "waited"  # which waits in any case
            kept.append(getattr(server, verb)().take("sent"))
        server.rpc_sync().take("last")
        assert ran == [*range(10), "waited", "sent", "last"]

    worlds(program)


def test_no_wait_is_for_its_block_and_thread() -> None:
    def program() -> None:
        server = Server.spawn(1)
        fill(server, seconds=0.2)
        with rpc.no_wait():
            with rpc.no_wait():
                pass
            with pytest.raises(rpc.BackpressureError):
                server.tell().take("refused")
            in_session(lambda: server.tell().take("waited")).join(10.0)
        server.tell().take("sent")
        server.rpc_sync().take("last")
        assert ran == [*range(10), "waited", "sent", "last"]

    worlds(program)


def test_functions_have_limits_too() -> None:
    def program() -> None:
        kept.extend(rpc.rpc_async(1, sleep, args=(1.0,)) for _ in range(10))
        with rpc.no_wait(), pytest.raises(rpc.BackpressureError, match="sleep was not sent"):
            rpc.rpc_async(1, sleep, args=(1.0,))
        with rpc.no_wait():
            rpc.rpc_async(2, abs, args=(1,)).wait()

    worlds(program, threads=16)


def test_a_peer_has_a_limit_beside_those_of_its_actors() -> None:
    def program() -> None:
        servers = [Server.spawn(1) for _ in range(5)]
        for server in servers:
            server.rpc_sync().take("there")
        for server in servers[:4]:
            fill(server, seconds=1.0)
        with rpc.no_wait():
            with pytest.raises(rpc.BackpressureError, match=r'40 calls with \d+ bytes to worker "w1"'):
                servers[4].tell().take("refused")
            other = rpc.rpc_async(2, abs, args=(-1,))
        servers[4].tell().take("waited")
        assert other.wait() == 1
        servers[4].rpc_sync().take("last")
        assert "refused" not in ran
        assert ran.index("waited") < ran.index("last")

    worlds(program)


def test_a_call_waits_for_room_no_longer_than_it_may_take() -> None:
    def program() -> None:
        server = Server.spawn(1)
        fill(server)
        clock = current().worker.clock
        begun = clock.now()
        future = server.rpc_async(timeout=2.0).take("late")
        assert 1.9 < clock.now() - begun < 2.2
        with pytest.raises(BackpressureTimeoutError, match=r"take was not sent: it waited 2 s for room; 10 calls"):
            future.wait()
        begun = clock.now()
        with pytest.raises(rpc.RPCTimeoutError, match=r"it waited 5 s for room"):
            server.tell().take("late")  # for which the worker's own limit holds
        assert 4.9 < clock.now() - begun < 5.2
        with pytest.raises(rpc.RPCTimeoutError, match=r"it waited 1 s for room"):
            server.remote(timeout=1.0).take("late")
        sleep(100.0)
        server.rpc_sync().take("last")
        assert ran == [*range(10), "last"]

    worlds(program, timeout=5.0)


def test_what_a_call_waited_for_room_is_part_of_its_time() -> None:
    def program() -> None:
        server = Server.spawn(1)
        fill(server, seconds=3.0)
        clock = current().worker.clock
        begun = clock.now()
        future = server.rpc_async(timeout=5.0).take("waited", 100.0)
        assert 2.9 < clock.now() - begun < 3.5
        with pytest.raises(rpc.RPCTimeoutError):
            future.wait()
        assert 4.9 < clock.now() - begun < 5.3
        sleep(100.0)

    worlds(program)


def tell_late(server: rpc.RRef[Server]) -> str:
    try:
        server.tell().take("late")
    except rpc.RPCTimeoutError as e:
        return str(e)
    return "sent"


def test_a_handlers_tell_waits_no_longer_than_the_handler_may_take() -> None:
    def program() -> None:
        server = Server.spawn(2)
        rpc.rpc_sync(1, fill, args=(server, 10, 20.0))
        future = rpc.rpc_async(1, tell_late, args=(server,), timeout=3.0)
        with pytest.raises(rpc.RPCTimeoutError):
            future.wait()
        sleep(1.0)
        assert rpc.rpc_sync(1, current_held_up) == 0
        server.rpc_sync().take("last")
        assert ran == [*range(10), "last"]

    worlds(program)


def current_held_up() -> int:
    return current().worker.limits.statistics()["held_up"]


def test_who_waits_for_room_at_a_worker_that_is_lost_hears_of_it_at_once() -> None:
    for seed in range(8):
        with SimWorld(size=2, seed=seed) as world:
            for session in world.sessions:
                session.worker.limits.set(40, 2**28)
            heard: list[float] = []

            def program(world: SimWorld = world, heard: list[float] = heard) -> None:
                server = Server.spawn(1)
                fill(server)
                clock = current().worker.clock
                world.simulation.at(clock.now() + 0.5, lambda: world.kill(1))
                begun = clock.now()
                with pytest.raises(rpc.WorkerLostError, match="was not sent"):
                    server.tell().take("late")
                heard.append(clock.now() - begun)

            world.run(program)
            assert heard[0] < 1.0


def hand_on(server: rpc.RRef[Server], what: Any) -> None:
    server.tell().take(what, 0.001)


def test_of_functions_that_wait_for_room_only_so_many_begin_and_all_come_to_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("actorrpc.runtime.lanes._HELD_UP_LIMIT", 8)

    def program() -> int:
        server = Narrow.spawn(2)
        rpc.rpc_sync(1, hand_on, args=(server, "learn"))
        sleep(0.1)
        first = server.rpc_async(timeout=0).take("first", 0.2)
        futures = [rpc.rpc_async(1, hand_on, args=(server, n), timeout=0) for n in range(60)]
        sleep(0.15)
        begun = current_world[-1].sessions[1].worker.crew._lanes._begun[2]
        for future in futures:
            future.wait()
        first.wait()
        server.rpc_sync().take("last")
        assert sorted(map(str, ran)) == sorted(map(str, ["learn", "first", *range(60), "last"]))
        return begun

    for begun in worlds(program, calls=400):
        assert 4 <= begun <= 4 + 8 + 4  # run, have lent their places, and a few as all stands still


# -- limits of an actor's class


def test_who_makes_an_actor_knows_the_limits_of_its_class_at_once() -> None:
    def program() -> None:
        for server in (Narrow.spawn(1), rpc.remote(1, Narrow)):
            with rpc.no_wait():
                sent = 0
                try:
                    for n in range(10):
                        kept.append(server.rpc_async().take(n, 0.1))
                        sent += 1
                except rpc.BackpressureError as e:
                    ran.append(str(e))
            assert sent == 3
            assert "the limits are 3 calls" in ran.pop()

    worlds(program)


def test_others_learn_them_from_the_actor() -> None:
    def narrow(server: rpc.RRef[Narrow]) -> int:
        server.rpc_async().take("first").wait()
        sent = 0
        with rpc.no_wait():
            try:
                for n in range(10):
                    server.tell().take(n, 0.1)
                    sent += 1
            except rpc.BackpressureError:
                pass
        return sent

    def program() -> None:
        server = Narrow.spawn(1)
        assert rpc.rpc_sync(2, narrow, args=(server,)) == 3

    worlds(program)


def test_an_actors_limit_in_bytes() -> None:
    def program() -> None:
        server = Light.spawn(1)
        for n in range(30):
            server.tell().take(n, load=bytes(4000))
        server.rpc_sync().take("last")

    worlds(program)
    assert 4000 < most["bytes"] <= 12_000


class Narrower(Narrow, max_pending_bytes=5):
    pass


def test_limits_of_classes_are_inherited_and_checked() -> None:
    assert Narrower._actorrpc_limits == (3, 5)
    assert Server._actorrpc_limits == (None, None)
    with pytest.raises(ValueError, match="max_pending must be at least 1, not 0"):

        class Wrong(rpc.Actor, max_pending=0):
            pass


# -- nobody waits for ever


class Echo(rpc.Actor):
    """Handlers that send to others, also to those who send to them."""

    def __init__(self) -> None:
        self.got = 0

    def receive(self, *_: Any) -> int:
        self.got += 1
        return self.got

    def call_back(self, to: rpc.RRef[Echo], verb: str, times: int = 1) -> None:
        futures = []
        for n in range(times):
            result = getattr(to, verb)(timeout=0).receive(n) if verb != "tell" else to.tell().receive(n)
            if verb == "rpc_async":
                futures.append(result)
        for future in futures:
            future.wait()
        self.got += 1

    def flood(self, to: rpc.RRef[Echo], back: rpc.RRef[Echo], verb: str, calls: int) -> None:
        for _ in range(calls):
            to.tell().call_back(back, verb)

    def count(self) -> int:
        return self.got


@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "tell"])
def test_a_main_thread_floods_an_actor_whose_handlers_call_back(verb: str) -> None:
    def program() -> None:
        mine, theirs = Echo.spawn(0), Echo.spawn(1)
        for _ in range(60):
            theirs.tell().call_back(mine, verb, 3)
        wait_for(lambda: theirs.rpc_sync(timeout=0).count() == 60)
        wait_for(lambda: mine.rpc_sync(timeout=0).count() == 180)

    worlds(program, calls=8, timeout=0)


@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "tell"])
def test_a_handler_floods_an_actor_whose_handlers_call_it_back(verb: str) -> None:
    def program() -> None:
        mine, theirs = Echo.spawn(0), Echo.spawn(1)
        mine.rpc_sync(timeout=0).flood(theirs, mine, verb, 40)
        wait_for(lambda: theirs.rpc_sync(timeout=0).count() == 40)
        wait_for(lambda: mine.rpc_sync(timeout=0).count() == 40)

    worlds(program, calls=8, timeout=0)


@pytest.mark.parametrize("size", [2, 3], ids=["two", "a ring of three"])
@pytest.mark.parametrize("verb", ["rpc_async", "tell"])
def test_actors_whose_handlers_flood_each_other_in_a_circle_come_to_an_end(verb: str, size: int) -> None:
    """Each handler's messages are of a chain of its own, so that no waiting handler admits them."""

    def program() -> None:
        echoes = [Ring.spawn(n) for n in range(size)]
        for n, echo in enumerate(echoes):
            echo.rpc_sync().meet(echoes[(n + 1) % size])
        for _ in range(6):
            for echo in echoes:
                echo.tell().spread(verb, 3)
        total = 6 * sum(2**depth for depth in range(4))
        wait_for(lambda: sum(echo.rpc_sync(timeout=0).count() for echo in echoes) == total * size)
        for echo in echoes:
            echo.rpc_sync(timeout=0).meet(None)

    worlds(program, calls=8, timeout=0, seeds=range(6))


class Ring(rpc.Actor):
    """Sends on to the next one, twice as much as came."""

    def __init__(self) -> None:
        self.next: rpc.RRef[Ring] | None = None
        self.got = 0

    def meet(self, other: rpc.RRef[Ring] | None) -> None:
        self.next = other

    def spread(self, verb: str, depth: int) -> None:
        self.got += 1
        for _ in range(2 if depth else 0):
            assert self.next is not None
            if verb == "tell":
                self.next.tell().spread(verb, depth - 1)
            else:
                kept.append(self.next.rpc_async(timeout=0).spread(verb, depth - 1))

    def count(self) -> int:
        return self.got


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    clock = current().worker.clock
    end = clock.now() + seconds
    while not condition():
        assert clock.now() < end
        worker = current().worker
        worker.wait(Completion(), clock.now() + 0.01)


def test_nested_calls_go_as_deep_as_they_like() -> None:
    def program() -> None:
        mine, theirs = Deep.spawn(0), Deep.spawn(1)
        assert mine.rpc_sync(timeout=0).down(mine, theirs, 30) == 30
        assert mine.rpc_async(timeout=0).down(mine, theirs, 30).wait() == 30

    worlds(program, calls=4, timeout=0)


class Deep(rpc.Actor, max_pending=1):
    def down(self, me: rpc.RRef[Deep], other: rpc.RRef[Deep], depth: int) -> int:
        return 0 if not depth else 1 + int(other.rpc_sync(timeout=0).down(other, me, depth - 1))


@functions.async_execution
def together(count: int, load: bytes) -> rpc.Future[int]:
    """Answers when as many have come."""
    future: rpc.Future[int] = rpc.Future()
    kept.append(future)
    if len(kept) == count:
        for one in kept:
            one.set_result(count)
    return future


def test_calls_that_wait_for_each_other_over_there_take_up_no_bytes() -> None:
    def program() -> None:
        kept.clear()
        futures = [rpc.rpc_async(1, together, args=(12, bytes(100_000)), timeout=0) for _ in range(12)]
        assert [future.wait() for future in futures] == [12] * 12

    worlds(program, most_bytes=1_000_000, calls=1000)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_calls_that_were_given_up_give_their_room_back(how: str) -> None:
    def program() -> None:
        server = Server.spawn(1)
        first = server.rpc_async(timeout=0).take("first", 5.0)
        for _ in range(5):
            futures = [server.rpc_async(timeout=0.2 if how == "timed out" else 0).take("never") for _ in range(9)]
            for future in futures:
                assert how == "timed out" or future.cancel()
            sleep(0.5)
        assert first.wait() == "first"
        assert ran == ["first"]

    worlds(program)


def test_a_handler_that_runs_on_keeps_its_place() -> None:
    def program() -> None:
        server = Narrow.spawn(1)
        future = server.rpc_async(timeout=0.2).take("runs on", 3.0)
        with pytest.raises(rpc.RPCTimeoutError):
            future.wait()
        kept.extend(server.rpc_async(timeout=0).take(n) for n in range(2))
        with rpc.no_wait(), pytest.raises(rpc.BackpressureError, match="3 calls"):
            server.tell().take("refused")
        sleep(3.5)
        with rpc.no_wait():
            server.tell().take("sent")

    worlds(program)


class Parting:
    """Tells somebody something when it is freed."""

    def __init__(self, server: rpc.RRef[Any]) -> None:
        self.server = server

    def __del__(self) -> None:
        self.server.tell().take("parting", 0.0)


def test_a_finalizer_in_the_midst_of_the_librarys_code_does_not_wait() -> None:
    def program() -> None:
        server = Narrow.spawn(1)
        fill(server, 3, 1.0)
        worker = current().worker
        clock, crew = worker.clock, worker.crew
        begun = clock.now()
        route = crew._route
        kept.append([Parting(server)])

        def freeing(frames: Any) -> Any:  # as the collector may at any time
            if kept and isinstance(kept[-1], list):
                kept.pop()
            return route(frames)

        crew._route = freeing
        assert rpc.rpc_sync(1, abs, args=(-1,)) == 1
        assert clock.now() - begun < 0.5
        assert server.rpc_sync().take("last") == "last"
        assert "parting" in ran

    # What the collector interrupts is this test's own function, but that is called by the crew, as it leads.
    worlds(program, size=2)


def test_an_actor_is_told_something_by_a_finalizer_in_the_midst_of_its_own_mailbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread would wait for itself."""

    def program() -> None:
        server, plain = Server.spawn(0), mailbox.Turn
        server.rpc_sync().take("first")
        kept.append([Parting(server)])

        def freeing(*what: Any) -> Any:  # as the collector may where anything is made
            if kept and what[0] is not None and len(ran) == 1:
                kept.clear()
            return plain(*what)

        monkeypatch.setattr(mailbox, "Turn", freeing)
        assert server.rpc_sync().take("second") == "second"
        monkeypatch.undo()
        wait_for(lambda: sorted(ran) == ["first", "parting", "second"])

    def run() -> None:
        worlds(program, size=1, seeds=[1])
        over.append(True)

    over: list[bool] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert over


def test_nobody_is_woken_under_the_lock_which_who_wakes_them_may_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake a handler takes its mailbox's lock, whose holder may be in a finalizer that tells."""
    woken: list[bool] = []

    def program() -> None:
        server = Narrow.spawn(1)
        limits: Any = current().worker.limits
        complete = current().worker.complete

        def completing(what: Completion) -> None:
            if isinstance(what, Room):
                woken.append(limits._door._is_owned())
            complete(what)

        monkeypatch.setattr(current().worker, "complete", completing)
        calls = [server.rpc_async().take(n, 1.0) for n in range(3)]
        window, room = next(w for w in limits._actors.values() if w.calls == 3), Room(1)
        with limits._door:
            window.queue(room)
            limits._full.add(window)
        limits._gone.append(next(n for n, counted in limits.counted.items() if counted[2] is window))
        limits.statistics()  # as anybody may come before who has just noted that
        assert room.granted
        with limits._door:
            window.give_back(1, room.size, window.moved, [])
        for call in calls:
            call.wait()

    worlds(program, seeds=[1])
    assert woken == [False]


def test_what_a_finalizer_could_not_send_is_no_failure_of_who_it_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        server = Server.spawn(1)
        worker = current().worker
        plain, peer = worker.transport.send, worker.peers[1]
        late: list[Any] = []

        def send(*what: Any, **more: Any) -> None:
            monkeypatch.setattr(worker.transport, "send", plain)
            plain(*what, **more)
            server.tell().take("parting", 0.0)
            late.append(server.rpc_async().take("parting", 0.0))
            peer.leaving = True

        server.rpc_sync().take("first")
        monkeypatch.setattr(worker.transport, "send", send)
        assert server.rpc_sync().take("sent") == "sent"
        with pytest.raises(rpc.WorkerLostError, match="was not sent"):
            late[0].wait(20)
        peer.leaving = False

    worlds(program, seeds=[1])


def test_what_a_finalizer_sends_leaves_though_who_it_interrupted_could_not_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program() -> None:
        server = Server.spawn(1)
        worker = current().worker
        plain = worker.transport.send

        def send(*what: Any, **more: Any) -> None:
            monkeypatch.setattr(worker.transport, "send", plain)
            worker.peers[1].sent -= 1
            server.tell().take("parting", 0.0)
            raise MemoryError

        server.rpc_sync().take("first")
        monkeypatch.setattr(worker.transport, "send", send)
        with pytest.raises(MemoryError):
            server.rpc_sync().take("sent")
        wait_for(lambda: ran == ["first", "parting"])

    worlds(program, seeds=[1])


# -- over processes


def test_too_large_a_message_is_refused_by_its_sender_with_its_size() -> None:
    def program(rank: int) -> int:
        if rank:
            return 0
        for send in (
            lambda: rpc.rpc_sync(1, len, args=(bytes(20_000),)),
            lambda: rpc.rpc_async(1, len, args=(bytes(20_000),)),
            lambda: rpc.rpc_sync(1, torch.sum, args=(torch.zeros(5_000),)),
            lambda: rpc.remote(1, len, args=(bytes(20_000),)),
            lambda: rpc.rpc_sync(1, bytes, args=(20_000,)),  # the answer
            lambda: rpc.RRef([b""]).rpc_sync().append(bytes(20_000)),
        ):
            with pytest.raises(rpc.MessageTooLargeError, match=r"of 20\d\d\d bytes from .* is 10000") as caught:
                send()
            assert 20_000 < caught.value.size < 21_000
            assert caught.value.limit == 10_000
        assert rpc.rpc_sync(1, len, args=(bytes(9_000),)) == 9_000
        return 1

    assert run_world(program, 2, options={"max_message_bytes": 10_000}) == [1, 0]


_gate = threading.Event()


class Gated(rpc.Actor):
    def take(self, load: bytes) -> None:
        _gate.wait(30)
        ran.append(len(load))


def many() -> int:
    return len(ran)


def go_on() -> None:
    _gate.set()


def start_anew() -> None:
    _gate.clear()
    ran.clear()


def produce(verb: str) -> tuple[int, int]:
    """Sends until there is no room, then waits for some; returns how much it had sent, and what windows are left."""
    server = Gated.spawn(1)
    futures: list[Any] = []
    with rpc.no_wait():
        try:
            while len(futures) < 1000:
                futures.append(getattr(server, verb)().take(bytes(30_000 if len(futures) % 2 else 10)))
        except rpc.BackpressureError:
            pass
    sent = len(futures)
    rpc.rpc_sync(1, go_on)
    for _ in range(500 - sent):
        futures.append(getattr(server, verb)().take(b"x"))
    until(lambda: rpc.rpc_sync(1, many) == 500)
    rpc.rpc_sync(1, start_anew)
    limits = current().worker.limits
    until(lambda: limits.statistics()["counted"] == 0, what=str(limits.statistics()))
    return sent, limits.statistics()["windows"]


def test_a_producer_is_held_up_between_processes_until_the_actor_goes_on() -> None:
    with World(2, options={"max_pending": 400, "max_pending_bytes": 4_000_000}) as world:
        for verb in ("tell", "rpc_async"):
            sent, windows = world.on(0, produce, verb)
            assert 60 <= sent <= 70  # a million bytes
            assert windows <= 2


# -- coroutines


class Calling(rpc.Actor, concurrency=4):
    """Its coroutines call past a limit."""

    def __init__(self, gated: rpc.RRef[Gated]) -> None:
        self.gated = gated

    async def flood(self, verb: str, count: int) -> str:
        """Calls until it is refused; returns how it was."""
        for n in range(count):
            try:
                getattr(self.gated, verb)().take(b"x")
            except rpc.BackpressureError as e:
                return f"{n}: {e}"
        return "it was let"

    async def keep_up(self, count: int) -> int:
        """Awaits, whenever it is refused, what it has called before."""
        under_way: list[Any] = []
        refused = 0
        for _ in range(count):
            while True:
                try:
                    under_way.append(self.gated.rpc_async().take(b"x"))
                    break
                except rpc.BackpressureError:
                    refused += 1
                    await under_way.pop(0)
        for future in under_way:
            await future
        return refused

    async def flood_in_a_thread(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(lambda: self.gated.tell().take(b"x"))

    async def say(self) -> str:
        return "the loop is free"

    async def no_wait_beside_another(self) -> list[bool]:
        """Whether calls are not to wait: in the block after an await; in a task beside it; in a thread of the block."""
        inside = asyncio.Event()

        async def block() -> list[bool]:
            with rpc.no_wait():
                inside.set()
                await asyncio.sleep(0.05)
                return [no_wait.get(), await asyncio.to_thread(no_wait.get)]

        task = asyncio.create_task(block())
        await inside.wait()
        beside = no_wait.get()
        return [*await task, beside, no_wait.get()]


def call_past_the_limit() -> dict[str, Any]:
    gated = Gated.spawn(1)
    calling = Calling.spawn(0, gated)
    said: dict[str, Any] = {}
    for verb in ("tell", "rpc_async", "remote"):
        said[verb] = calling.rpc_sync(timeout=30).flood(verb, 500)
    said["meanwhile"] = calling.rpc_sync(timeout=30).say()
    waits = calling.rpc_async(timeout=0).flood_in_a_thread(100)
    said["beside a thread that waits"] = calling.rpc_sync(timeout=30).say()
    rpc.rpc_sync(1, go_on)
    waits.wait()
    said["refused"] = calling.rpc_sync(timeout=60).keep_up(300)
    said["no_wait"] = calling.rpc_sync(timeout=30).no_wait_beside_another()
    return said


def test_a_coroutine_past_a_limit_is_refused_and_the_loop_goes_on() -> None:
    with World(2, options={"max_pending": 200, "max_pending_bytes": 4_000_000}) as world:
        said = world.on(0, call_past_the_limit)
        world.on(1, start_anew)
    assert re.match(r"50: take was not sent, since a wait for room would block the worker's loop.*await", said["tell"])
    for verb in ("rpc_async", "remote"):
        assert said[verb].startswith("0: ")
    assert said["meanwhile"] == said["beside a thread that waits"] == "the loop is free"
    assert said["refused"] > 0
    assert said["no_wait"] == [True, True, False, False]


# -- many callers


def flood_from(rank: int, server: rpc.RRef[Any], count: int) -> None:
    for _ in range(count):
        server.tell().take(bytes(100_000))


def test_what_lies_before_an_actor_is_no_more_than_each_callers_share() -> None:
    """However many call: a window for each of them."""
    callers, share = 4, 2_000_000

    def gather() -> tuple[int, int]:
        server = Gated.spawn(0)
        ranks = range(1, callers + 1)
        floods = [rpc.rpc_async(rank, flood_from, args=(rank, server, 100), timeout=0) for rank in ranks]
        until(lambda: all(rpc.rpc_sync(rank, current_held_up) for rank in ranks), 30)
        home: Any = server.local_value()._home
        lies_here = home.entry.mailbox.mailbox.view().queue
        size = sum(size_of(message.frames) for message in lies_here)
        go_on()
        for flood in floods:
            flood.wait()
        until(lambda: many() == callers * 100, 30)
        start_anew()
        return len(lies_here), size

    with World(callers + 1, options={"max_pending_bytes": 4 * share}) as world:
        count, size = world.on(0, gather)
    assert callers * share // 200_000 <= count  # each caller has used its share
    assert size <= callers * share


class Slow(rpc.Actor):
    def take(self, load: bytes) -> None:
        time.sleep(0.001)
        ran.append(len(load))


def rss() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def produce_for(seconds: float, verb: str) -> dict[str, int]:
    """Sends calls of 100 kB for a while; returns how many, and how far each side's memory has grown at most."""
    server = Slow.spawn(1)
    server.rpc_sync().take(b"")
    load, mine, theirs = bytes(100_000), rss(), rpc.rpc_sync(1, rss)
    grown = [0, 0]
    sent, end, look = 0, time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        if verb == "tell":
            server.tell().take(load)
        else:
            server.rpc_async(timeout=0).take(load)
        sent += 1
        if time.monotonic() > look:
            look = time.monotonic() + 0.2
            grown = [max(grown[0], rss() - mine), max(grown[1], rpc.rpc_sync(1, rss, timeout=0) - theirs)]
    until(lambda: rpc.rpc_sync(1, many) == sent + 1, 60.0)
    rpc.rpc_sync(1, ran.clear)
    return {"sent": sent, "mine": grown[0], "theirs": grown[1]}


@pytest.mark.parametrize("verb", ["tell", "rpc_async"])
@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=[pytest.mark.slow, pytest.mark.timeout(200)])])
def test_a_producer_of_large_calls_to_a_slow_actor_keeps_both_sides_under_200_mb(seconds: float, verb: str) -> None:
    with World(2, timeout=seconds + 90) as world:
        grown = world.on(0, produce_for, seconds, verb)
    assert grown["sent"] > 100
    assert grown["mine"] < 200e6, grown
    assert grown["theirs"] < 200e6, grown


# -- descriptors


def narrow_to(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_rank_0_says_at_once_that_it_may_not_open_enough_files_and_so_do_the_others(meet: str) -> None:
    def program(rank: int) -> str:
        if rank == 0:
            narrow_to(60)
        options = rpc.RpcBackendOptions(init_method=meet, init_timeout=30)
        try:
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=12, rpc_backend_options=options)
        except rpc.RendezvousError as e:
            return str(e)
        return "joined"

    outcomes = run_processes(program, 2)
    for outcome in outcomes:
        assert 'worker "worker0" (rank 0) may open 60 files' in outcome.value
        assert "a world of 12 workers takes up to" in outcome.value
        assert "ulimit -n " in outcome.value


def test_another_rank_warns_of_it_and_works(meet: str) -> None:
    def program(rank: int) -> int:
        if rank:
            narrow_to(60)
        options = rpc.RpcBackendOptions(init_method=meet, init_timeout=30)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=6, rpc_backend_options=options)
        result: int = rpc.rpc_sync(0, abs, args=(-rank,))
        rpc.shutdown()
        return result

    outcomes = run_processes(program, 6)
    assert [outcome.value for outcome in outcomes] == list(range(6))
    for outcome in outcomes:
        assert ("may open 60 files" in outcome.stderr) == (outcome.rank > 0)
