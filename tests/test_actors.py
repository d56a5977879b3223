"""Actors as users see them, in one launched world of several roles."""

from __future__ import annotations

import logging
import threading
import time
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import actorrpc as rpc
from tests.checks import Checks, options, until
from tests.forking import in_child

check = Checks()


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)
        self.one, self.two = one, two


# --- the roles --------------------------------------------------------------------------------------------------------


class Plain(rpc.Actor):
    """Serves; keeps notes."""

    def __init__(self, folder: Path | None = None) -> None:
        self.born_as = (self.name, self.role, self.index, self.worker, self.world.roles)
        self.born_ref = self.rref
        self.notes: list[object] = ["init"]
        self.inside = 0
        self.folder = folder
        self.caught: list[logging.LogRecord] = []

    def on_start(self) -> None:
        self.notes.append("on_start")

    def on_stop(self) -> None:
        if self.folder is not None:
            with (self.folder / "stopped").open("a") as file:
                file.write(f"{self.name}\n")

    def identity(self) -> Any:
        return self.name, self.role, self.index, self.worker, self.world.roles

    def birth(self) -> Any:
        return self.born_as

    def reference(self) -> rpc.RRef[Plain]:
        return self.rref

    def reference_of_birth(self) -> rpc.RRef[Plain]:
        return self.born_ref

    def another_reference(self) -> rpc.RRef[Plain]:
        """What somebody used to torch would write."""
        return rpc.RRef(self)

    def myself(self) -> Plain:
        return self

    def note(self, what: object) -> object:
        self.notes.append(what)
        return what

    def take(self) -> list[object]:
        notes, self.notes = self.notes, []
        return notes

    def alone(self, seconds: float = 0.0005) -> None:
        self.inside += 1
        assert self.inside == 1, "another message is in progress"
        time.sleep(seconds)
        assert self.inside == 1, "another message began"
        self.inside -= 1

    def bombard(self, target: rpc.RRef[Plain], times: int) -> None:
        futures = [target.rpc_async().alone(0.0) for _ in range(times)]
        for future in futures:
            future.wait()

    def tell_many(self, target: rpc.RRef[Any], who: str, times: int) -> None:
        for i in range(times):
            target.tell().note((who, i))

    def bounce(self, me: rpc.RRef[Plain], other: rpc.RRef[Plain], depth: int) -> list[str]:
        if depth == 0:
            return [self.name]
        found: list[str] = other.rpc_sync().bounce(other, me, depth - 1)
        return [self.name, *found]

    def call_myself(self, depth: int) -> int:
        return 0 if depth == 0 else 1 + int(self.rref.rpc_sync().call_myself(depth - 1))

    def hold(self, other: rpc.RRef[Plain], seconds: float) -> None:
        self.notes.append("hold begins")
        other.rpc_sync().sleep(seconds)
        self.notes.append("hold ends")

    def cross(self, other: rpc.RRef[Plain]) -> None:
        time.sleep(0.1)
        other.rpc_sync(timeout=0.5).note("crossing")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def call_and_look(self, other: rpc.RRef[Plain], count: int) -> list[object]:
        """Has the other one tell it things, and looks for them as soon as the call has returned."""
        self.take()
        other.rpc_sync().tell_many(self.rref, "told", count)
        return list(self.notes)

    def touch(self, driver: rpc.RRef[Driver], what: object) -> object:
        return driver.rpc_sync().touched(what)

    def touch_later(self, driver: rpc.RRef[Driver], what: object) -> None:
        driver.tell().touched(what)

    def fork_and_call(self, other: rpc.RRef[Plain]) -> dict[str, str]:
        wrong = refusals({"call": lambda: other.rpc_sync(timeout=4).identity(), "spawn": lambda: Plain.spawn(0)})
        assert other.rpc_sync(timeout=10).note("parent") == "parent"
        return wrong

    def fail(self, error: BaseException) -> None:
        raise error

    def catch_log(self) -> None:
        plain = self

        class Catch(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                plain.caught.append(record)

        self.handler = Catch()
        logging.getLogger("actorrpc").addHandler(self.handler)

    def log_texts(self) -> list[str]:
        logging.getLogger("actorrpc").removeHandler(self.handler)
        return [f"{record.levelname} {record.getMessage()} {record.exc_info}" for record in self.caught]

    @rpc.functions.async_execution
    def later(self, other: rpc.RRef[Plain], what: object) -> rpc.Future[object]:
        future: rpc.Future[object] = other.rpc_async().slow_echo(what)
        return future.then(lambda done: (self.name, done.wait()))

    def slow_echo(self, what: object) -> object:
        time.sleep(0.05)
        return what

    @staticmethod
    def number_of_threads() -> int:
        return threading.active_count()

    def run_episode(self, agent: rpc.RRef[Driver], number: int, steps: int) -> int:
        for step in range(steps):
            action = agent.rpc_sync().select_action(self.name, (number, step))
            assert action == (number, step)
            agent.tell().report_reward(self.name, (number, step))
        return steps


class Wide(rpc.Actor, concurrency=4):
    def __init__(self) -> None:
        self.inside = self.most = 0
        self.door = threading.Lock()
        self.barrier = threading.Barrier(4)

    def meet(self) -> int:
        return self.barrier.wait(10)

    def crowd(self) -> None:
        with self.door:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.01)
        with self.door:
            self.inside -= 1

    def greatest(self) -> int:
        return self.most


