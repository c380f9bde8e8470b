"""The options and the help of ``vorox train``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, TrustCode

app = typer.Typer(add_completion=False)

DEFAULT_PRESET = "quickstart"

Configuration = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [--data PATH] [a.b=v ...]", show_default=False,
        help=f"A preset (default: {DEFAULT_PRESET}), a YAML or Python file, or a run; --data: a file or folder of your "
        "own text; then settings.",
    ),
]  # fmt: skip
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|RUN|CHECKPOINT|s3://...",
        help="auto: resume the run of this configuration, if there is one; never: start a new run; or a run or "
        "checkpoint to resume, with its recorded configuration, downloaded first if it is in a store. A run resumes "
        "from its mirror if that is ahead; a checkpoint resumes from exactly that state.",
    ),
]
FromWeights = Annotated[
    str | None,
    typer.Option(
        metavar="RUN[@STEP]|CHECKPOINT|DIRECTORY|hf://...|s3://...",
        help="Initialise from these weights, with their architecture and tokenizer (train.from_weights).",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run (run.name).")]
Minutes = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Train for as many steps as fit into this time, in minutes or with a unit: 3, 0.5, 90s, 2h.",
    ),
]
NumProcesses = Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes on this machine.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, metavar="K",
        help="Restart the run from its newest checkpoint after a crash or a kill, K times in total; after 3 restarts "
        "in a row without progress, stop.",
    ),
]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the configuration and print what would run; build and write nothing.")
]
Menu = Annotated[
    bool,
    typer.Option(
        "--menu",
        help="Choose a checkpoint to resume, or a new run, in a menu; needs a terminal. Without arguments, it opens "
        "by default.",
    ),
]


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.training.train")
def train(
    arguments: Configuration = None,
    resume: Resume = "auto",
    from_weights: FromWeights = None,
    name: Name = None,
    minutes: Minutes = None,
    nproc: NumProcesses = 1,
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
    menu: Menu = False,
    _: TrustCode = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Without arguments on a terminal, a menu opens: it lists the checkpoints, and starts or resumes a run.

    Write settings as section.key=value, with or without dashes:
    model.num_layers=8 --optimizer.lr=6e-4. Common names work too:
    --lr 1e-3 --steps 500 --batch_size 16 --seed 1 --device cpu.
    `vorox config explain KEY` describes a setting.
    """
