"""The options and the help of ``vorox tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, AsJson

app = typer.Typer(add_completion=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.sweeps.tune")
def tune(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [a.b=v ...] ['a.b=DISTRIBUTION' ...]",
            show_default=False,
            help="A preset, a YAML or Python file, or a run; settings; and settings to search: choice(A, B), "
            "uniform(LOW, HIGH) or loguniform(LOW, HIGH).",
        ),
    ],
    space: Annotated[
        Path | None, typer.Option("--space", metavar="FILE", help="YAML file of settings with a distribution each.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials, earlier ones included.")] = 16,
    concurrent: Annotated[int, typer.Option("--concurrent", min=1, help="Trials at a time.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search; run.seed seeds the trials.")] = 0,
    asha: Annotated[
        bool, typer.Option("--asha/--no-asha", help="Stop the worse trials early (ASHA), by validation loss.")
    ] = True,
    grace_percent: Annotated[
        float, typer.Option(min=0.1, max=99, help="First comparison of ASHA, in percent of a trial's steps.")
    ] = 10.0,
    reduction_factor: Annotated[
        float, typer.Option(min=1.1, help="ASHA's reduction factor: at each comparison, one in this many continues.")
    ] = 3.0,
    nproc: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes of a trial; each has a GPU, unless it trains on CPUs.")
    ] = 1,
    cpus: Annotated[int, typer.Option(min=0, help="CPUs that Ray reserves for a trial.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the sweep, and prefix of its runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search settings for the lowest validation loss: many runs, each an ordinary run directory.

    Optuna (TPE) chooses the settings of each trial, and ASHA stops the worse
    ones early. The same command continues an interrupted sweep and repeats no
    finished trial; with more --trials, it extends it. Trials run on this
    machine, or on the Ray cluster of RAY_ADDRESS.
    """
