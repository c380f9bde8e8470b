"""The batch size by stage, against a list with one entry per row; contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_runs
from vorox.core.batch_sizes import BatchSizes, BatchStage, batch_sizes_of
from vorox.core.config import config_digest
from vorox.core.errors import ConfigError

STAGES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=4)


@settings(deadline=None)
@given(st.integers(1, 9), STAGES)
def test_steps_and_positions_are_those_of_a_list_of_rows(rows: int, given_stages: list[tuple[int, int]]) -> None:
    stages, start = list[BatchStage](), 0
    for steps, size in given_stages:
        start += steps
        stages.append(BatchStage(start, size))
    size_of = [next((s.rows for s in reversed(stages) if s.start_step <= step), rows) for step in range(40)]
    step_of = [step for step, size in enumerate(size_of) for _ in range(size)]
    sizes = BatchSizes(rows, stages)
    for step, size in enumerate(size_of):
        assert sizes.rows_of(step) == size
        assert sizes.position_of(step) == step_of.index(step)
    for position, step in enumerate(step_of):
        assert sizes.step_at(position) == step
        assert sizes.floor(position) == step_of.index(step)
        assert sizes.is_start(position) == (position == step_of.index(step))
        assert sizes.num_steps(position) == len({*step_of[:position]})
    starts = [step_of.index(step) for step in range(40)]
    parts = [start for first, end, each in sizes.parts(0, len(step_of)) for start in range(first, end, each)]
    assert parts == starts
    assert sizes.largest == max([rows, *(stage.rows for stage in stages)])


def configured(directory: Path, stages: list[dict[str, Any]], *overrides: str) -> Any:
    return tiny_runs.configuration(directory, [f"train.batch_stages={json.dumps(stages)}", *overrides])


def test_stages_start_at_steps_or_tokens(tmp_path: Path) -> None:
    stages = [
        {"start_step": 5, "global_batch_sequences": 8},
        {"start_tokens": (4 * 4 + 2 * 8) * 16 + 1, "global_batch_sequences": 6},
    ]
    found = batch_sizes_of(configured(tmp_path, stages))
    assert found.stages == (BatchStage(0, 4), BatchStage(4, 8), BatchStage(7, 6)), "rounded up to whole steps"


def test_the_digest_without_stages_is_that_of_earlier_versions(tmp_path: Path) -> None:
    plain = config_digest(tiny_runs.configuration(tmp_path))
    assert config_digest(configured(tmp_path, [])) == plain
    assert config_digest(configured(tmp_path, [{"start_step": 5, "global_batch_sequences": 8}])) != plain


@pytest.mark.parametrize(
    ("stages", "overrides", "message"),
    [
        ([{"start_step": 5, "global_batch_sequences": 7}], [], r"0\.global_batch_sequences=7 is not a mult"),
        ([{"global_batch_sequences": 8}], [], "needs exactly one start"),
        ([{"start_step": 5, "start_tokens": 9, "global_batch_sequences": 8}], [], "needs exactly one start"),
        (
            [{"start_step": n, "global_batch_sequences": 8} for n in (5, 4)],
            [],
            r"batch_stages\.1 starts at step 4, which is not after the start of the previous stage, step 5",
        ),
        ([{"start_step": 1, "global_batch_sequences": 8}], [], "start_step"),
        ([{"start_step": 5, "global_batch_sequences": 8}], ["parallel.kind=deepspeed"], "not supported with"),
        (
            [{"start_step": 5, "global_batch_sequences": 2}],
            ["parallel.pipeline_parallel_size=2", "model.num_layers=2"],
            "1 micro-batch of 2 rows, but parallel.pipeline_parallel_size=2",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(
    stages: list[dict[str, Any]], overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, stages, *overrides)
