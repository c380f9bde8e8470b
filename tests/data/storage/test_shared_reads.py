"""Shared reads: the bytes are right, none is fetched twice while it is held, and memory is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.data.storage import StoredFile
from vorox.data.storage.shared_reads import SharedReads

SIZE = 200
FILE = StoredFile("s3://bucket/a", SIZE, "stamp", 0)


@dataclass
class FakePiece:
    start_byte: int
    end_byte: int
    has_failed: bool = False


@dataclass
class Fetches:
    pieces: list[FakePiece] = field(default_factory=list)

    def __call__(self, start_byte: int, end_byte: int) -> FakePiece:
        self.pieces.append(FakePiece(start_byte, end_byte))
        return self.pieces[-1]

    def times(self) -> list[int]:
        """How often each byte was fetched."""
        return [sum(piece.start_byte <= byte < piece.end_byte for piece in self.pieces) for byte in range(SIZE)]


def read(shared: SharedReads[FakePiece], fetches: Fetches, start: int, end: int, before: int = 0) -> list[FakePiece]:
    """What a reader of ``[start, end)`` does; ``before``: bytes that it also fetches before each position."""
    found: list[FakePiece] = []
    while start < end:
        piece = shared.piece(FILE, start, max(0, start - before), end, fetches)
        assert piece.start_byte <= start < piece.end_byte
        start = piece.end_byte
        found.append(piece)
    return found


ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(0, 30))


@settings(deadline=None)
@given(st.lists(ranges, max_size=30))
def test_no_byte_is_fetched_twice(wanted: list[tuple[int, int, int]]) -> None:
    shared, fetches = SharedReads[FakePiece](SIZE, 0), Fetches()
    with shared.registered([FILE]):
        for start, length, before in wanted:
            read(shared, fetches, start, min(start + length, SIZE), before)
        assert max(fetches.times(), default=0) <= 1
    assert not shared.is_registered(FILE)


@settings(deadline=None)
@given(st.lists(ranges, max_size=30), st.integers(20, 100))
def test_what_is_held_is_bounded(wanted: list[tuple[int, int, int]], limit: int) -> None:
    shared, fetches = SharedReads[FakePiece](limit, 0), Fetches()
    with shared.registered([FILE]):
        for start, length, before in wanted:
            last = read(shared, fetches, start, min(start + length, SIZE), before)[-1]
            held = sum(piece.end_byte - piece.start_byte for piece in shared._pieces.values())
            assert held <= max(limit, last.end_byte - last.start_byte)


def test_the_least_recently_used_goes_first() -> None:
    shared, fetches = SharedReads[FakePiece](100, 0), Fetches()
    with shared.registered([FILE]):
        for start in (0, 50, 0, 100, 0, 50):
            read(shared, fetches, start, start + 50)
    assert [piece.start_byte for piece in fetches.pieces] == [0, 50, 100, 50]


def test_what_failed_is_fetched_again() -> None:
    shared, fetches = SharedReads[FakePiece](SIZE, 0), Fetches()
    with shared.registered([FILE]):
        read(shared, fetches, 0, 100)[0].has_failed = True
        assert not read(shared, fetches, 50, 100)[0].has_failed
        assert len(fetches.pieces) == 2


def test_files_that_nobody_registered_share_nothing() -> None:
    shared, fetches = SharedReads[FakePiece](SIZE, 0), Fetches()
    with shared.registered([FILE]):
        with shared.registered([FILE]):
            read(shared, fetches, 0, 100)
        assert read(shared, fetches, 0, 100) == fetches.pieces, "the other registration is still there"
    read(shared, fetches, 0, 100)
    assert fetches.times()[0] == 2


def test_a_small_file_is_fetched_whole() -> None:
    shared, fetches = SharedReads[FakePiece](SIZE, SIZE), Fetches()
    with shared.registered([FILE]):
        for start in (150, 20, 199):
            read(shared, fetches, start, start + 1)
    assert fetches.pieces == [FakePiece(0, SIZE)]
