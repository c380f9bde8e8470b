"""A fork goes on from a state of another run: unchanged it computes the same bits, changed it differs from there on."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import tiny_runs
import vorox.run
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import NumericalError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MaskedDocument, MaskEvent
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain, read_states
from vorox.training.audit import audit
from vorox.training.audit_records import open_run
from vorox.training.checkpoints.store import Checkpoint, verify
from vorox.training.fork import ForkChange, fork
from vorox.training.materialize import materialize, open_range
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

EVERY_DOCUMENT = ["data.validation.held_out_fraction=0", "eval.every_steps=null", "checkpoint.keep_last=9"]
CASES: dict[str, list[str]] = {
    "plain": [],
    "stages": ['data.stages=[{"start_tokens":0,"weights":{"text":1}},{"start_tokens":256,"sequence_length_tokens":8}]'],
    "batch sizes": ['train.batch_stages=[{"start_step":5,"global_batch_sequences":8}]'],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=24000"],
    "elastic": ["data.growth.mode=elastic", "data.growth.horizon_steps=2"],
    "unshuffled": ["data.packing=concat", "data.shuffle=false"],
}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def chain(run_directory: Path) -> dict[int, str]:
    return {step: entry.chain for step, entry in read_chain(run_directory).items()}


def state(run_directory: Path, step: int, scratch: Path) -> Checkpoint | None:
    """The state after a step, kept or not."""
    if step == 0:
        return None
    if (kept := step_directories(run_directory).get(step)) is not None:
        return verify(kept)
    (one,) = materialize(open_range(run_directory, [step]), make_workload, [step], scratch, on_step=lambda *_: None)
    return verify(one.path)


def train_on(forked: Path) -> Path:
    """Resume a run with its own configuration, as ``vorox train --resume`` does."""
    outcome = tiny_runs.run(load_config(RunLayout(forked).config), resume_from=forked)
    assert outcome.run_directory == forked
    return forked


def documents(run_directory: Path, *ordinals: int) -> tuple[MaskedDocument, ...]:
    with RunDataIndex.open(run_directory) as run_data:
        (file,) = run_data.readers[0].files
        return tuple(MaskedDocument("text", file.version, ordinal) for ordinal in ordinals)


@pytest.mark.parametrize(("case", "step"), [*((case, 3) for case in CASES), *(("plain", step) for step in (0, 4, 12))])
def test_an_empty_fork_is_its_parent(tmp_path: Path, case: str, step: int) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, CASES[case])).run_directory
    before = {path: path.stat().st_mtime_ns for path in parent.rglob("*") if path.is_file() and path.suffix != ".pin"}
    forked = fork(parent, step, state(parent, step, tmp_path / "made"), ForkChange())
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the parent is not changed"
    assert step == 0 or max(chain(forked)) == step
    assert step == 0 or verify(step_directories(forked)[step]).step == step
    assert step == 0 or step in open_run(forked).kept
    train_on(forked)
    assert chain(forked) == chain(parent)
    assert [verify(step_directories(one)[12]).metadata["fingerprint"] for one in (forked, parent)] == [
        verify(step_directories(parent)[12]).metadata["fingerprint"]
    ] * 2
    assert replay(forked, make_workload).is_exact
    assert audit(open_run(forked), "7", 99, make_workload).verdict == "passed"
    numbers = [
        {at: found["loss"] for at, found in read_metrics(one).items() if "loss" in found} for one in (forked, parent)
    ]
    assert numbers[0] == numbers[1]


def test_a_masked_document_differs_from_its_first_step_on_and_never_before(tmp_path: Path) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    for ordinal in random.sample(range(60), 6):
        with RunDataIndex.open(parent) as run_data:
            later = sorted({one.step for one in when(run_data, "text.jsonl", ordinal=ordinal) if 4 < one.step <= 12})
            change = ForkChange(named_documents(run_data, [f"text.jsonl:{ordinal}"], "here"))
        forked = train_on(fork(parent, 4, state(parent, 4, tmp_path), change, f"without-{ordinal}"))
        before, after = chain(parent), chain(forked)
        assert [step for step in before if before[step] != after[step]] == list(range(min(later, default=13), 13))
        assert replay(forked, make_workload).is_exact
        with RunDataIndex.open(forked) as run_data:
            found = [one for one in when(run_data, "text.jsonl", ordinal=ordinal) if one.step <= 12]
            assert {one.step for one in found if one.is_masked} == {*later}
            rows = [row for step in range(1, 13) for row in where(run_data, step)]
        assert {part.ordinal for row in rows for part in row.documents if part.is_masked} <= {ordinal}


def test_a_fork_knows_where_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    command = ["fork", str(parent), "--step", "8", "--without-document", "text.jsonl:3", "optimizer.lr=0.02"]
    assert main([*command, "--plan"]) == 0
    assert [path.name for path in parent.parent.iterdir()] == [parent.name], "nothing is written"
    assert main([*command, "--name", "other", "--no-train", "--json"]) == 0
    *_, line = capsys.readouterr().out.partition("{")
    told = json.loads("{" + line)
    forked = Path(told["directory"])
    assert told["change"] == {
        "without_documents": ["text.jsonl:3"], "without_sources": [], "overrides": ["optimizer.lr=0.02"],
    }  # fmt: skip
    assert main(["runs", "show", str(forked)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"fork of {parent.name} at step 8: without text.jsonl:3, optimizer.lr=0.02" in shown
    assert "stopped" in shown
    train_on(forked)
    assert replay(forked, make_workload).is_exact
    assert {step: entry for step, entry in chain(forked).items() if step <= 8} == {
        step: entry for step, entry in chain(parent).items() if step <= 8
    }
    assert chain(forked)[12] != chain(parent)[12]
    assert main(["runs", "compare", "--paired", str(parent), str(forked), "--steps", "9:12"]) == 0
    said = capsys.readouterr().out
    assert "Bit-equal for 9 steps" in said  # the rate changes the update of step 9
    assert "text.jsonl:" in said


def test_a_fork_of_a_fork_has_both_changes(tmp_path: Path) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    made, ordinals = parent, [3, 7]
    for step, ordinal in zip((4, 8), ordinals, strict=True):
        with RunDataIndex.open(made) as run_data:
            change = ForkChange(named_documents(run_data, [f"text.jsonl:{ordinal}"], "here"))
        made = train_on(fork(made, step, state(made, step, tmp_path), change))
    assert replay(made, make_workload).is_exact
    with RunDataIndex.open(made) as run_data:
        for ordinal, start in zip(ordinals, (4, 8), strict=True):
            found = [one for one in when(run_data, "text.jsonl", ordinal=ordinal) if one.step <= 12]
            assert {one.is_masked == (one.step > start) for one in found} == {True}


def test_later_decisions_of_the_parent_are_not_those_of_the_fork(tmp_path: Path) -> None:
    """The parent masked a document, and changed its settings and its length, after the state of the fork."""
    config = tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)
    plain = tiny_runs.run(config).run_directory
    expected = chain(plain)
    plan = DataPlan.open(RunLayout(plain).plan)
    position = plan.start.batch_sizes.position_of(8)
    plan.add([MaskEvent(position, documents(plain, *range(60)))])
    changed = tiny_runs.configuration(tmp_path, [*EVERY_DOCUMENT, "optimizer.lr=0.05", "train.num_steps=16"])
    tiny_runs.run(changed, resume_from=RunLayout(plain).checkpoint(8))
    assert chain(plain)[9] != expected[9]
    forked = train_on(fork(plain, 8, state(plain, 8, tmp_path), ForkChange()))
    assert chain(forked)[12] == chain(plain)[12], "the settings in force after step 8 are the later ones"
    earlier = train_on(fork(plain, 7, state(plain, 7, tmp_path / "made"), ForkChange()))
    assert chain(earlier) == expected


@pytest.mark.parametrize("step", [8, 9])
def test_states_that_the_parent_left_behind_are_not_those_of_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The parent went back to step 4 under another rate and never saved again, so its states 8 and 12 are void."""
    settings = ["data.document_mask=true", "checkpoint.keep_last=9", "eval.every_steps=null"]
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    for later in (8, 12):
        shutil.rmtree(RunLayout(parent).checkpoint(later))
    changed = tiny_runs.configuration(
        tmp_path, [*settings, "optimizer.lr=0.003", "checkpoint.every_steps=100", "train.max_nonfinite_steps=0"]
    )
    with monkeypatch.context() as patch:
        tiny_runs.scale_steps(patch, {11: float("nan")})
        with pytest.raises(NumericalError):
            tiny_runs.run(changed, resume_from=parent)
    assert {8, 12} <= set(read_states(parent))
    forked = fork(parent, step, state(parent, step, tmp_path / "made"), ForkChange())
    assert max(read_states(forked)) == step
    train_on(forked)
    assert audit(open_run(forked), "7", 99, make_workload).verdict == "passed"


