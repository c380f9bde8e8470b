"""The prefetch scheduler: needed units, worked out for five segments of two units."""

from __future__ import annotations

from vorox.data.streaming.prefetch_scheduler import PrefetchScheduler

SEGMENTS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


def priorities(schedule: PrefetchScheduler, peers=()) -> list[int]:
    """Of the first unit of each segment."""
    return [schedule.eviction_priority(first, peers) for first, _ in SEGMENTS]


def test_before_anything_is_read_only_what_is_waited_for_is_needed() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 1)
    assert schedule.window() == []
    assert schedule.build_order() == []
    schedule.awaited = 0
    assert schedule.build_order() == [(0, 2), (0, 2), (2, 4)]
    assert priorities(schedule) == [0, 2, 5, 6, 7]


def test_the_segment_that_was_left_is_held_until_all_threads_have_left_it() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 1)
    assert schedule.touch([0, 1])
    assert not schedule.touch([1])
    assert schedule.touch([1, 2])
    assert priorities(schedule) == [1, 0, 2, 5, 6]
    for _ in range(100):
        schedule.touch([3])
    assert priorities(schedule) == [7, 0, 2, 5, 6], "in cyclic order, what was just read is needed last"
    assert schedule.window() == [(2, 4), (4, 6)]


def test_what_lies_between_the_reader_and_a_wait_goes_before_neither() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 1)
    schedule.touch([0])
    schedule.awaited = 3
    assert priorities(schedule) == [0, 1, 1, 0, 7]
    schedule.touch([6])
    assert schedule.awaited is None
    assert schedule.window() == [(6, 8), (8, 10)]


def test_what_other_processes_read_counts_like_the_next_segment() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 0)
    schedule.touch([2])
    assert priorities(schedule) == [7, 0, 4, 5, 6]
    assert priorities(schedule, [(6, 8)]) == [7, 0, 4, 2, 6]


def test_the_last_segment_is_followed_by_the_first() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 1)
    schedule.touch([9])
    schedule.touch([9, 0])
    assert schedule.window() == [(0, 2), (2, 4)]
    assert priorities(schedule)[0] == 0


def test_what_was_awaited_and_is_recorded_makes_room_for_what_is_read() -> None:
    schedule = PrefetchScheduler(SEGMENTS, 0)
    schedule.awaited = 4
    schedule.clear_awaited()
    assert schedule.awaited == 4, "before anything is read it is what is read first"
    schedule.touch([0])
    assert priorities(schedule)[4] == 0
    schedule.clear_awaited()
    assert priorities(schedule) == [0, 4, 5, 6, 7]


def test_units_that_are_not_known_are_cut_when_all_before_them_are_built() -> None:
    schedule = PrefetchScheduler([(0, 1), (1, 3), (3, 7), (7, 40)], 1)
    schedule.awaited = 2
    assert schedule.next_units((), (), (), 4) == ([3], 0), "what is known comes first"
    assert schedule.next_units((), (), {3}, 4) == ([], 7)
    assert schedule.awaits_more(4)
    assert not schedule.awaits_more(7)
    assert schedule.next_units((), (), {3, 4}, 4) == ([], 0), "it failed and is not tried now"
    assert schedule.next_units({1}, (), {3}, 4) == ([1], 0), "who waits for a unit goes first"
    schedule.awaited = 3
    assert schedule.next_units((), (), range(7), 7) == ([], 15), "some at a time"
    assert schedule.next_units((), (), (), None) == (list(range(7, 40)), 0)
    schedule.set_segments([(0, 1), (1, 3), (3, 5)])
    assert schedule.awaited is None
