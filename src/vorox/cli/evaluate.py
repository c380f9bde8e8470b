"""``vorox eval``: evaluate a checkpoint on lm-evaluation-harness tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, WeightsOption, print_json, print_table

if TYPE_CHECKING:
    from vorox.training.evaluation.task_evaluation import TaskResult


def evaluate(
    run: RunName,
    tasks: Annotated[str, typer.Option("--tasks", "-t", help="Tasks, groups, tags or YAML files, by commas.")],
    task_path: Annotated[
        Path | None, typer.Option("--task-path", help="Directory of YAML tasks, besides those of the harness.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Documents per task. Default: all.")] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="Time budget; unfinished tasks have no result.")
    ] = None,
    weights: WeightsOption = "model",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences per batch.")] = 16,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to evaluate. Default: the newest valid one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint on lm-evaluation-harness tasks, and record the results in the run."""
    from vorox.api.model import find_model
    from vorox.cli.generate import report_skipped
    from vorox.core.errors import ConfigError
    from vorox.experiments.task_results import checkpoint_sha256, write_task_results
    from vorox.training.evaluation.task_evaluation import evaluate_tasks, records_of, time_budget
    from vorox.training.evaluation.task_loading import load_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("No task is named", where="--tasks", hint="for example --tasks hellaswag,lambada_openai")
    loaded = load_tasks(names, task_path)  # a mistake is reported before the model is loaded
    model = find_model(run, step=step, root=root, device=device, weights=weights, on_corrupt=report_skipped)
    if model.path is None:
        raise ConfigError(
            "Results are recorded in a run, and an average belongs to none", where=run,
            hint="train from it with --from-weights, or evaluate its export with lm-evaluation-harness",
        )  # fmt: skip
    sha256 = checkpoint_sha256(model.path)
    if not as_json:
        typer.echo(f"{model.run_directory.name}: step {model.step:,}, checkpoint manifest sha256:{sha256}")

    def report(result: TaskResult) -> None:
        if not as_json:
            typer.echo(f"Finished {result.task}: {result.num_samples:,} documents", err=True)

    results, unfinished = evaluate_tasks(
        model, loaded, limit=limit, batch_size=batch_size,
        check=time_budget(None if minutes is None else minutes * 60), on_result=report,
    )  # fmt: skip
    found = records_of(results, limit, weights)
    path, has_metrics = write_task_results(model.run_directory, model.step, sha256, found)
    if as_json:
        print_json({
            "run": model.run_directory.name, "step": model.step, "checkpoint_sha256": sha256, "tasks": found,
            "unfinished": unfinished, "file": str(path),
        })  # fmt: skip
        return
    _print_results(results)
    for name in unfinished:
        typer.echo(f"No result for {name}: the time budget of {minutes:g} minutes ended")
    typer.echo(f"Written to {path}")
    if not has_metrics:
        typer.echo("A live process writes this run, so metrics.jsonl was not changed")


def _print_results(results: list[TaskResult]) -> None:
    rows = [
        [result.task, f"{result.num_samples:,}", str(result.num_fewshot), name, f"{value:.6g}", error]
        for result in results
        for name, value in result.metrics.items()
        if "_stderr" not in name
        for error in [_standard_error(result, name)]
    ]
    if rows:
        print_table(
            ["TASK", "DOCUMENTS", "SHOTS", "METRIC", "VALUE", "STDERR"], rows, right="DOCUMENTS SHOTS VALUE STDERR"
        )


def _standard_error(result: TaskResult, name: str) -> str:
    metric, _, filter_name = name.partition(".")
    value = result.metrics.get(f"{metric}_stderr.{filter_name}" if filter_name else f"{metric}_stderr")
    return "" if value is None else f"{value:.2g}"
