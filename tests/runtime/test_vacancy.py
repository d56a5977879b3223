"""For how long leadership may lie free (RULE TR4): longer where nothing lay there for who was sent to take it up."""

from __future__ import annotations

from actorrpc.runtime.vacancy import Vacancy


def ticks_until_one_is_sent(vacancy: Vacancy, turns: int) -> int:
    """Returns at which tick that sees leadership free a thread is sent, when it was taken up `turns` times before."""
    assert vacancy.tick(False, turns) == (True, False)
    count = 1
    while not vacancy.tick(True, turns)[1]:
        count += 1
    return count


def test_a_thread_is_sent_later_where_that_was_in_vain_and_at_the_first_tick_where_it_was_not() -> None:
    vacancy = Vacancy(0.5)
    found = []
    for turns, (seconds, anything) in enumerate(
        [(9.0, True), (0.1, False), (9.0, True), (9.0, True), (0.1, True), (9.0, True)], 1
    ):
        found.append(ticks_until_one_is_sent(vacancy, turns))
        assert vacancy.taken()
        vacancy.served(seconds, anything)
    assert found == [1, 2, 3, 4, 4, 1]


def test_threads_are_sent_until_one_takes_leadership_up() -> None:
    vacancy = Vacancy(0.5)
    assert ticks_until_one_is_sent(vacancy, 1) == 1
    assert vacancy.tick(True, 1) == (False, True)
    assert vacancy.taken()
    vacancy.served(9.0, True)
    assert not vacancy.taken()


def test_a_thread_that_comes_back_from_a_handler_and_finds_something_there_ends_the_patience() -> None:
    """Else handlers of some milliseconds that release the GIL would run one after the other."""
    vacancy = Vacancy(0.5)
    for turns in (1, 2, 3):
        ticks_until_one_is_sent(vacancy, turns)
        vacancy.served(9.0, True)
    vacancy.tick(False, 4)
    assert not vacancy.taken()  # leadership was not free for a tick
    assert [vacancy.tick(True, 4)[1] for _ in range(3)] == [False] * 3
    assert vacancy.taken()
    vacancy.served(0.1, True)
    assert ticks_until_one_is_sent(vacancy, 5) == 1


def test_leadership_that_changes_hands_is_not_free_for_long() -> None:
    vacancy = Vacancy(0.5)
    assert [vacancy.tick(True, turns) for turns in (1, 2, 3)] == [(True, False)] * 3
    assert vacancy.tick(True, 3) == (False, True)
    vacancy.served(9.0, False)
    assert [vacancy.tick(free, 3)[1] for free in (True, False, True, True)] == [False, False, False, True]


def test_the_keeper_looks_again_when_a_thread_may_be_due_and_counts_the_ticks_that_it_let_out() -> None:
    vacancy = Vacancy(0.5)
    for turns in (1, 2):
        ticks_until_one_is_sent(vacancy, turns)
        vacancy.served(9.0, True)
    assert vacancy.tick(False, 3) == (True, False)
    assert vacancy.rest(False) > 1
    assert vacancy.tick(True, 4, passed=4) == (True, False)  # free since then, for all that is known
    assert vacancy.rest(True) == 3
    assert vacancy.tick(True, 4, passed=2) == (False, False)
    assert vacancy.rest(True) == 1
    assert vacancy.tick(True, 4) == (False, True)
