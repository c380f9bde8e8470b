"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

OVERRIDES_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer context settings of commands that accept overrides."""
DEFAULT_ROOT = "runs"

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, name or prefix, a path, or 'latest' (with a checkpoint).")
]
CheckpointName = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="Run id, name or prefix, or 'latest', with a step as in latest@340; or the path of a checkpoint.",
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]|MODEL",
        help="Run id, name or prefix, or 'latest', with a step as in latest@340; the path of a run, a checkpoint or a "
        "directory of transformers; or hf://OWNER/NAME.",
    ),
]
Root = Annotated[str, typer.Option("--root", help="Parent directory of runs (run.directory).")]
WeightsOption = Annotated[
    Literal["model", "ema"], typer.Option(help="ema: the moving average of the weights (train.ema_decay).")
]
STEP_HELP = "The same as RUN@STEP: any step, kept or not. Default: the newest valid checkpoint."
StepOption = Annotated[int | None, typer.Option("--step", min=0, help=STEP_HELP)]
DeviceOption = Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0: greedy.")]
TopKOption = Annotated[int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")]
TopPOption = Annotated[
    float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this probability together.")
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Sampling seed. Default: the run's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", expose_value=False, help="Trust the functions that the run names, as their files are now."
    ),
]
"""Taken off the command line before it is parsed (``core/user_code/trusted_code.py``), of commands that declare it."""
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
ConfigArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG [a.b=v ...]",
        help="A preset, a YAML file or a run; then settings. --data and --from-weights as for vorox train.",
    ),
]
