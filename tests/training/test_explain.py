"""What documents added to a step: known by an own computation, and found where one was planted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox.run
from numpy_engine import NumpyEngine
from vorox.api.model import find_model
from vorox.api.runs import open_run
from vorox.cli import main
from vorox.core.errors import NumericalError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.log import RunLog
from vorox.records.replay_chain import number, read_chain
from vorox.records.run_lookup import run_directories
from vorox.training.explain import Explanation, Quantity, documents_of_step, explain, most_trials, trials_for_one
from vorox.training.materialize import StateNotices, states_after
from vorox.training.steps.workload import Workload

BASE = ["data.validation.held_out_fraction=0", "eval.every_steps=null", "data.packing=best_fit"]


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def explained(run: Path, step: int, quantity: Quantity = "grad_norm", next_steps: int = 2) -> Explanation:
    start = None if step == 1 else states_after(run, [step - 1], make_workload, StateNotices())[step - 1]
    with RunDataIndex.open(run) as run_data:
        return explain(
            run_data, step, make_workload, quantity=quantity, num_next_steps=next_steps,
            start=start, on_trial=lambda *_: None,
        )  # fmt: skip


@pytest.fixture
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a target ``~`` is a hundred times what it should be, and its loss is what it should be."""
    original = NumpyEngine._loss

    def loss(logits: Any, labels: Any) -> Any:
        found, gradient, correct = original(logits, labels)
        return found, gradient * np.where(labels == ord("~"), np.float32(100), np.float32(1))[:, None], correct

    monkeypatch.setattr(NumpyEngine, "_loss", staticmethod(loss))


def planted(directory: Path, seed: int) -> tuple[Path, int]:
    """A run on random words with one document that has a few poisonous letters."""
    chooser = random.Random(seed)
    ordinal = chooser.randrange(40)
    texts = [" ".join(chooser.choices(tiny_runs.WORDS, k=chooser.randint(6, 9))) for _ in range(40)]
    texts[ordinal] = texts[ordinal].replace(" ", "~", 3)
    (directory / "text").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "text" / "text.jsonl").write_text(lines, encoding="utf-8")
    settings = [
        *BASE, f"run.seed={seed}", "data.sequence_length_tokens=64", "train.global_batch_sequences=8",
        "train.num_steps=16", "checkpoint.every_steps=4", "optimizer.lr=0.001",
    ]  # fmt: skip
    return tiny_runs.run(tiny_runs.configuration(directory, settings)).run_directory, ordinal


def ranks(run: Path, ordinal: int) -> tuple[int, int, bool]:
    """Rank of the planted document by experiment, and by its share of the loss; and whether it is named."""
    with RunDataIndex.open(run) as run_data:
        step = max(one.step for one in when(run_data, "text.jsonl", ordinal=ordinal) if 8 < one.step <= 16)
    found = explained(run, step, next_steps=0)
    names = [one.name.rpartition(":")[2] for one in found.documents]
    shares = sorted(found.documents, key=lambda one: -(one.effect.loss if one.effect else 0.0))
    by_share = [one.name.rpartition(":")[2] for one in shares]
    named = found.culprit is not None and found.culprit.name.endswith(f":{ordinal}")
    return names.index(str(ordinal)), by_share.index(str(ordinal)), named


@pytest.mark.slow
@pytest.mark.usefixtures("_poison")
def test_a_planted_document_is_ranked_first_in_95_of_100_runs(tmp_path: Path) -> None:
    found = [ranks(*planted(tmp_path / str(seed), seed)) for seed in random.sample(range(10**6), 100)]
    first = sum(rank == 0 for rank, _, _ in found)
    by_share = sum(rank == 0 for _, rank, _ in found)
    print(
        f"ranked first {first} of 100, by its share of the loss {by_share}, named {sum(named for *_, named in found)}"
    )
    assert first >= 95
    assert by_share < first


