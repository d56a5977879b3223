"""Worlds without a size: workers come and go while others work. Real processes."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import autograd as dist_autograd
from actorrpc import session
from actorrpc.optim import DistributedOptimizer
from actorrpc.services import elastic, rendezvous
from actorrpc.services.devices import Placement
from actorrpc.services.objects import Objects
from actorrpc.services.store import HintStore
from actorrpc.world import World as WorldView
from tests.joining import add, free_port, options
from tests.worlds import World, stop, until

SIZE = 4
_rounds = itertools.count()
Seen = list[tuple[str, int]]


class Place:
    """An address at which the processes of a standing world meet, without saying how many they are."""

    def __init__(self, world: World, method: str = "") -> None:
        self.world, self.method = world, method or f"file://{world.folder}/elastic-{next(_rounds)}"

    def come(self, *ranks: int) -> None:
        """Has processes join, one after the other, as w0, w1, ..."""
        for rank in ranks:
            self.world.on(rank, come, rank, self.method)

    def on(self, process: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.world.on(process, function, *args)


@pytest.fixture
def place() -> Iterator[Place]:
    with World(SIZE, join=False, timeout=60) as world:
        yield Place(world)


# -- what runs in the processes

_kept: dict[str, Any] = {}


def kept() -> dict[str, Any]:
    """What a process keeps between calls. (A local function would take a copy of a global with it.)"""
    return _kept


def come(rank: int, method: str, name: str = "", door: float = 0.0, **more: Any) -> Seen:
    elastic.DOOR_SECONDS = door
    rendezvous._SILENCE_SECONDS = 0.5
    rendezvous._LAST_WORD_SECONDS = 0.3
    make = more.pop("make", options)
    rpc.init_rpc(name or f"w{rank}", rank=rank, rpc_backend_options=make(method, **more))
    return present()


def fail_to_come(rank: int, method: str, name: str = "", **more: Any) -> str:
    with pytest.raises(rpc.RendezvousError) as caught:
        come(rank, method, name, **{"init_timeout": 10.0, **more})
    assert not session.is_available()
    rpc.shutdown()  # does nothing
    return str(caught.value)


def present() -> Seen:
    return [(worker.name, worker.id) for worker in WorldView(session.current()).workers]


def named(*ranks: int) -> Seen:
    return [(f"w{rank}", rank) for rank in ranks]


def end() -> None:
    kept().clear()
    rpc.shutdown(graceful=False)


def leave() -> None:
    rpc.shutdown()
    assert not session.is_available()


def call_back(to: str) -> int:
    value: int = rpc.rpc_sync(to, add, args=(2, 3))
    return value


def call_everybody(seen: Seen) -> None:
    """Calls all by name and by rank, and has them call back by name."""
    own = rpc.get_worker_info().name
    for name, rank in seen:
        assert rpc.rpc_sync(name, add, args=(1, 2)) == rpc.rpc_sync(rank, add, args=(1, 2)) == 3
        assert rpc.rpc_sync(name, call_back, args=(own,)) == 5


def come_and_call(rank: int, method: str) -> Seen:
    seen = come(rank, method)
    call_everybody(seen)
    return seen


def objects() -> Objects:
    found: Objects = session.current().objects
    return found


def is_leaving(name: str) -> bool:
    worker = session.current().worker
    return worker.peers[worker.names[name]].leaving


def is_gone(name: str) -> bool:
    worker = session.current().worker
    return worker.peers[worker.names[name]].standing.name != "MEMBER"


def sees(*ranks: int) -> bool:
    return present() == named(*ranks)


def compat() -> Any:
    from actorrpc import compat  # it imports what torch warns of

    return compat


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


def keep(what: Any) -> None:
    kept()["it"] = what


def use_kept() -> int:
    value: int = kept()["it"].rpc_sync().get()
    return value


def note(word: str) -> None:
    kept().setdefault("words", []).append(word)


def words() -> list[str]:
    found: list[str] = kept().get("words", [])
    return found


def watch_for_all() -> None:
    def joined(worker: rpc.WorkerInfo) -> None:
        note(f"+{worker.name}")
        if worker.name == "w2":
            raise LookupError("the next ones are told of all the same")

    kept()["watch"] = WorldView().watch(lambda worker, _: note(f"-{worker.name}"), joined=joined)
    with pytest.raises(TypeError, match="a callback for those who are gone"):
        WorldView().watch()


def attach_and_leave(method: str) -> None:
    with rpc.attach(method) as world:
        assert [worker.name for worker in world.workers] == ["w0", "w1", "w2"]


# -- coming


def test_who_watches_is_told_of_newcomers_also_of_those_who_come_again_but_not_of_guests() -> None:
    with World(4, join=False, timeout=60, strict=False) as world:
        place = Place(world)
        place.come(0)
        place.on(0, watch_for_all)
        place.come(1, 2)
        place.on(3, attach_and_leave, place.method)
        place.on(1, leave)  # in order, which is no loss
        place.come(1)
        world.kill(1)
        until(lambda: "-w1" in place.on(0, words), 20)
        place.come(3)
        until(lambda: place.on(0, words) == ["+w1", "+w2", "+w1", "-w1", "+w3"], 20)
        place.on(0, lambda: kept()["watch"].stop())
        place.on(3, leave)
        place.come(3)
        assert place.on(0, words)[-1] == "+w3"
        assert len(place.on(0, words)) == 5


def test_rank_0_begins_alone_and_who_comes_can_call_and_be_called_at_once(place: Place) -> None:
    assert place.on(0, come_and_call, 0, place.method) == named(0)
    assert place.on(0, lambda: compat()._get_current_rpc_agent().is_static_group) is False
    assert place.on(3, come_and_call, 3, place.method) == named(0, 3)
    assert place.on(1, come_and_call, 1, place.method) == named(0, 1, 3)
    assert place.on(0, present) == place.on(3, present) == named(0, 1, 3)  # before init_rpc of the newcomer returned
    assert place.on(0, lambda: [info.id for info in compat()._get_current_rpc_agent().get_worker_infos()]) == [0, 1, 3]


def test_who_waits_in_a_long_call_takes_note_of_newcomers_meanwhile(place: Place) -> None:
    def wait_for_newcomer() -> int:
        return rpc.rpc_sync("w0", until, args=(functools.partial(sees, 0, 1, 2), 30), timeout=40)  # type: ignore[no-any-return]

    place.come(0, 1)
    place.world.start(1, wait_for_newcomer)
    assert place.on(2, come_and_call, 2, place.method) == named(0, 1, 2)
    place.world.result(1)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_workers_that_come_together_all_know_each_other_in_the_end(kind: str, place: Place) -> None:
    if kind == "tcp":
        place.method = f"tcp://127.0.0.1:{free_port()}"
    for rank in range(SIZE):
        place.world.start(rank, come_and_call, rank, place.method)
    place.world.results()
    for rank in range(SIZE):
        assert place.on(rank, present) == named(*range(SIZE))
    place.world.everywhere(call_everybody, named(*range(SIZE)))


def test_without_a_rank_nobody_comes(place: Place) -> None:
    method = place.method

    def try_it() -> None:
        elastic.DOOR_SECONDS = 0.0
        os.environ.pop("RANK", None)
        with pytest.raises(ValueError, match="rank parameter missing"):
            rpc.init_rpc("a", rpc_backend_options=options(method))
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            rpc.init_rpc("a")
        os.environ["RANK"] = "0"
        try:
            rpc.init_rpc("a", rpc_backend_options=options(method))
        finally:
            del os.environ["RANK"]
        assert present() == [("a", 0)]

    place.on(0, try_it)


# -- who is refused


def test_a_name_or_rank_in_use_is_refused_on_the_newcomer_alone_naming_the_holder(place: Place) -> None:
    place.come(0, 1)
    place.on(0, lambda: setattr(elastic, "_HOLDER_SECONDS", 0.3))
    holder = f'worker "w1" (rank 1, host {os.uname().nodename}, pid {place.world.pid(1)})'
    text = place.on(2, fail_to_come, 2, place.method, "w1")
    assert 'name "w1"' in text
    assert f"is taken by {holder}" in text
    text = place.on(2, fail_to_come, 1, place.method, "other")
    assert "rank 1," in text
    assert f"is taken by {holder}" in text
    place.world.on(0, call_everybody, named(0, 1))
    assert place.on(2, come_and_call, 2, place.method) == named(0, 1, 2)


def test_a_second_rank_0_is_refused_while_the_first_one_is_there(place: Place) -> None:
    place.come(0, 1)
    text = place.on(2, fail_to_come, 0, place.method, "other")
    assert "cannot begin a world at this address, where one is alive" in text
    assert 'is taken by worker "w0" (rank 0' in text
    assert place.on(3, come_and_call, 3, place.method) == named(0, 1, 3)


def test_worlds_with_and_without_a_size_do_not_mix(place: Place) -> None:
    method = place.method
    words = "RPC group mixes statically and dynamically initialized members which is not supported"

    def come_with_size(rank: int, size: int, method: str) -> None:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options(method))

    def fail_with_size(rank: int, size: int) -> str:
        with pytest.raises(rpc.RendezvousError) as caught:
            come_with_size(rank, size, method)
        return str(caught.value)

    place.come(0)
    text = place.on(1, fail_with_size, 1, 2)
    assert words in text
    assert '"w1" (rank 1' in text
    assert "world_size=2" in text
    place.on(0, end)
    static = Place(place.world)
    for rank in (0, 1):
        place.world.start(rank, come_with_size, rank, 2, static.method)
    for rank in (0, 1):
        place.world.result(rank)
    assert words in place.on(2, fail_to_come, 2, static.method)
    place.world.start(0, leave)
    place.world.start(1, leave)
    place.world.result(0)
    place.world.result(1)


def test_a_world_with_a_size_whose_rank_0_is_silent_is_known_by_its_hint(place: Place) -> None:
    method = place.method

    def leave_hint() -> None:
        store = HintStore(method, 0)
        worker = session._made("dead", 0, options(method), "", 0)
        store.publish(elastic.hint_of(worker.worker, "its session", 3), time.monotonic() + 5)
        worker.close(0.0)
        kept()["store"] = store

    place.on(0, leave_hint)
    text = place.on(1, fail_to_come, 1, place.method)
    assert "mixes statically and dynamically" in text
    assert "begun with 3 workers" in text
    place.on(0, lambda: kept()["store"].close())


def test_device_maps_are_checked_and_known_as_workers_come(place: Place) -> None:
    method = place.method

    def come_with_maps(rank: int, maps: Any, count: int) -> None:
        def make(method: str, **more: Any) -> Any:
            return rpc.TensorPipeRpcBackendOptions(init_method=method, device_maps=maps, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda: count)
            come(rank, method, make=make)

    def fail_with_maps(rank: int, maps: Any, count: int) -> str:
        with pytest.raises(rpc.DeviceMapError) as caught:
            come_with_maps(rank, maps, count)
        return str(caught.value)

    def placed() -> Any:
        return session.current().worker.services[Placement]

    place.on(0, come_with_maps, 0, {"w2": {0: 1}}, 1)
    text = place.on(1, fail_with_maps, 1, {"w0": {0: 1}}, 1)
    assert 'maps to cuda:1 of worker "w0"' in text
    text = place.on(2, fail_with_maps, 2, {}, 1)
    assert 'worker "w0" maps to cuda:1 of worker "w2"' in text
    place.on(3, come_with_maps, 3, {}, 1)
    place.on(2, come_with_maps, 2, {"w0": {1: 0}, "w3": {1: 0}}, 2)
    there = {"cuda:1": "cuda:0"}
    assert place.on(2, placed) == Placement({"w0": there, "w3": there}, {"w0": there}, ("cuda:1",))
    assert place.on(3, placed) == Placement({}, {"w2": {"cuda:0": "cuda:1"}}, ("cuda:0",))
    assert place.on(0, placed) == Placement({"w2": {"cuda:0": "cuda:1"}}, {"w2": {"cuda:0": "cuda:1"}}, ("cuda:0",))


def test_a_newcomer_that_gives_up_says_for_whom_it_has_waited_and_is_no_ghost() -> None:
    with World(4, join=False, timeout=60) as world:
        place = Place(world)
        place.come(0, 1)
        stop(world.pid(1))
        try:
            text = place.on(2, functools.partial(fail_to_come, init_timeout=1.0), 2, place.method)
        finally:
            os.kill(world.pid(1), signal.SIGCONT)
        assert "who has not taken note of it yet" in text
        assert '"w1" (rank 1' in text
        until(lambda: place.on(0, present) == named(0, 1), 20)
        until(lambda: place.on(1, present) == named(0, 1), 20)
        assert place.on(2, come_and_call, 2, place.method) == named(0, 1, 2)


# -- leaving


def test_who_has_left_is_not_there_any_more_and_the_others_go_on(place: Place) -> None:
    def call_the_one_who_left() -> str:
        with pytest.raises(rpc.WorkerLostError, match="has left") as caught:
            rpc.rpc_sync("w1", add, args=(1, 2))
        assert (caught.value.worker, caught.value.rank) == ("w1", 1)
        return str(caught.value)

    place.come(0, 1, 2, 3)
    place.on(1, leave)
    for rank in (0, 2, 3):  # all of them, though not all have ever spoken to it
        until(lambda rank=rank: place.on(rank, sees, 0, 2, 3), 20)  # type: ignore[misc]
        assert "not sent" in place.on(rank, call_the_one_who_left)
        place.on(rank, call_everybody, named(0, 2, 3))


def test_leaving_waits_for_the_workers_own_calls_and_for_those_that_others_had_begun(place: Place) -> None:
    def leave_at_work() -> list[Any]:
        own = [rpc.rpc_async(to, until, args=(functools.partial(is_leaving, "w1"), 30)) for to in ("w0", "w2")]
        back = rpc.rpc_async("w0", call_back_when_leaving, args=("w1",))  # its own chain may still call it
        for i in range(20):
            rpc.rpc_async("w2", note, args=(f"{i}",))
        rpc.shutdown()
        return [future.wait() for future in (*own, back)]

    def call_back_when_leaving(name: str) -> int:
        until(functools.partial(is_leaving, name), 30)
        return call_back(name)

    def still_served() -> str:
        future = rpc.rpc_async("w1", begun_and_waiting)
        rpc.rpc_sync("w1", until, args=(lambda: kept().get("begun"), 30))
        until(functools.partial(is_leaving, "w1"), 30)
        with pytest.raises(rpc.WorkerLostError, match=r"is about to leave.*not sent") as caught:
            rpc.rpc_sync("w1", add, args=(1, 2))
        assert caught.value.worker == "w1"
        return str(future.wait())

    def begun_and_waiting() -> str:
        kept()["begun"] = True
        until(lambda: session.current().elastic._leaving, 30)  # type: ignore[union-attr]
        time.sleep(0.3)
        return "served"

    place.come(0, 1, 2, 3)
    place.world.start(3, still_served)
    until(lambda: place.on(1, lambda: kept().get("begun")), 30)
    place.world.start(1, leave_at_work)
    assert place.world.result(1) == [True, True, 5]
    assert place.world.result(3) == "served"
    assert sorted(map(int, place.on(2, words))) == list(range(20))


def test_no_call_is_half_done_when_its_callee_leaves(place: Place) -> None:
    """Others call all the time: every call has either run, with its result, or was not sent."""

    def storm() -> int:
        """Returns how many calls have come back."""
        returned: list[int] = []
        door = threading.Lock()

        def call_on() -> None:
            try:
                while True:
                    rpc.rpc_sync("w1", count_up)
                    with door:
                        returned.append(1)
            except rpc.WorkerLostError as e:
                if "not sent" not in str(e):
                    returned.append(1000000)

        threads = [threading.Thread(target=call_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(returned) if 1000000 not in returned else -1

    def count_up() -> None:
        with lock():
            kept()["count"] = kept().get("count", 0) + 1

    def lock() -> Any:
        return session.current().worker.services.setdefault("lock", threading.Lock())  # type: ignore[call-overload]

    def leave_and_count() -> int:
        until(lambda: kept().get("count", 0) > 100, 30)
        rpc.shutdown()
        return int(kept()["count"])

    place.come(0, 1, 2)
    place.world.start(0, storm)
    place.world.start(2, storm)
    place.world.start(1, leave_and_count)
    ran = place.world.result(1)
    assert place.world.result(0) + place.world.result(2) == ran


def test_what_a_leaver_held_is_released_and_what_it_has_passed_on_lives(place: Place) -> None:
    def hold_pass_on_and_leave() -> None:
        passed, held = rpc.remote("w0", Box, args=(7,)), rpc.remote("w0", Box, args=(8,))
        assert held.rpc_sync().get() == 8
        rpc.rpc_async("w2", keep, args=(passed,))
        kept()["held"] = held, passed
        rpc.shutdown()

    def owned() -> list[int]:
        return sorted(entry.value.value for entry in objects().owned())

    place.come(0, 1, 2)
    place.on(1, hold_pass_on_and_leave)
    until(lambda: place.on(0, owned) == [7], 20)
    assert place.on(2, use_kept) == 7


def test_a_leaving_that_takes_too_long_says_what_goes_on_and_ends_all_the_same(place: Place) -> None:
    def leave_in_vain() -> str:
        future = rpc.rpc_async("w0", until, args=(lambda: kept().get("done"), 30))
        with pytest.raises(rpc.RendezvousError) as caught:
            rpc.shutdown(timeout=0.5)
        assert not session.is_available()
        del future
        return str(caught.value)

    place.come(0, 1, 2)
    text = place.on(1, leave_in_vain)
    assert 'calls to worker "w0" (rank 0' in text
    assert "are not answered" in text
    until(lambda: place.on(2, sees, 0, 2), 20)
    place.on(0, set_done)


def set_done() -> None:
    kept()["done"] = True


# -- coming again


@pytest.mark.parametrize("process", [1, 2], ids=["the same process", "another process"])
def test_who_comes_again_is_another_worker_under_its_old_name_and_rank(process: int, place: Place) -> None:
    def use_both() -> tuple[int, int]:
        new = rpc.remote("w1", Box, args=(2,))
        with pytest.raises(rpc.WorkerLostError, match=r'"w1" \(rank 1.*has left'):
            kept()["old"].rpc_sync().get()
        assert new.owner() == rpc.get_worker_info("w1") == rpc.WorkerInfo("w1", 1)
        kept()["old"] = new
        return new.rpc_sync().get(), rpc.rpc_sync(1, add, args=(1, 1))

    place.come(0, 1, 3)
    place.on(3, hold)
    for _ in range(3):
        place.on(1 if place.on(1, session.is_available) else process, leave)
        assert place.on(process, come_and_call, 1, place.method) == named(0, 1, 3)
        assert place.on(3, use_both) == (2, 2)
        assert place.on(0, present) == place.on(3, present) == named(0, 1, 3)
    until(lambda: place.on(3, watched_processes) <= 2, 20)


def watched_processes() -> int:
    transport: Any = session.current().worker.transport
    return len(transport._lookout._processes)


def hold() -> None:
    kept()["old"] = rpc.remote("w1", Box, args=(1,))
    assert kept()["old"].rpc_sync().get() == 1


def test_a_killed_worker_can_be_replaced_at_once() -> None:
    with World(4, join=False, timeout=60) as world:
        place = Place(world)
        place.come(0, 1, 2)
        world.start(2, call_until_lost)
        until(lambda: place.on(1, words), 20)
        world.kill(1)
        assert place.on(3, come_and_call, 1, place.method) == named(0, 1, 2)
        assert "was lost" in world.result(2)
        place.on(2, call_everybody, named(0, 1, 2))


def call_until_lost() -> str:
    def call() -> None:
        rpc.rpc_sync("w1", note, args=("begun",))  # which may be the one that is lost
        rpc.rpc_sync("w1", time.sleep, args=(30,))

    with pytest.raises(rpc.WorkerLostError) as caught:
        call()
    return str(caught.value)


def test_exchanges_are_among_those_who_are_there(place: Place) -> None:
    def exchange(value: int) -> dict[str, int]:
        found: dict[str, int] = compat()._all_gather(value, timeout=20)
        return found

    def on_all(*ranks: int) -> list[dict[str, int]]:
        for rank in ranks:
            place.world.start(rank, exchange, rank)
        return [place.world.result(rank) for rank in ranks]

    place.come(0, 1)
    assert on_all(0, 1) == [{"w0": 0, "w1": 1}] * 2
    place.come(2)
    assert on_all(0, 1, 2) == [{"w0": 0, "w1": 1, "w2": 2}] * 3
    place.on(1, leave)
    assert on_all(0, 2) == [{"w0": 0, "w2": 2}] * 2
    place.come(1)  # it has not exchanged anything yet; the others have, with its earlier self
    assert on_all(0, 1, 2) == [{"w0": 0, "w1": 1, "w2": 2}] * 3


# -- without rank 0


@pytest.mark.parametrize("how", ["leaves", "goes without a word", "is killed"])
def test_without_rank_0_the_others_go_on_and_who_comes_is_told(how: str) -> None:
    with World(4, join=False, timeout=60) as world:
        place = Place(world)
        place.come(0, 1, 2)
        if how == "is killed":
            world.kill(0)
        else:
            place.on(0, leave if how == "leaves" else end)
        for rank in (1, 2):
            until(lambda rank=rank: place.on(rank, sees, 1, 2), 20)  # type: ignore[misc]
            place.on(rank, call_everybody, named(1, 2))
        text = place.on(3, fail_to_come, 3, place.method)
        assert '"w0" (rank 0' in text
        assert ("was lost" if how == "is killed" else "has left") in text
        assert "nobody can join any more" in text
        assert '"w1", "w2"' in text
        place.on(1, leave)  # the one who has told it
        until(lambda: place.on(2, sees, 2), 20)
        assert "nobody can join any more" in place.on(3, fail_to_come, 3, place.method)
        if how == "leaves":
            assert place.on(0, come_and_call, 0, place.method) == named(0)  # a world of its own
            assert place.on(3, come_and_call, 3, place.method) == named(0, 3)
            assert place.on(2, present) == named(2)
            place.on(3, leave)
        place.on(2, leave)


def test_all_may_leave_at_the_same_time(place: Place) -> None:
    for _ in range(3):
        place.come(*range(SIZE))
        place.world.everywhere(leave)
        place.method += "+"


# -- gradients


class Scale:
    def __init__(self, value: float) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([value]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    def parameter(self) -> Any:
        return rpc.RRef(self.weight)

    def value(self) -> float:
        return float(self.weight)


def test_contexts_and_optimizers_work_among_those_present(place: Place) -> None:
    def train(*names: str) -> list[float]:
        """One step on a product of a weight on each worker; returns the weights."""
        layers = kept().setdefault("layers", {})
        for name in names:
            if name not in layers:
                layers[name] = rpc.remote(name, Scale, args=(2.0,))
        chosen = [layers[name] for name in names]
        optimizer = DistributedOptimizer(torch.optim.SGD, [s.rpc_sync().parameter() for s in chosen], lr=0.1)
        with dist_autograd.context() as context_id:
            x = torch.ones(1)
            for layer in chosen:
                x = layer.rpc_sync().forward(x)
            dist_autograd.backward(context_id, [x.sum()])
            optimizer.step(context_id)
        return [layer.rpc_sync().value() for layer in chosen]

    def forget(name: str) -> None:
        del kept()["layers"][name]

    place.come(0, 1)
    assert place.on(0, train, "w1") == pytest.approx([1.9])
    place.come(2)
    assert place.on(0, train, "w1", "w2") == pytest.approx([1.7, 1.81])
    place.on(1, leave)
    assert place.on(0, train, "w2") == pytest.approx([1.71])
    place.come(1)
    place.on(0, forget, "w1")
    assert place.on(0, train, "w2", "w1") == pytest.approx([1.51, 1.829])
