"""Who builds a stream's units: one process; another one where the first does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tiny_runs import configuration
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.leases import Leases
from vorox.data.corpus import prepare
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