class SlowStart(Plain):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(1)


class Fragile(rpc.Actor):
    def __init__(self, error: BaseException) -> None:
        raise error

    def anything(self) -> None:
        """Is never reached."""


class NeverServed(rpc.Actor):
    """Its turn of start calls out, so that it is not left alone meanwhile."""

    def __init__(self, other: rpc.RRef[Plain]) -> None:
        self.echo = other.rpc_sync().note("from a constructor")

    def what(self) -> object:
        return self.echo


def only_runs(path: Path) -> None:
    path.write_text("ran")


class Driver(rpc.Actor):
    def __init__(self, episodes: int, folder: Path) -> None:
        self.episodes, self.folder = episodes, folder
        self.seen: list[object] = []
        self.actions: Counter[str] = Counter()
        self.rewards: dict[str, list[object]] = {}
        self.inside = False

    def touched(self, what: object) -> object:
        self.seen.append(what)
        return what

    def select_action(self, observer: str, state: object) -> object:
        assert not self.inside
        self.inside = True
        self.actions[observer] += 1
        self.inside = False
        return state

    def report_reward(self, observer: str, reward: object) -> None:
        assert not self.inside
        self.rewards.setdefault(observer, []).append(reward)

    def main(self) -> dict[str, str]:
        return check.run(self)


# --- order, one at a time ---------------------------------------------------------------------------------------------


@check
def messages_of_one_sender_are_served_in_the_order_of_sending(driver: Driver) -> None:
    a = driver.world.plain[0]
    a.rpc_sync().take()
    kept = []
    for i in range(0, 300, 3):
        a.tell().note(i)
        kept.append(a.rpc_async().note(i + 1))
        kept.append(a.remote().note(i + 2))
    assert a.rpc_sync().take() == list(range(300))
    assert [f.wait() for f in kept[::2]] == list(range(1, 300, 3))
    assert kept[-1].to_here() == 299


@check
def two_senders_are_each_served_in_their_own_order(driver: Driver) -> None:
    a, b = driver.world.plain
    target = Plain.spawn("bare:0")
    target.rpc_sync().take()
    futures = [sender.rpc_async().tell_many(target, who, 200) for sender, who in ((a, "a"), (b, "b"))]
    for i in range(200):
        target.tell().note(("driver", i))
    for future in futures:
        future.wait()
    notes: list[Any] = []

    def all_came() -> bool:
        notes.extend(target.rpc_sync().take())
        return len(notes) == 600

    until(all_came)
    for who in ("a", "b", "driver"):
        assert [i for name, i in notes if name == who] == list(range(200))


@check
def an_actor_serves_one_message_at_a_time_whoever_sends(driver: Driver) -> None:
    a, b = driver.world.plain
    target = Plain.spawn("plain:0")
    futures = [a.rpc_async().bombard(target, 60), b.rpc_async().bombard(target, 60)]
    errors: list[BaseException] = []

    def send() -> None:
        try:
            for _ in range(20):
                target.rpc_sync().alone()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for future in futures:
        future.wait()
    for thread in threads:
        thread.join(20)
    assert errors == []


