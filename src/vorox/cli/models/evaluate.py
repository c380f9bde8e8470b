"""``vorox eval``: evaluate a checkpoint on lm-evaluation-harness tasks."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.api.model import find_model
from vorox.cli.models.exposure import (
    ExposureOptions,
    find_states,
    plan_json,
    print_plan,
    report_exposure,
    standard_error,
    study_exposure,
)
from vorox.cli.terminal.output import print_json, print_table
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.schema.train import Weights
from vorox.experiments.task_results import checkpoint_sha256, write_task_results
from vorox.training.evaluation.task_evaluation import TaskResult, evaluate_tasks, records_of, time_budget
from vorox.training.evaluation.task_loading import load_tasks


def evaluate(
    run: str,
    tasks: str,
    task_path: Path | None,
    limit: int | None,
    minutes: float | None,
    weights: Weights,
    batch_size: int,
    step: int | None,
    device: str | None,
    exposure: bool,
    exposures: int | None,
    ngram_tokens: int | None,
    plan: bool,
    root: str,
    as_json: bool,
) -> None:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("No task is named", where="--tasks", hint="for example --tasks hellaswag,lambada_openai")
    options = ExposureOptions(exposure, exposures, ngram_tokens, plan)
    options.check()
    loaded = load_tasks(names, task_path)  # a mistake is reported before the model is loaded
    study = study_exposure(run, step, root, loaded, limit, options) if exposure else None
    if study is not None:
        if plan and as_json:
            print_json(plan_json(study))
        elif not as_json:
            print_plan(study)
        if plan:
            return
        run, step = str(study.directory), study.step
    states = {} if study is None else find_states(study)
    model = find_model(run, step=step, root=root, device=device, weights=weights, notices=PrintedNotices())
    sha256 = None if model.path is None else checkpoint_sha256(model.path)
    if not as_json:
        typer.echo(model.title + ("" if sha256 is None else f", checkpoint manifest sha256:{sha256}"))

    def report(result: TaskResult) -> None:
        if not as_json:
            typer.echo(f"Finished {result.task}: {result.num_samples:,} documents", err=True)

    results, unfinished = evaluate_tasks(
        model, loaded, limit=limit, batch_size=batch_size,
        check=time_budget(None if minutes is None else minutes * 60), on_result=report,
        on_samples=None if study is None else study.samples.__setitem__,
    )  # fmt: skip
    found = records_of(results, limit, weights)
    path, has_metrics = None, True
    if sha256 is not None:
        path, has_metrics = write_task_results(model.run_directory, model.step, sha256, found)
    if not as_json:
        _print_results(results)
    studied = None
    if study is not None:
        studied = report_exposure(study, model, loaded, states, weights, batch_size, is_shown=not as_json)
    if as_json:
        print_json({
            "run": model.name if path is not None else None, "model": model.name, "step": model.step,
            "checkpoint_sha256": sha256, "tasks": found, "unfinished": unfinished,
            "file": None if path is None else str(path), **({} if study is None else {"exposure": studied}),
        })  # fmt: skip
        return
    for name in unfinished:
        typer.echo(f"No result for {name}: the time budget of {minutes:g} minutes ended")
    typer.echo("Not recorded: it is no checkpoint that a run keeps" if path is None else f"Written to {path}")
    if not has_metrics:
        typer.echo("A live process writes this run, so metrics.jsonl was not changed")


def _print_results(results: list[TaskResult]) -> None:
    rows = [
        [
            result.task, f"{result.num_samples:,}", str(result.num_fewshot), name, f"{value:.6g}",
            "" if error is None else f"{error:.2g}",
        ]
        for result in results
        for name, value in result.metrics.items()
        if "_stderr" not in name
        for error in [standard_error(result.metrics, name)]
    ]  # fmt: skip
    if rows:
        print_table(
            ["TASK", "DOCUMENTS", "SHOTS", "METRIC", "VALUE", "STDERR"], rows, right="DOCUMENTS SHOTS VALUE STDERR"
        )
