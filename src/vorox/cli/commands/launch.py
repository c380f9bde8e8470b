"""The options and the help of ``vorox launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT

app = typer.Typer(
    name="launch",
    help="Write a job file that trains on the machines of a scheduler.",
    no_args_is_help=True,
    add_completion=False,
)

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG [a.b=v ...]", show_default=False, help="As for vorox train."),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Number of machines.")]
Devices = Annotated[
    int, typer.Option("--devices", min=1, metavar="G", help="Devices of each machine, a rank for each.")
]
Cpus = Annotated[
    int | None, typer.Option("--cpus", min=1, metavar="C", help="CPUs of each machine. Default: 8 for each device.")
]
Shared = Annotated[
    str | None, typer.Option("--shared", metavar="DIRECTORY", help="Shared storage for runs and caches.")
]
Secrets = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="VARIABLE", help="Environment variable that the scheduler must provide."),
]
NoticeTime = Annotated[
    str | None,
    typer.Option("--notice", metavar="TIME", help="Time for a save after SIGTERM, such as 10m. Default: estimated."),
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", min=0, metavar="K", help="Restarts after crashes; after a save, no limit.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")]
Setup = Annotated[
    str | None, typer.Option("--setup", metavar="COMMAND", help="Shell command before the run, as for a virtualenv.")
]
Volume = Annotated[str, typer.Option("--volume", metavar="NAME", help="Volume that holds the shared directory.")]
_SHARED_MOUNT = "/shared"


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.launch.launch")
def slurm(
    arguments: Arguments,
    nodes: Nodes = 1,
    devices: Devices = 1,
    cpus: Cpus = None,
    shared: Shared = None,
    secret: Secrets = None,
    notice: NoticeTime = None,
    max_restarts: MaxRestarts = 3,
    time: Annotated[str, typer.Option("--time", metavar="LIMIT", help="Time limit, as SLURM writes it.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option("--partition", help="Partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Account.")] = None,
    setup: Setup = None,
    output: Output = None,
) -> None:
    """Write a SLURM batch script. Paths are relative to this folder, which must be on shared storage."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.launch.launch")
def kubernetes(
    arguments: Arguments,
    image: Annotated[str, typer.Option("--image", help="Container image with Vorox and its engine.")],
    volume: Volume,
    nodes: Nodes = 1,
    devices: Devices = 1,
    cpus: Cpus = None,
    shared: Shared = _SHARED_MOUNT,
    secret: Secrets = None,
    secrets_from: Annotated[
        str, typer.Option("--secrets-from", metavar="SECRET", help="Secret with a key for each --secret.")
    ] = "vorox-secrets",
    notice: NoticeTime = None,
    max_restarts: MaxRestarts = 3,
    output: Output = None,
) -> None:
    """Write a Kubernetes manifest: the configuration, a headless Service and an indexed Job."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.launch.launch")
def ray(
    arguments: Arguments,
    nodes: Nodes = 1,
    devices: Devices = 1,
    cpus: Cpus = None,
    shared: Shared = None,
    secret: Secrets = None,
    notice: NoticeTime = None,
    max_restarts: MaxRestarts = 3,
    output: Output = None,
) -> None:
    """Write the driver file of a Ray job. Paths are relative to the folder that is submitted."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.launch.launch")
def skypilot(
    arguments: Arguments,
    volume: Volume,
    nodes: Nodes = 1,
    devices: Devices = 1,
    accelerator: Annotated[str, typer.Option("--accelerator", help="Kind of the devices.")] = "H100",
    spot: Annotated[bool, typer.Option("--spot", help="Use spot machines.")] = False,
    cpus: Cpus = None,
    shared: Shared = _SHARED_MOUNT,
    secret: Secrets = None,
    notice: NoticeTime = None,
    max_restarts: MaxRestarts = 3,
    setup: Setup = None,
    output: Output = None,
) -> None:
    """Write a SkyPilot task for `sky jobs launch`. Paths are relative to this folder, which is copied."""