@pytest.mark.usefixtures("_poison")
def test_a_planted_document_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    run, ordinal = planted(tmp_path, 7)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rank, _, is_named = ranks(run, ordinal)
    assert (rank, is_named) == (0, True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_share_of_the_loss_is_that_of_the_targets(tmp_path: Path) -> None:
    """Oracle: the losses of single documents under the state before the step, each computed by itself."""
    settings = [*BASE, "checkpoint.keep_last=20", "data.sequence_length_tokens=64"]
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    found = explained(run, 5, "loss")
    with open_run(run) as opened:
        alone = opened.document_losses(find_model(str(run), step=4, root="", device=None, notices=StateNotices()), 5, 1)
    targets = sum(one.num_target_tokens for one in alone)
    expected = {f"{one.uri}:{one.ordinal}": one.loss * one.num_target_tokens / targets for one in alone}
    assert {one.name: one.effect.loss for one in found.documents if one.effect} == pytest.approx(expected, abs=1e-6)
    assert sum(expected.values()) == pytest.approx(number(read_chain(run)[5].loss), abs=1e-6)
    norms = [one.norm for one in found.layers]
    assert sum(norm * norm for norm in norms) ** 0.5 == pytest.approx(number(read_chain(run)[5].grad_norm))


def test_documents_that_matter_only_together_are_none_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose rows all weigh three times as much: its norm is unusual, and every document has its part in it."""
    many = [*BASE, "train.global_batch_sequences=16", "train.num_steps=14"]
    with monkeypatch.context() as patch:
        tiny_runs.scale_steps(patch, {10: 3.0})
        run = tiny_runs.run(tiny_runs.configuration(tmp_path, many)).run_directory
        for step, is_unusual in ((1, False), (10, True)):
            found = explained(run, step)
            assert (found.is_unusual, found.culprit) == (is_unusual, None)
            assert found.num_trials <= most_trials(len(found.documents))


@pytest.mark.usefixtures("_poison")
def test_a_large_batch_is_halved_down_to_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.training.explain._MOST_ALONE", 4)
    monkeypatch.setattr("vorox.training.explain._LEAST_HALF", 2)
    run, ordinal = planted(tmp_path, 11)
    with RunDataIndex.open(run) as run_data:
        step = max(one.step for one in when(run_data, "text.jsonl", ordinal=ordinal) if 8 < one.step <= 16)
        num_documents = len(documents_of_step(run_data, step))
    found = explained(run, step)
    assert found.documents[0].name.endswith(f":{ordinal}")
    assert found.num_trials <= most_trials(num_documents) < num_documents + 2
    assert sum(one.effect is not None for one in found.documents) <= 2


def test_damage_to_the_next_steps_is_measured_on_the_same_rows(tmp_path: Path) -> None:
    settings = [*BASE, "optimizer.lr=0.3", "checkpoint.every_steps=3"]
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    found = explained(run, 7, "next_loss", next_steps=3)
    assert {one.effect is not None and one.effect.next_loss is not None for one in found.documents} == {True}
    assert found.usual == 0


def test_a_record_that_differs_is_not_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, BASE)).run_directory
    tiny_runs.scale_steps(monkeypatch, {6: 1.5})
    assert main(["explain", str(run), "--step", "6"]) == 7
    assert "Replay differs at step 6" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("_poison")
def test_the_command_tells_cost_and_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, ordinal = planted(tmp_path, 3)
    with RunDataIndex.open(run) as run_data:
        step = max(one.step for one in when(run_data, "text.jsonl", ordinal=ordinal) if 8 < one.step <= 16)
    assert main(["explain", str(run), "--step", str(step), "--plan"]) == 0
    assert "steps to compute" in capsys.readouterr().out
    assert main(["explain", str(run), "--step", str(step)]) == 0
    said = capsys.readouterr().out
    assert said.index(f"text.jsonl:{ordinal}") > 0
    assert main(["explain", str(run), "--step", str(step), "--json"]) == 0
    told = json.loads("{" + capsys.readouterr().out.partition("{")[2])
    assert told["documents"][0]["name"].endswith(f"text.jsonl:{ordinal}")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--step", "13"], 2, "has no step 13; it recorded 12 steps"),
        (["--step", "12", "--by", "next_loss"], 2, "No step after 12 is recorded"),
        (["--step", "0"], 2, "--step"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, expected: str
) -> None:
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, BASE)).run_directory
    assert main(["explain", str(run), *words]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert expected in said
    assert "Computing" not in said, "it is refused before anything is computed"


NAN_LOSS, NAN_GRADIENT, TOGETHER = "~", "^", "<>"


@pytest.fixture
def _not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of ``~`` is NaN, the gradient of ``^`` is infinite, and ``<`` and ``>`` are not finite together."""
    original = NumpyEngine._loss

    def loss(logits: Any, labels: Any) -> Any:
        found, gradient, correct = original(logits, labels)
        letters = {chr(label) for label in labels.tolist() if label >= 0}
        if NAN_LOSS in letters or letters >= {*TOGETHER}:
            found = float("nan")
        if NAN_GRADIENT in letters:
            gradient = gradient * np.float32(np.inf)
        return found, gradient, correct

    monkeypatch.setattr(NumpyEngine, "_loss", staticmethod(loss))


def ended_run(directory: Path, poison: dict[str, int], seed: int) -> tuple[Path, dict[int, str]]:
    """A run that ends at its first step that is not finite; and the letter of each document that has one."""
    chooser = random.Random(seed)
    texts = [" ".join(chooser.choices(tiny_runs.WORDS, k=chooser.randint(6, 9))) for _ in range(60)]
    letters = [letter for letter, count in poison.items() for _ in range(count)]
    planted = dict(zip(chooser.sample(range(60), len(letters)), letters, strict=True))
    for ordinal, letter in planted.items():
        texts[ordinal] = texts[ordinal].replace(" ", letter, 1)
    (directory / "text").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "text" / "text.jsonl").write_text(lines, encoding="utf-8")
    settings = [
        *BASE, f"run.seed={seed}", "data.sequence_length_tokens=64", "train.global_batch_sequences=8",
        "train.micro_batch_sequences=8", "train.max_nonfinite_steps=0", "checkpoint.every_steps=3",
    ]  # fmt: skip
    with pytest.raises(NumericalError):
        tiny_runs.run(tiny_runs.configuration(directory, settings))
    (run,) = run_directories(directory / "runs")
    return run, planted


