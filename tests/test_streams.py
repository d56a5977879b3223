"""Streams: the items of generators on other workers, with flow control, and closed early without leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from actorrpc.autograd import backward, context, get_gradients
from tests import worlds
from tests.worlds import World, inside, no_references, until

OTHER = "worker1"


# --- what streams -----------------------------------------------------------------------------------------------------


class Player(rpc.Actor):
    """Makes items; notes how far it has come, and who else came between."""

    def __init__(self) -> None:
        self.made = self.ended = self.inside = 0
        self.notes: list[object] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()

    def rollout(self, steps: int) -> Iterator[int]:
        try:
            for i in range(steps):
                self.enter()
                self.made += 1
                self.leave()
                yield i
        finally:
            self.enter()
            self.ended += 1
            self.notes.append(("ended", i))
            self.leave()

    async def rollout_async(self, steps: int) -> AsyncIterator[int]:
        try:
            for i in range(steps):
                await asyncio.sleep(0)
                self.made += 1
                yield i
        finally:
            await asyncio.sleep(0)
            self.threads.add(threading.current_thread().name)
            self.ended += 1

    async def one_and_no_more(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    def fails_after(self, steps: int) -> Iterator[int]:
        yield from range(steps)
        raise KeyError("no more")

    async def fails_after_async(self, steps: int) -> AsyncIterator[int]:
        for i in range(steps):
            yield i
        raise KeyError("no more")

    def slow(self) -> Iterator[int]:
        yield 0
        self.gate.wait(20)
        yield 1

    def open_gate(self) -> None:
        self.gate.set()

    def enter(self) -> None:
        self.inside += 1
        time.sleep(0.0002)
        assert self.inside == 1, "another message is in progress"

    def leave(self) -> None:
        self.inside -= 1

    def note(self, what: object) -> None:
        self.enter()
        self.notes.append((what, self.made))
        self.leave()

    def take(self) -> list[object]:
        notes, self.notes = self.notes, []
        return notes

    def counts(self) -> tuple[int, int]:
        return self.made, self.ended

    def where(self) -> set[str]:
        return self.threads

    def calls_back(self, caller: rpc.RRef[Player], steps: int) -> Iterator[Any]:
        for _ in range(steps):
            yield caller.rpc_sync().counts()

    def consume(self, other: rpc.RRef[Player], steps: int) -> list[Any]:
        return list(other.stream(window=0).calls_back(self.rref, steps))

    async def consume_async(self, other: rpc.RRef[Player], steps: int) -> list[int]:
        return [item async for item in other.stream().rollout(steps)]

    def plain(self) -> int:
        return 3

    def __call__(self, steps: int) -> Iterator[int]:
        return iter(range(steps))

    def references(self, steps: int) -> Iterator[rpc.RRef[Any]]:
        for i in range(steps):
            yield rpc.RRef([i])

    def unwritable(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()
        yield 2

    def without_grad(self) -> Iterator[bool]:
        with torch.no_grad():
            for _ in range(3):
                yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()


class WidePlayer(Player, concurrency=4):
    pass


class Scale:
    def __init__(self) -> None:
        self.weight = torch.full((2,), 3.0, requires_grad=True)

    def times(self, x: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        for i in range(1, steps + 1):
            yield self.weight * x * i

    def gradient_of(self, number: int) -> Any:
        return get_gradients(number).get(self.weight)


def numbers(end: int) -> Iterator[int]:
    yield from range(end)


async def numbers_async(end: int) -> AsyncIterator[int]:
    for i in range(end):
        await asyncio.sleep(0)
        yield i


async def no_generator() -> int:
    return 1


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def quiet(world_rank: int = 1) -> bool:
    """Whether the other worker has nothing left of any stream."""
    return bool(rpc.rpc_sync(world_rank, _nothing_left))


def _nothing_left() -> bool:
    gc.collect()
    return session.current().objects.statistics()["owned"] == 0


# --- items ------------------------------------------------------------------------------------------------------------


@inside
def test_items_come_in_their_order() -> None:
    player = Player.spawn(1)
    assert list(player.stream().rollout(50)) == list(range(50))
    assert list(player.stream(window=0).rollout(5)) == list(range(5))
    assert list(player.stream(window=20).rollout(5)) == list(range(5))
    assert list(player.stream().rollout_async(20)) == list(range(20))
    assert list(player.stream()(4)) == [0, 1, 2, 3]
    stream = player.stream().rollout(1)
    assert [next(stream), next(stream, "end"), next(stream, "end")] == [0, "end", "end"]


@inside
def test_items_keep_their_order_in_an_actor_that_serves_several_at_once() -> None:
    player = WidePlayer.spawn(1)
    assert list(player.stream(window=16).rollout_async(300)) == list(range(300))
    assert list(player.stream(window=16)(300)) == list(range(300))


@inside
def test_items_can_be_awaited() -> None:
    player = Player.spawn(1)

    async def body() -> None:
        assert [item async for item in player.stream().rollout(30)] == list(range(30))
        assert [item async for item in player.stream().rollout_async(30)] == list(range(30))
        streams = [player.stream().rollout(10) for _ in range(5)]

        async def all_of(stream: rpc.Stream[int]) -> list[int]:
            return [item async for item in stream]

        assert await asyncio.gather(*map(all_of, streams)) == [list(range(10))] * 5
        with pytest.raises(rpc.RPCTimeoutError):
            await late.__anext__()

    late = Player.spawn(1).stream(timeout=0.1).one_and_no_more()
    assert next(late) == 1
    run(body())
    late.close()
    assert Player.spawn(0).rpc_async().consume_async(player, 12).wait() == list(range(12))


@inside
def test_functions_stream_as_well() -> None:
    assert list(rpc.stream(1, numbers, args=(5,))) == [0, 1, 2, 3, 4]
    assert list(rpc.stream(OTHER, numbers_async, args=(5,), window=0)) == [0, 1, 2, 3, 4]
    assert list(rpc.stream(1, range, args=(3,))) == [0, 1, 2]
    assert list(rpc.stream(1, dict, kwargs={"a": 1})) == ["a"]
    assert list(rpc.stream(0, numbers, args=(5,))) == [0, 1, 2, 3, 4]
    assert list(rpc.remote(1, list, args=("abc",)).stream().__iter__()) == ["a", "b", "c"]


@inside
def test_what_has_no_items_is_an_error_at_the_first() -> None:
    player = Player.spawn(1)
    for stream in (
        player.stream().plain(),
        rpc.stream(1, abs, args=(-1,)),
        rpc.stream(1, no_generator),
        rpc.stream(1, str, args=("text",)),
    ):
        with pytest.raises(TypeError, match=r"no items to stream.*rpc_sync\(\)"):
            next(stream)
    with pytest.raises(AttributeError, match="no_such"):
        next(player.stream().no_such())
    with pytest.raises(TypeError, match="steps"):
        next(player.stream().rollout())
    with pytest.raises(TypeError, match="window must be"):
        player.stream(window=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0 .* or above"):
        rpc.stream(1, numbers, window=-1)
    with pytest.raises(rpc.SerializationError, match="lock"):
        rpc.stream(1, numbers, args=(threading.Lock(),))


@inside
def test_a_generator_that_is_called_plainly_is_an_error_that_names_stream() -> None:
    player = Player.spawn(1)
    for call in (player.rpc_sync().rollout, player.rpc_sync().rollout_async):
        with pytest.raises(rpc.SerializationError, match=r"for item in ref\.stream\(\)\.rollout"):
            call(3)


def until_made(player: rpc.RRef[Player], count: int) -> None:
    """Waits until a player has made as many items; it makes no more as long as it is left alone."""
    until(lambda: player.rpc_sync().counts()[0] >= count)
    for _ in range(3):
        assert player.rpc_sync().counts()[0] == count


def until_ended(player: rpc.RRef[Player], count: int) -> None:
    until(lambda: player.rpc_sync(timeout=10).counts()[1] == count)


# --- flow control -----------------------------------------------------------------------------------------------------


@inside
def test_no_more_items_are_made_ahead_than_the_window_says() -> None:
    for window in (0, 1, 5):
        for name in ("rollout", "rollout_async"):
            player = Player.spawn(1)
            stream = getattr(player.stream(window=window), name)(100)
            for taken in range(1, 10):
                next(stream)
                until_made(player, taken + window)
            stream.close()


@inside
def test_an_actor_serves_others_between_two_items() -> None:
    for name in ("rollout", "rollout_async"):
        player = Player.spawn(1)
        stream = getattr(player.stream(window=1), name)(10)
        for i, item in enumerate(stream):
            assert item == i
            player.rpc_sync(timeout=10).note(i)
        notes: Any = [note for note in cast("Any", player.rpc_sync().take()) if note[0] != "ended"]
        assert [what for what, _ in notes] == list(range(10))
        assert [min(made, 10) for _, made in notes] == sorted(made for _, made in notes)


@inside
def test_an_item_may_call_back_the_one_who_waits_for_it() -> None:
    here, there = Player.spawn(0), Player.spawn(1)
    assert here.rpc_sync(timeout=20).consume(there, 4) == [(0, 0)] * 4


# --- errors and limits ------------------------------------------------------------------------------------------------


@inside
def test_an_error_is_raised_in_its_place_with_the_remote_traceback() -> None:
    player = Player.spawn(1)
    for name in ("fails_after", "fails_after_async"):
        stream = getattr(player.stream(window=8), name)(3)
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="no more") as caught:
            next(stream)
        assert f"in {name}" in str(caught.value.__cause__)
        assert list(stream) == []


@inside
def test_an_item_that_cannot_be_written_is_an_error_in_its_place() -> None:
    stream = Player.spawn(1).stream().unwritable()
    assert next(stream) == 1
    with pytest.raises(rpc.SerializationError, match="lock"):
        next(stream)
    assert list(stream) == []


@inside
def test_a_wait_for_an_item_has_a_bound_and_the_item_is_not_lost() -> None:
    player = WidePlayer.spawn(1)
    stream = player.stream(timeout=0.1, window=0).slow()
    assert next(stream) == 0
    for _ in range(2):
        with pytest.raises(rpc.RPCTimeoutError, match="slow"):
            next(stream)
    player.rpc_sync().open_gate()
    until(lambda: stream._asked[0].done())
    assert next(stream) == 1
    assert list(stream) == []


@inside
def test_a_stream_stays_where_it_is() -> None:
    stream = Player.spawn(1).stream().rollout(3)
    with pytest.raises(rpc.SerializationError, match="stays where it is"):
        rpc.rpc_sync(1, repr, args=(stream,))
    with pytest.raises(rpc.SerializationError, match="stays where it is"):
        cloudpickle.dumps(stream)
    assert "Stream of rollout" in repr(stream)


# --- the end ----------------------------------------------------------------------------------------------------------


@inside
def test_leaving_a_loop_closes_the_generator() -> None:
    player = Player.spawn(1)
    for item in player.stream().rollout(1000):
        if item == 5:
            break
    until_ended(player, 1)
    assert player.rpc_sync().counts()[0] <= 9
    with player.stream().rollout(1000) as stream:
        next(stream)
    until_ended(player, 2)
    assert list(stream) == []
    stream.close()

    async def body() -> None:
        async for item in player.stream().rollout_async(1000):
            if item == 5:
                break

    run(body())
    until_ended(player, 3)
    assert player.rpc_sync().where() == {f"{OTHER}-loop"}


@inside
def test_the_collector_closes_the_generator() -> None:
    player = Player.spawn(1)
    stream: Any = player.stream().rollout(1000)
    assert next(stream) == 0
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    until_ended(player, 1)


@inside
def test_a_stream_that_is_closed_at_once_leaves_nothing() -> None:
    player = Player.spawn(1)
    for window in (0, 2):
        for _ in range(20):
            player.stream(window=window).rollout(10).close()
            player.stream(window=window).references(10).close()
            rpc.stream(1, numbers, args=(3,), window=window).close()
    del player
    until(quiet)


@inside
def test_an_async_generator_that_awaits_what_never_comes_is_closed_as_well() -> None:
    player = Player.spawn(1)
    stream = player.stream().one_and_no_more()
    assert next(stream) == 1
    assert player.rpc_async().counts() is not None
    stream.close()
    until_ended(player, 1)


@inside
def test_references_among_the_items_are_counted_taken_or_not() -> None:
    player = Player.spawn(1)
    assert [ref.to_here() for ref in player.stream().references(5)] == [[i] for i in range(5)]
    stream = player.stream(window=5).references(50)
    next(stream)
    stream.close()
    del player, stream
    until(quiet)


@inside
def test_a_finally_that_fails_goes_to_the_log_and_the_actor_goes_on() -> None:
    stream = rpc.stream(1, _fails_at_the_end)
    next(stream)
    stream.close()
    until(quiet)
    assert rpc.rpc_sync(1, abs, args=(-1,)) == 1


def _fails_at_the_end() -> Iterator[int]:
    import logging

    logging.disable(logging.CRITICAL)
    try:
        yield 1
        yield 2
    finally:
        threading.Timer(0.2, logging.disable, (logging.NOTSET,)).start()
        raise ValueError("at the end")


KEPT: list[Any] = []
ENDED: list[str] = []


def test_the_loss_of_the_callee_is_raised_after_the_items_that_came() -> None:
    with World(2) as world:
        world.on(0, begin_to_consume)
        world.kill(1)
        world.on(0, consume_the_rest)


def begin_to_consume() -> None:
    stream = rpc.stream(1, numbers, args=(100,), window=3)
    assert next(stream) == 0
    until(lambda: all(future.done() for future in stream._asked))
    KEPT.append(stream)


def consume_the_rest() -> None:
    (stream,) = KEPT
    until(lambda: session.current().worker.peers[1].standing.name != "MEMBER")
    assert [next(stream) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(rpc.WorkerLostError, match=OTHER):
        next(stream)
    assert list(stream) == []


def test_the_loss_of_the_caller_closes_the_generator() -> None:
    with World(2) as world:
        world.on(1, begin_to_stream)
        world.kill(1)
        world.on(0, see_that_all_has_ended)


def begin_to_stream() -> None:
    for function in (noted_numbers, noted_numbers_async):
        KEPT.append(rpc.stream(0, function))
        assert next(KEPT[-1]) == 0


def see_that_all_has_ended() -> None:
    until(lambda: sorted(ENDED) == ["async", "sync"])
    until(lambda: worlds.counts()["owned"] == 0)


def noted_numbers() -> Iterator[int]:
    try:
        yield from range(1000)
    finally:
        ENDED.append("sync")


async def noted_numbers_async() -> AsyncIterator[int]:
    try:
        for i in range(1000):
            yield i
    finally:
        ENDED.append("async")


def test_a_world_ends_while_streams_are_open() -> None:
    """The world looks for threads and processes that are left, and for a world that does not end."""
    with World(2) as world:
        world.on(0, leave_streams_open)


def leave_streams_open() -> None:
    player = Player.spawn(1)
    for stream in (player.stream().rollout(1000), player.stream().rollout_async(1000)):
        assert next(stream) == 0
        KEPT.append(stream)


# --- groups -----------------------------------------------------------------------------------------------------------


@inside
def test_a_group_streams_the_items_of_all_its_members_as_they_come() -> None:
    group = rpc.Group([Player.spawn(1), Player.spawn(0), WidePlayer.spawn(1)])
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for member, item in group.stream(window=1).rollout_async(20):
        seen[group.index(member)].append(item)
    assert seen == {0: list(range(20)), 1: list(range(20)), 2: list(range(20))}
    assert sorted(item for _, item in group.scatter([1, 2, 3]).stream().rollout_async()) == [0, 0, 0, 1, 1, 2]
    assert list(rpc.Group([]).stream().rollout(3)) == []

    async def body() -> list[int]:
        return [item async for _, item in group.stream().rollout_async(5)]

    assert sorted(run(body())) == sorted([*range(5)] * 3)


@inside
def test_a_slow_member_holds_up_no_other_and_the_window_is_each_members_own() -> None:
    slow, quick = WidePlayer.spawn(1), Player.spawn(1)
    stream = rpc.GroupStream([slow, quick], [slow.stream(window=1).slow(), quick.stream(window=1).rollout(100)], 10.0)
    seen = [next(stream)[1] for _ in range(12)]
    assert seen.count(0) == 2
    until_made(quick, 13)
    slow.rpc_sync().open_gate()


@inside
def test_an_error_of_a_member_names_it_and_the_others_go_on() -> None:
    failing, good = Player.spawn(1), Player.spawn(0)
    stream = rpc.GroupStream(
        [failing, good], [failing.stream().fails_after(2), good.stream().rollout(4)], 10.0
    )  # fmt: skip
    seen, failed = [], []
    while True:
        try:
            seen.append(next(stream)[1])
        except StopIteration:
            break
        except rpc.GroupError as e:
            failed.append((e.names, type(e.exceptions[0])))
    assert sorted(seen) == [0, 0, 1, 1, 2, 3]
    assert failed == [((OTHER,), KeyError)]


@inside
def test_a_groups_stream_has_a_bound_and_is_closed_with_all_that_it_has() -> None:
    players = [Player.spawn(1), Player.spawn(0)]
    stream = rpc.Group(players).stream(timeout=0.1).one_and_no_more()
    assert [next(stream)[1] for _ in range(2)] == [1, 1]
    with pytest.raises(rpc.RPCTimeoutError, match="worker0, worker1"):
        next(stream)
    del stream
    gc.collect()
    for player in players:
        until_ended(player, 1)
    with rpc.Group(players).stream().rollout(100) as stream:
        next(stream)
    for player in players:
        until_ended(player, 2)
    assert list(stream) == []


# --- what follows the generator ---------------------------------------------------------------------------------------


@inside
def test_items_are_recorded_in_the_context_of_the_one_who_asks() -> None:
    scale = rpc.remote(1, Scale)
    with context() as number:
        x = torch.full((2,), 2.0, requires_grad=True)
        total = torch.stack(list(scale.stream().times(x, 3))).sum()
        backward(number, [total])
        assert get_gradients(number)[x].tolist() == [18.0, 18.0]
        assert scale.rpc_sync().gradient_of(number).tolist() == [12.0, 12.0]


@inside
def test_grad_mode_stays_the_generators_own() -> None:
    player = Player.spawn(1)
    stream = player.stream().without_grad()
    for expected in (False, False, False, True):
        assert next(stream) is expected
        assert rpc.rpc_sync(1, torch.is_grad_enabled)


# --- many at once -----------------------------------------------------------------------------------------------------


@inside
def test_many_streams_at_once_that_are_closed_at_random_leave_nothing() -> None:
    chance = random.Random(7)
    players: list[rpc.RRef[Any]] = [Player.spawn(1), WidePlayer.spawn(1), Player.spawn(0)]
    faults: list[BaseException] = []

    def consume(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                player = rng.choice(players)
                steps, stop = rng.randrange(1, 30), rng.randrange(40)
                name = rng.choice(["rollout", "rollout_async", "fails_after", "fails_after_async"])
                if player is players[1] and name == "rollout":
                    name = "fails_after"  # which does not mind that others run beside it
                stream = getattr(player.stream(window=rng.randrange(6), timeout=20), name)(steps)
                seen = []
                try:
                    for item in stream:
                        seen.append(item)
                        if len(seen) == stop:
                            break
                        if rng.random() < 0.1:
                            player.rpc_sync(timeout=20).counts()
                except KeyError:
                    assert "fails" in name
                    assert len(seen) == steps
                assert seen == list(range(min(steps, stop) if stop else steps))
                if rng.random() < 0.5:
                    stream.close()
        except BaseException as e:
            faults.append(e)

    async def consume_async(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            stop = rng.randrange(1, 20)
            seen = []
            with contextlib.closing(players[0].stream(window=rng.randrange(4), timeout=20).rollout(15)) as stream:
                async for item in stream:
                    seen.append(item)
                    if len(seen) == stop:
                        break
            assert seen == list(range(min(15, stop)))

    async def all_async() -> None:
        await asyncio.gather(*(consume_async(chance.randrange(1000)) for _ in range(4)))

    threads = [threading.Thread(target=consume, args=(chance.randrange(1000),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    asyncio.run(asyncio.wait_for(all_async(), 60))
    for thread in threads:
        thread.join(60)
    assert not faults, faults
    players.clear()
    until(quiet)
    no_references()
