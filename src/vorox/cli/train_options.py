"""The options of ``vorox train``: their types, names and help."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_PRESET = "quickstart"

Configuration = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [--data PATH] [a.b=v ...]", show_default=False,
        help=f"A preset ({DEFAULT_PRESET} if none is named), a YAML or Python file or a run; --data: your own "
        "text, a file or folder; then settings.",
    ),
]  # fmt: skip
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|RUN|CHECKPOINT|gs://...|s3://...",
        help="auto: go on with the run of this very configuration, if there is one; never: begin a new one; "
        "or the run or checkpoint to go on from, with its own configuration; brought here from a store.",
    ),
]
FromWeights = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|CHECKPOINT|DIRECTORY|hf://...|gs://...",
        help="Start from these weights, with their architecture and tokenizer (from_weights).",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run (run.name).")]
Minutes = Annotated[
    str | None, typer.Option(metavar="TIME", help="Train as many steps as fit into this time: 3, 0.5, 90s, 2h.")
]
NumProcesses = Annotated[int, typer.Option(min=1, metavar="N", help="Processes on this machine that train as one run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and show the plan; build and write nothing.")]
