"""The mailbox alone: messages in, decisions out. Rules MB1 to MB3 one by one, then against a slow model of them."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from actorrpc.runtime import mailbox
from actorrpc.runtime.clock import LockGate
from actorrpc.runtime.mailbox import Mailbox, State, Turn

Box = Mailbox[str]


def texts(turns: list[Turn[str]] | None) -> list[str | None]:
    """What was let run: messages of new turns, "main" or the message again of turns that go on."""
    assert turns is not None
    return [turn.message for turn in turns]


def put(box: Box, number: int, chain: int, message: str) -> list[Turn[str]]:
    turns = box.put(number, chain, message)
    assert turns is not None
    return turns


def first(box: Box, number: int, chain: int, message: str) -> Turn[str]:
    """Puts a message that starts at once."""
    (turn,) = put(box, number, chain, message)
    assert turn.message == message
    return turn


# -- MB1: order, and how many


def test_messages_start_one_at_a_time_in_the_order_in_which_they_were_put() -> None:
    box: Box = Mailbox()
    turn = first(box, 1, 10, "a")
    assert put(box, 2, 20, "b") == []
    assert put(box, 3, 30, "c") == []
    assert len(box) == 2
    (turn,) = box.finish(turn)
    assert turn.message == "b"
    (turn,) = box.finish(turn)
    assert turn.message == "c"
    assert box.finish(turn) == []
    assert not box.busy


def test_as_many_start_as_concurrency_allows() -> None:
    box: Box = Mailbox(3)
    turns = [first(box, i, i, f"m{i}") for i in range(3)]
    assert put(box, 3, 3, "m3") == []
    assert put(box, 4, 4, "m4") == []
    assert texts(box.finish(turns[1])) == ["m3"]
    assert texts(box.finish(turns[0])) == ["m4"]


def test_nothing_starts_before_the_mailbox_is_opened_and_then_all_in_order() -> None:
    box: Box = Mailbox(0)
    for i in range(4):
        assert put(box, i, i, f"m{i}") == []
    assert box.busy
    assert texts(box.open(3)) == ["m0", "m1", "m2"]


def test_opening_an_empty_mailbox_lets_the_next_message_start_at_once() -> None:
    box: Box = Mailbox(0)
    assert box.open(1) == []
    first(box, 1, 1, "a")


def test_a_running_handler_admits_nothing_even_of_its_own_chain() -> None:
    box: Box = Mailbox()
    first(box, 1, 10, "a")
    assert put(box, 2, 10, "own") == []


# -- main's turn


def test_main_holds_the_actor_while_it_computes() -> None:
    box: Box = Mailbox()
    main = box.enter()
    assert put(box, 1, 10, "a") == []
    assert put(box, 2, 20, "b") == []
    assert texts(box.finish(main)) == ["a"]


def test_messages_that_came_before_main_are_held_until_it_waits() -> None:
    box: Box = Mailbox(0)
    put(box, 1, 10, "a")
    main = box.enter()
    assert box.open(1) == []
    assert texts(box.suspend(main)) == ["a"]


def test_main_admits_any_chain_while_it_waits_and_one_at_a_time() -> None:
    box: Box = Mailbox()
    main = box.enter()
    assert box.suspend(main) == []
    a = first(box, 1, 10, "a")
    assert put(box, 2, 20, "b") == []
    (b,) = box.finish(a)
    assert b.message == "b"
    assert box.finish(b) == []
    assert texts(box.resume(main, 3, LockGate())) == [None]
    assert main.state is State.RUNNING


def test_main_goes_on_only_when_the_handler_above_it_has_ended() -> None:
    box: Box = Mailbox()
    main, gate = box.enter(), LockGate()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    put(box, 3, 30, "later")
    assert box.resume(main, 2, gate) == []
    assert main.state is State.RETURNING
    (back,) = box.finish(a)
    assert back is main
    assert back.gate is gate
    assert len(box) == 1, "what came after the reply waits for the next wait"
    assert texts(box.suspend(main)) == ["later"]


def test_main_takes_one_of_several_seats() -> None:
    box: Box = Mailbox(3)
    box.enter()
    first(box, 1, 1, "a")
    first(box, 2, 2, "b")
    assert put(box, 3, 3, "c") == []


# -- MB2: own chain


def test_a_waiting_handler_admits_its_own_chain_ahead_of_the_queue() -> None:
    box: Box = Mailbox()
    a = first(box, 1, 10, "a")
    put(box, 2, 20, "foreign")
    assert box.suspend(a) == []
    own = first(box, 3, 10, "own")
    assert box.finish(own) == []
    assert texts(box.resume(a, 4, LockGate())) == ["a"]
    assert texts(box.finish(a)) == ["foreign"]


def test_a_waiting_handler_takes_up_own_messages_that_are_queued_already() -> None:
    box: Box = Mailbox()
    a = first(box, 1, 10, "a")
    put(box, 2, 20, "foreign")
    put(box, 3, 10, "own1")
    put(box, 4, 10, "own2")
    (own1,) = box.suspend(a)
    assert own1.message == "own1"
    assert texts(box.finish(own1)) == ["own2"]


def test_a_waiting_handler_lets_foreign_messages_wait() -> None:
    box: Box = Mailbox()
    a = first(box, 1, 10, "a")
    assert box.suspend(a) == []
    assert put(box, 2, 20, "foreign") == []
    assert texts(box.resume(a, 3, LockGate())) == ["a"]


def test_admitted_handlers_admit_in_their_turn_and_unwind_from_the_top() -> None:
    box: Box = Mailbox()
    gates = [LockGate() for _ in range(3)]
    stack = [first(box, 1, 10, "d0")]
    for depth in range(1, 4):
        assert box.suspend(stack[-1]) == []
        stack.append(first(box, 1 + depth, 10, f"d{depth}"))
    # The replies come in an order in which no turn below may go on before those above it.
    for turn, gate, number in zip(stack[:3], gates, (5, 6, 7), strict=True):
        assert box.resume(turn, number, gate) == []
    for depth in (3, 2, 1):
        (below,) = box.finish(stack[depth])
        assert below is stack[depth - 1]
        assert below.gate is gates[depth - 1]
    assert box.finish(stack[0]) == []
    assert not box.busy


def test_a_foreign_handler_on_top_of_main_admits_its_own_chain_only() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    box.suspend(a)
    assert put(box, 2, 20, "foreign") == []
    own = first(box, 3, 10, "own")
    assert box.finish(own) == []
    assert texts(box.resume(a, 4, LockGate())) == ["a"]
    assert texts(box.finish(a)) == ["foreign"]


def test_with_several_seats_each_waiting_handler_admits_its_own() -> None:
    box: Box = Mailbox(2)
    a, b = first(box, 1, 10, "a"), first(box, 2, 20, "b")
    put(box, 3, 30, "foreign")
    assert box.suspend(a) == []
    assert box.suspend(b) == []
    of_b = first(box, 4, 20, "of b")
    of_a = first(box, 5, 10, "of a")
    assert box.finish(of_b) == []
    assert box.finish(of_a) == []
    assert texts(box.resume(b, 6, LockGate())) == ["b"]
    assert texts(box.finish(b)) == ["foreign"], "the seat is free, and the first in the queue takes it"


def test_a_free_seat_is_taken_in_order_even_by_the_chain_of_a_waiting_handler() -> None:
    box: Box = Mailbox(2)
    a = first(box, 1, 10, "a")
    box.suspend(a)
    b = first(box, 2, 20, "b")
    own = first(box, 3, 10, "own")
    assert own.below is a
    box.suspend(b)
    assert put(box, 4, 30, "c") == []


# -- MB3: a reply keeps its place


def test_what_came_before_the_reply_is_served_before_the_wait_ends() -> None:
    """The last reward of an episode: told before the reply, so served before main goes on."""
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    put(box, 2, 10, "reward")
    box.arrived(main, 3)
    assert box.resume(main, 3, LockGate()) == []
    (reward,) = box.finish(a)
    assert reward.message == "reward"
    assert box.finish(reward) == [main]


def test_what_came_after_the_reply_is_not_served_before_the_wait_ends() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    box.arrived(main, 5)
    assert put(box, 6, 10, "late") == []
    assert texts(box.resume(main, 5, LockGate())) == [None]
    assert len(box) == 1


def test_a_handler_serves_its_own_earlier_tells_before_its_reply_and_no_later_ones() -> None:
    box: Box = Mailbox()
    a = first(box, 1, 10, "a")
    put(box, 2, 20, "foreign")
    put(box, 3, 10, "before")
    put(box, 5, 10, "after")
    (before,) = box.suspend(a, 4)
    assert before.message == "before"
    assert box.resume(a, 4, LockGate()) == []
    assert box.finish(before) == [a]
    assert len(box) == 2


def test_the_first_reply_counts_when_arrival_and_resume_differ() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    box.arrived(main, 3)
    box.arrived(main, 9)
    a = put(box, 4, 10, "a")
    assert a == []
    assert texts(box.resume(main, 9, LockGate())) == [None]


def test_a_wait_that_timed_out_goes_on_at_once_unless_a_handler_runs() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    put(box, 2, 20, "b")
    assert box.resume(main, 0, LockGate()) == []
    assert box.finish(a) == [main]
    assert len(box) == 1


def test_arrival_for_a_turn_that_runs_changes_nothing() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.arrived(main, 1)
    assert box.suspend(main) == []
    first(box, 2, 10, "a")


def test_a_second_wait_forgets_the_limit_of_the_first() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    box.arrived(main, 1)
    assert box.resume(main, 1, LockGate()) == [main]
    assert box.suspend(main) == []
    first(box, 2, 10, "a")


# -- being forced, and closing


def test_a_forced_turn_runs_beside_the_one_above_it_and_both_end() -> None:
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    box.force(main)
    assert main.state is State.RUNNING
    assert box.finish(main) == []
    assert put(box, 2, 20, "b") == []
    assert texts(box.finish(a)) == ["b"]


def test_a_forced_turn_that_waits_again_is_above_nobody() -> None:
    """It goes on when the handler above it has ended, as before."""
    box: Box = Mailbox()
    main = box.enter()
    box.suspend(main)
    a = first(box, 1, 10, "a")
    box.force(main)
    assert box.suspend(main) == []
    assert put(box, 2, 20, "b") == []
    assert box.resume(main, 3, LockGate()) == []
    (b,) = box.finish(a)
    assert b.message == "b"
    assert box.finish(b) == [main]


def test_a_turn_in_the_middle_of_a_stack_may_end_first() -> None:
    box: Box = Mailbox()
    d0 = first(box, 1, 10, "d0")
    box.suspend(d0)
    d1 = first(box, 2, 10, "d1")
    box.suspend(d1)
    d2 = first(box, 3, 10, "d2")
    box.force(d1)
    assert box.finish(d1) == []
    assert box.resume(d0, 4, LockGate()) == []
    assert box.finish(d2) == [d0]


def test_a_closed_mailbox_gives_back_what_waited_and_takes_nothing_more() -> None:
    box: Box = Mailbox()
    a = first(box, 1, 10, "a")
    put(box, 2, 10, "own")
    put(box, 3, 30, "c")
    assert box.close() == ["own", "c"]
    assert box.put(4, 40, "d") is None
    assert box.suspend(a) == []
    assert box.resume(a, 5, LockGate()) == [a]
    assert box.finish(a) == []
    assert not box.busy


def test_a_mailbox_closed_before_it_was_opened_starts_nothing() -> None:
    box: Box = Mailbox(0)
    put(box, 1, 10, "a")
    assert box.close() == ["a"]
    assert box.open(1) == []


# -- against a model


@dataclass(eq=False)
class Stay:
    """A turn as the model knows it."""

    name: str
    chain: int | None
    state: State = State.RUNNING
    limit: int | None = None


@dataclass
class Model:
    """The rules, written for being read: seats are stacks of stays, each decision looks at everything."""

    concurrency: int
    queue: list[tuple[int, int, str]] = field(default_factory=list)
    seats: list[list[Stay]] = field(default_factory=list)

    def decide(self) -> list[str]:
        """Lets run what may; returns the names, as a set would hold them but sorted."""
        let: list[str] = []
        for seat in self.seats:
            top = seat[-1]
            if top.state is State.RUNNING:
                continue
            chosen = self._admissible(top)
            if chosen is not None and self.concurrency:
                self.queue.remove(chosen)
                seat.append(Stay(chosen[2], chosen[1]))
                let.append(chosen[2])
            elif top.state is State.RETURNING:
                top.state = State.RUNNING
                let.append(top.name)
        while self.queue and len(self.seats) < self.concurrency:
            _, chain, name = self.queue.pop(0)
            self.seats.append([Stay(name, chain)])
            let.append(name)
        return sorted(let)

    def _admissible(self, top: Stay) -> tuple[int, int, str] | None:
        if top.chain is None:
            fits = self.queue[:1]
        else:
            fits = [entry for entry in self.queue if entry[1] == top.chain]
        fits = [entry for entry in fits if top.limit is None or entry[0] < top.limit]
        return fits[0] if fits else None

    def running(self) -> list[Stay]:
        return [seat[-1] for seat in self.seats if seat[-1].state is State.RUNNING]

    def waiting(self) -> list[Stay]:
        return [stay for seat in self.seats for stay in seat if stay.state is State.WAITING]

    def finish(self, stay: Stay) -> None:
        for seat in self.seats:
            if seat[-1] is stay:
                seat.pop()
        self.seats = [seat for seat in self.seats if seat]


class Play:
    """One random run of a mailbox beside its model."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        concurrency = self.dice.choice((1, 1, 1, 2, 3))
        self.box: Box = Mailbox(concurrency)
        self.model = Model(concurrency)
        self.turns: dict[str, Turn[str]] = {}
        self.number = 0
        self.said: list[str] = []
        self.started: list[str] = []
        if self.dice.random() < 0.5:
            self.turns["main"] = self.box.enter()
            self.model.seats.append([Stay("main", None)])

    def name_of(self, turn: Turn[str]) -> str:
        return turn.message or "main"

    def agree(self, turns: list[Turn[str]]) -> None:
        let = []
        for turn in turns:
            name = self.name_of(turn)
            let.append(name)
            if name not in self.turns:
                self.turns[name] = turn
                self.started.append(name)
            else:
                assert turn.gate is not None
                turn.gate = None
            assert turn.state is State.RUNNING
        assert sorted(let) == self.model.decide()
        assert len(self.box) == len(self.model.queue)

    def put(self) -> None:
        self.number += 1
        chain = self.dice.randrange(4)
        name = f"m{self.number}"
        self.said.append(name)
        self.model.queue.append((self.number, chain, name))
        self.agree(put(self.box, self.number, chain, name))

    def step(self) -> None:
        dice, model = self.dice, self.model
        running, waiting = model.running(), model.waiting()
        act = dice.choice(("put", "put", "finish", "suspend", "suspend", "arrive", "resume", "resume"))
        if act == "put":
            self.put()
        elif act == "finish" and running:
            self.finish(dice.choice(running))
        elif act == "suspend" and running:
            stay = dice.choice(running)
            limit = None
            if dice.random() < 0.2:  # what it waits for is there
                self.number += 1
                limit = self.number
            stay.state, stay.limit = State.WAITING, limit
            self.agree(self.box.suspend(self.turns[stay.name], limit))
        elif act == "arrive" and waiting:
            stay = dice.choice(waiting)
            self.number += 1
            if stay.limit is None:
                stay.limit = self.number
            self.box.arrived(self.turns[stay.name], self.number)
        elif act == "resume" and waiting:
            self.resume(dice.choice(waiting))

    def resume(self, stay: Stay) -> None:
        self.number += 1
        number = self.dice.choice((self.number, self.number, 0))  # 0: its time ran out
        stay.state = State.RETURNING
        stay.limit = number if stay.limit is None else min(number, stay.limit)
        self.agree(self.box.resume(self.turns[stay.name], number, LockGate()))

    def finish(self, stay: Stay) -> None:
        self.model.finish(stay)
        self.agree(self.box.finish(self.turns[stay.name]))

    def wind_up(self) -> None:
        """Ends all waits and handlers: everything that was put must have had its turn, in order where it must."""
        for _ in range(1000):
            running, waiting = self.model.running(), self.model.waiting()
            if running:
                self.finish(running[-1])
            elif waiting:
                self.resume(waiting[-1])
            else:
                break
        assert not self.box.busy
        assert not self.model.queue
        assert sorted(self.started) == sorted(self.said)


