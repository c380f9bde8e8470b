"""``vorox eval --exposure`` against planted records, a search of the batches, and forward passes of the states.

The corpus is random words; records of the tasks are planted into it at known places and known numbers of times.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from numpy_engine import NumpyEngine
from vorox.cli import main
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.training.checkpoints.materialized_cache import folder
from vorox.training.evaluation import task_evaluation

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow
NUM_STEPS, NUM_RECORDS = 18, 14
PLANTED = {0: 1, 2: 1, 3: 2, 5: 3, 8: 1, 9: 2, 12: 1}
"""Record of the task, and how many documents have it."""
PARTLY, SHORT = 6, 13
Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Planted:
    """A run, its task, and what was planted.

    Attributes:
        run: The run.
        tasks: The folder of the tasks.
        texts: The text of each record.
        documents: The documents of the corpus.
    """

    run: Path
    tasks: Path
    texts: list[str]
    documents: list[str]


def words(chooser: random.Random, count: int) -> str:
    return " ".join("".join(chooser.choices(string.ascii_lowercase, k=4)) for _ in range(count))


def plant(directory: Path, *overrides: str) -> Planted:
    """Train a run of the numpy engine on a corpus with planted records; documents fit into rows."""
    chooser = random.Random()
    records = [
        {"text": words(chooser, 4), "choices": [words(chooser, 1) for _ in range(3)], "answer": chooser.randrange(3)}
        for _ in range(NUM_RECORDS)
    ]
    records[SHORT] = {"text": "ab", "choices": ["c", "d", "e"], "answer": 0}
    texts = [f"{one['text']} {one['choices'][one['answer']]}" for one in records]
    documents = [words(chooser, chooser.randint(4, 9)) for _ in range(60)]
    places = chooser.sample(range(60), sum(PLANTED.values()) + 1)
    for record, count in PLANTED.items():
        for _ in range(count):
            documents[places.pop()] = f"{words(chooser, 2)} {texts[record]} {words(chooser, 2)}"
    documents[places.pop()] = f"{words(chooser, 2)} {texts[PARTLY][:14]} {words(chooser, 3)}"
    (directory / "text").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (directory / "text" / "text.jsonl").write_text(lines, encoding="utf-8")
    tasks = directory / "tasks"
    tasks.mkdir()
    (tasks / "exam.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    task = {
        "task": "exam", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tasks / "exam.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    rolling = {
        **task, "task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text}} {{choices[answer]}}", "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    del rolling["doc_to_choice"]
    for one in (task, rolling):
        (tasks / f"{one['task']}.yaml").write_text(json.dumps(one), encoding="utf-8")
    settings = [
        "data.sequence_length_tokens=64", f"train.num_steps={NUM_STEPS}", "data.validation.held_out_fraction=0",
        "eval.every_steps=null", "checkpoint.every_steps=6", *overrides,
    ]  # fmt: skip
    run = tiny_runs.run(tiny_runs.configuration(directory, settings)).run_directory
    return Planted(run, tasks, texts, documents)


def read_steps(planted: Planted, last_step: int = NUM_STEPS) -> dict[int, list[int]]:
    """The step of every place in the batches that has the text of a record, by record: a search of bytes."""
    found: dict[int, list[int]] = defaultdict(list)
    with vorox.open_run(planted.run) as run:
        for batch in run.batches(1, last_step):
            for tokens in batch.tokens_ABT.reshape(-1, batch.tokens_ABT.shape[-1]):
                text = "".join(chr(token) if token < 256 else "\n" for token in tokens.tolist())
                for number, record in enumerate(planted.texts):
                    if number != SHORT:
                        found[number] += [batch.step] * len(re.findall(re.escape(record), text))
    return {number: steps for number, steps in found.items() if steps}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    tiny_runs.use_numpy_engine(monkeypatch)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        return plant(tmp_path_factory.mktemp("exposure"))


@pytest.fixture
def evaluate(planted: Planted, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*options: str, run: Path | str = planted.run, tasks: str = "exam") -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["eval", str(run), "--tasks", tasks, "--task-path", str(planted.tasks), "--exposure", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def studied(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, error = result
    assert code == 0, error
    return json.loads(out)["exposure"]


@pytest.mark.parametrize("step", [NUM_STEPS, 7])
def test_steps_are_those_of_a_search_of_the_batches(planted: Planted, evaluate: Run, step: int) -> None:
    expected = read_steps(planted, step)
    assert step < NUM_STEPS or set(expected) == set(PLANTED), "every record that was planted was read"
    found = studied(evaluate("--json", "--exposures", "0", run=f"{planted.run}@{step}"))["tasks"]["exam"]["records"]
    times = {one["id"]: sorted(step for read in one["exposures"] for step in read["steps"]) for one in found}
    assert {number: steps for number, steps in times.items() if steps} == expected
    for one in found:
        assert one["steps"] == sorted({*expected.get(one["id"], [])})
        for read in one["exposures"]:
            file, _, ordinal = read["document"].rpartition(":")
            assert file.endswith("text.jsonl")
            assert planted.texts[one["id"]] in planted.documents[int(ordinal)]
    groups = {one["id"]: one["group"] for one in found}
    assert {number for number, group in groups.items() if group == "seen"} == set(expected)
    assert groups[SHORT] == "too short"
    if step == NUM_STEPS:
        assert [number for number, group in groups.items() if group == "partly seen"] == [PARTLY]
        assert {*groups.values()} == {"seen", "partly seen", "not seen", "too short"}


@pytest.mark.filterwarnings("default")
def test_scores_of_groups_equal_a_recount_of_the_records(
    planted: Planted, evaluate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's own results of each record, kept by a spy; means and standard errors with numpy."""
    evaluator: Any = import_module("lm_eval.evaluator")
    original, logged = evaluator.evaluate, list[dict[str, Any]]()

    def spy(**arguments: Any) -> Any:
        found = original(**{**arguments, "log_samples": True})
        logged.extend(found["samples"]["exam"])
        return found

    monkeypatch.setattr(evaluator, "evaluate", spy)
    expected = read_steps(planted)
    found = studied(evaluate("--json", "--exposures", "0"))["tasks"]["exam"]["groups"]
    score = {int(one["doc_id"]): float(one["acc_norm"]) for one in logged}
    assert len(score) == NUM_RECORDS
    by_times = defaultdict(set)
    for number, steps in expected.items():
        by_times[{1: "seen once", 2: "seen twice"}.get(len(steps), "seen 3 times or more")].add(number)
    members = {
        "all": set(score), "seen": set(expected), **by_times, "partly seen": {PARTLY}, "too short": {SHORT},
        "not seen": set(score) - set(expected) - {PARTLY, SHORT},
    }  # fmt: skip
    assert {one["group"] for one in found} == set(members)
    for one in found:
        own = [score[number] for number in members[one["group"]]]
        assert one["num_records"] == len(own)
        assert one["metrics"]["acc_norm"] == pytest.approx(np.mean(own))
        if len(own) > 1:
            assert one["metrics"]["acc_norm_stderr"] == pytest.approx(np.std(own, ddof=1) / len(own) ** 0.5)
        steps = [step for number in members[one["group"]] for step in expected.get(number, [])]
        assert (one["first_step"], one["last_step"]) == (min(steps, default=None), max(steps, default=None))


