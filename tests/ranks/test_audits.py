"""A run of two ranks is audited by two, and names that number to one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks.processes import Runs
from ranks.test_rank_data import ranks
from ranks.test_torch_ranks import MODEL
from vorox.records.replay_chain import read_chain

pytestmark = pytest.mark.slow


@pytest.mark.torch
def test_two_ranks_compute_segments_of_two_ranks_again(tmp_path: Path) -> None:
    runs, statement = Runs(tmp_path, MODEL), tmp_path / "statement.json"
    run, _ = runs.train("parent", ranks(runs, 2))
    words = ["audit", run.name, "--segments", "2", "--challenge", "5 2 6"]
    said = runs.run_fresh([*words, "--output", str(statement), "--nproc", "2"])
    assert "Passed: 2 of 2 sampled segments bit-exact" in said
    found = json.loads(statement.read_text())
    assert found["predicate"]["heads"]["chain"] == read_chain(run)[max(read_chain(run))].chain
    assert found["predicate"]["auditor"]["engine"]["num_processes"] == 2
    assert "add --nproc 2" in runs.run_fresh(words, code=2)