def test_a_fork_without_a_source_reads_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_runs.write_text(tmp_path / "other", seed=1)
    sources = [{"name": name, "format": "jsonl", "paths": [str(tmp_path / name)]} for name in ("text", "other")]
    config = tiny_runs.configuration(tmp_path, [f"data.sources={json.dumps(sources)}", "checkpoint.keep_last=9"])
    parent = tiny_runs.run(config).run_directory
    assert main(["fork", str(parent), "--step", "8", "--without-source", "other", "--no-train", "--json"]) == 0
    told = json.loads("{" + capsys.readouterr().out.partition("{")[2])
    forked = train_on(Path(told["directory"]))
    with RunDataIndex.open(forked) as run_data:
        by_step = {step: {row.source for row in where(run_data, step)} for step in range(1, 13)}
    assert {name for step in range(9, 13) for name in by_step[step]} == {"text"}
    assert {name for step in range(1, 9) for name in by_step[step]} == {"text", "other"}
    assert replay(forked, make_workload).is_exact


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--step", "13"], 2, "has no step 13; it recorded 12 steps"),
        (["--step", "4", "--without-document", "text.jsonl:600"], 2, "reads no record 600 of text.jsonl"),
        (["--step", "4", "--without-document", "text.jsonl"], 2, "names no document"),
        (["--step", "4", "--without-document", "other.jsonl:1"], 2, "No file matches other.jsonl"),
        (["--step", "4", "--without-source", "other"], 2, "has no source other"),
        (["--step", "4", "--without-source", "text"], 2, "No source would be left"),
        (["--step", "4", "model.hidden_size=32"], 2, "cannot be forked with another configuration"),
        (["--step", "4", "optimizer.lr=fast"], 2, "optimizer.lr"),
        (["--step", "8", "train.num_steps=6"], 2, "would end before it begins"),
        (["--step", "4", "run.name=other"], 2, "--name names it"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, expected: str
) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    assert main(["fork", str(parent), *words]) == code
    assert expected in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in parent.parent.iterdir()] == [parent.name]