def own_loss(engine: Any, run: Path, text: str) -> float:
    """Mean cross entropy of a text after the prefix token, with nothing of ours but the engine's logits."""
    tokenizer = load_tokenizer(RunLayout(run).tokenizer)
    ids = [tokenizer.prefix_id, *text.encode()]
    logits = engine.logits(np.array([ids[:-1]], np.int32))[0].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(-np.mean([log_p[at, token] for at, token in enumerate(ids[1:])]))


def test_losses_are_those_of_the_saved_states(planted: Planted, evaluate: Run, tmp_path: Path) -> None:
    """A twin of the run keeps every state; its checkpoints are loaded here, not by the command."""
    config = vorox.load_config(
        RunLayout(planted.run).config,
        {"run.name": "shadow", "checkpoint.every_steps": 1, "checkpoint.keep_last": 99},
    )
    shadow = tiny_runs.run(config).run_directory
    expected, found = read_steps(planted), studied(evaluate("--json", "--exposures", "99"))["losses"]
    assert {one["id"] for one in found} == set(expected)
    unseen = set(range(NUM_RECORDS)) - {*expected, PARTLY, SHORT}
    vocab_size = len(load_tokenizer(RunLayout(shadow).tokenizer).token_byte_lengths())
    states = {0: NumpyEngine(vocab_size, seed=config.run.seed, width=4)}
    for step, path in step_directories(shadow).items():
        states[step] = NumpyEngine(vocab_size, width=4)
        states[step].load(path)
    assert len(states) == NUM_STEPS + 1
    for one in found:
        first = min(expected[one["id"]])
        assert (one["before_step"], one["after_step"]) == (first - 1, first)
        for name, step in (("before", first - 1), ("after", first), ("end", NUM_STEPS)):
            loss = own_loss(states[step], shadow, planted.texts[one["id"]])
            assert one["losses"][name] == pytest.approx(loss, rel=1e-5)
            controls = [own_loss(states[step], shadow, planted.texts[number]) for number in unseen]
            assert one["control"][name] == pytest.approx(np.mean(controls), rel=1e-5)


