"""How many jobs may run at once: limits, their growth at a standstill, and that one lane's does not hide another's."""

from __future__ import annotations

from actorrpc.runtime.lanes import STANDSTILL, Lane, Lanes


def queued(lanes: Lanes, lane: int, count: int) -> None:
    for _ in range(count):
        lanes.queues[lane].append((lane, lambda _: None, None))


def begun(lanes: Lanes) -> int:
    """Starts all that may start; returns how many."""
    count = 0
    while lanes.take() is not None:
        count += 1
    return count


def test_thousands_of_callbacks_at_once_start_few() -> None:
    lanes = Lanes(16)
    queued(lanes, Lane.FREE, 3000)
    assert begun(lanes) == 32
    for _ in range(2968):  # one begins where one ends; as long as they end, no more than these run
        lanes.end(Lane.FREE)
        assert lanes.grow(0.0) == 0
        assert begun(lanes) == 1
    assert begun(lanes) == 0


def test_handlers_are_bounded_by_the_users_limit() -> None:
    lanes = Lanes(2)
    queued(lanes, Lane.HANDLER, 10)
    assert begun(lanes) == 2
    lanes.lend(Lane.HANDLER)  # one waits, and its place is free meanwhile
    assert begun(lanes) == 1


def test_a_lane_that_stands_still_grows_by_doubling() -> None:
    for lane, limit in ((Lane.FREE, 32), (Lane.HANDLER, 4)):
        lanes, now = Lanes(4), 0.0
        queued(lanes, lane, 1000)
        assert begun(lanes) == limit
        assert lanes.grow(now) == 0
        for more in (1, 1, 2, 4, 8):
            now += 1.01 * STANDSTILL
            assert lanes.grow(now) == more
            assert begun(lanes) == more


def test_a_standstill_of_handlers_is_seen_though_callbacks_end_all_the_time() -> None:
    lanes, now, grown = Lanes(2), 0.0, 0
    queued(lanes, Lane.HANDLER, 3)
    assert begun(lanes) == 2
    while now < 2 * STANDSTILL:
        now += STANDSTILL / 10
        queued(lanes, Lane.FREE, 1)
        assert lanes.take() is not None
        lanes.end(Lane.FREE)
        grown += lanes.grow(now)
    assert grown == 1
    assert begun(lanes) == 1


def test_a_lane_whose_queue_is_empty_goes_back_to_its_limit() -> None:
    lanes = Lanes(2)
    queued(lanes, Lane.HANDLER, 3)
    begun(lanes)
    assert lanes.grow(0.0) == 0
    assert lanes.grow(STANDSTILL) == 1
    assert begun(lanes) == 1
    lanes.grow(STANDSTILL)
    for _ in range(3):
        lanes.end(Lane.HANDLER)
    queued(lanes, Lane.HANDLER, 3)
    assert begun(lanes) == 2


def test_what_is_put_off_comes_after_all_that_is_queued_and_keeps_to_its_lane() -> None:
    lanes = Lanes(2)
    lanes.put_off.append((Lane.CONTROL, lambda _: None, "first"))
    lanes.put_off.append((Lane.CONTROL, lambda _: None, "second"))
    queued(lanes, Lane.HANDLER, 1)
    handler, first, second = lanes.take(), lanes.take(), lanes.take()
    assert handler is not None
    assert handler[0] == Lane.HANDLER
    assert first is not None
    assert first[2] == "first"
    assert second is None  # there is one place in its lane
    before = lanes.startable
    lanes.end(Lane.CONTROL)
    assert (before, lanes.startable) == (False, True)
    assert lanes.statistics()["queued"] == 1