@pytest.mark.parametrize("part", range(4))
def test_random_plays_agree_with_the_model_and_lose_nothing(part: int) -> None:
    for seed in range(part * 1000, part * 1000 + 1000):
        play = Play(seed)
        try:
            for _ in range(40):
                play.step()
            play.wind_up()
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e


def test_random_plays_with_forced_turns_end_with_nothing_left() -> None:
    """After a force two turns of one seat run, which the model does not know; but nothing is lost or stuck."""
    for seed in range(2000):
        dice, box = random.Random(seed), Mailbox[str](dice_concurrency := 1 + seed % 2)
        main = box.enter()
        alive: list[Turn[str]] = [main]
        done = 0
        for number in range(1, 20):
            alive += put(box, number, dice.randrange(3), f"m{number}")
            turn = dice.choice(alive)
            if turn.state is State.WAITING and dice.random() < 0.5:
                box.force(turn)
            elif turn.state is State.RUNNING and dice.random() < 0.5:
                alive += [t for t in box.suspend(turn) if t not in alive]
            elif turn.state is State.RUNNING:
                alive.remove(turn)
                done += turn is not main
                alive += [t for t in box.finish(turn) if t not in alive]
        for _ in range(200):
            if not alive:
                break
            turn = next((t for t in alive if t.state is State.RUNNING), alive[-1])
            if turn.state is not State.RUNNING:
                alive += [t for t in box.resume(turn, 0, LockGate()) if t not in alive]
                continue
            alive.remove(turn)
            done += turn is not main
            alive += [t for t in box.finish(turn) if t not in alive]
        assert (done, box.busy, dice_concurrency) == (19, False, dice_concurrency), f"seed {seed}"