@check
def a_concurrent_actor_serves_as_many_as_it_says_and_no_more(driver: Driver) -> None:
    wide = driver.world.wide[0]
    futures = [wide.rpc_async().meet() for _ in range(4)]
    assert sorted(f.wait() for f in futures) == [0, 1, 2, 3]
    futures = [wide.rpc_async().crowd() for _ in range(20)]
    for future in futures:
        future.wait()
    assert 1 < wide.rpc_sync().greatest() <= 4


@check
def all_references_to_an_actor_lead_to_the_same_mailbox(driver: Driver) -> None:
    """Also one that it made by `RRef(self)`, and one to what a method that returns `self` has returned."""
    a = driver.world.plain[0]
    references = [a, a.rpc_sync().reference(), a.rpc_sync().another_reference(), a.remote().myself()]
    futures = [ref.rpc_async().alone(0.01) for _ in range(5) for ref in references]
    for future in futures:
        future.wait()
    assert a.rpc_sync().take().count("on_start") <= 1


# --- main and serve ---------------------------------------------------------------------------------------------------


@check
def main_is_served_while_it_waits_for_a_call(driver: Driver) -> None:
    driver.seen.clear()
    assert driver.world.plain[0].rpc_sync().touch(driver.rref, 1) == 1
    assert driver.seen == [1]


@check
def main_is_not_served_while_it_computes_and_is_in_serve(driver: Driver) -> None:
    driver.seen.clear()
    a = driver.world.plain[0]
    future = a.rpc_async().touch(driver.rref, 2)
    begun = time.monotonic()
    while time.monotonic() - begun < 0.15:
        assert driver.seen == []
    for _ in range(100):
        driver.serve(0.15)
        if driver.seen:
            break
    assert driver.seen == [2]
    assert future.wait() == 2


@check
def serve_lasts_as_long_as_it_says(driver: Driver) -> None:
    for seconds in (0.0, 0.05, 0.2):
        begun = time.monotonic()
        driver.serve(seconds)
        assert seconds <= time.monotonic() - begun < seconds + 5


@check
def main_may_call_its_own_actor(driver: Driver) -> None:
    driver.seen.clear()
    assert driver.rref.rpc_sync().touched("self") == "self"
    driver.rref.tell().touched("told")
    assert driver.rref.rpc_async().touched("after").wait() == "after"
    assert driver.seen == ["self", "told", "after"]


@check
def main_is_served_by_one_handler_at_a_time(driver: Driver) -> None:
    a, b = driver.world.plain
    driver.seen.clear()
    futures = [sender.rpc_async().touch(driver.rref, i) for i in range(30) for sender in (a, b)]
    for future in futures:
        future.wait()
    assert len(driver.seen) == 60


def refusals(actions: dict[str, Any]) -> dict[str, str]:
    """Tries each in a forked child; returns what was not refused as it should be."""
    got = {name: in_child(action) for name, action in actions.items()}
    return {name: text for name, text in got.items() if "NotAMemberError" not in text or "forked" not in text}


@check
def children_forked_in_main_are_refused_and_main_goes_on(driver: Driver) -> None:
    plain = driver.world.plain[0]
    plain.rpc_sync().take()
    for number in range(2):
        actions = {
            "call": lambda: plain.rpc_sync(timeout=4).note("child"),
            "tell": lambda: plain.tell().note("child"),
            "group": lambda: driver.world.plain.rpc_sync(timeout=4).note("child"),
            "rpc": lambda: rpc.rpc_sync("plain:0", abs, args=(-1,), timeout=4),
            "itself": lambda: driver.rref.rpc_sync(timeout=4).touched("child"),
            "spawn": lambda: Plain.spawn("plain:0"),
        }
        assert not (wrong := refusals(actions)), wrong
        assert plain.rpc_sync(timeout=10).note(number) == number
    assert plain.rpc_sync().take() == [0, 1]
    driver.seen.clear()
    assert plain.rpc_sync(timeout=10).touch(driver.rref, "here") == "here"


@check
def children_forked_in_an_actors_handler_are_refused_and_it_goes_on(driver: Driver) -> None:
    a, b = driver.world.plain
    assert not (wrong := a.rpc_sync().fork_and_call(b)), wrong
    assert a.rpc_sync().bounce(a, b, 3) == ["plain:0", "plain:1"] * 2


# --- chains -----------------------------------------------------------------------------------------------------------