def test_the_command_prints_costs_and_tables_and_a_plan_computes_nothing(
    planted: Planted, evaluate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in planted.run.rglob("*.json*")}
    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "logits", None)
        patch.setattr(NumpyEngine, "train_step", None)
        code, out, error = evaluate("--plan", run=f"{planted.run}@11")
        assert code == 0, error
        code, line, error = evaluate("--plan", "--json", run=f"{planted.run}@11")
        assert code == 0, error
    assert {path: path.stat().st_mtime_ns for path in planted.run.rglob("*.json*")} == before
    expected = read_steps(planted, 11)
    assert f"exam: training saw {len(expected)} of the {NUM_RECORDS} records" in out
    assert re.search(r"Loss before and after \d exposures?; \d+ of \d+ states to compute again: \d+ steps", out)
    plan = json.loads(line)
    assert plan["records"]["exam"]["seen"] == len(expected)
    assert set(plan["states"]) <= {step - offset for steps in expected.values() for step in steps for offset in (0, 1)}
    found = studied(evaluate("--json", run=f"{planted.run}@11"))["losses"]
    assert {one[name] for one in found for name in ("before_step", "after_step")} == set(plan["states"])
    code, out, error = evaluate()
    assert code == 0, error
    text = " ".join(out.split())
    assert f"{NUM_RECORDS} records" in text
    for words in ("80% of its tokens in sequences of 13 or more", "not seen", "BEFORE AFTER END DROP CONTROL BEYOND"):
        assert words in text, out
    assert folder(planted.run).exists(), "the states of RUN@STEP are cached"


@pytest.mark.torch
def test_with_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of("torch", tmp_path, monkeypatch, capsys)


@pytest.mark.jax
def test_with_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of("jax", tmp_path, monkeypatch, capsys)