def test_documents_that_cannot_be_masked_are_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_runs.configuration(tmp_path, ["data.document_mask=false"])
    parent = tiny_runs.run(config).run_directory
    assert main(["fork", str(parent), "--step", "4", "--without-document", "text.jsonl:3"]) == 2
    assert "data.document_mask=false" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in parent.parent.iterdir()] == [parent.name]


def test_a_document_that_is_masked_already_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory
    with RunDataIndex.open(parent) as run_data:
        late = {ordinal: [one.step for one in when(run_data, "text.jsonl", ordinal=ordinal)] for ordinal in range(60)}
        name = next(f"text.jsonl:{ordinal}" for ordinal, steps in late.items() if any(8 < step <= 12 for step in steps))
        change = ForkChange(named_documents(run_data, [name], "here"))
    masked = train_on(fork(parent, 4, state(parent, 4, tmp_path), change))
    assert main(["fork", f"{masked}@8", "--without-document", name, "--plan"]) == 0
    assert "masked already, so nothing will differ" in " ".join(capsys.readouterr().out.split())


def test_the_time_of_a_fork_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    forked = fork(parent, 8, state(parent, 8, tmp_path), ForkChange())
    assert main(["runs", "time", str(forked)]) == 4
    assert "vorox train --resume" in capsys.readouterr().err
    train_on(forked)
    assert main(["runs", "time", str(forked), "--json"]) == 0
    told = json.loads("{" + capsys.readouterr().out.partition("{")[2])
    assert [one["number"] for one in told["attempts"]] == [2]


def test_runs_that_read_other_tokens_are_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        tiny_runs.run(tiny_runs.configuration(tmp_path, [f"data.sequence_length_tokens={length}"])).run_directory
        for length in (16, 24)
    )
    assert main(["runs", "compare", "--paired", str(one), str(two)]) == 2
    assert "other tokenizers or rows" in " ".join(capsys.readouterr().err.split())