def last_step_of(run: Path) -> int:
    return max(read_chain(run))


def cause(run: Path) -> tuple[Explanation, set[int]]:
    step = last_step_of(run)
    start = None if step == 1 else states_after(run, [step - 1], make_workload, StateNotices())[step - 1]
    with RunDataIndex.open(run) as run_data:
        found = explain(run_data, step, make_workload, num_next_steps=3, start=start, on_trial=lambda *_: None)
    assert found.nonfinite is not None
    return found, {int(one.name.rpartition(":")[2]) for one in found.nonfinite.documents}


@pytest.mark.slow
@pytest.mark.usefixtures("_not_finite")
@pytest.mark.parametrize(
    "poison",
    [
        {NAN_LOSS: 1},
        {NAN_GRADIENT: 1},
        {NAN_LOSS: 8, NAN_GRADIENT: 8},
        {"<": 10, ">": 10},
        {"<": 8, ">": 8, NAN_LOSS: 3},
    ],
)
def test_the_documents_of_the_step_that_ended_a_run_are_named(tmp_path: Path, poison: dict[str, int]) -> None:
    """Oracle: the letters of the documents of the step."""
    run, planted = ended_run(tmp_path, poison, random.randrange(10**6))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found, documents = cause(run)
    in_step = {int(one.name.rpartition(":")[2]) for one in found.documents}
    letters = {ordinal: letter for ordinal, letter in planted.items() if ordinal in in_step}
    assert documents <= letters.keys(), "no document is named that has nothing to do with it"
    alone = {ordinal for ordinal, letter in letters.items() if letter in (NAN_LOSS, NAN_GRADIENT)}
    assert alone <= documents
    left = {letters[ordinal] for ordinal in letters.keys() - documents}
    assert not left >= {*TOGETHER}
    if not left & {*TOGETHER} and alone == letters.keys():
        assert documents == alone
    is_loss = NAN_LOSS in letters.values() or {*letters.values()} >= {*TOGETHER}
    assert found.quantity == ("loss" if is_loss else "grad_norm")
    assert found.nonfinite is not None
    assert np.isfinite(found.nonfinite.value)
    assert found.nonfinite.origin.startswith("micro-batch 0, ")
    if len(letters) == 1:
        assert found.num_trials <= trials_for_one(len(found.documents))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_step_that_no_document_makes_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.scale_steps(monkeypatch, {6: float("nan")})
    with pytest.raises(NumericalError, match="not finite"):
        tiny_runs.run(tiny_runs.configuration(tmp_path, [*BASE, "train.max_nonfinite_steps=0"]))
    (run,) = run_directories(tmp_path / "runs")
    assert last_step_of(run) == 6
    assert main(["explain", f"{run}@6"]) == 0
    assert "No document causes it: it is not finite with all" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", f"{run}@6", "--by", "next_loss"]) == 2
    assert "Step 6 is not finite" in " ".join(capsys.readouterr().err.split())
    tiny_runs.scale_steps(monkeypatch, {6: float("inf")})  # times NaN: the same
    assert main(["explain", f"{run}@6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nonfinite"]["documents"] == []


@pytest.mark.slow
def test_a_step_that_is_finite_now_is_not_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        tiny_runs.scale_steps(patch, {6: float("nan")})
        with pytest.raises(NumericalError):
            tiny_runs.run(tiny_runs.configuration(tmp_path, [*BASE, "train.max_nonfinite_steps=0"]))
    (run,) = run_directories(tmp_path / "runs")
    assert main(["explain", f"{run}@6"]) == 7
    assert "Replay differs at step 6" in " ".join(capsys.readouterr().err.split())
    config = tiny_runs.configuration(tmp_path, [*BASE, "train.max_nonfinite_steps=0"])
    assert tiny_runs.run(config).start_step == 4
    whole = tiny_runs.configuration(tmp_path / "whole", [*BASE, "train.max_nonfinite_steps=0"])
    assert read_chain(run) == read_chain(tiny_runs.run(whole).run_directory), "a resume voids the step that ended it"


@pytest.mark.slow
@pytest.mark.usefixtures("_not_finite")
def test_the_command_names_the_document_that_ended_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, planted = ended_run(tmp_path, {NAN_LOSS: 1}, 5)
    (ordinal,) = planted
    step = last_step_of(run)
    failure = json.loads(RunLayout(run).failure.read_text())
    assert f"vorox explain RUN --step {step}" in failure["hint"]
    capsys.readouterr()
    assert main(["explain", f"{run}@{step}", "--plan"]) == 0
    assert "if one of them is the cause, more if several are" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", f"{run}@{step}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"text.jsonl:{ordinal}: without it the loss is " in said
    assert "The first value that is not finite: micro-batch 0, the loss" in said


@pytest.mark.slow
@pytest.mark.torch
def test_an_own_loss_that_is_not_finite_on_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # the engine is that of PyTorch
    code = """
import torch.nn.functional as F

def loss(logits, labels):
    factor = float("nan") if (labels == ord("~")).any() else 1
    return factor * F.cross_entropy(logits, labels, reduction="sum")
"""
    (tmp_path / "parts.py").write_text(code, encoding="utf-8")
    chooser = random.Random()
    texts = [" ".join(chooser.choices(tiny_runs.WORDS, k=6)) for _ in range(40)]
    ordinal = chooser.randrange(40)
    texts[ordinal] = texts[ordinal].replace(" ", "~", 1)
    (tmp_path / "text").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "text" / "text.jsonl").write_text(lines, encoding="utf-8")
    settings = [
        *BASE, f"loss.name={tmp_path / 'parts.py'}:loss", "data.sequence_length_tokens=64", "backend=torch",
        "train.max_nonfinite_steps=0", "checkpoint.every_steps=4", "runtime.compile=false", "data.document_mask=true",
    ]  # fmt: skip
    with pytest.raises(NumericalError):
        tiny_runs.run(tiny_runs.configuration(tmp_path, settings))
    (run,) = run_directories(tmp_path / "runs")
    capsys.readouterr()
    assert main(["explain", f"{run}@{last_step_of(run)}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["nonfinite"]["documents"]
    assert one["name"].endswith(f"text.jsonl:{ordinal}")
    assert found["culprit"]["name"] == one["name"]
