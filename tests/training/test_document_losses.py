"""Loss per document: the same as a plain loop over the tokens of the documents' texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.api.runs import Run
from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.data.provenance.run_data_index import RunDataIndex

FIRST, LAST = 3, 10


def expected_losses(run: Run, model: Any, piece: int) -> dict[int, tuple[float, int, list[int]]]:
    """Mean loss, targets and steps by record, from the text of the documents and the logits of the model."""
    (file,) = Path(run.config.data.sources[0].paths[0]).glob("*.jsonl")
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    end = model.tokenizer.end_of_text_id
    sums: dict[int, list[Any]] = {}
    seen: set[int] = set()
    for step in range(FIRST, LAST + 1):
        for row in run.where(step):
            tokens: list[int] = []
            owners: list[int] = []
            for part in row.documents:
                whole = [*map(int, model.tokenizer.encode_batch([texts[part.ordinal]])[0]), end]
                tokens += whole[part.first_token : part.first_token + part.num_tokens]
                owners += [part.ordinal] * part.num_tokens
                sums.setdefault(part.ordinal, [0.0, 0, set()])[2].add(step)
            if row.row in seen:
                continue
            seen.add(row.row)
            for start in range(0, len(tokens) - 1, piece):
                inputs = tokens[start : start + piece]
                for index in range(len(inputs)):
                    target = start + index + 1
                    if target == len(tokens) or (
                        run.config.data.document_mask and owners[target - 1] != owners[target]
                    ):
                        continue
                    context = inputs[: index + 1]
                    if run.config.data.document_mask:  # of the same document only
                        context = [t for t, o in zip(context, owners[start:], strict=False) if o == owners[target]]
                    padded = context + [0] * (piece - len(context))  # one shape to compile
                    logits = model.logits(padded)[len(context) - 1].astype(np.float64)
                    sums[owners[target]][0] += np.log(np.exp(logits).sum()) - logits[tokens[target]]
                    sums[owners[target]][1] += 1
    return {ordinal: (s[0] / s[1], s[1], sorted(s[2])) for ordinal, s in sums.items() if s[1]}


def check(run: Run, piece: int = 16) -> None:
    model = vorox.load_model(run)
    found = run.document_losses(model, FIRST, LAST - FIRST + 1)
    expected = expected_losses(run, model, piece)
    assert {one.ordinal: (one.num_target_tokens, [*one.steps]) for one in found} == {
        ordinal: (num, steps) for ordinal, (_, num, steps) in expected.items()
    }
    for one in found:
        assert one.loss == pytest.approx(expected[one.ordinal][0], rel=2e-5), one
    assert [one.loss for one in found] == sorted((one.loss for one in found), reverse=True)
    assert any(len(one.steps) > 1 for one in found)


@pytest.mark.parametrize(
    ("overrides", "piece"),
    [
        ([], 16),
        (["data.document_mask=false"], 16),
        (["data.stages=[{start_tokens: 0, sequence_length_tokens: 8}]"], 8),
        (["data.stages=[{start_tokens: 0, sequence_length_tokens: 8}]", "data.document_mask=false"], 8),
    ],
)
def test_losses_equal_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: Sequence[str], piece: int
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.write_text(tmp_path / "text", documents=5)
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path, overrides))
    with vorox.open_run(outcome.run_directory) as run:
        check(run, piece)


def both(text: str) -> list[str]:
    """A transform that keeps the original."""
    return [text, text.upper()]


def test_the_texts_of_a_record_have_losses_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.write_text(tmp_path / "text", documents=5)
    transforms = json.dumps([{"name": f"{__name__}:both"}])
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path, [f"data.transforms={transforms}"])).run_directory
    with vorox.open_run(directory) as run, RunDataIndex.open(directory) as run_data:
        model = vorox.load_model(run)
        found = run.document_losses(model, FIRST, LAST - FIRST + 1)
        steps: dict[tuple[int, bool], set[int]] = {}
        copies: dict[tuple[int, bool], set[int]] = {}
        for step in range(FIRST, LAST + 1):
            for row in run.where(step):
                ids = run_data.readers[0].read_rows(np.array([row.row])).tokens_NC[0]
                for part in row.documents:
                    held = ids[part.row_token : part.row_token + part.num_tokens]
                    letters = bytes(int(token) for token in held if token < 256).decode().replace(" ", "")
                    if letters:
                        steps.setdefault((part.ordinal, letters.isupper()), set()).add(step)
                        copies.setdefault((part.ordinal, letters.isupper()), set()).add(part.copy)
    assert {len(known) for known in copies.values()} == {1}
    assert len(steps) > len({ordinal for ordinal, _ in steps})
    by_copy = {(one.ordinal, one.copy): set(one.steps) for one in found}
    assert {key: by_copy[key[0], min(copies[key])] for key in steps} == steps
    capsys.readouterr()
    words = ["data", "losses", str(directory), "--steps", f"{FIRST}:{LAST}", "--against", "8", "--json"]
    assert main(words) == 0
    with vorox.open_run(directory) as run:
        earlier = run.document_losses(vorox.load_model(run, step=8), FIRST, LAST - FIRST + 1)
    before = {(one.ordinal, one.copy): one.loss for one in earlier}
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert {(one["ordinal"], one["copy"]): one["loss_before"] for one in documents} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_losses_of_the_engines(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    tiny_runs.write_text(tmp_path / "text", documents=3)
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path, [f"backend={backend}", "runtime.num_threads=null"]))
    with vorox.open_run(outcome.run_directory) as run:
        check(run)


def test_the_command_sorts_by_loss_and_by_its_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.write_text(tmp_path / "text", documents=20)
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path))
    words = ["data", "losses", str(outcome.run_directory), "--steps", "2:5", "--against", "8"]
    capsys.readouterr()
    assert main([*words, "--easiest", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["against"], answer["steps"]) == (12, 8, [2, 5])
    with vorox.open_run(outcome.run_directory) as run:
        earlier = run.document_losses(vorox.load_model(run, step=8), 2, 4)
    assert {one["ordinal"]: one["loss_before"] for one in answer["documents"]} == {
        one.ordinal: one.loss for one in earlier
    }
    changes = [one["loss"] - one["loss_before"] for one in answer["documents"]]
    assert changes == sorted(changes)
    assert changes[0] < 0
    assert main([*words, "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert f"record {answer['documents'][-1]['ordinal']}" in lines[1]
    assert "documents of steps 2 to 5 under the weights of step 12: mean loss" in lines[-1]
    assert main(["data", "losses", str(outcome.run_directory), "--steps", "5"]) == 2
    with (
        vorox.open_run(outcome.run_directory) as run,
        pytest.raises(ConfigError, match="first_step=0 must be at least 1"),
    ):
        run.document_losses(vorox.load_model(run), 0, 1)