@check
def actors_call_each_other_back_without_deadlock(driver: Driver) -> None:
    a, b = driver.world.plain
    assert a.rpc_sync().bounce(a, b, 7) == ["plain:0", "plain:1"] * 4


@check
def an_actor_may_call_itself(driver: Driver) -> None:
    assert driver.world.plain[0].rpc_sync().call_myself(6) == 6


@check
def a_chain_through_main_goes_on(driver: Driver) -> None:
    a, b = driver.world.plain
    driver.seen.clear()
    futures = [a.rpc_async().touch(driver.rref, "a"), b.rpc_async().touch(driver.rref, "b")]
    assert [f.wait() for f in futures] == ["a", "b"]


@check
def a_foreign_message_waits_until_a_waiting_handler_has_ended(driver: Driver) -> None:
    a, b = driver.world.plain
    a.rpc_sync().take()
    held = a.rpc_async().hold(b, 0.2)
    foreign = a.rpc_async().note("foreign")
    foreign.wait()
    held.wait()
    assert a.rpc_sync().take() == ["hold begins", "hold ends", "foreign"]


@check
def a_reply_does_not_overtake_the_earlier_tells_of_its_sender(driver: Driver) -> None:
    a, b = driver.world.plain
    for count in (1, 3, 50):
        assert a.rpc_sync().call_and_look(b, count) == [("told", i) for i in range(count)]


@check
def every_action_of_an_episode_has_its_reward(driver: Driver) -> None:
    driver.actions.clear()
    driver.rewards.clear()
    group = driver.world.plain
    for number in range(driver.episodes):
        steps = 1 + number % 5
        assert group.rpc_sync().run_episode(driver.rref, number, steps) == [steps] * 2
        for observer in ("plain:0", "plain:1"):
            assert driver.rewards[observer] == [(number, step) for step in range(steps)], f"episode {number}"
            assert driver.actions[observer] == steps
        driver.actions.clear()
        driver.rewards.clear()


@check
def chains_that_wait_for_each_others_actor_end_by_their_timeouts_and_all_goes_on(driver: Driver) -> None:
    """A deadlock of the program's own: both handlers wait, and neither admits the other's chain."""
    a, b = driver.world.plain
    futures = [a.rpc_async().cross(b), b.rpc_async().cross(a)]
    for future in futures:
        with pytest.raises(rpc.RPCTimeoutError, match="note"):
            future.wait()
    assert a.rpc_sync().note(1) == b.rpc_sync().note(1) == 1


# --- tell, errors -----------------------------------------------------------------------------------------------------


@check
def an_error_of_a_tell_goes_to_the_log_and_the_actor_goes_on(driver: Driver) -> None:
    a = driver.world.plain[0]
    a.rpc_sync().catch_log()
    a.tell().fail(ValueError("told to fail"))
    a.tell().no_such_method()
    assert a.rpc_sync().note("alive") == "alive"
    texts = a.rpc_sync().log_texts()
    assert len(texts) == 2, texts
    assert all(text.startswith("ERROR") for text in texts)
    assert "told to fail" in texts[0]
    assert "no_such_method" in texts[1]


@check
def an_error_of_a_call_comes_back_with_its_type_and_place(driver: Driver) -> None:
    a = driver.world.plain[0]
    with pytest.raises(ValueError, match="boom") as e:
        a.rpc_sync().fail(ValueError("boom"))
    assert "plain:0" in str(e.value.__cause__)
    assert "in fail" in str(e.value.__cause__)
    with pytest.raises(TwoArguments) as two:
        a.rpc_sync().fail(TwoArguments(1, 2))
    assert (two.value.one, two.value.two) == (1, 2)
    for stop in (SystemExit(3), KeyboardInterrupt("sent"), StopIteration(1)):
        with pytest.raises(BaseException) as other:  # noqa: PT011
            a.rpc_sync().fail(stop)
        assert type(stop).__name__ in repr(other.value) + str(other.value)
    assert a.rpc_sync().note("alive") == "alive"


@check
def a_missing_method_is_named_with_its_class(driver: Driver) -> None:
    a = driver.world.plain[0]
    with pytest.raises(AttributeError, match=r"'?Plain'? object has no attribute 'no_such'"):
        a.rpc_sync().no_such()
    with pytest.raises(AttributeError, match="no_such"):
        a.rpc_async().no_such(1).wait()


