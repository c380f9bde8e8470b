"""The options and the help of ``vorox parity``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, AsJson

app = typer.Typer(add_completion=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.checks.parity")
def parity(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG [a.b=v ...]", help="A preset, a YAML file, a run or RUN@STEP; then settings."),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps to compare.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Train both engines from the same weights on the same batches, and compare every step.

    Compares logits, loss, gradient norm and parameters. Exit code 7 if a
    quantity exceeds its tolerance. Use precision.dtype=fp32; lower precisions
    are expected to differ. RUN@STEP starts from the weights of that step.
    Dropout is off: each engine draws its own. The verdict on the configuration
    of a run is added to its verdicts.jsonl.
    """
