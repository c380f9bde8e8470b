"""Whole runs over growing caches, changing mixtures, stages and parts: interrupted anywhere they end as the straight
run does, replay bit-exactly, and say aloud what changed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vorox.run
from numpy_engine import NumpyEngine, NumpyResult
from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.core.errors import ConfigError, DataError, Preempted
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.corpus import cache_opener
from vorox.data.corpus.corpus import prepare
from vorox.data.order.plan import DataPlan
from vorox.data.provenance.queries import RunDataIndex, when
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.run import Outcome
from vorox.training.replay import ReplayReport, replay
from vorox.training.steps.workload import Workload

STRICT = ["data.growth.mode=strict", "data.growth.horizon_steps=2", "train.num_steps=30"]
ELASTIC = ["data.growth.mode=elastic", "data.growth.horizon_steps=2", "train.num_steps=30"]


class Killed(BaseException):
    """Ends a run in the middle, as far as that is possible without ending the process."""


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


class NoBackgroundBuild:
    """Builds nothing: the cache stays as it is until somebody else goes on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        del arguments, options

    is_running = False

    def check(self) -> None: ...

    def close(self) -> None: ...


def without_builder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_opener, "build_in_background", NoBackgroundBuild)


def at_step(patch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Do something in the middle of a step (from 1), once."""
    original, done = NumpyEngine.train_step, []

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
        if batch.step + 1 == step and not done:
            done.append(step)
            action()
        return original(self, batch, **kwargs)

    patch.setattr(NumpyEngine, "train_step", train_step)


def watched(patch: pytest.MonkeyPatch) -> dict[int, str]:
    """The digest of every batch that is trained on, by step (from 1)."""
    original, seen = NumpyEngine.train_step, dict[int, str]()

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
        seen[batch.step + 1] = batch.digest()
        return original(self, batch, **kwargs)

    patch.setattr(NumpyEngine, "train_step", train_step)
    return seen


def kill() -> None:
    raise Killed


def killed_at(config: RunConfig, step: int, **arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config, **arguments)


def result(outcome: Outcome) -> tuple[Any, ...]:
    """Bits of the run: its chain, its final state, its validation losses."""
    chain = [entry.chain for entry in read_chain(outcome.run_directory).values()]
    return chain, outcome.fingerprint, outcome.eval_losses


def batches(directory: Path) -> dict[int, str]:
    return {step: entry.batch for step, entry in read_chain(directory).items()}


def replayed(directory: Path, first_step: int = 0, last_step: int | None = None) -> ReplayReport:
    def make(config: RunConfig) -> Workload:
        kept = directory / "tokenizer"
        log = RunLog(None)
        return vorox.run.make_workload(config, DistributedContext(), log, None, build=False, tokenizer_directory=kept)

    return replay(directory, make, first_step=first_step, last_step=last_step)


def events(directory: Path, kind: str) -> list[str]:
    return [event["message"] for event in read_lines(directory / "events.jsonl") if event["kind"] == kind]


def only_run(directory: Path) -> Path:
    (found,) = (directory / "runs").iterdir()
    return found


# Growing caches


def test_a_run_over_a_growing_cache_is_the_run_over_the_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = configuration(tmp_path / "complete", STRICT)
    prepare(configuration(tmp_path / "complete"))
    slow = configuration(tmp_path / "slow", STRICT)
    with monkeypatch.context() as patch:
        without_builder(patch)
        corpus = prepare(slow)
        assert len(corpus.train[0].missing_units(0, 6)) == 5
        others = threading.Timer(0.2, lambda: prepare(configuration(tmp_path / "slow")))
        others.start()  # another process that builds, for the run
        growing = run(slow)
        others.join()
    straight = run(complete)
    assert result(growing) == result(straight)
    assert len(events(growing.run_directory, "segment")) >= 2
    assert replayed(growing.run_directory).is_exact
    assert replayed(growing.run_directory, 8, 24).is_exact


@pytest.mark.parametrize("mode", [STRICT, ELASTIC])
def test_the_background_of_the_run_builds_for_it(tmp_path: Path, mode: Sequence[str]) -> None:
    outcome = run(configuration(tmp_path, mode))
    assert outcome.progress.step == 30
    report = replayed(outcome.run_directory)
    assert (report.is_exact, report.num_steps) == (True, 30)
    plan = DataPlan.open(outcome.run_directory / "plan.jsonl")
    assert plan.start.growth is not None
    assert len(plan.segments[0]) >= 2


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 30), min_size=2, max_size=2), st.sampled_from([STRICT, ELASTIC, []]))
def test_twice_interrupted_at_any_step_is_not_interrupted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], mode: list[str]
) -> None:
    """In elastic mode, what one run has recorded decides: the straight run is over a cache that was complete."""
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        directory = tmp_path_factory.mktemp("runs")
        mode = [*mode, "train.num_steps=30"]
        prepare(configuration(directory))
        config = configuration(directory, mode)
        for step in sorted(steps):
            killed_at(config, step)
        interrupted = run(config)
        straight = run(configuration(directory, [*mode, "run.name=straight"]))
        assert result(interrupted) == result(straight)
        assert replayed(interrupted.run_directory).is_exact


def test_what_was_recorded_is_replayed_whatever_is_there_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind events that no checkpoint knows of; by the resume, everything is built."""
    config = configuration(tmp_path, [*ELASTIC, "checkpoint.every_steps=20"])
    with monkeypatch.context() as patch:
        without_builder(patch)
        recorded = watched(patch)
        killed_at(config, 19)
    assert len(recorded) == 18
    plan_before = (only_run(tmp_path) / "plan.jsonl").read_bytes()
    prepare(configuration(tmp_path))
    outcome = run(config)
    after = batches(outcome.run_directory)
    assert {step: after[step] for step in recorded} == recorded
    assert (outcome.run_directory / "plan.jsonl").read_bytes().startswith(plan_before)
    assert replayed(outcome.run_directory).is_exact


def test_starving_stops_saves_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, [*STRICT, "data.growth.on_starve=stop"])
    with monkeypatch.context() as patch:
        without_builder(patch)
        with pytest.raises(Preempted, match=r"Stopped after step 21 of 30: Step 22 has no rows yet") as stopped:
            run(config)
        assert "step-00000021" in stopped.value.saved
        with pytest.raises(Preempted, match="Stopped after step 21 of 30"):
            run(config)
    prepare(configuration(tmp_path))
    outcome = run(config)
    straight = run(configuration(tmp_path, [*STRICT, "data.growth.on_starve=stop", "run.name=straight"]))
    assert result(outcome) == result(straight)


