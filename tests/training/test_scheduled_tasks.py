"""Tasks evaluated during training: the scores of ``vorox eval``, and a run whose bits do not change."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import rank_threads
import tiny_runs
from vorox.cli import main
from vorox.core.batch import DataCursor, Progress
from vorox.core.errors import ConfigError, Preempted
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain
from vorox.training.evaluation import task_loading
from vorox.training.evaluation.task_evaluation import TaskResult
from vorox.training.loop import scheduled_tasks
from vorox.training.loop.scheduled_tasks import ScheduledTasks, TasksReport
from vorox.training.steps.stop import StopRequest

TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "completion": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip


def write_tasks(directory: Path) -> dict[str, str]:
    directory.mkdir()
    words = tiny_runs.WORDS
    documents = [{"text": " ".join(words[n : n + 4]), "choices": words[n : n + 3], "answer": n % 3} for n in range(12)]
    file = directory / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    for name, task in TASKS.items():
        kept = {"data_files": {"test": str(file)}}
        settings = {"task": name, "dataset_path": "json", "dataset_kwargs": kept, "test_split": "test", **task}
        (directory / f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return {name: str(directory / f"{name}.yaml") for name in TASKS}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_scores_equal_a_later_evaluation_and_the_run_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tiny_runs.use_numpy_engine(monkeypatch)
    files = write_tasks(tmp_path / "tasks")
    shape = ["model.max_positions_tokens=64", "checkpoint.every_steps=null", "checkpoint.keep_last=9"]
    plain = tiny_runs.run(tiny_runs.configuration(tmp_path, [*shape, "run.name=plain"]))
    names = [files["choices"], files["completion"], "rolling"]
    tasks = [f"eval.tasks={json.dumps(names)}", f"eval.task_path={tmp_path / 'tasks'}"]
    every = ["eval.tasks_every_steps=5", "run.name=tasks"]
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path, [*shape, *tasks, *every]))
    assert read_chain(outcome.run_directory) == read_chain(plain.run_directory)
    assert outcome.fingerprint == plain.fingerprint
    layout, scores = RunLayout(outcome.run_directory), []
    for step in (5, 10, 12):
        during = json.loads(layout.task_results(step).read_bytes())
        layout.task_results(step).unlink()
        words = ["--tasks", ",".join(names), "--task-path", str(tmp_path / "tasks"), "--step", str(step)]
        capsys.readouterr()
        assert main(["eval", str(outcome.run_directory), *words, "--json"]) == 0
        afterwards = json.loads(capsys.readouterr().out)
        assert afterwards["tasks"] == during["tasks"]
        assert {*afterwards["tasks"]} == {*TASKS}
        assert afterwards["checkpoint_sha256"] == during["checkpoint_sha256"]
        recorded = read_metrics(outcome.run_directory)[step]
        assert recorded["eval/tasks/rolling/bits_per_byte"] == during["tasks"]["rolling"]["metrics"]["bits_per_byte"]
        scores.append(recorded["eval/tasks/rolling/bits_per_byte"])
    assert len({*scores}) == 3  # each of its own checkpoint
    long = ["eval.tasks=[completion]", tasks[1], "model.max_positions_tokens=6", "data.sequence_length_tokens=6"]
    with pytest.raises(ConfigError, match="completion requests 6 new tokens, but the model has 6 positions"):
        tiny_runs.run(tiny_runs.configuration(tmp_path, [*long, "run.name=long"]))


@pytest.mark.slow
def test_tasks_of_the_harness_are_found_in_their_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = pytest.importorskip("lm_eval.tasks")
    harness = tmp_path / "harness"
    task = {"dataset_path": "json", "output_type": "loglikelihood_rolling"}
    files: Mapping[str, dict[str, Any]] = {
        "one/a.yaml": {"task": "alpha", "tag": "greek", **task},
        "two/b.yaml": {"task": "beta", "include": "_template_yaml", **task},
        "two/_template_yaml": {"tag": ["greek"]},
        "three/g.yaml": {"group": "both", "task": ["alpha", {"group": "inner", "task": [{"task": "gamma"}]}]},
        "four/c.yaml": {"task": "gamma", **task},
        "five/d.yaml": {"task": "delta", **task},
    }
    for name, content in files.items():
        (harness / name).parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{key}: {json.dumps(value)}" for key, value in content.items())
        (harness / name).write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(module, "__file__", str(harness / "__init__.py"))

    def found(*names: str) -> list[str]:
        return task_loading.find_tasks(names, None).all_tasks

    assert "alpha" in found("alpha")
    assert "delta" not in found("alpha")
    assert {"alpha", "beta"} <= {*found("greek")}
    assert {"alpha", "gamma", "both"} <= {*found("both")}
    assert "delta" not in found("both")
    with pytest.raises(ConfigError, match="Unknown task detla") as caught:
        found("detla")
    assert "delta" in caught.value.hint
    with pytest.raises(ConfigError, match="Task file does not exist"):
        found("absent.yaml")


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., Any], overrides: tuple[str, ...] = ()
) -> Any:
    """A run with one task that ``evaluate`` evaluates."""
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.setattr(scheduled_tasks, "load_tasks", lambda *_: {"one": FakeTask()})
    monkeypatch.setattr(scheduled_tasks, "evaluate_tasks", evaluate)
    settings = ["eval.tasks=[one]", "eval.tasks_every_steps=3", *overrides]
    return tiny_runs.run(tiny_runs.configuration(tmp_path, settings))


class FakeTask:
    OUTPUT_TYPE = "loglikelihood"


def fake_result(accuracy: float) -> TaskResult:
    return TaskResult("one", "1", 3, 0, {"acc": accuracy})


def test_a_failing_evaluation_ends_neither_run_nor_later_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def evaluate(model: Any, *_: Any, on_result: Callable[[TaskResult], None], **__: Any) -> Any:
        steps.append(model.step)
        if model.step == 6:
            raise ValueError("broken metric")
        on_result(fake_result(model.step / 100))
        return [], (["two"] if model.step == 9 else [])

    outcome = run_with(tmp_path, monkeypatch, evaluate)
    assert steps == [3, 6, 9, 12]
    assert outcome.progress.step == 12
    failed = tiny_runs.events(outcome.run_directory, "tasks_failed")
    assert failed == ["Task evaluation at step 6 failed (ValueError: broken metric); training continues"]
    assert "for two" in tiny_runs.events(outcome.run_directory, "tasks_unfinished")[0]
    metrics = read_metrics(outcome.run_directory)
    found = {step: values.get("eval/tasks/one/acc") for step, values in metrics.items() if "tasks_seconds" in values}
    assert found == {3: 0.03, 6: None, 9: 0.09, 12: 0.12}
    assert not RunLayout(outcome.run_directory).task_results(6).exists()


def test_a_stopped_evaluation_is_repeated_after_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def evaluate(model: Any, *_: Any, check: Callable[[], None], on_result: Callable[[TaskResult], None]) -> Any:
        steps.append(model.step)
        if steps == [3, 6]:
            stops[0].requested = "SIGTERM"
        check()
        on_result(fake_result(0.5))
        return [], []

    stops: list[StopRequest] = []
    created = StopRequest.__init__
    monkeypatch.setattr(StopRequest, "__init__", lambda self: (stops.insert(0, self), created(self))[1])

    def call(model: Any, tasks: Any, *, check: Any, limit: int | None, on_result: Any) -> Any:
        assert limit is None
        return evaluate(model, tasks, check=check, on_result=on_result)

    with pytest.raises(Preempted, match="stopped after step 6 of 12"):
        run_with(tmp_path, monkeypatch, call)
    outcome = run_with(tmp_path, monkeypatch, call)
    assert steps == [3, 6, 6, 9, 12]
    assert outcome.progress.step == 12


def test_ranks_end_an_evaluation_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails after two batches, in the harness's code; rank 0 ends at its next batch."""
    batches = {0: 0, 1: 0}

    def evaluate(rank: Any, *_: Any, check: Callable[[], None], **__: Any) -> Any:
        for number in range(5):
            check()
            batches[rank] += 1
            if rank == 1 and number == 1:
                raise ValueError("only here")
        return [], []

    monkeypatch.setattr(scheduled_tasks, "evaluate_tasks", evaluate)
    monkeypatch.setattr(scheduled_tasks, "_without_progress_bars", contextlib.nullcontext)
    config = tiny_runs.configuration(tmp_path, ["eval.tasks=[one]"]).eval
    start, end = (Progress(step, 0, DataCursor("", 0, 0, 0, 0)) for step in (0, 4))

    RunLayout(tmp_path).checkpoint(4).mkdir(parents=True)

    def program(dist: DistributedContext) -> list[TasksReport]:
        rank: Any = dist.rank
        tasks = ScheduledTasks(tmp_path, config, {"one": FakeTask()}, 4, start, dist, lambda step: rank)
        assert tasks.due(end)
        reports: list[TasksReport] = []
        tasks.run(end, StopRequest(), reports.append)
        return reports

    found, _ = rank_threads.together(2, program)
    assert [report.failure for reports in found for report in reports] == ["ValueError: only here"] * 2
    assert batches == {0: 2, 1: 2}
