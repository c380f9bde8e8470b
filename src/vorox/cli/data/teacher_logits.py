"""``vorox data teacher-logits``: write the logits of a teacher for the rows of a configuration."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import typer

from vorox.api.teacher_logits import write_teacher_logits
from vorox.cli.data.loading import load, progress_display
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json
from vorox.core.pluralize import pluralize
from vorox.training.steps.teacher_logits import Precision

_REPORT_SECONDS = 10.0


def teacher_logits(arguments: list[str], to: Path, precision: Precision, as_json: bool) -> None:
    config = load(arguments, ("--to", "--precision", "--json"))
    last = time.monotonic()

    def report(step: int, num_steps: int) -> None:
        nonlocal last
        if not as_json and time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            typer.echo(f"Step {step:,} of {num_steps:,}", err=True)

    with progress_display() as display:
        done = write_teacher_logits(config, to, precision=precision, on_progress=display, on_step=report)
    if as_json:
        print_json({**asdict(done), "path": str(done.path)})
        return
    typer.echo(
        f"{done.path}: {pluralize(done.num_rows, 'row')}, {done.num_new_rows:,} of them new, for "
        f"{pluralize(done.num_steps, 'step')}; {humanize.size(done.size_bytes)}"
    )
    typer.echo(f"Train a student with: train.distillation.logits={done.path}")
