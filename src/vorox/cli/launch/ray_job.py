"""The driver file of a Ray job; the driver itself is ``ray_driver``."""

from __future__ import annotations

import json

from vorox.cli.launch.job import Job

_DRIVER = '''\
"""{name} on {num_nodes} x {devices} devices. Submit, from the folder with the configuration:

    ray job submit --working-dir . -- python THIS_FILE

Each start runs the same command, which resumes the run. `ray job stop` sends SIGTERM and waits for 3 seconds; for a
save, start the Ray head with RAY_JOB_STOP_WAIT_TIME_S={notice_seconds}
({notice}).
"""

import sys

from vorox.cli.launch.ray_driver import train_on_ray

sys.exit(
    train_on_ray(
        [
{command}
        ],
        num_nodes={num_nodes},
        gpus_per_node={gpus},
        cpus_per_node={cpus},
        max_restarts={max_restarts},  # after crashes; restarts after exit code 75 (saved) are not counted
        secrets={secrets},  # environment variables that must be set on every machine
    )
)
'''


def ray_driver_file(job: Job) -> str:
    """Return the text of the driver file."""
    return _DRIVER.format(
        name=job.name, num_nodes=job.num_nodes, devices=job.devices_per_node, notice_seconds=job.notice.seconds,
        notice=job.notice.reason, command="\n".join(f"            {json.dumps(word)}," for word in job.command()[1:]),
        gpus=job.devices_per_node if job.uses_gpus else 0, cpus=job.cpus_per_node, max_restarts=job.max_restarts,
        secrets=json.dumps(job.secrets),
    )  # fmt: skip