def test_a_signal_ends_a_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, STRICT)
    without_builder(monkeypatch)
    at_step(monkeypatch, 21, lambda: threading.Timer(0.2, lambda: os.kill(os.getpid(), 15)).start())
    with pytest.raises(Preempted, match=r"SIGTERM: stopped after step 21 of 30"):
        run(config)


# Length and warm-up


def test_epochs_of_a_part_of_the_dataset(tmp_path: Path) -> None:
    whole = run(configuration(tmp_path, ["train.num_epochs=1"]))
    part = run(configuration(tmp_path, ["train.target_epochs=2", "train.epoch_dataset_fraction=0.4", "run.name=part"]))
    rows = sum(s.num_rows for s in DataPlan.open(whole.run_directory / "plan.jsonl").segments[0])
    assert whole.progress.step == -(-rows // 4)
    assert part.progress.step == -(-8 * rows // 40)
    assert batches(part.run_directory) == {
        step: batch for step, batch in batches(whole.run_directory).items() if step <= part.progress.step
    }


@pytest.mark.parametrize("follow", [False, True])
def test_a_cache_that_grew_between_two_attempts(tmp_path: Path, follow: bool) -> None:
    """Later passes use the new rows; the length is logged, and follows only if configured."""
    extra = [
        "train.num_epochs=2",
        "data.cache.grow=true",
        "data.validation.held_out_fraction=0",
        "eval.every_steps=null",
    ]
    config = configuration(tmp_path, [*extra, f"train.follow_growth={str(follow).lower()}"])
    killed_at(config, 50)
    directory = only_run(tmp_path)
    rows = DataPlan.open(directory / "plan.jsonl").segments[0][0].num_rows
    (tmp_path / "text" / "zmore.jsonl").write_bytes((write_text(tmp_path / "x", seed=5) / "text.jsonl").read_bytes())
    outcome = run(config)
    plan = DataPlan.open(directory / "plan.jsonl")
    assert [segment.num_epochs for segment in plan.segments[0]] == [1, 2 if follow else 1]
    assert plan.segments[0][1].num_rows > rows + 50
    assert events(directory, "cache_grown") == ["Source 'text' grew: used from pass 2 on"]
    begun, grown = -(-2 * rows // 4), -(-2 * plan.segments[0][1].num_rows // 4)
    assert outcome.progress.step == (grown if follow else begun)
    (said,) = events(directory, "dataset_grew")
    assert f"would be {grown:,} steps; the run started with {begun:,}" in said
    assert ("is extended" in said) == follow
    assert [known.total_steps for known in plan.state.horizons] == [begun, grown][: 1 + follow]
    report = replayed(directory)
    assert (report.is_exact, report.num_steps) == (True, outcome.progress.step)


def test_new_files_that_the_last_pass_does_not_reach_are_named(tmp_path: Path) -> None:
    extra = ["train.num_steps=20", "data.cache.grow=true", "data.validation.held_out_fraction=0"]
    config = configuration(tmp_path, [*extra, "eval.every_steps=null"])
    killed_at(config, 5)
    (tmp_path / "text" / "zmore.jsonl").write_bytes((write_text(tmp_path / "x", seed=5) / "text.jsonl").read_bytes())
    outcome = run(config)
    (said,) = events(only_run(tmp_path), "cache_grown")
    assert said == (
        "Source 'text' grew, but the run ends before a pass that would read the new files; a larger train.num_steps or "
        "train.num_epochs reaches them"
    )
    longer = configuration(tmp_path, [*extra[1:], "eval.every_steps=null", "train.num_steps=200"])
    resumed = run(longer, resume_from=only_run(tmp_path))
    assert (outcome.progress.step, resumed.progress.step) == (20, 200)
    plan = DataPlan.open(only_run(tmp_path) / "plan.jsonl")
    assert len(plan.segments[0]) == 2
    assert plan.segments[0][-1].num_rows > plan.segments[0][0].num_rows, "the second pass reads them"


@pytest.mark.slow
def test_new_files_that_come_after_the_passes_that_are_planned_are_named(tmp_path: Path) -> None:
    """Later passes of a ``strict`` run are planned together, as far as ``horizon_steps`` ahead."""
    strict = ["data.growth.mode=strict", "data.growth.horizon_steps=300", "data.cache.grow=true"]
    extra = [*strict, "data.validation.held_out_fraction=0", "eval.every_steps=null"]
    run(configuration(tmp_path, [*extra, "train.num_steps=400"]))
    directory = only_run(tmp_path)
    (tmp_path / "text" / "zmore.jsonl").write_bytes((write_text(tmp_path / "x", seed=5) / "text.jsonl").read_bytes())
    planned = DataPlan.open(directory / "plan.jsonl").segments[0][-1]
    assert planned.num_epochs > 1
    run(configuration(tmp_path, [*extra, "train.num_steps=1200"]), resume_from=directory)
    (said,) = events(directory, "cache_grown")
    assert said == (
        f"Source 'text' grew: its new files are read from pass {planned.next_epoch + 1} on, after the passes that are "
        "planned already"
    )
    segments = DataPlan.open(directory / "plan.jsonl").segments[0]
    first = next(segment for segment in segments if segment.epoch == planned.next_epoch)
    assert first.num_rows > planned.num_rows


def test_files_that_are_added_during_a_run_join_it_with_the_tokenizer_that_it_trained(tmp_path: Path) -> None:
    """A tokenizer that is trained on all files would build another cache, which the run never reads."""
    trained = ["tokenizer.kind=bpe", "tokenizer.vocab_size=300", "data.cache.grow=true"]
    config = configuration(tmp_path, [*ELASTIC, *trained, "train.num_steps=200"])
    caches = tmp_path / "cache"

    def grow() -> None:
        words = ["zebra", "giraffe", "lion"]
        lines = [json.dumps({"text": f"{index} " + " ".join(words * 9)}) for index in range(60)]
        (tmp_path / "text" / "zmore.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        prepare(config, options=BuildOptions(wait_for="complete")).close()

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 8, grow)
        outcome = run(config)
    assert len([*caches.glob("text-train-*")]) == len([*caches.glob("tokenizers/*")]) == 1
    with RunDataIndex.open(outcome.run_directory) as run_data:
        steps = [found.step for found in when(run_data, "zmore.jsonl")]
    assert steps
    assert min(steps) > 8


def test_a_validation_set_that_grew_between_two_attempts_is_reported(tmp_path: Path) -> None:
    config = configuration(tmp_path, ["data.cache.grow=true"])
    killed_at(config, 9)
    killed_at(config, 10)
    directory = only_run(tmp_path)
    assert not events(directory, "validation_set_changed")
    added = write_text(tmp_path / "x", seed=5) / "text.jsonl"
    added.rename(tmp_path / "text" / "zmore.jsonl")
    run(config)
    (said,) = events(directory, "validation_set_changed")
    assert "earlier validation losses are not comparable" in said


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_added_files_are_left_alone_unless_the_run_grows(tmp_path: Path, num_epochs: int) -> None:
    """The rest of the run is that of a twin in whose folder nothing happened."""
    write_text(tmp_path / "text", documents=300)
    config = configuration(tmp_path, ["train.num_steps=null", f"train.num_epochs={num_epochs}"])
    killed_at(config, 6)
    directory = only_run(tmp_path)
    before = (directory / "plan.jsonl").read_bytes()
    added = write_text(tmp_path / "x", seed=5) / "text.jsonl"
    added.rename(tmp_path / "text" / "zmore.jsonl")
    ended = run(config, resume_from=directory)
    assert ended.start_step == 4
    assert any("data.cache.grow=true" in text for text in events(directory, "source_added_files"))
    assert (directory / "plan.jsonl").read_bytes() == before
    write_text(tmp_path / "twin" / "text", documents=300)
    overrides = ["train.num_steps=null", f"train.num_epochs={num_epochs}"]
    assert result(ended) == result(run(configuration(tmp_path / "twin", overrides)))


def test_warm_up_comes_from_the_full_dataset_and_a_small_cache_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_builder(monkeypatch)
    overrides = [*STRICT, "train.num_steps=12", "schedule.warmup_steps=null", "schedule.warmup_fraction=0.3"]
    outcome = run(configuration(tmp_path, overrides))
    (estimate,) = events(outcome.run_directory, "dataset_estimate")
    assert "Full dataset: about" in estimate
    assert "error unknown: one unit measured" in estimate
    state = json.loads((outcome.run_directory / "checkpoints" / "step-00000012" / "state.json").read_bytes())
    horizon = state["horizon"]
    assert horizon["warmup_steps"] == -(-3 * horizon["dataset_tokens"] // (10 * 64))
    warnings = events(outcome.run_directory, "long_warmup")
    assert any("is computed from the full dataset of about" in text for text in warnings)


# Mixtures


def two_sources(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    for number, name in enumerate(("one", "two", "three")):
        if not (directory / name).exists():
            write_text(directory / name, seed=number)
    sources = [{"name": name, "format": "jsonl", "paths": [str(directory / name)]} for name in ("one", "two")]
    kept = "checkpoint.keep_last=9"  # to replay from
    return configuration(directory, [f"data.sources={json.dumps(sources)}", kept, *overrides])


def test_a_mixture_changed_at_resume_is_recorded_and_said(tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        before = watched(patch)
        killed_at(config, 7)
    directory = only_run(tmp_path)
    changed = two_sources(tmp_path, ["data.sources.0.weight=3"])
    killed_at(changed, 11, resume_from=directory)
    outcome = run(changed, resume_from=directory)
    assert outcome.progress.step == 12
    after = batches(directory)
    assert {step: after[step] for step in range(1, 5)} == {step: before[step] for step in range(1, 5)}
    assert any(after[step] != before[step] for step in (5, 6))
    said = events(directory, "mixture")
    assert said == [
        "one: 50.0% -> 75.0%; goes on after 8 rows, nothing repeats or is skipped",
        "two: 50.0% -> 25.0%; goes on after 8 rows, nothing repeats or is skipped",
    ]
    plan = DataPlan.open(directory / "plan.jsonl")
    assert [stage.start_position for stage in plan.stages] == [0, 16]
    assert replayed(directory, 0, 4).is_exact
    assert replayed(directory, 4).is_exact
    straight = two_sources(tmp_path, ["run.name=straight"])
    killed_at(straight, 7)
    (other,) = (path for path in (tmp_path / "runs").iterdir() if path != directory)
    again = run(two_sources(tmp_path, ["run.name=straight", "data.sources.0.weight=3"]), resume_from=other)
    assert batches(again.run_directory) == after


def test_a_changed_mixture_keeps_the_tokenizer_that_was_trained_on_the_old_one(tmp_path: Path) -> None:
    bpe = ["tokenizer.kind=bpe", "tokenizer.vocab_size=300"]
    config = two_sources(tmp_path, bpe)
    killed_at(config, 7)
    directory = only_run(tmp_path)
    kept = (directory / "tokenizer" / "tokenizer.json").read_bytes()
    outcome = run(two_sources(tmp_path, [*bpe, "data.sources.0.weight=9"]), resume_from=directory)
    assert outcome.progress.step == 12
    assert (directory / "tokenizer" / "tokenizer.json").read_bytes() == kept
    assert len(events(directory, "mixture")) == 2
    assert replayed(directory, 4).is_exact


def test_a_replay_does_not_run_earlier_steps_under_a_later_configuration(tmp_path: Path) -> None:
    config = two_sources(tmp_path, ["checkpoint.keep_last=1"])
    killed_at(config, 7)
    directory = only_run(tmp_path)
    run(two_sources(tmp_path, ["checkpoint.keep_last=1", "data.sources.0.weight=3"]), resume_from=directory)
    report = replayed(directory, 5)
    assert (report.start_step, report.is_exact, report.num_steps) == (0, True, 12)
    assert replayed(directory, 0, 4).is_exact


def test_a_source_taken_out_and_another_put_in_at_resume(tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    killed_at(config, 7)
    directory = only_run(tmp_path)
    sources = [{"name": n, "format": "jsonl", "paths": [str(tmp_path / n)]} for n in ("three", "one")]
    changed = two_sources(tmp_path, [f"data.sources={json.dumps(sources)}"])
    outcome = run(changed, resume_from=directory)
    plan = DataPlan.open(directory / "plan.jsonl")
    assert [source.name for source in plan.sources] == ["one", "two", "three"]
    said = events(directory, "mixture")
    assert any(text.startswith("two: 50.0% -> no longer drawn; ") and "are skipped" in text for text in said)
    assert "three: not drawn before -> 50.0%, from its first row" in said
    killed = outcome.progress.step
    assert run(changed, resume_from=directory).progress.step == killed
    assert replayed(directory, 4).is_exact
    assert replayed(directory, 0, 4).is_exact


def test_other_text_under_the_same_name_is_refused_at_resume(tmp_path: Path) -> None:
    killed_at(two_sources(tmp_path), 7)
    sources = [{"name": n, "format": "jsonl", "paths": [str(tmp_path / "three")]} for n in ("one", "two")]
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.paths"):
        run(two_sources(tmp_path, [f"data.sources={json.dumps(sources)}"]), resume_from=only_run(tmp_path))


def test_stages_of_mixture_and_row_length(tmp_path: Path) -> None:
    stages = [
        {"start_tokens": 0, "sequence_length_tokens": 4, "weights": {"one": 1}},
        {"start_tokens": 200, "sequence_length_tokens": 8},
        {"start_tokens": 400, "weights": {"one": "1/3", "two": "2/3"}},
    ]
    config = two_sources(tmp_path, [f"data.stages={json.dumps(stages)}"])
    shapes: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        original = NumpyEngine.train_step

        def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
            shapes.append(batch.tokens_ABT.shape)
            return original(self, batch, **kwargs)

        patch.setattr(NumpyEngine, "train_step", train_step)
        straight = run(config)
    assert shapes == [(2, 8, 4)] * 4 + [(2, 4, 8)] * 3 + [(2, 2, 16)] * 5
    assert straight.progress.num_tokens == 12 * 64
    plan = DataPlan.open(straight.run_directory / "plan.jsonl")
    assert [stage.start_position for stage in plan.stages] == [0, 16, 28]
    assert events(straight.run_directory, "mixture") == []
    interrupted = two_sources(tmp_path, [f"data.stages={json.dumps(stages)}", "run.name=other"])
    for step in (3, 6, 10):
        killed_at(interrupted, step)
    assert result(run(interrupted)) == result(straight)
    assert replayed(straight.run_directory).is_exact


def test_a_curriculum_by_difficulty(tmp_path: Path) -> None:
    stages = [{"start_tokens": 0, "weights": {"text.easy": 1}}, {"start_tokens": 300, "weights": {"text.hard": 1}}]
    overrides = ["data.sources.0.split_by=tokens_per_document", f"data.stages={json.dumps(stages)}"]
    config = configuration(tmp_path, overrides)
    killed_at(config, 9)
    outcome = run(config)
    plan = DataPlan.open(outcome.run_directory / "plan.jsonl")
    assert [source.name for source in plan.sources] == ["text.easy", "text.hard"]
    sources = plan.state.mixture.locate(np.arange(48))[0].tolist()
    assert sources == [0] * 20 + [1] * 28
    assert replayed(outcome.run_directory).is_exact


def test_a_source_that_is_used_up_is_dropped_aloud(tmp_path: Path) -> None:
    few = [
        "train.num_steps=40",
        "data.sources.1.max_epochs=1",
        "data.sources.1.max_bytes=700",
    ]
    write_text(tmp_path / "two", documents=4, seed=1)
    outcome = run(two_sources(tmp_path, [*few, "data.sources.1.on_exhausted=drop"]))
    (said,) = events(outcome.run_directory, "mixture")
    assert said.startswith("source 'two' is used up after 1 pass and no longer drawn from step ")
    assert replayed(outcome.run_directory).is_exact
    with pytest.raises(DataError, match="Source 'two' is exhausted at step"):
        run(two_sources(tmp_path, [*few, "run.name=other"]))


@pytest.mark.parametrize("mode", [STRICT, ELASTIC])
def test_everything_at_once(tmp_path: Path, mode: list[str]) -> None:
    """A growing cache divided by difficulty, stages of mixture and row length, and weights changed at a resume."""
    stages = [
        {"start_tokens": 0, "weights": {"one.easy": 1, "two": 1}, "sequence_length_tokens": 8},
        {"start_tokens": 600, "weights": {"one": 3, "two": 1}},
    ]
    split = [
        "data.sources.0.split_by=tokens_per_document",
        "data.cache.chunk_rows=4",
        "data.growth.first_segment_units=2",
    ]
    overrides = [*mode, *(split if mode == STRICT else split[:2]), f"data.stages={json.dumps(stages)}"]
    config = two_sources(tmp_path, overrides)
    killed_at(config, 11)
    directory = only_run(tmp_path)
    stages[1]["weights"] = {"one.hard": "1/2", "two": "1/2"}
    changed = two_sources(tmp_path, [*overrides[:-1], f"data.stages={json.dumps(stages)}"])
    killed_at(changed, 23, resume_from=directory)
    outcome = run(changed, resume_from=directory)
    assert outcome.progress.step == 30
    plan = DataPlan.open(directory / "plan.jsonl")
    assert [source.name for source in plan.sources] == ["one.easy", "one.hard", "two"]
    drawn = plan.state.mixture.locate(np.arange(120))[0].tolist()
    assert drawn[:40].count(0) == drawn[:40].count(2) == 20
    assert drawn[40:].count(1) == drawn[40:].count(2) == 40
    assert replayed(directory, 0, 8).is_exact
    assert replayed(directory, 8).is_exact
