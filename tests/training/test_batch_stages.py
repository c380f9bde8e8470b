"""Runs whose batch size grows by stage: rows against an independent recomputation, steps against a plain loop, kill and
resume across a boundary, growing caches, replay, provenance, both engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
import vorox.run
from tiny_runs import configuration, result, run
from vorox.cli.planning.dry_run import RunPreview
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.dashboard.pages.chart_marks import chart_marks
from vorox.data.permutation import permutation_key, permute
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

STAGES = [{"start_step": 5, "global_batch_sequences": 8}, {"start_tokens": 1000, "global_batch_sequences": 6}]
SIZES = [4] * 4 + [8] * 6 + [6] * 2
"""Rows of the 12 steps: 4 * 4 * 16 = 256 tokens, then 8 * 16 per step; 1,000 are reached within step 10."""
BATCHES = [f"train.batch_stages={json.dumps(STAGES)}", "log.every_steps=1"]


@pytest.fixture
def numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        return run(configuration(tmp_path_factory.mktemp("straight"), BATCHES))


def replayed(directory: Path, first_step: int = 0) -> Any:
    def make(config: RunConfig) -> Workload:
        return vorox.run.make_workload(
            config, DistributedContext(), RunLog(None), None, build=False, tokenizer_directory=directory / "tokenizer"
        )

    return replay(directory, make, first_step=first_step)


def test_the_rows_of_every_step_equal_an_independent_recomputation(straight: Any) -> None:
    """One source: draws follow each other through whole epochs; the slots of a step are permuted by its number."""
    with RunDataIndex.open(straight.run_directory) as index:
        (segments,) = index.plan.segments
        seed, num_rows = index.plan.start.seed, segments[0].num_rows
        rows_key = permutation_key(seed, "rows", "text", segments[0].ranges[0].start, segments[0].ranges[0].end,
                                   segments[0].content_digest)  # fmt: skip
        before, known = 0, set[int]()
        for step, size in enumerate(SIZES):
            slots = permute(np.arange(size), size, permutation_key(seed, "slots"), step)
            epochs, offsets = np.divmod(before + slots, num_rows)
            wanted = permute(offsets, num_rows, rows_key, epochs)
            positions = index.positions_of_step(step + 1)
            assert list(positions) == list(range(before, before + size))
            found = index.plan.locate(np.arange(positions.start, positions.stop))
            assert found.row.tolist() == wanted.tolist()
            assert [index.step_and_slot(position) for position in positions] == [(step + 1, s) for s in range(size)]
            before, known = before + size, {*known, *positions}
        assert index.num_steps == 12 + (num_rows - before) // 6, "the plan covers a whole pass"
        assert len(known) == sum(SIZES) == straight.progress.cursor.position


def test_tokens_marks_and_provenance_follow_the_schedule(straight: Any) -> None:
    directory = straight.run_directory
    tokens = [values["tokens_total"] for _, values in sorted(read_metrics(directory).items())]
    assert tokens == (np.cumsum(SIZES) * 16).tolist()
    run_files = vorox.open_run(directory)
    assert [len(run_files.where(step)) for step in (4, 5, 10, 11)] == [4, 8, 8, 6]
    assert [batch.tokens_ABT.shape for batch in run_files.batches(4, 2)] == [(2, 2, 16), (4, 2, 16)]
    steps = [mark["step"] for mark in chart_marks(directory, []) if mark["label"] == "batch size change"]
    assert steps == [5, 11]
    with RunDataIndex.open(directory) as index:
        (uses,) = index.row_uses(np.arange(1, 13))
        assert uses.sum() == sum(SIZES)


@pytest.mark.parametrize("step", [4, 5, 6, 11])
@pytest.mark.usefixtures("numpy_engine")
def test_killed_at_a_boundary_and_resumed(
    step: int, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, BATCHES)
    tiny_runs.at_step(monkeypatch, step, tiny_runs.kill)
    with pytest.raises(tiny_runs.Killed):
        run(config)
    assert result(run(config)) == result(straight)


@pytest.mark.usefixtures("numpy_engine")
def test_replay_and_a_changed_schedule(straight: Any) -> None:
    directory = straight.run_directory
    assert replayed(directory).is_exact
    assert replayed(directory, 8).is_exact
    changed = configuration(directory.parent.parent, ["train.num_steps=14", "log.every_steps=1"])
    with pytest.raises(ConfigError, match="batch_stages"):
        run(changed, resume_from=directory)
    longer = run(configuration(directory.parent.parent, [*BATCHES, "train.num_steps=14"]), resume_from=directory)
    assert longer.progress.cursor.position == sum(SIZES) + 2 * 6


@pytest.mark.usefixtures("numpy_engine")
def test_a_growing_cache_and_longer_rows_keep_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 8 positions until 600 tokens; the mixture stage starts at a whole step."""
    growing = [*BATCHES, "data.growth.mode=strict", "data.growth.horizon_steps=2"]
    growing += [f"data.stages={json.dumps([{'start_tokens': 0, 'sequence_length_tokens': 8}, {'start_tokens': 600}])}"]
    whole = run(configuration(tmp_path / "whole", growing))
    assert whole.progress.num_tokens == sum(SIZES) * 16
    with RunDataIndex.open(whole.run_directory) as index:
        assert [stage.start_position for stage in index.plan.stages] == [0, 4 * 4 + 3 * 8]
    config = configuration(tmp_path / "killed", growing)
    tiny_runs.at_step(monkeypatch, 7, tiny_runs.kill)
    with pytest.raises(tiny_runs.Killed):
        run(config)
    assert result(run(config)) == result(whole)
    assert replayed(whole.run_directory, 4).is_exact