@check
def wrong_arguments_are_the_callees_type_error(driver: Driver) -> None:
    with pytest.raises(TypeError, match="note"):
        driver.world.plain[0].rpc_sync().note()


@check
def an_actor_itself_is_refused_with_advice_and_its_reference_is_not(driver: Driver) -> None:
    a = driver.world.plain[0]
    with pytest.raises(Exception, match="rref") as e:
        a.rpc_sync().note(driver)
    assert "an actor cannot be sent" in str(e.value)
    with pytest.raises(Exception, match="an actor cannot be sent"):
        a.rpc_sync().myself()
    with pytest.raises(Exception, match="an actor cannot be sent"):
        a.to_here()
    assert isinstance(a.rpc_sync().note(driver.rref), rpc.RRef)
    a.rpc_sync().take()


@check
def a_worker_of_no_actor_says_so(driver: Driver) -> None:
    with pytest.raises(rpc.ActorGoneError, match=r"bare:0.*only serves"):
        driver.world.bare[0].rpc_sync().anything()
    with pytest.raises(rpc.ActorGoneError, match=r"function:0.*only_runs"):
        driver.world.function[0].rpc_sync().anything()


@check
def a_call_that_expires_in_the_queue_is_never_run(driver: Driver) -> None:
    a = driver.world.plain[0]
    a.rpc_sync().take()
    busy = a.rpc_async().sleep(0.5)
    with pytest.raises(rpc.RPCTimeoutError, match="note"):
        a.rpc_sync(timeout=0.1).note("late")
    busy.wait()
    assert a.rpc_sync().take() == []


# --- who it is --------------------------------------------------------------------------------------------------------


@check
def an_actor_knows_who_it_is_in_its_constructor_and_later(driver: Driver) -> None:
    roles = {"driver": 1, "plain": 2, "wide": 1, "bare": 1, "function": 1}
    for i, ref in enumerate(driver.world.plain):
        expected = (f"plain:{i}", "plain", i, rpc.WorkerInfo(f"plain:{i}", 1 + i), roles)
        assert ref.rpc_sync().birth() == expected
        assert ref.rpc_sync().identity() == expected
        assert ref.rpc_sync().reference_of_birth().rpc_sync().identity() == expected
        assert ref.rpc_sync().reference().owner() == rpc.WorkerInfo(f"plain:{i}", 1 + i)
    assert (driver.name, driver.role, driver.index) == ("driver:0", "driver", 0)
    assert driver.rref.is_owner()
    assert driver.rref.local_value() is driver
    names = [w.name for w in driver.world.workers]
    assert names == ["driver:0", "plain:0", "plain:1", "wide:0", "bare:0", "function:0"]


@check
def an_actor_is_spawned_by_name_rank_and_worker_info_and_here(driver: Driver) -> None:
    names = set()
    targets: list[Any] = ["plain:1", 2, rpc.get_worker_info("plain:1"), "bare:0", "driver:0", 0]
    for to in targets:
        ref = Plain.spawn(to)
        name, role, index, worker, _ = ref.rpc_sync().identity()
        owner = "plain:1" if to not in ("bare:0", "driver:0", 0) else "bare:0" if to == "bare:0" else "driver:0"
        assert (worker.name, role, index) == (owner, owner[:-2], int(owner[-1]))
        assert ref.owner_name() == owner
        names.add(name)
        assert ref.rpc_sync().birth()[0] == name
        assert ref.rpc_sync().take() == ["init", "on_start"]
    assert len(names) == len(targets), "names are unique"
    with pytest.raises(rpc.NotAMemberError, match="nobody"):
        Plain.spawn("nobody")
    with pytest.raises(rpc.NotAMemberError, match="99"):
        Plain.spawn(99)


@check
def remote_of_an_actor_class_does_as_spawn(driver: Driver) -> None:
    ref = rpc.remote("plain:0", Plain)
    assert ref.rpc_sync().take() == ["init", "on_start"]
    a = driver.world.plain[0]
    futures = [ref.rpc_async().alone(0.005) for _ in range(5)]
    for future in futures:
        future.wait()
    assert ref.rpc_sync().identity()[0] != a.rpc_sync().identity()[0]


