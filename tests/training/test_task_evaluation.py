"""Tasks of lm-evaluation-harness: the same scores as its own Hugging Face model gives on the exported directory."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import base_models
import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout, lock_run
from vorox.experiments.task_results import write_task_results
from vorox.experiments.tracking import read_metrics
from vorox.training.evaluation import task_evaluation
from vorox.training.evaluation.task_evaluation import OutOfTime, RequestScorer, check_completions, time_budget
from vorox.training.inference.language_model import LanguageModel
from vorox.training.inference.sampling import SamplingSettings

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
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}], "process_docs": "!function noise.keep",
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
        text = json.dumps(settings).replace('"!function noise.keep"', "!function noise.keep")  # JSON is YAML
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    (directory / "noise.py").write_text("print('imported')\ndef keep(docs):\n    print('called')\n    return docs\n")
    return directory


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.torch
@pytest.mark.hf
@pytest.mark.parametrize("shape", [None, "llama3", "both"])
def test_scores_equal_those_of_the_harness(
    shape: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokenizer of the run, and with those of a base that adds BOS, or BOS and EOS."""
    harness = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    settings = ["model.norm_bias=false", "model.max_positions_tokens=64"]
    if shape is not None:
        base_models.write(tmp_path / "base", shape)
        generation = tmp_path / "base" / "generation_config.json"
        options = json.loads(generation.read_text()) if generation.exists() else {}
        generation.write_text(json.dumps({**options, "repetition_penalty": 1.3}))  # as Qwen's chat models have
        settings = [
            "model={kind: huggingface}", f"model.name_or_path={tmp_path / 'base'}", "runtime.compile=false",
            "tokenizer.kind=huggingface", f"tokenizer.path={tmp_path / 'base'}",
        ]  # fmt: skip
    run = vorox.train(tiny_runs.configuration(tmp_path, settings)).run_directory
    tasks = write_tasks(tmp_path / "tasks")
    assert main(["export", str(run), "--to", "hf", "--output", str(tmp_path / "hf"), "--check"]) == 0
    capsys.readouterr()
    words = ["eval", str(run), "--tasks", ",".join(TASKS), "--task-path", str(tasks), "--batch-size", "4", "--json"]
    assert main(words) == 0
    output, beside = capsys.readouterr()
    assert "called" in beside, "a task prints, and so do metrics: not into the result"
    found = json.loads(output)
    loader, manager = import_module("lm_eval.models.huggingface"), import_module("lm_eval.tasks").TaskManager
    length = 64 if shape is None else 128
    model = loader.HFLM(pretrained=str(tmp_path / "hf"), device="cpu", batch_size=3, max_length=length)
    manager = manager(include_path=str(tasks), include_defaults=False)
    expected: Any = harness.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    assert "called" in capsys.readouterr().out, "the harness itself lets them print"
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


def test_a_continuation_longer_than_the_model_is_truncated_on_the_left() -> None:
    """Oracle: the sum over single tokens, each after the one before it, of the last ones that have a position."""
    model: Any = ModelOfBigrams()
    longest, chooser = model.spec.max_positions_tokens, random.Random(2)
    pairs = [
        ([chooser.randrange(7) for _ in range(before)], [chooser.randrange(7) for _ in range(length)])
        for before in (1, 3, longest + 2)
        for length in (longest - 1, longest, longest + 1, 3 * longest)
    ]
    found = RequestScorer(model, 4, time_budget(None)).log_likelihoods(pairs)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        ids = (context + continuation)[-longest - 1 :]
        num_targets = min(len(continuation), longest)
        single = [([before], [token]) for before, token in itertools.pairwise(ids)][-num_targets:]
        assert value == pytest.approx(sum(model.expected(*pair)[0] for pair in single), rel=1e-12)


class CompletionTask:
    OUTPUT_TYPE = "generate_until"

    def __init__(self, **options: object) -> None:
        self._options = options

    def get_config(self, name: str) -> dict[str, object]:
        assert name == "generation_kwargs"
        return self._options


def test_options_of_a_completion_that_are_not_read_are_refused() -> None:
    model: Any = SimpleNamespace(spec=SimpleNamespace(max_positions_tokens=64))
    known = {"until": ["."], "max_gen_toks": 5, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
    known |= {"min_p": 0.1, "repetition_penalty": 1.2}
    check_completions({"a": CompletionTask(**known, num_beams=1, length_penalty=1.0)}, model)
    for option in ({"num_beams": 4}, {"length_penalty": 1.2}, {"stop_sequences": ["x"]}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))}.*not supported"):
            check_completions({"a": CompletionTask(**known, **option)}, model)


def test_top_p_of_a_task_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingSettings] = []

    def complete(engine: object, prompts: list[list[int]], settings: SamplingSettings) -> list[list[int]]:
        seen.append(settings)
        return [[1] for _ in prompts]

    monkeypatch.setattr(task_evaluation, "generate", complete)
    tokenizer = SimpleNamespace(
        encode=lambda text: [1], decode=lambda ids: "x", end_of_text_id=0, stop_ids=(0,), vocab_size=7,
        without_special=lambda ids: ids, repetition_penalty=1.1,
    )  # fmt: skip
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(max_positions_tokens=64), tokenizer=tokenizer, engine=None,
        config=SimpleNamespace(eval=SimpleNamespace(sample_tokens=4), run=SimpleNamespace(seed=1)),
    )  # fmt: skip
    model.sampling_settings = partial(LanguageModel.sampling_settings, model)
    monkeypatch.setattr(RequestScorer, "encode", lambda self, text: [1])
    scorer = RequestScorer(model, 4, time_budget(None))
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.25, "min_p": 0.05, "top_k": 3, "max_gen_toks": 2}
    scorer.complete(["a"], options)
    assert [(one.top_p, one.min_p, one.top_k, one.temperature) for one in seen] == [(0.25, 0.05, 3, 0.7)]
    assert seen[0].repetition_penalty == 1.1, "that of the model"
    scorer.complete(["a"], {**options, "repetition_penalty": 1.5})
    assert seen[-1].repetition_penalty == 1.5


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
