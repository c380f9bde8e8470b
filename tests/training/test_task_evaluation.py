"""Tasks of lm-evaluation-harness: the same scores as its own Hugging Face model gives on the exported directory."""

from __future__ import annotations

import hashlib
import json
import math
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.run_layout import RunLayout, lock_run
from vorox.experiments.task_results import write_task_results
from vorox.experiments.tracking import read_metrics
from vorox.training.evaluation.task_evaluation import OutOfTime, RequestScorer, time_budget

TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "completion": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_tasks(directory: Path) -> Path:
    """YAML tasks over a local file; some texts are longer than the model's positions, and one is empty."""
    directory.mkdir()
    chooser = random.Random(3)
    documents = [
        {
            "text": " ".join(chooser.choices(tiny_runs.WORDS, k=number % 24)),
            "choices": chooser.sample(["a", "b", *tiny_runs.WORDS], k=3),
            "answer": number % 3,
        }
        for number in range(20)
    ]
    file = directory / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    for name, task in TASKS.items():
        kept = {"data_files": {"test": str(file)}}
        settings = {"task": name, "dataset_path": "json", "dataset_kwargs": kept, "test_split": "test", **task}
        (directory / f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return directory


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.torch
@pytest.mark.hf
def test_scores_equal_those_of_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    shape = ["model.norm_bias=false", "model.max_positions_tokens=64"]
    run = vorox.train(tiny_runs.configuration(tmp_path, shape)).run_directory
    tasks = write_tasks(tmp_path / "tasks")
    assert main(["export", str(run), "--to", "hf", "--output", str(tmp_path / "hf"), "--check"]) == 0
    capsys.readouterr()
    words = ["eval", str(run), "--tasks", ",".join(TASKS), "--task-path", str(tasks), "--batch-size", "4", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    loader, manager = import_module("lm_eval.models.huggingface"), import_module("lm_eval.tasks").TaskManager
    model = loader.HFLM(pretrained=str(tmp_path / "hf"), device="cpu", batch_size=3, max_length=64)
    manager = manager(include_path=str(tasks), include_defaults=False)
    expected: Any = harness.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    compared = 0
    for name in TASKS:
        for key, value in expected["results"][name].items():
            metric = key.partition(",")[0]
            if "," in key and "stderr" not in key:
                assert found["tasks"][name]["metrics"][metric] == pytest.approx(value, rel=1e-6, abs=1e-6), key
                compared += 1
    assert compared >= 5
    recorded = json.loads(Path(found["file"]).read_text(encoding="utf-8"))
    assert recorded["tasks"] == found["tasks"]
    manifest = RunLayout(run).checkpoint(12) / "MANIFEST.json"
    assert recorded["checkpoint_sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    metrics = read_metrics(run)[12]
    assert metrics["eval/tasks/choices/acc"] == found["tasks"]["choices"]["metrics"]["acc"]
    assert "loss" in metrics  # the step's own metrics are kept
    assert main([*words, "--minutes", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == list(TASKS)
    assert json.loads(Path(found["file"]).read_text(encoding="utf-8"))["tasks"] == found["tasks"]
    assert main(["eval", str(run), "--tasks", "chioces", "--task-path", str(tasks)]) == 2
    assert "choices" in capsys.readouterr().err


class ModelOfBigrams:
    """Logits that depend on the last token only, so that an oracle needs no padding and no batch."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(5).normal(size=(7, 7)).astype(np.float32)
        self.batches: list[tuple[int, ...]] = []
        self.spec = type("Spec", (), {"vocab_size": 7, "max_positions_tokens": 5})()
        self.tokenizer = type("Tokenizer", (), {"end_of_text_id": 0})()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        assert ids.shape[1] <= 5
        self.batches.append(ids.shape)
        return self.table[ids]

    def expected(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        total, is_greedy = 0.0, True
        for before, token in zip([context[-1], *continuation], continuation, strict=False):
            row = self.table[before].astype(np.float64)
            total += row[token] - math.log(np.exp(row).sum())
            is_greedy &= int(row.argmax()) == token
        return total, is_greedy


def test_log_likelihoods_in_batches() -> None:
    """Unequal lengths, contexts that do not fit, equal inputs with several continuations, greedy ones among them."""
    model: Any = ModelOfBigrams()
    chooser = random.Random(1)
    pairs = [
        ([chooser.randrange(7) for _ in range(chooser.randint(1, 9))], [chooser.randrange(7)] * chooser.randint(1, 4))
        for _ in range(30)
    ]
    pairs += [([1, 2], [token]) for token in range(7)]
    for size in (1, 4, 100):
        model.batches.clear()
        found = RequestScorer(model, size, time_budget(None)).log_likelihoods(pairs)
        assert [value for value, _ in found] == pytest.approx([model.expected(*pair)[0] for pair in pairs], rel=1e-12)
        assert [greedy for _, greedy in found] == [model.expected(*pair)[1] for pair in pairs]
        assert {greedy for _, greedy in found} == {True, False}
        assert sum(rows for rows, _ in model.batches) <= 31  # the last seven pairs have one input
        assert max(rows for rows, _ in model.batches) <= size


def test_no_batch_starts_after_the_deadline() -> None:
    model: Any = ModelOfBigrams()
    with pytest.raises(OutOfTime):
        RequestScorer(model, 4, time_budget(0.0)).log_likelihoods([([1], [2])])
    assert not model.batches


def test_results_of_a_live_run_do_not_touch_its_metrics(tmp_path: Path) -> None:
    metrics = RunLayout(tmp_path).metrics
    metrics.write_text('{"step":4,"attempt":2,"time":1.0,"values":{"loss":3.0}}\n', encoding="utf-8")
    before = metrics.read_bytes()
    with lock_run(tmp_path):
        path, has_metrics = write_task_results(tmp_path, 4, "aa", {"one": {"metrics": {"acc": 0.5}}})
    assert not has_metrics
    assert metrics.read_bytes() == before
    assert write_task_results(tmp_path, 4, "aa", {"two/x": {"metrics": {"acc": 0.25}}}) == (path, True)
    assert read_metrics(tmp_path)[4] == {"loss": 3.0, "eval/tasks/two_x/acc": 0.25}
    assert set(json.loads(path.read_bytes())["tasks"]) == {"one", "two/x"}
    write_task_results(tmp_path, 4, "bb", {"one": {"metrics": {"acc": 0.75}}})  # another checkpoint of the same step
    assert set(json.loads(path.read_bytes())["tasks"]) == {"one"}
