"""Masked documents (the plan's event ``mask``): a run trains as if a filler of equal length stood in their place."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox.run
from numpy_engine import NumpyEngine
from vorox.cli import main
from vorox.core.batch import IGNORED_LABEL, Batch
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MaskedDocument, MaskEvent
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.provenance.training_content import training_content
from vorox.data.rows import RowBlock
from vorox.experiments.metadata import MetadataCache
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.training.replay import replay
from vorox.training.reports.document_search import finding_of
from vorox.training.reports.metadata_database import refresh_database

END_OF_TEXT = 256
KEPT = 4
"""The checkpoint from which the documents are masked."""
BASE = ["data.validation.held_out_fraction=0", "eval.every_steps=null", "checkpoint.keep_last=9"]
SETTINGS: dict[str, list[str]] = {
    "packed": [],
    "concatenated": ["data.packing=concat", "data.shuffle=false"],
    "pieces": [
        'data.stages=[{"start_tokens":0,"sequence_length_tokens":16},{"start_tokens":256,"sequence_length_tokens":8}]'
    ],
    "buckets": ["data.sources.0.split_by=tokens_per_document", "data.sources.0.split_quantiles=[0.5]"],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=24000"],
}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


@dataclass
class Trained:
    """A run, and the batches that its engine got, by step."""

    directory: Path
    batches: dict[int, Batch]

    @property
    def chain(self) -> list[str]:
        return [entry.chain for entry in read_chain(self.directory).values()]


def train(config: RunConfig, checkpoint: Path | None = None) -> Trained:
    batches: dict[int, Batch] = {}
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Batch, **arguments: Any) -> Any:
        batches[batch.step + 1] = batch
        return original(self, batch, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyEngine, "train_step", train_step)
        return Trained(tiny_runs.run(config, resume_from=checkpoint).run_directory, batches)


def named(run_directory: Path, *ordinals: int) -> tuple[MaskedDocument, ...]:
    with RunDataIndex.open(run_directory) as run_data:
        (file,) = run_data.readers[0].files
        return tuple(MaskedDocument("text", file.version, ordinal) for ordinal in ordinals)


def mask(run_directory: Path, *ordinals: int, step: int = KEPT) -> None:
    plan = DataPlan.open(RunLayout(run_directory).plan)
    position = plan.start.batch_sizes.position_of(step)
    plan.add([MaskEvent(position, named(run_directory, *ordinals))])


def steps_with(run_directory: Path, ordinal: int, after: int = KEPT) -> list[int]:
    with RunDataIndex.open(run_directory) as run_data:
        found = when(run_data, "text.jsonl", ordinal=ordinal)
    return sorted({one.step for one in found if one.state == "kept" and one.step > after})


def late_documents(run_directory: Path) -> list[int]:
    """Documents that are read after ``KEPT``, the one that is read last at first."""
    first = {ordinal: steps_with(run_directory, ordinal) for ordinal in range(60)}
    return sorted((ordinal for ordinal, steps in first.items() if steps), key=lambda ordinal: -first[ordinal][0])


def replayed(run_directory: Path) -> bool:
    def make(config: RunConfig) -> Any:
        kept = run_directory / "tokenizer"
        return vorox.run.make_workload(
            config, DistributedContext(), RunLog(None), None, build=False, tokenizer_directory=kept
        )

    return replay(run_directory, make).is_exact


def expected(batch: Batch, spans: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a batch in whose rows some spans of tokens are masked; ``spans`` are by stored row."""
    tokens, labels = (
        array.reshape(len(spans), -1).copy() for array in (batch.tokens_ABT, batch.labels_ABT)
    )  # a split row has its pieces in order
    for row, found in enumerate(spans):
        for start, end in found:
            tokens[row, start:end] = END_OF_TEXT
            labels[row, max(start - 1, 0) : end - 1] = IGNORED_LABEL  # token i is the label of position i - 1
    return tokens, labels


