"""Groups as users see them, in one launched world."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.checks import Checks, options, until
from tests.worlds import World

check = Checks()


class Member(rpc.Actor):
    def __init__(self) -> None:
        self.notes: list[object] = []

    def number(self) -> int:
        return self.index

    def note(self, *what: object, **named: object) -> int:
        self.notes.append((what, named))
        return self.index

    def take(self) -> list[object]:
        notes, self.notes = self.notes, []
        return notes

    def answer_after(self, seconds: list[float]) -> int:
        time.sleep(seconds[self.index])
        return self.index

    def fail_if(self, who: list[int]) -> int:
        if self.index in who:
            raise ValueError(f"{self.index} was told to fail")
        return self.index

    def fail_with_the_others(self, who: list[int]) -> None:
        self.world.member.rpc_sync().fail_if(who)

    def role_here(self) -> list[str]:
        return [ref.owner_name() for ref in rpc.role("member")]

    def fail_late_if(self, who: list[int], seconds: list[float]) -> int:
        time.sleep(seconds[self.index])
        return self.fail_if(who)

    def state(self) -> list[object]:
        return self.notes


class Driver(rpc.Actor):
    def main(self) -> dict[str, str]:
        return check.run(self)

    def identity(self) -> str:
        return self.name

    @property
    def group(self) -> rpc.Group:
        group: rpc.Group = self.world.member
        return group


# --- the sequence -----------------------------------------------------------------------------------------------------


@check
def a_role_is_a_group_of_its_members_in_order(driver: Driver) -> None:
    group = driver.group
    assert len(group) == 4
    assert [ref.owner_name() for ref in group] == [f"member:{i}" for i in range(4)]
    assert group[2].owner_name() == group[-2].owner_name() == "member:2"
    assert isinstance(group[1:3], rpc.Group)
    assert [ref.owner_name() for ref in group[1:3]] == ["member:1", "member:2"]
    assert group[::2].rpc_sync().number() == [0, 2]
    assert [ref.owner_name() for ref in driver.world.role("member")] == [f"member:{i}" for i in range(4)]
    with pytest.raises(IndexError, match="no member 4 in a group of 4"):
        group[4]
    assert "Group" in repr(group)


@check
def a_method_called_on_the_group_itself_is_answered_with_how_it_is_called(driver: Driver) -> None:
    with pytest.raises(AttributeError, match=r"a group has no attribute 'number'; .*\.rpc_sync\(\)\.number\(\.\.\.\)"):
        driver.group.number()  # type: ignore[attr-defined]
    assert not hasattr(driver.group, "_ipython_display_")


@check
def the_world_names_its_roles_and_workers(driver: Driver) -> None:
    assert driver.world.roles == {"driver": 1, "member": 4}
    assert [w.name for w in driver.world.workers] == ["driver:0", *(f"member:{i}" for i in range(4))]
    assert driver.world.driver[0].is_owner()


@check
def an_unknown_role_is_an_error_that_names_the_known_ones(driver: Driver) -> None:
    with pytest.raises(AttributeError, match=r"no role 'members'.*driver, member"):
        _ = driver.world.members
    with pytest.raises(rpc.NotAMemberError, match=r"no role 'members'.*driver, member"):
        driver.world.role("members")
    assert not hasattr(driver.world, "_ipython_display_")


@check
def a_role_is_found_from_any_worker_without_an_actor(driver: Driver) -> None:
    assert [ref.owner_name() for ref in rpc.role("member")] == [f"member:{i}" for i in range(4)]
    assert rpc.role("member").rpc_sync().number() == [0, 1, 2, 3]
    assert rpc.rpc_sync("member:2", names_of_role, args=("member",)) == [f"member:{i}" for i in range(4)]
    assert driver.group[3].rpc_sync().role_here() == [f"member:{i}" for i in range(4)]
    with pytest.raises(rpc.NotAMemberError, match=r"no role 'members'.*driver, member"):
        rpc.role("members")


def names_of_role(name: str) -> list[str]:
    return [ref.owner_name() for ref in rpc.role(name)]


# --- calls ------------------------------------------------------------------------------------------------------------


@check
def results_come_in_the_order_of_the_members(driver: Driver) -> None:
    assert driver.group.rpc_sync().answer_after([0.06, 0.04, 0.02, 0.0]) == [0, 1, 2, 3]
    assert driver.group.rpc_async().answer_after([0.0, 0.02, 0.04, 0.06]).wait() == [0, 1, 2, 3]


@check
def members_are_called_at_once_and_not_one_after_the_other(driver: Driver) -> None:
    begun = time.monotonic()
    driver.group.rpc_sync().answer_after([0.8] * 4)
    assert time.monotonic() - begun < 3.0


@check
def all_members_get_the_same_arguments(driver: Driver) -> None:
    driver.group.rpc_sync().take()
    driver.group.rpc_sync().note(1, [2], key="word")
    assert driver.group.rpc_sync().take() == [[((1, [2]), {"key": "word"})]] * 4


@check
def a_reference_among_the_arguments_reaches_every_member(driver: Driver) -> None:
    driver.group.rpc_sync().take()
    driver.group.rpc_sync().note(driver.rref, driver.group[0], rpc.RRef([1]))
    for notes in driver.group.rpc_sync().take():
        ((back, first, value), _) = notes[0]
        assert back.is_owner()
        assert first.rpc_sync().number() == 0
        assert value.local_value() == [1]


@check
def errors_name_the_members_and_hold_their_exceptions(driver: Driver) -> None:
    told = r"^2 of 4 members of the group failed \(member:1, member:3\): member:1: ValueError: 1 was told"
    with pytest.raises(rpc.GroupError, match=told) as e:
        driver.group.rpc_sync().fail_if([1, 3])
    assert [name for name, _ in e.value.errors] == ["member:1", "member:3"]
    assert all(isinstance(error, ValueError) for _, error in e.value.errors)
    assert e.value.size == 4
    assert isinstance(e.value.__cause__, ValueError)
    future = driver.group.rpc_async().fail_if([0])
    with pytest.raises(rpc.GroupError, match="1 of 4"):
        future.wait()
    with pytest.raises(rpc.GroupError, match="no_such_method"):
        driver.group.rpc_sync().no_such_method()


@check
def errors_are_an_exception_group_that_can_be_split(driver: Driver) -> None:
    with pytest.raises(rpc.GroupError) as caught:
        driver.group.rpc_sync().fail_if([1, 3])
    error = caught.value
    assert isinstance(error, rpc.ActorRPCError)
    if sys.version_info >= (3, 11):
        assert isinstance(error, ExceptionGroup)  # noqa: F821
    assert [type(e) for e in error.exceptions] == [ValueError, ValueError]
    first, rest = error.split(lambda e: isinstance(e, ValueError) and "1 was told" in str(e))
    assert isinstance(first, rpc.GroupError)
    assert isinstance(rest, rpc.GroupError)
    assert (first.names, rest.names) == (("member:1",), ("member:3",))
    assert error.split(KeyError)[0] is None
    assert rest.size == 4
    assert isinstance(first.exceptions[0].__cause__, BaseException)


@check
def a_groups_error_travels_with_its_members(driver: Driver) -> None:
    with pytest.raises(rpc.GroupError, match="2 of 4") as caught:
        driver.group[0].rpc_sync().fail_with_the_others([1, 3])
    assert caught.value.names == ("member:1", "member:3")
    assert caught.value.size == 4
    assert [str(e) for _, e in caught.value.errors] == ["1 was told to fail", "3 was told to fail"]
    assert "fail_with_the_others" in str(caught.value.__cause__)


@check
def a_groups_error_does_not_lose_its_members_in_a_callback(driver: Driver) -> None:
    future = driver.group.rpc_async().fail_if([2])
    with pytest.raises(rpc.GroupError, match="1 of 4") as caught:
        torch.futures.wait_all([future])
    assert caught.value.names == ("member:2",)
    assert [str(e) for e in caught.value.exceptions] == ["2 was told to fail"]


@check
def a_member_out_of_time_is_named(driver: Driver) -> None:
    with pytest.raises(rpc.GroupError, match=r"1 of 4.*member:2: RPCTimeoutError") as e:
        driver.group.rpc_sync(timeout=0.3).answer_after([0.0, 0.0, 1.0, 0.0])
    assert isinstance(e.value.errors[0][1], rpc.RPCTimeoutError)
    with pytest.raises(rpc.GroupError, match="member:2"):
        driver.group.rpc_async(timeout=0.1).number().wait()
    driver.group[2].rpc_sync().number()


@check
def what_cannot_be_sent_is_refused_at_once(driver: Driver) -> None:
    with pytest.raises((rpc.SerializationError, rpc.GroupError), match="generator"):
        driver.group.rpc_sync().note(i for i in range(3))
    assert driver.group.rpc_sync().number() == [0, 1, 2, 3]


@check
def callbacks_hang_on_a_groups_future(driver: Driver) -> None:
    future = driver.group.rpc_async().number()
    assert future.then(lambda done: sum(done.wait())).wait() == 6
    assert future.done()
    assert future.value() == [0, 1, 2, 3]


@check
def a_groups_future_can_be_waited_for_with_a_bound(driver: Driver) -> None:
    future = driver.group.rpc_async().answer_after([0.0, 0.0, 0.4, 0.0])
    with pytest.raises(rpc.RPCTimeoutError):
        future.wait(timeout=0.1)
    assert future.wait() == [0, 1, 2, 3]


# --- tell and remote --------------------------------------------------------------------------------------------------


@check
def tell_waits_for_nothing_and_reaches_all_in_order(driver: Driver) -> None:
    driver.group.rpc_sync().take()
    begun = time.monotonic()
    assert driver.group.tell().answer_after([1.0] * 4) is None
    for i in range(20):
        assert driver.group.tell().note(i) is None
    assert time.monotonic() - begun < 1.0
    assert driver.group.rpc_sync().take() == [[((i,), {}) for i in range(20)]] * 4


@check
def remote_returns_a_group_of_references_to_the_results(driver: Driver) -> None:
    results = driver.group.remote().number()
    assert isinstance(results, rpc.Group)
    assert [ref.to_here() for ref in results] == [0, 1, 2, 3]
    assert [ref.owner_name() for ref in results] == [f"member:{i}" for i in range(4)]
    assert results.rpc_sync().__add__(10) == [10, 11, 12, 13]


# --- any --------------------------------------------------------------------------------------------------------------


@check
def any_returns_the_first_answer(driver: Driver) -> None:
    assert driver.group.any().rpc_sync().answer_after([0.5, 0.5, 0.0, 0.5]) == 2
    # Those that lost are busy for half a second yet.
    assert driver.group.any().rpc_async().answer_after([0.0, 3.0, 3.0, 3.0]).wait() == 0


@check
def any_goes_by_the_first_answer_and_not_by_errors(driver: Driver) -> None:
    driver.group.rpc_sync().number()
    assert driver.group.any().rpc_sync().fail_late_if([0, 1, 2], [0.0, 0.0, 0.0, 0.2]) == 3


@check
def any_fails_when_all_have_failed(driver: Driver) -> None:
    with pytest.raises(rpc.GroupError, match="4 of 4"):
        driver.group.any().rpc_sync().fail_if([0, 1, 2, 3])


# --- pick and scatter -------------------------------------------------------------------------------------------------


@check
def pick_takes_the_members_in_turn(driver: Driver) -> None:
    group = driver.group
    assert [group.pick().rpc_sync().number() for _ in range(6)] == [[0], [1], [2], [3], [0], [1]]
    assert group.pick().any().rpc_sync().number() in (2, [2])


@check
def picks_of_a_role_go_round_though_each_look_makes_a_new_group(driver: Driver) -> None:
    found = [driver.world.member.pick()[0].owner_name() for _ in range(8)]
    assert sorted(found[:4]) == sorted(found[4:]) == [f"member:{i}" for i in range(4)]


@check
def the_least_loaded_member_can_be_picked(driver: Driver) -> None:
    group = driver.group[:]
    busy = [group[i].rpc_async().answer_after([0.4] * 4) for i in (0, 1, 3, 3)]
    assert [group.pick(least_loaded=True)[0].owner_name() for _ in range(3)] == ["member:2"] * 3
    more = [group[2].rpc_async().answer_after([0.4] * 4) for _ in range(2)]
    assert {group.pick(least_loaded=True)[0].owner_name() for _ in range(8)} == {"member:0", "member:1"}
    for future in busy + more:
        future.wait()
    assert len({group.pick(least_loaded=True)[0].owner_name() for _ in range(4)}) == 4
    with pytest.raises(IndexError, match="empty group"):
        driver.group[4:].pick(least_loaded=True)


@check
def scatter_gives_each_member_its_own_first_argument(driver: Driver) -> None:
    driver.group.rpc_sync().take()
    assert driver.group.scatter("abcd").rpc_sync().note("same", key=1) == [0, 1, 2, 3]
    assert driver.group.rpc_sync().take() == [[((letter, "same"), {"key": 1})] for letter in "abcd"]
    driver.group.scatter(range(4)).tell().note()
    assert driver.group.rpc_sync().take() == [[((i,), {})] for i in range(4)]
    assert [r.to_here() for r in driver.group.scatter(range(4)).remote().note()] == [0, 1, 2, 3]
    assert driver.group.scatter(range(4)).any().rpc_sync().note() in range(4)
    assert driver.group.any().scatter(range(4)).rpc_sync().note() in range(4)


@check
def scatter_wants_as_many_shares_as_members(driver: Driver) -> None:
    for shares in ("abc", "abcde", ""):
        with pytest.raises(ValueError, match=f"{len(shares)} shares for a group of 4 members"):
            driver.group.scatter(shares)


@check
def modifiers_leave_the_group_as_it_is(driver: Driver) -> None:
    group = driver.group
    group.any()
    group.scatter(range(4))
    group.pick()
    assert group.rpc_sync().number() == [0, 1, 2, 3]


# --- as_completed -----------------------------------------------------------------------------------------------------


@check
def as_completed_yields_in_the_order_of_the_answers(driver: Driver) -> None:
    future = driver.group.rpc_async().answer_after([0.45, 0.0, 0.3, 0.15])
    order = [(ref.owner_name(), one.wait()) for ref, one in future.as_completed()]
    assert order == [(f"member:{i}", i) for i in (1, 3, 2, 0)]
    assert future.wait() == [0, 1, 2, 3]
    assert sorted(one.wait() for _, one in future.as_completed()) == [0, 1, 2, 3]


@check
def as_completed_can_be_awaited(driver: Driver) -> None:
    async def body() -> list[object]:
        future = driver.group.rpc_async().answer_after([0.3, 0.0, 0.15, 0.6])
        following = future.as_completed(timeout=0.1)
        found: list[object] = [(await following.__anext__())[1].value()]
        while len(found) < 4:
            try:
                async for _, one in following:
                    found.append(one.value())
            except rpc.RPCTimeoutError:
                continue
        assert await future == [0, 1, 2, 3]
        return found

    assert asyncio.run(body()) == [1, 2, 0, 3]


@check
def as_completed_yields_failed_calls_too(driver: Driver) -> None:
    future = driver.group.rpc_async().fail_if([2])
    outcomes: dict[str, Any] = {}
    for ref, one in future.as_completed():
        try:
            outcomes[ref.owner_name()] = one.wait()
        except ValueError as e:
            outcomes[ref.owner_name()] = str(e)
    assert outcomes == {"member:0": 0, "member:1": 1, "member:2": "2 was told to fail", "member:3": 3}


@check
def as_completed_has_a_bound_for_each_next_one(driver: Driver) -> None:
    future = driver.group.rpc_async().answer_after([0.0, 0.0, 0.0, 0.5])
    following = future.as_completed(timeout=0.2)
    taken = [next(following)[0].owner_name() for _ in range(3)]
    with pytest.raises(rpc.RPCTimeoutError):
        next(following)
    assert sorted(taken) == ["member:0", "member:1", "member:2"]
    assert future.wait() == [0, 1, 2, 3]


# --- settled ----------------------------------------------------------------------------------------------------------


@check
def settled_has_results_and_errors_in_the_order_of_the_members(driver: Driver) -> None:
    future = driver.group.rpc_async().fail_late_if([1, 2], [0.1, 0.0, 0.05, 0.0])
    outcomes = future.settled().wait()
    assert (outcomes[0], outcomes[3]) == (0, 3)
    assert [(type(e), str(e)) for e in outcomes[1:3]] == [(ValueError, f"{i} was told to fail") for i in (1, 2)]
    assert isinstance(outcomes[1].__cause__, BaseException)
    with pytest.raises(rpc.GroupError, match="2 of 4"):
        future.wait()
    assert future.settled().wait()[3] == 3  # afterwards as well
    assert driver.group[4:].rpc_async().number().settled().wait() == []


@check
def settled_can_be_awaited_and_tells_who_was_late_or_cancelled(driver: Driver) -> None:
    async def body() -> list[object]:
        found: list[object] = await driver.group.rpc_async(timeout=0.3).answer_after([0.0, 1.0, 0.0, 0.0]).settled()
        return found

    outcomes = asyncio.run(body())
    assert [type(one) for one in outcomes] == [int, rpc.RPCTimeoutError, int, int]
    driver.group[1].rpc_sync().number()
    first = driver.group.any().rpc_async().answer_after([0.0, 0.5, 0.5, 0.5])
    assert first.wait() == 0
    assert [type(one) for one in first.settled().wait()] == [int, *[rpc.CancelledError] * 3]


# --- odd groups -------------------------------------------------------------------------------------------------------


@check
def an_empty_group_has_empty_results(driver: Driver) -> None:
    empty = driver.group[4:]
    assert len(empty) == 0
    assert empty.rpc_sync().number() == []
    assert empty.rpc_async().number().wait() == []
    assert list(empty.rpc_async().number().as_completed()) == []
    assert list(empty.remote().number()) == []
    assert empty.tell().number() is None
    assert empty.scatter([]).rpc_sync().number() == []


@check
def an_empty_group_has_nobody_to_pick_and_no_first_answer(driver: Driver) -> None:
    empty = driver.group[4:]
    with pytest.raises(IndexError, match="empty group"):
        empty.pick()
    with pytest.raises(rpc.GroupError, match="no members"):
        empty.any().rpc_sync().number()


@check
def any_references_make_a_group(driver: Driver) -> None:
    """Also those to plain objects, and to the driver itself."""
    group = rpc.Group([driver.group[0], rpc.remote("member:1", list, args=([1, 2],)), driver.rref])
    assert [ref.owner_name() for ref in group] == ["member:0", "member:1", "driver:0"]
    with pytest.raises(rpc.GroupError, match=r"2 of 3.*member:1.*driver:0"):
        group.rpc_sync().number()
    assert rpc.Group([driver.rref]).rpc_sync().identity() == ["driver:0"]


# --- pytest's side ----------------------------------------------------------------------------------------------------


def outcomes_of_a_world() -> dict[str, str]:
    outcomes: dict[str, str] = rpc.launch(options=options(), driver=Driver, member=rpc.Role(Member, 4))
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of_a_world()


@check.parameters()
def test_in_one_world(outcomes: dict[str, str], check: str) -> None:
    outcome = outcomes[check]
    assert outcome == "", outcome


# --- a member that is dead --------------------------------------------------------------------------------------------


class Held(rpc.Actor):
    def where(self) -> str:
        return self.worker.name


GROUP: list[rpc.Group] = []


def make_a_group() -> None:
    GROUP.append(rpc.Group([Held.spawn(1), Held.spawn(2)]))
    assert GROUP[0].rpc_sync().where() == ["worker1", "worker2"]


def call_it_after_a_death() -> None:
    group = GROUP.pop()
    until(lambda: session.current().worker.peers[2].standing.name != "MEMBER")
    assert [group.pick().rpc_sync().where() for _ in range(4)] == [["worker1"]] * 4
    assert [group.pick(least_loaded=True).rpc_sync().where() for _ in range(4)] == [["worker1"]] * 4
    with pytest.raises(rpc.GroupError, match=r"1 of 2 members.*worker2.*was not sent") as caught:
        group.rpc_sync().where()
    assert caught.value.exceptions[0].__traceback__ is None, "which would be all of the library's inside"
    with pytest.raises(rpc.GroupError, match="worker2"):
        group[1:].pick().rpc_sync().where()


def test_a_member_that_is_dead_is_not_picked_while_others_are_there() -> None:
    """It has no calls under way, and so would seem to be the one with the least load."""
    with World(3) as world:
        world.on(0, make_a_group)
        world.kill(2)
        world.on(0, call_it_after_a_death)