def test_threads_that_put_at_once_lose_nothing_and_keep_their_own_order() -> None:
    box: Box = Mailbox()
    door, served = threading.Lock(), []
    inside = 0

    def serve(turns: list[Turn[str]]) -> None:
        nonlocal inside
        while turns:
            (turn,) = turns
            with door:
                inside += 1
                assert inside == 1
            assert turn.message is not None
            served.append(turn.message)
            with door:
                inside -= 1
            turns = box.finish(turn)

    def send(sender: int) -> None:
        for i in range(500):
            serve(put(box, 0, sender, f"{sender}:{i}"))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not box.busy
    for sender in range(4):
        assert [m for m in served if m.startswith(f"{sender}:")] == [f"{sender}:{i}" for i in range(500)]


def test_a_finalizer_in_the_midst_of_a_mailbox_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    box: Box = Mailbox(1)
    came: list[Any] = []

    class Interrupted(Turn[str]):
        """The collector may run where one is made."""

        __slots__ = ()

        def __init__(self, *what: Any) -> None:
            monkeypatch.undo()
            came.append(box.put(2, 8, "the finalizer's"))
            super().__init__(*what)

    def work() -> None:
        came.append(box.put(1, 7, "a"))

    monkeypatch.setattr(mailbox, "Turn", Interrupted)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert len(came) == 2, "a thread waits for itself"
    assert came[0] is mailbox.LATER
    assert texts(came[1]) == ["a"]
    assert texts(box.put(3, 8, "b")) == []
