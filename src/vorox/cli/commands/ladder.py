"""The options and the help of ``vorox ladder``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, AsJson

app = typer.Typer(add_completion=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.sweeps.ladder")
def ladder(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [a.b=v ...]",
            show_default=False,
            help="A preset, a YAML or Python file, or a run; settings.",
        ),
    ],
    widths: Annotated[str, typer.Option(metavar="W,W,...", help="Values of model.hidden_size; the first is the base.")],
    lr: Annotated[str, typer.Option("--lr", metavar="LR,LR,...", help="Peak learning rates.")],
    target: Annotated[
        int | None, typer.Option(metavar="W", min=1, help="Width of the large model. Default: model.hidden_size.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the learning rate of a wide model: train narrow ones at several rates, and transfer the best.

    Every run is an ordinary run directory with the maximal update
    parametrisation (model.mup_base_hidden_size). The same command continues
    an interrupted run and repeats no finished one.
    """
