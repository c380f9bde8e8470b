"""Forks without one document each: the effect that they show has the right sign."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_runs
from vorox.core.config import load_config
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import verify
from vorox.training.fork import ForkChange, fork
from vorox.training.steps.evaluate import recorded_losses

pytestmark = pytest.mark.slow


def train_on(forked: Path) -> Path:
    return tiny_runs.run(load_config(RunLayout(forked).config), resume_from=forked).run_directory


def test_the_sign_of_the_effect_of_planted_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Useful documents are as the validation set, noise is what it lacks; the rest is a mixture.

    The effect of a document, defined beforehand: the mean validation loss over the 5 steps from its first one on, of
    the run less that of its fork without the document. Negative: it helped.
    """
    tiny_runs.use_numpy_engine(monkeypatch)
    chooser = random.Random()
    validated, others = "abcdef", "ghijkl"

    def text(letters: str) -> str:
        return " ".join("".join(chooser.choices(letters, k=chooser.randint(2, 5))) for _ in range(12))

    kinds = dict(enumerate(chooser.sample(["useful"] * 10 + ["noise"] * 10, 20)))
    texts = {
        "text": [text(validated + others) for _ in range(300)],
        "planted": [text(validated) if kind == "useful" else text(others) for kind in kinds.values()],
        "held": [text(validated) for _ in range(30)],
    }
    for name, lines in texts.items():
        (tmp_path / name).mkdir()
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / name / f"{name}.jsonl").write_text(content)
    sources = {name: {"name": name, "format": "jsonl", "paths": [str(tmp_path / name)]} for name in texts}
    stages = [  # before, any text helps: it shows which bytes are letters
        {"start_tokens": 0, "weights": {"text": 1}},
        {"start_tokens": 400 * 4 * 64, "weights": {"text": 7, "planted": 1}},
    ]
    overrides = [
        f"data.sources={json.dumps([sources['text'], sources['planted']])}", f"data.stages={json.dumps(stages)}",
        f"data.validation={json.dumps({'sources': [sources['held']]})}", "eval.every_steps=1", "eval.num_sequences=24",
        "data.sequence_length_tokens=64", "train.num_steps=440", "checkpoint.every_steps=10", "checkpoint.keep_last=99",
        "schedule.name=constant",
    ]  # fmt: skip
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, overrides)).run_directory
    last, losses = max(read_chain(parent)), recorded_losses(parent)
    effects: dict[int, float] = {}
    for ordinal in kinds:
        with RunDataIndex.open(parent) as run_data:
            first = min(one.step for one in when(run_data, "planted.jsonl", ordinal=ordinal))
            change = ForkChange(named_documents(run_data, [f"planted.jsonl:{ordinal}"], "here"))
        step = max(at for at in (0, *step_directories(parent)) if at < first)
        checkpoint = None if step == 0 else verify(step_directories(parent)[step])
        forked = recorded_losses(train_on(fork(parent, step, checkpoint, change, f"without-{ordinal}")))
        steps = range(first, min(first + 4, last) + 1)
        effects[ordinal] = statistics.mean(losses[at] - forked[at] for at in steps)
    right = [ordinal for ordinal, kind in kinds.items() if (effects[ordinal] < 0) == (kind == "useful")]
    record_property("effects", effects)
    assert len(right) >= 19, {(kinds[ordinal], effects[ordinal]) for ordinal in kinds}