@pytest.mark.parametrize("name", SETTINGS)
def test_the_rows_of_a_masked_run_are_those_of_the_run_with_a_filler(tmp_path: Path, name: str) -> None:
    config = tiny_runs.configuration(tmp_path, [*BASE, *SETTINGS[name]])
    plain = train(config)
    with RunDataIndex.open(plain.directory) as run_data:
        rows = {step: where(run_data, step) for step in plain.batches}
    late = late_documents(plain.directory)
    masked_ordinals = late[:2] if name == "streaming" else late[::2]
    mask(plain.directory, *masked_ordinals)
    masked = train(config, RunLayout(plain.directory).checkpoint(KEPT))
    assert set(masked.batches) == set(range(KEPT + 1, 13))
    num_changed = 0
    for step, batch in masked.batches.items():
        spans = [
            [
                (part.row_token, part.row_token + part.num_tokens)
                for part in row.documents if part.ordinal in masked_ordinals
            ]
            for row in rows[step]
        ]  # fmt: skip
        before = plain.batches[step]
        tokens, labels = expected(before, spans)
        assert np.array_equal(batch.tokens_ABT.reshape(tokens.shape), tokens)
        assert np.array_equal(batch.labels_ABT.reshape(labels.shape), labels)
        for array, same in (
            (batch.segment_ids_ABT, before.segment_ids_ABT), (batch.position_ids_ABT, before.position_ids_ABT)
        ):  # fmt: skip
            assert array is not None
            assert same is not None
            assert np.array_equal(array, same)
        assert batch.num_target_tokens == before.num_target_tokens, "the share of other documents stays"
        is_changed = any(spans)
        assert (batch.digest() != before.digest()) == is_changed
        num_changed += is_changed
    assert num_changed > 1
    assert replayed(masked.directory)
    with RunDataIndex.open(masked.directory) as run_data:
        parts = [part for step in range(1, 13) for row in where(run_data, step) for part in row.documents]
        (content,) = training_content(run_data, np.arange(1, 13))
    read = [part for part in parts if not part.is_masked]
    assert content.tokens == sum(part.num_tokens for part in read) < sum(part.num_tokens for part in parts)
    assert content.documents == len({part.ordinal for part in read})


def with_other_text(patch: pytest.MonkeyPatch, ordinal: int) -> None:
    """Let caches return other tokens in the place of a document, as after it was erased."""
    original = CacheReader.read_rows

    def read_rows(self: CacheReader, rows: Any, /) -> RowBlock:
        block = original(self, rows)
        tokens = block.tokens_NC.copy()
        for at, row in enumerate(rows.tolist()):
            end = 0
            for span in self.documents_of(row):
                start, end = end, end + span.length
                if span.ordinal == ordinal:
                    tokens[at, start:end] = (tokens[at, start:end] + 7) % 200
        return replace(block, tokens_NC=tokens)

    patch.setattr(CacheReader, "read_rows", read_rows)


@pytest.mark.parametrize("engine", ["numpy", "torch", pytest.param("jax", marks=[pytest.mark.jax, pytest.mark.slow])])
def test_two_texts_of_equal_length_under_the_mask_give_equal_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    own_engine = {"torch": ["backend=torch"], "jax": ["backend=jax", "runtime.num_threads=null"]}.get(engine, [])
    if own_engine:
        monkeypatch.undo()
    config = tiny_runs.configuration(tmp_path, [*BASE, "model.dropout_fraction=0.1", *own_engine])
    first = tiny_runs.run(config).run_directory
    (ordinal, *_) = late_documents(first)
    checkpoint = RunLayout(first).checkpoint(KEPT)
    results: list[tuple[list[str], str]] = []
    for is_masked, has_other_text in ((False, False), (False, True), (True, False), (True, True)):
        directory = tmp_path / f"{is_masked} {has_other_text}" / "runs"
        directory.mkdir(parents=True)
        copy = Path(shutil.copytree(first, directory / first.name))
        if is_masked:
            mask(copy, ordinal)
        with pytest.MonkeyPatch.context() as patch:
            if has_other_text:
                with_other_text(patch, ordinal)
            own = config.model_copy(update={"run": config.run.model_copy(update={"directory": str(directory)})})
            outcome = tiny_runs.run(own, resume_from=copy / checkpoint.relative_to(first))
        results.append(([entry.chain for entry in read_chain(outcome.run_directory).values()], outcome.fingerprint))
    plain, plain_other, masked, masked_other = results
    assert masked == masked_other
    assert len({plain[1], plain_other[1], masked[1]}) == 3, "the comparison would be trivial"


