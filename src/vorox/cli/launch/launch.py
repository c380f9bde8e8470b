"""``vorox launch``: write the job file of a run for SLURM, Kubernetes, Ray or SkyPilot.

The job starts ``vorox train`` on every machine. Each start runs the same command, which resumes the run; exit codes
decide whether to restart (``restarts.JOB_FINAL_EXIT_CODES``).
"""

from __future__ import annotations

import math
from pathlib import Path

import typer

from vorox.cli.launch import job as jobs
from vorox.cli.launch.job import Job
from vorox.cli.launch.kubernetes import kubernetes_manifest
from vorox.cli.launch.ray_job import ray_driver_file
from vorox.cli.launch.skypilot import skypilot_task
from vorox.cli.launch.slurm import slurm_script
from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.settings.config import source_and_overrides
from vorox.core.errors import ConfigError
from vorox.planning.time_limit import parse_minutes
from vorox.training.origin.configuration import load_config

_OPTIONS = (
    "--nodes", "--devices", "--cpus", "--shared", "--secret", "--notice", "--max-restarts", "--output", "--setup",
    "--volume", "--time", "--partition", "--account", "--image", "--secrets-from", "--accelerator", "--spot",
)  # fmt: skip


def slurm(
    arguments: list[str],
    nodes: int,
    devices: int,
    cpus: int | None,
    shared: str | None,
    secret: list[str] | None,
    notice: str | None,
    max_restarts: int,
    time: str,
    partition: str | None,
    account: str | None,
    setup: str | None,
    output: Path | None,
) -> None:
    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts)
    _write(slurm_script(job, time=time, partition=partition, account=account, setup=setup), output, "sbatch")


def kubernetes(
    arguments: list[str],
    image: str,
    volume: str,
    nodes: int,
    devices: int,
    cpus: int | None,
    shared: str | None,
    secret: list[str] | None,
    secrets_from: str,
    notice: str | None,
    max_restarts: int,
    output: Path | None,
) -> None:
    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts, is_local=False)
    text = kubernetes_manifest(job, image=image, volume=volume, secrets_from=secrets_from)
    _write(text, output, "kubectl apply -f")


def ray(
    arguments: list[str],
    nodes: int,
    devices: int,
    cpus: int | None,
    shared: str | None,
    secret: list[str] | None,
    notice: str | None,
    max_restarts: int,
    output: Path | None,
) -> None:
    job = _job(arguments, nodes, devices, cpus, shared, secret, notice, max_restarts, is_local=False)
    _write(ray_driver_file(job), output, "ray job submit --working-dir . -- python")


def skypilot(
    arguments: list[str],
    volume: str,
    nodes: int,
    devices: int,
    accelerator: str,
    spot: bool,
    cpus: int | None,
    shared: str | None,
    secret: list[str] | None,
    notice: str | None,
    max_restarts: int,
    setup: str | None,
    output: Path | None,
) -> None:
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
    config = load_config(source, settings)
    jobs.check_secrets([*arguments, *settings], ())  # also what the configuration turned out to hold as a secret
    jobs.check_devices(config, nodes * devices)
    if not is_local:
        jobs.check_shared(config)
    given = None if notice is None else math.ceil(parse_minutes(notice) * 60)
    time_to_save = jobs.estimate_notice(config) if given is None else jobs.Notice(given, "as --notice")
    if config.checkpoint.notice_seconds is None:
        settings.append(f"checkpoint.notice_seconds={time_to_save.seconds}")
        config = load_config(source, settings)
    return jobs.Job(
        config=config, source=parsed.positional[0], settings=tuple(settings), num_nodes=nodes,
        devices_per_node=devices, cpus_per_node=cpus or 8 * devices, max_restarts=max_restarts, shared=shared or "",
        secrets=tuple(secrets or ()),
        notice=time_to_save,
    )  # fmt: skip


def _write(text: str, output: Path | None, submit: str) -> None:
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