@check
def an_actor_that_lives_nowhere_says_so(driver: Driver) -> None:
    """Made by hand, also inside a handler or constructor of another actor, it has no place."""
    del driver
    stray = Wide()
    for attribute in ("name", "role", "index", "worker", "rref", "world"):
        with pytest.raises(rpc.NotAMemberError, match=r"lives on no worker.*Wide\.spawn"):
            getattr(stray, attribute)
    with pytest.raises(rpc.NotAMemberError, match="lives on no worker"):
        stray.serve(0)


@check
def an_actor_put_behind_a_reference_by_hand_gets_its_mailbox(driver: Driver) -> None:
    ref = rpc.RRef(Wide())
    assert driver.world.plain[0].rpc_sync().note(ref) is not None
    futures = [ref.rpc_async().crowd() for _ in range(20)]
    for future in futures:
        future.wait()
    assert 1 < ref.rpc_sync().greatest() <= 4
    assert ref.local_value().name.startswith("driver:0/")
    driver.world.plain[0].rpc_sync().take()


# --- constructors -----------------------------------------------------------------------------------------------------


@check
def messages_sent_before_the_constructor_has_ended_are_served_afterwards_in_order(driver: Driver) -> None:
    for to in ("plain:0", "driver:0"):
        begun = time.monotonic()
        ref = SlowStart.spawn(to)
        for i in range(20):
            ref.tell().note(i)
        futures = [ref.rpc_async().note(20 + i) for i in range(20)]
        assert time.monotonic() - begun < 1, "spawning does not wait"
        assert ref.rpc_sync().take() == ["init", "on_start", *range(40)]
        assert [f.wait() for f in futures] == list(range(20, 40))


@check
def an_error_of_the_constructor_comes_at_the_next_use(driver: Driver) -> None:
    for to in ("plain:0", "driver:0"):
        ref = Fragile.spawn(to, ValueError("no luck"))
        for _ in range(2):
            with pytest.raises(ValueError, match="no luck"):
                ref.rpc_sync().anything()
        with pytest.raises(ValueError, match="no luck"):
            ref.rpc_async().anything().wait()
    wrong = Plain.spawn("plain:0", "one", "argument", "too many")
    with pytest.raises(TypeError, match="__init__"):
        wrong.rpc_sync().identity()
    assert driver.world.plain[0].rpc_sync().note(1) == 1


@check
def a_constructor_may_call_out(driver: Driver) -> None:
    a = driver.world.plain[0]
    for to in ("plain:0", "plain:1", "bare:0"):
        assert NeverServed.spawn(to, a).rpc_sync().what() == "from a constructor"
    a.rpc_sync().take()


# --- the other verbs --------------------------------------------------------------------------------------------------


@check
def remote_on_a_method_keeps_the_result_there_and_goes_through_the_mailbox(driver: Driver) -> None:
    a = driver.world.plain[0]
    a.rpc_sync().take()
    held = a.rpc_async().sleep(0.1)
    ref = a.remote().note([1, 2])
    a.tell().note("after")
    assert ref.to_here() == [1, 2]
    assert ref.owner_name() == "plain:0"
    assert ref.rpc_sync().__len__() == 2
    held.wait()
    assert a.rpc_sync().take() == [[1, 2], "after"]


@check
def an_asynchronous_method_frees_the_actor_and_answers_later(driver: Driver) -> None:
    a, b = driver.world.plain
    future = a.rpc_async().later(b, "x")
    assert a.rpc_sync().note("meanwhile") == "meanwhile"
    assert future.wait() == ("plain:0", "x")
    assert a.rpc_sync().later(b, "y") == ("plain:0", "y")
    assert a.remote().later(b, "z").to_here() == ("plain:0", "z")


@check
def a_static_method_is_called_like_any_other(driver: Driver) -> None:
    assert driver.world.plain[0].rpc_sync().number_of_threads() > 0


@check
def typed_references_can_be_evaluated(driver: Driver) -> None:
    hints = typing.get_type_hints(Plain.touch)
    assert hints["driver"] == rpc.RRef[Driver]
    assert typing.get_origin(hints["driver"]) is rpc.RRef
    assert isinstance(driver.rref, typing.get_origin(hints["driver"]))


# --- on_stop ----------------------------------------------------------------------------------------------------------


def stops(folder: Path) -> list[str]:
    path = folder / "stopped"
    return path.read_text().split() if path.exists() else []


