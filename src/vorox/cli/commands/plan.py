"""The options and the help of ``vorox plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, AsJson, ConfigArguments

app = typer.Typer(add_completion=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.planning.plan")
def plan(
    arguments: ConfigArguments,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="For example rtx4090, a100-80x4, h200x8. Default: this machine."),
    ] = None,
    mfu: Annotated[
        float, typer.Option("--mfu", min=0.01, max=1.0, help="Assumed model FLOPs utilisation of a GPU.")
    ] = 0.4,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the step for this machine, and plan with the compiler's memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, speed, duration and disk of a run on some hardware; nothing is built or written.

    Exit code 3 if the run does not fit; settings that do are listed.
    """
