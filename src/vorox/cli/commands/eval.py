"""The options and the help of ``vorox eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import (
    DEFAULT_ROOT,
    AsJson,
    DeviceOption,
    ModelName,
    Root,
    StepOption,
    TrustCode,
    WeightsOption,
)

app = typer.Typer(add_completion=False)


@app.command("eval")
@implemented_in("vorox.cli.models.evaluate")
def evaluate(
    run: ModelName,
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
    step: StepOption = None,
    device: DeviceOption = None,
    exposure: Annotated[
        bool, typer.Option("--exposure", help="Scores on records that training read and did not read, and when.")
    ] = False,
    exposures: Annotated[
        int | None,
        typer.Option(
            "--exposures",
            min=0,
            show_default=False,
            help="Seen records of a task whose loss is measured before and after training read them. Default: 5.",
        ),
    ] = None,
    ngram_tokens: Annotated[
        int | None,
        typer.Option("--ngram-tokens", min=1, show_default=False, help="Length of a shared sequence. Default: 13."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="With --exposure: only print what training read, and what the losses take.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on lm-evaluation-harness tasks; the results of a checkpoint are recorded in its run.

    A base against its fine-tuned model: the same command for the directory or
    hf://OWNER/NAME that a run started from, and for the run.

    --exposure compares the records that the run was trained on with the others,
    and measures the loss of some just before and after training read them.
    """