@check
def on_stop_is_called_once_when_the_last_reference_is_gone(driver: Driver) -> None:
    ref = Plain.spawn("plain:0", driver.folder)
    name = ref.rpc_sync().identity()[0]
    other = driver.world.plain[1]
    other.rpc_sync().note(ref)
    del ref
    time.sleep(0.2)
    assert name not in stops(driver.folder), "the other one still has a reference"
    other.rpc_sync().take()
    until(lambda: stops(driver.folder).count(name) == 1)
    time.sleep(0.1)
    assert stops(driver.folder).count(name) == 1


@check
def on_stop_comes_after_the_messages_that_were_sent_before_the_last_reference_was_dropped(driver: Driver) -> None:
    ref = LateStopper.spawn("plain:0", driver.folder)
    ref.rpc_sync().ready()
    ref.tell().work(0.3)
    del ref
    path = driver.folder / "late"
    until(path.exists)
    assert path.read_text() == "work done, then stopped"


class LateStopper(rpc.Actor):
    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, "work under way"

    def ready(self) -> None:
        """Says that the constructor has ended."""

    def work(self, seconds: float) -> None:
        time.sleep(seconds)
        self.done = "work done"

    def on_stop(self) -> None:
        (self.folder / "late").write_text(f"{self.done}, then stopped")


@check
def on_stop_of_an_actor_spawned_here_comes_when_it_is_dropped_and_not_before(driver: Driver) -> None:
    ref = Plain.spawn("driver:0", driver.folder)
    name = ref.rpc_sync().identity()[0]
    driver.world.plain[0].rpc_sync().note(ref)
    driver.world.plain[0].rpc_sync().take()
    time.sleep(0.2)
    assert stops(driver.folder).count(name) == 0
    assert ref.rpc_sync().note(1) == 1
    del ref
    until(lambda: stops(driver.folder).count(name) == 1, 3)


@check
def an_actor_still_referred_to_stops_when_the_world_ends(driver: Driver) -> None:
    """What is kept here is looked for after the end (see the test below)."""
    driver.kept = [Plain.spawn(to, driver.folder) for to in ("plain:1", "bare:0")]  # type: ignore[attr-defined]
    assert [ref.rpc_sync().note(1) for ref in driver.kept] == [1, 1]  # type: ignore[attr-defined]


# --- pytest's side ----------------------------------------------------------------------------------------------------


class World:
    """What the world has left."""

    def __init__(self, episodes: int, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, str] = rpc.launch(
            options=options(),
            driver=rpc.Role(Driver, 1, episodes, folder),
            plain=rpc.Role(Plain, 2, folder),
            wide=Wide,
            bare=None,
            function=rpc.Role(only_runs, 1, folder / "function"),
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(100, tmp_path_factory.mktemp("world"))


@check.parameters()
def test_in_one_world(world: World, check: str) -> None:
    outcome = world.outcomes[check]
    assert outcome == "", outcome


def test_actors_stop_once_at_the_end_of_the_world(world: World) -> None:
    names = Counter(stops(world.folder))
    assert names["plain:0"] == names["plain:1"] == 1
    assert {name.partition("/")[0] for name in names} >= {"plain:1", "bare:0"}
    assert set(names.values()) == {1}
    assert sum(name.startswith("bare:0/") for name in names) == 1


def test_a_function_is_run_as_a_role(world: World) -> None:
    assert (world.folder / "function").read_text() == "ran"


@pytest.mark.slow
def test_every_action_of_a_thousand_episodes_has_its_reward(tmp_path: Path) -> None:
    world = World(1000, tmp_path)
    assert world.outcomes["every_action_of_an_episode_has_its_reward"] == ""


def test_an_actor_made_outside_of_any_world_says_so() -> None:
    stray = Wide()
    with pytest.raises(rpc.NotAMemberError, match=r"this Wide lives on no worker; actors are made by launch"):
        _ = stray.name
    with pytest.raises(rpc.NotAMemberError, match="init_rpc"):
        Wide.spawn("anywhere")


def test_concurrency_is_checked_when_the_class_is_made() -> None:
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):

        class Nothing(rpc.Actor, concurrency=0):
            """Would never be served."""


def test_concurrency_is_inherited() -> None:
    class Wider(Wide):
        """As wide as its base."""

    assert (Wider.concurrency, Plain.concurrency) == (4, 1)
