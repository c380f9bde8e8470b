"""The options and the help of ``vorox compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, CheckpointName, DeviceOption, Root, StepOption, TrustCode

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.models.compress")
def compress(
    run: CheckpointName,
    to: Annotated[Path, typer.Option("--to", help="New directory.")],
    quantize: Annotated[
        Literal["int8-weight-only", "int8-dynamic", "int4"] | None,
        typer.Option(
            "--quantize",
            help="Linear layers of the blocks in 8 bits, weights only or with 8-bit activations; or in 4 bits. "
            "Writes a directory that transformers loads.",
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            metavar="magnitude:F|2:4",
            help="Zero the fraction F of each matrix, or two of every four inputs.",
        ),
    ] = None,
    step: StepOption = None,
    device: DeviceOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Prune and quantise a checkpoint, and compare loss, size and speed on the run's validation set."""
