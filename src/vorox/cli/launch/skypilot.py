"""The SkyPilot task of a job, for ``sky jobs launch``."""

from __future__ import annotations

import json
import shlex
import textwrap

from vorox.cli.launch.job import PORT, SAVED_EXIT_CODE, Job

_TASK = """\
# {name} on {num_nodes} x {devices} devices. Submit: sky jobs launch {options}THIS_FILE
# Each start runs the same command, which resumes the run.
name: {name}
workdir: .                           # the folder with the configuration
num_nodes: {num_nodes}
resources:
{accelerators}  cpus: {cpus}+
  use_spot: {spot}
  job_recovery:
    # SkyPilot restarts after a loss of machines without counting, and after any error so often. It cannot except exit
    # codes 2, 3, 4 and 7, which end each such start before a step.
    max_restarts_on_errors: {max_restarts}
    recover_on_exit_codes: [{saved}]      # saved and stopped on request: not counted
volumes:
  {shared}: {volume}                 # runs and caches
{secrets}{setup}run: |
  # Clouds give 30 s to 2 min before they take a spot machine, and SkyPilot cannot extend it. This run needs
  # {notice_seconds} s ({notice}).
  # Steps since the last checkpoint are lost otherwise: set checkpoint.every_seconds.
  export VOROX_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}"
  export VOROX_NODE_COUNT="$SKYPILOT_NUM_NODES" VOROX_NODE_INDEX="$SKYPILOT_NODE_RANK"
  exec {command}
"""


def skypilot_task(job: Job, *, accelerator: str, volume: str, spot: bool, setup: str | None) -> str:
    """Return the task.

    Args:
        job: The job.
        accelerator: Kind of the devices, as SkyPilot names it.
        volume: SkyPilot volume of the shared directory.
        spot: Whether to use spot machines.
        setup: Shell command that prepares a machine.
    """
    secrets = "".join(f"  {name}: null\n" for name in job.secrets)
    return _TASK.format(
        name=job.name, num_nodes=job.num_nodes, devices=job.devices_per_node, cpus=job.cpus_per_node,
        options="".join(f"--secret {name} " for name in job.secrets),
        accelerators=f"  accelerators: {accelerator}:{job.devices_per_node}\n" if job.uses_gpus else "",
        spot=str(spot).lower(), max_restarts=job.max_restarts, saved=SAVED_EXIT_CODE, shared=json.dumps(job.shared),
        volume=json.dumps(volume), secrets=f"secrets:                             # values: --secret\n{secrets}"
        if secrets else "",
        setup=f"setup: |\n{textwrap.indent(setup, '  ')}\n" if setup else "", notice_seconds=job.notice.seconds,
        notice=job.notice.reason, port=PORT, command=shlex.join(job.command()),
    )  # fmt: skip
