"""Who builds a stream's units: one process; another one where the first does not."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from eventually import wait_until
from tiny_runs import configuration
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.files.leases import DIRECTORY_NAME, Leases
from vorox.data.cache.upkeep.disk_budget import resident_units
from vorox.data.corpus.corpus import prepare
from vorox.data.streaming import leading_process, stream
from vorox.data.streaming.leading_process import PATIENCE_SECONDS, LeadingProcess

ROWS = np.arange(4)
STREAMED = ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=100000"]


def test_a_wait_lasts_while_any_unit_is_being_built(tmp_path: Path) -> None:
    now = 0.0
    leader = LeadingProcess(tmp_path, lambda: now)

    def expected_after(seconds: float) -> bool:
        nonlocal now
        now += seconds * PATIENCE_SECONDS
        return leader.is_expected()

    with Leases(tmp_path) as leases:
        leases.acquire(3)
        assert all(expected_after(0.4) for _ in range(10))
    assert expected_after(0.9), "patience begins with the end of the last lease"
    assert not expected_after(0.2)
    assert not expected_after(0.9)
    assert expected_after(1.1), "the next wait"


def test_a_follower_reads_what_the_leader_builds_and_builds_what_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_process, "PATIENCE_SECONDS", 0.5)
    config = configuration(tmp_path, STREAMED)
    leading = prepare(config)
    following = prepare(config, options=BuildOptions(leads=False))
    try:
        (theirs,), (mine,) = leading.train, following.train
        assert isinstance(mine, stream.StreamReader)
        expected = theirs.read_rows(ROWS).tokens_NC
        np.testing.assert_array_equal(mine.read_rows(ROWS).tokens_NC, expected)
        assert mine.stream.units_built == 0

        leading.close()
        mine.drop(0)
        shutil.rmtree(mine.directory / "chunks")
        np.testing.assert_array_equal(mine.read_rows(ROWS).tokens_NC, expected)
        assert mine.stream.units_rebuilt > 0, "nobody else did"
    finally:
        leading.close()
        following.close()


SMALL_UNITS = [
    "data.cache.unit_bytes=300", "data.growth.first_segment_units=1", "data.growth.max_segment_units=1",
    "data.streaming.retention_bytes=16000",
]  # fmt: skip
UNITS_READ = 31
"""More than the budget holds, and fewer than there are."""


def test_a_leader_that_waits_for_room_builds_what_a_follower_waits_for(tmp_path: Path) -> None:
    config = configuration(tmp_path, [*STREAMED, *SMALL_UNITS])
    leading = prepare(config)
    following = prepare(config, options=BuildOptions(leads=False))
    try:
        (theirs,), (mine,) = leading.train, following.train
        assert isinstance(mine, stream.StreamReader)
        assert isinstance(theirs, stream.StreamReader)
        for unit in range(UNITS_READ):
            reader = _reader_of(theirs, unit)
            if len(rows := _rows(reader, unit)):
                reader.read_rows(rows)
        leases = theirs.directory / DIRECTORY_NAME
        wait_until(lambda: list(leases.glob("u*")), seconds=60)  # it has built the next unit, and has no room for it

        mine = mine.refreshed()
        on_disk = resident_units(mine.directory)
        rows = next(
            _rows(mine, unit) for unit in range(UNITS_READ - 1, 0, -1) if unit not in on_disk and len(_rows(mine, unit))
        )
        read: list[object] = []
        reading = threading.Thread(target=lambda: read.append(mine.read_rows(rows)), daemon=True)
        reading.start()
        reading.join(timeout=60)
        assert read, "both waited: one for room, the other for a unit that was evicted"
        assert mine.stream.units_built == mine.stream.units_rebuilt == 0, "the leader built it"
    finally:
        leading.close()
        following.close()


def _reader_of(reader: stream.StreamReader, unit: int) -> stream.StreamReader:
    """Return a reader that sees a unit, once it is built."""
    found = [reader]

    def sees() -> bool:
        found[0] = found[0].refreshed(awaited_units=unit + 1)
        return len(found[0].unit_row_starts) > unit + 1 and not len(found[0].missing_units(0, unit + 1))

    wait_until(sees, seconds=60)
    return found[0]


def _rows(reader: stream.StreamReader, unit: int) -> np.ndarray:
    return np.arange(*reader.unit_row_starts[unit : unit + 2])