def test_the_first_difference_is_the_first_step_that_holds_the_document(tmp_path: Path) -> None:
    config = tiny_runs.configuration(tmp_path, BASE)
    plain = train(config)
    before = plain.chain
    (ordinal, *_) = late_documents(plain.directory)
    first_step, *_ = steps_with(plain.directory, ordinal)
    assert first_step > KEPT + 1
    mask(plain.directory, ordinal)
    masked = train(config, RunLayout(plain.directory).checkpoint(KEPT))
    different = [step for step, pair in enumerate(zip(before, masked.chain, strict=True), 1) if pair[0] != pair[1]]
    assert different == list(range(first_step, 13))


def test_an_interrupted_masked_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_runs.configuration(tmp_path, BASE)
    first = train(config).directory
    mask(first, *late_documents(first)[:3])
    whole = tiny_runs.result(tiny_runs.run(config, resume_from=RunLayout(first).checkpoint(KEPT)))
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 10, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config, resume_from=RunLayout(first).checkpoint(KEPT))
    again = tiny_runs.run(config)
    assert again.start_step == 8
    assert tiny_runs.result(again) == whole
    assert replayed(again.run_directory)


def test_queries_tell_masked_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_runs.configuration(tmp_path, BASE)
    first = train(config).directory
    ordinal = next(one for one in reversed(late_documents(first)) if not steps_with(first, one, after=0)[0] <= KEPT)
    steps = steps_with(first, ordinal)
    mask(first, ordinal)
    tiny_runs.run(config, resume_from=RunLayout(first).checkpoint(KEPT))
    with RunDataIndex.open(first) as run_data:
        found = [one for one in when(run_data, "text.jsonl", ordinal=ordinal) if one.state != "beyond"]
        assert {(one.step, one.attempt) for one in found if one.is_masked} == {(step, 2) for step in steps}
        assert {(one.step, one.attempt) for one in found if not one.is_masked} == {(step, 1) for step in steps}
        parts = [part for row in where(run_data, steps[0]) for part in row.documents]
        assert {part.is_masked for part in parts if part.ordinal == ordinal} == {True}
        assert {part.is_masked for part in parts if part.ordinal != ordinal} <= {False}
    refresh_database(first, sample_steps=(1, 12))
    sql = "SELECT DISTINCT step, attempt FROM samples WHERE is_masked = 1 ORDER BY step"
    assert [tuple(row) for row in MetadataCache.query(first / "metadata.sqlite", sql).rows] == [(s, 2) for s in steps]
    assert not finding_of(first, [one for one in found if one.attempt == 2]).checkpoints
    assert main(["data", "where", str(first), "--step", str(steps[0]), "--text"]) == 0
    assert "masked: the run trained on a filler" in " ".join(capsys.readouterr().out.split())


def refused(tmp_path: Path, overrides: Sequence[str] = ()) -> ConfigError:
    """What a run says that is to go on with a masked document."""
    config = tiny_runs.configuration(tmp_path, [*BASE, *overrides])
    first = tiny_runs.run(config).run_directory
    mask(first, late_documents(first)[0])
    with pytest.raises(ConfigError, match="masks documents") as caught:
        tiny_runs.run(config, resume_from=RunLayout(first).checkpoint(KEPT))
    return caught.value


def test_what_leaks_is_refused_by_name(tmp_path: Path) -> None:
    assert refused(tmp_path, ["data.document_mask=false"]).where == "data.document_mask"