@pytest.mark.usefixtures("numpy_engine")
@pytest.mark.parametrize(
    ("length", "steps"), [("train.num_tokens=1024", 10), ("train.num_tokens=1025", 11), ("train.num_epochs=0.25", None)]
)
def test_lengths_are_converted_with_the_schedule(length: str, steps: int | None, tmp_path: Path) -> None:
    outcome = run(configuration(tmp_path, [*BATCHES, "train.num_steps=null", length]))
    if steps is not None:
        assert outcome.progress.step == steps
        return
    with RunDataIndex.open(outcome.run_directory) as index:
        rows = 0.25 * index.readers[0].num_rows
    step = outcome.progress.step
    assert sum([*SIZES, *[6] * 99][: step - 1]) < rows <= sum([*SIZES, *[6] * 99][:step])


def test_a_dry_run_names_the_stages(tmp_path: Path) -> None:
    lines = "\n".join(RunPreview(configuration(tmp_path, BATCHES), "auto").lines())
    assert "from step 5: 8 rows per step" in lines
    assert f"12 steps, {sum(SIZES) * 16:,} tokens" in lines or f"12 steps, {sum(SIZES) * 16 / 1000:.2f}" in lines, lines


PLAIN: Sequence[str] = [
    "data.document_mask=false", "schedule.name=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0",
    "optimizer.clip_norm=null", "train.num_steps=20", "log.matmul_peak=false", "checkpoint.every_steps=20",
]  # fmt: skip


@pytest.mark.torch
def test_twenty_steps_equal_a_plain_loop_with_changing_batches(tmp_path: Path) -> None:
    import torch
    from torch.nn import functional as F

    config = configuration(tmp_path, [*BATCHES, *PLAIN])
    directory = run(config).run_directory
    opened, model = vorox.open_run(directory), vorox.create_model(config)
    parameters = list(model.module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=config.optimizer.lr, betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps, weight_decay=0.0,
    )  # fmt: skip
    recorded, sizes = read_metrics(directory), list[int]()
    for step in range(1, 21):
        (batch,) = opened.batches(step, 1)
        tokens_BT, labels_BT = (a.reshape(-1, 16) for a in (batch.tokens_ABT, batch.labels_ABT))
        sizes.append(len(tokens_BT))
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model.forward(tokens_BT).flatten(0, 1), torch.from_numpy(labels_BT).flatten().long())
        loss.backward()
        optimizer.step()
        assert recorded[step]["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert sizes == SIZES + [6] * 8


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.jax
def test_both_engines_train_on_the_same_batches(tmp_path: Path) -> None:
    first = run(configuration(tmp_path, ["train.num_steps=1", "log.matmul_peak=false", "run.name=first"]))
    losses = dict[str, list[float]]()
    chains = dict[str, list[str]]()
    for backend in ("torch", "jax"):
        settings = [
            *BATCHES, f"backend={backend}", f"run.name={backend}", "log.matmul_peak=false",
            f"train.from_weights={first.run_directory}", "runtime.num_threads=null",
        ]  # fmt: skip
        directory = run(configuration(tmp_path, settings)).run_directory
        losses[backend] = [values["loss"] for _, values in sorted(read_metrics(directory).items())]
        chains[backend] = [entry.batch for entry in read_chain(directory).values()]
    assert losses["jax"] == pytest.approx(losses["torch"], abs=1e-5)
    assert chains["jax"] == chains["torch"]
