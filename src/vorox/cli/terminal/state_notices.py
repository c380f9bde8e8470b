"""What commands print on the way to a checkpoint: corrupt ones that are skipped, and steps that are computed again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import typer

from vorox.cli.terminal.build_display import BuildDisplay
from vorox.training.materialize import StateNotices, cost_line
from vorox.training.re_execution import ReExecution


class PrintedNotices(StateNotices):
    """Prints on standard error, with the progress of the computation."""

    def __init__(self) -> None:
        self._display = BuildDisplay()

    def corrupt(self, path: Path, error: Exception) -> None:
        typer.echo(f"Skipping {path.name}: {error}", err=True)

    def computes(self, execution: ReExecution, steps: Collection[int]) -> None:
        typer.echo(cost_line(execution, steps), err=True)

    def progress(self, done: int, total: int) -> None:
        self._display.step("computing steps", done, total)

    def ends(self) -> None:
        self._display.close()