def engine_of(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps as a search of the batches has them; losses as ``vorox.load_model`` has them, one state at a time."""
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    found = plant(
        tmp_path,
        f"backend={backend}",
        "runtime.num_threads=null",
        "model.max_positions_tokens=64",
        "optimizer.lr=0.001",
    )
    capsys.readouterr()
    words = ["eval", str(found.run), "--tasks", "exam", "--task-path", str(found.tasks), "--exposure", "--json"]
    assert main([*words, "--exposures", "2"]) == 0
    exposure, expected = json.loads(capsys.readouterr().out)["exposure"], read_steps(found)
    assert {one["id"]: one["steps"] for one in exposure["tasks"]["exam"]["records"] if one["steps"]} == {
        number: sorted({*steps}) for number, steps in expected.items()
    }
    assert len(exposure["losses"]) == 2
    for one in exposure["losses"]:
        for name, step in (("before", one["before_step"]), ("after", one["after_step"]), ("end", NUM_STEPS)):
            model: Any = vorox.load_model(found.run, step=step)
            loss = own_loss(model, found.run, found.texts[one["id"]])
            assert one["losses"][name] == pytest.approx(loss, rel=1e-5)


def test_masked_documents_and_records_that_nothing_read_are_not_seen(
    planted: Planted, evaluate: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (ordinal,) = [index for index, text in enumerate(planted.documents) if planted.texts[0] in text]
    words = ["fork", str(planted.run), "--step", "0", "--without-document", f"text.jsonl:{ordinal}", "--name", "masked"]
    assert main(words) == 0, capsys.readouterr().err
    (forked,) = planted.run.parent.glob("masked*")
    found = studied(evaluate("--json", "--exposures", "0", run=forked))["tasks"]["exam"]["records"]
    assert not found[0]["exposures"]
    assert {one["id"] for one in found if one["exposures"]} == {*PLANTED} - {0}
    code, out, error = evaluate(run=f"{planted.run}@0")
    assert code == 0, error
    assert f"exam: training saw none of the {NUM_RECORDS} records" in out
    assert "Loss before and after exposures: none" in out


def test_several_tasks_and_a_limit(planted: Planted, evaluate: Run) -> None:
    found = studied(evaluate("--json", "--limit", "4", "--exposures", "1", tasks="exam,rolling"))
    for name in ("exam", "rolling"):
        assert [one["id"] for one in found["tasks"][name]["records"]] == [0, 1, 2, 3]
        assert {one["id"] for one in found["tasks"][name]["records"] if one["exposures"]} == {0, 2, 3}
    assert [one["task"] for one in found["losses"]] == ["exam", "rolling"]
    (bits,) = {one["metrics"]["bits_per_byte"] for one in found["tasks"]["rolling"]["groups"] if one["group"] == "all"}
    assert 0 < bits < 20


def test_bad_input_is_refused_by_name(
    planted: Planted, evaluate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = json.loads((planted.tasks / "exam.yaml").read_text(encoding="utf-8"))
    empty = {**task, "task": "empty", "output_type": "generate_until", "doc_to_text": "", "doc_to_target": ""}
    empty = {key: value for key, value in empty.items() if key not in ("doc_to_choice", "metric_list")}
    (planted.tasks / "empty.yaml").write_text(json.dumps(empty), encoding="utf-8")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(task_evaluation, "RequestScorer", None)  # nothing is scored
    cases: list[tuple[str, tuple[int, str, str]]] = [
        ("Unknown task exma", evaluate(tasks="exma")),
        ("has no step 99", evaluate(run=f"{planted.run}@99")),
        ("is no run", evaluate(run=tmp_path / "exported")),
        ("No record of empty has a text", evaluate(tasks="empty")),
        ("does not fit into a row", evaluate("--ngram-tokens", "66")),
    ]
    for message, (code, out, error) in cases:
        assert code == 2, (message, out, error)
        assert message in error
        assert not out
    for option in (["--plan"], ["--exposures", "2"], ["--ngram-tokens", "5"]):
        assert main(["eval", str(planted.run), "--tasks", "exam", *option]) == 2


def test_a_lost_cache_is_named(planted: Planted, evaluate: Run, tmp_path: Path) -> None:
    cache = planted.run.parent.parent / "cache"
    cache.rename(tmp_path / "away")
    try:
        code, out, error = evaluate()
    finally:
        (tmp_path / "away").rename(cache)
    assert code == 4, error
    assert "The cache of source 'text' is missing" in error
    assert not out
