"""What is needed next, told by hand for five segments of two units."""

from __future__ import annotations

from vorox.data.streaming.need import Need

SEGMENTS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


def ranks(need: Need, others=()) -> list[int]:
    """Of the first unit of each segment."""
    return [need.rank(first, others) for first, _ in SEGMENTS]


def test_before_anything_is_read_only_what_is_waited_for_is_needed() -> None:
    need = Need(SEGMENTS, 1)
    assert need.window() == []
    assert need.to_build() == []
    need.awaited = 0
    assert need.to_build() == [(0, 2), (0, 2), (2, 4)]
    assert ranks(need) == [0, 2, 5, 6, 7]


def test_the_segment_that_was_left_is_held_until_all_threads_have_left_it() -> None:
    need = Need(SEGMENTS, 1)
    assert need.touch([0, 1])
    assert not need.touch([1])
    assert need.touch([1, 2])
    assert ranks(need) == [1, 0, 2, 5, 6]
    for _ in range(100):
        need.touch([3])
    assert ranks(need) == [7, 0, 2, 5, 6], "in cyclic order, what was just read is needed last"
    assert need.window() == [(2, 4), (4, 6)]


def test_what_lies_between_the_reader_and_a_wait_goes_before_neither() -> None:
    need = Need(SEGMENTS, 1)
    need.touch([0])
    need.awaited = 3
    assert ranks(need) == [0, 1, 1, 0, 7]
    need.touch([6])
    assert need.awaited is None
    assert need.window() == [(6, 8), (8, 10)]


def test_what_other_processes_read_counts_like_the_next_segment() -> None:
    need = Need(SEGMENTS, 0)
    need.touch([2])
    assert ranks(need) == [7, 0, 4, 5, 6]
    assert ranks(need, [(6, 8)]) == [7, 0, 4, 2, 6]


def test_the_last_segment_is_followed_by_the_first() -> None:
    need = Need(SEGMENTS, 1)
    need.touch([9])
    need.touch([9, 0])
    assert need.window() == [(0, 2), (2, 4)]
    assert ranks(need)[0] == 0


def test_what_was_awaited_and_is_recorded_makes_room_for_what_is_read() -> None:
    need = Need(SEGMENTS, 0)
    need.awaited = 4
    need.was_recorded()
    assert need.awaited == 4, "before anything is read it is what is read first"
    need.touch([0])
    assert ranks(need)[4] == 0
    need.was_recorded()
    assert ranks(need) == [0, 4, 5, 6, 7]


def test_units_that_are_not_known_are_cut_when_all_before_them_are_built() -> None:
    need = Need([(0, 1), (1, 3), (3, 7), (7, 40)], 1)
    need.awaited = 2
    assert need.wanted((), (), (), 4) == ([3], 0), "what is known comes first"
    assert need.wanted((), (), {3}, 4) == ([], 7)
    assert need.awaits_more(4)
    assert not need.awaits_more(7)
    assert need.wanted((), (), {3, 4}, 4) == ([], 0), "it failed and is not tried now"
    assert need.wanted({1}, (), {3}, 4) == ([1], 0), "who waits for a unit goes first"
    need.awaited = 3
    assert need.wanted((), (), range(7), 7) == ([], 15), "some at a time"
    assert need.wanted((), (), (), None) == (list(range(7, 40)), 0)
    need.know([(0, 1), (1, 3), (3, 5)])
    assert need.awaited is None
