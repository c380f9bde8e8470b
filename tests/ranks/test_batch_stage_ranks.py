"""Runs whose batch size grows by stage on several ranks: no bit depends on their number, and pipelines train as one.

The oracle is the same command with one process. Steps 1 to 4 have 8 rows, steps 5 to 8 have 16 and later ones 12.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks.processes import Runs, entries, fingerprint, killed_and_resumed, lines, losses
from ranks.test_torch_ranks import MODEL, ROLLBACKS, assert_identical
from vorox.experiments.tracking import read_metrics

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STAGES = [{"start_step": 5, "global_batch_sequences": 16}, {"start_tokens": 1500, "global_batch_sequences": 12}]
ROWS = [8] * 4 + [16] * 4 + [12] * 12
"""16 tokens per row: 512 in four steps of 8 rows, then 256 per step; 1,500 are reached within step 8."""
BATCHES = [
    f"train.batch_stages={json.dumps(STAGES)}", "schedule.name=constant",  # another length changes no learning rate
]  # fmt: skip
EXACT = [
    *BATCHES, "runtime.determinism=bitwise-any-world", "model.dropout_fraction=0.1", "data.document_mask=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("stages"), MODEL)


@pytest.fixture(scope="module")
def exact(runs: Runs) -> Path:
    """One process, in the order that no number of ranks changes."""
    return runs.train("exact", EXACT)[0]


def rows_of_steps(run: Path) -> list[int]:
    tokens = [values["tokens_total"] for _, values in sorted(read_metrics(run).items())]
    return [int(after - before) // 16 for before, after in zip([0, *tokens], tokens, strict=False)]


@pytest.mark.parametrize("count", [2, 4])
def test_no_bit_depends_on_the_number_of_ranks(runs: Runs, exact: Path, count: int) -> None:
    run, _ = runs.train(f"exact-{count}", [*EXACT, "--nproc", str(count)])
    assert_identical(run, exact)


def test_a_stage_that_does_not_divide_on_all_ranks_is_refused(runs: Runs) -> None:
    _, said = runs.train("misfit", [*EXACT, "train.micro_batch_sequences=2", "--nproc", "4"], code=2)
    assert "12 rows per step do not divide into micro-batches of 2 on each of 4 ranks" in said


def test_ranks_change_within_and_at_the_stages(runs: Runs, exact: Path) -> None:
    """Four ranks until a stage begins, one process into the next stage, two ranks to the end; then a replay on one."""
    run, _ = runs.train("elastic", [*EXACT, "train.num_steps=4", "--nproc", "4"])
    for count, steps in [(1, 9), (2, 12)]:
        runs.vorox(["train", "--resume", str(run), f"train.num_steps={steps}", "--nproc", str(count)])
    assert entries(run) == entries(exact)
    assert fingerprint(run) == fingerprint(exact)
    assert "bit-exact, 12 steps" in runs.vorox(["replay", str(run)])


def test_rollbacks_across_stages_are_those_of_one_process(runs: Runs) -> None:
    settings = [*EXACT, *ROLLBACKS, "train.spike_rollback_steps=3", "train.micro_batch_sequences=2"]
    oracle, _ = runs.train("rollbacks", settings)
    run, _ = runs.train("rollbacks-2", [*settings, "--nproc", "2"])
    assert_identical(run, oracle)
    undone = [
        [line["body"] for line in lines(path, "plan") if line["body"]["kind"] == "rollback"] for path in (run, oracle)
    ]
    assert undone[0] == undone[1]
    starts = [sum(ROWS[:step]) for step in range(len(ROWS))]
    windows = [[one[key] for key in ("start_position", "end_position")] for one in undone[0]]
    assert all(start in starts and end in starts for start, end in windows)
    assert any(start < starts[4] < end or start < starts[8] < end for start, end in windows), "none crosses a stage"
    assert "bit-exact" in runs.vorox(["replay", str(oracle)])


PIPELINES = {
    "1f1b": ["parallel.pipeline_schedule=1f1b"],
    "interleaved": ["parallel.pipeline_schedule=interleaved"],
    "zero-bubble": ["parallel.pipeline_schedule=zero_bubble"],
}
DEEP = [*BATCHES, "model.num_layers=4", "train.micro_batch_sequences=2"]


@pytest.fixture(scope="module")
def deep(runs: Runs) -> Path:
    return runs.train("deep", [*DEEP, "train.num_steps=20"])[0]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_twenty_steps_of_a_pipeline_equal_one_process(runs: Runs, deep: Path, schedule: str) -> None:
    stages = ["parallel.pipeline_parallel_size=2", *PIPELINES[schedule]]
    run, _ = runs.train(schedule, [*DEEP, *stages, "train.num_steps=20", "--nproc", "2"])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(deep)]
    assert len(losses(run)) == 20
    assert losses(run) == pytest.approx(losses(deep), rel=1e-5)


def test_a_pipeline_killed_after_a_change_of_the_batch_repeats_every_bit(runs: Runs, tmp_path: Path) -> None:
    """Killed in step 9, the first of the last stage, and resumed from step 4 or 8, each the last of its stage."""
    stages = [*DEEP, "parallel.pipeline_parallel_size=2", "log.every_steps=1", "--nproc", "2"]
    pair, _ = runs.train("pair", stages)
    assert rows_of_steps(pair) == ROWS[:12]
    run = killed_and_resumed(runs, stages, tmp_path / "hold")
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
