"""``vorox launch``: write the job file of a run for SLURM, Kubernetes, Ray or SkyPilot.

The job starts ``vorox train`` on every machine. Each start runs the same command, which resumes the run; exit codes
decide whether to restart (``job.FINAL_EXIT_CODES``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.arguments import OVERRIDES_CONTEXT, parse_arguments

if TYPE_CHECKING:
    from vorox.cli.launch.job import Job

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
_OPTIONS = (
    "--nodes", "--devices", "--cpus", "--shared", "--secret", "--notice", "--max-restarts", "--output", "--setup",
    "--volume", "--time", "--partition", "--account", "--image", "--secrets-from", "--accelerator", "--spot",
)  # fmt: skip


@app.command(context_settings=OVERRIDES_CONTEXT)
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
    from vorox.cli.launch.slurm import slurm_script

    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts)
    _write(slurm_script(job, time=time, partition=partition, account=account, setup=setup), output, "sbatch")


@app.command(context_settings=OVERRIDES_CONTEXT)
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
    from vorox.cli.launch.kubernetes import kubernetes_manifest

    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts, is_local=False)
    text = kubernetes_manifest(job, image=image, volume=volume, secrets_from=secrets_from)
    _write(text, output, "kubectl apply -f")


@app.command(context_settings=OVERRIDES_CONTEXT)
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
    from vorox.cli.launch.ray_job import ray_driver_file

    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts, is_local=False)
    _write(ray_driver_file(job), output, "ray job submit --working-dir . -- python")


@app.command(context_settings=OVERRIDES_CONTEXT)
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
    from vorox.cli.launch.skypilot import skypilot_task

    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts, is_local=False)
    text = skypilot_task(job, accelerator=accelerator, volume=volume, spot=spot, setup=setup)
    _write(text, output, " ".join(["sky jobs launch", *(f"--secret {name}" for name in job.secrets)]))


def _job(
    arguments: list[str],
    nodes: int,
    devices: int,
    cpus: int | None,
    shared: str | None,
    secrets: list[str] | None,
    notice: str | None,
    max_restarts: int,
    *,
    is_local: bool = True,
) -> Job:
    """Return the job of a command.

    Args:
        is_local: Whether the job runs in this folder.

    Raises:
        ConfigError: The configuration does not fit the job, or the command contains a secret.
    """
    from vorox.cli.config import source_and_overrides
    from vorox.cli.launch import job as jobs
    from vorox.cli.time_limit import parse_minutes
    from vorox.core.errors import ConfigError
    from vorox.training.checkpoints.weights_source import load_config_with_weights

    jobs.check_secrets(arguments, secrets or ())
    parsed = parse_arguments(arguments, options=_OPTIONS, max_positional=1)
    if not parsed.positional or parsed.data:
        raise ConfigError(
            "No configuration is named", where="launch",
            hint="for example `vorox launch slurm my.yaml`; a text becomes one by data.sources",
        )  # fmt: skip
    waits = [f"parallel.start_timeout_seconds={jobs.START_TIMEOUT_SECONDS}"] if nodes > 1 else []
    settings = [*waits, *jobs.shared_settings(shared or ""), *parsed.overrides]
    source, _ = source_and_overrides(parsed)
    config = load_config_with_weights(source, settings)
    jobs.check_devices(config, nodes * devices)
    if not is_local:
        jobs.check_shared(config)
    given = None if notice is None else math.ceil(parse_minutes(notice) * 60)
    time_to_save = jobs.estimate_notice(config) if given is None else jobs.Notice(given, "as --notice")
    if config.checkpoint.notice_seconds is None:
        settings.append(f"checkpoint.notice_seconds={time_to_save.seconds}")
        config = load_config_with_weights(source, settings)
    return jobs.Job(
        config=config, source=parsed.positional[0], settings=tuple(settings), num_nodes=nodes,
        devices_per_node=devices, cpus_per_node=cpus or 8 * devices, max_restarts=max_restarts, shared=shared or "",
        secrets=tuple(secrets or ()),
        notice=time_to_save,
    )  # fmt: skip


def _write(text: str, output: Path | None, submit: str) -> None:
    from vorox.core.errors import ConfigError

    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The job file cannot be written: {error.strerror or error}", where=str(output),
            hint="name a file in a writable folder by -o FILE",
        ) from error  # fmt: skip
    typer.echo(f"Wrote {output}. Submit it with: {submit} {output}", err=True)
