"""Workers as Ray tasks, on this machine or on a cluster.

Each task runs a scheduler. Tasks coordinate through the leases in the cache directory; all machines must see that
directory and the source under the same paths. Ray transfers assignments and counts only, no text and no rows. Ray is
imported only here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from dataclasses import astuple
from typing import Any

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.platform.installation import install_command
from vorox.core.ranks.ray_cluster import ray_cluster
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.building.workers import Assignment, WorkerCounts, decode_error, encode_error
from vorox.data.recipe import RECIPE_NAME

_POLL_SECONDS = 0.5
_LOST_TASK_RETRIES = 3
_CANCEL_AGAIN_SECONDS = 3.0
_DRAIN_SECONDS = 30.0


def run_on_ray(scheduler: BuildScheduler, num_workers: int) -> None:
    """Build with Ray tasks until nothing is missing or a stop is requested.

    Connects to the cluster of an earlier ``ray.init`` or of ``$RAY_ADDRESS``; else starts one on this machine for the
    duration of the build.

    Args:
        scheduler: The scheduler to run; afterwards its counts and manifest include the work of all tasks.
        num_workers: Number of tasks, with one CPU each.

    Raises:
        ConfigError: Ray is not installed.
        DataError: A task failed or was lost.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "--executor ray needs Ray, which is not installed", where="executor", hint=install_command("ray")
        ) from error
    with ray_cluster(ray):
        task = ray.remote(_work).options(num_cpus=1, max_retries=_LOST_TASK_RETRIES)
        assignment = ray.put(Assignment.from_scheduler(scheduler))
        pending = [task.remote(assignment) for _ in range(num_workers)]
        counts: list[WorkerCounts] = []
        try:
            while pending and not scheduler.should_stop():
                done, pending = ray.wait(pending, timeout=_POLL_SECONDS)
                counts += [_result(ray, reference) for reference in done]
                WorkerCounts.total(counts).report_to(scheduler)
        finally:
            deadline = time.monotonic() + _DRAIN_SECONDS
            while pending and time.monotonic() < deadline:  # a library may swallow an interrupt, so cancel repeatedly
                for reference in pending:
                    ray.cancel(reference)
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=_CANCEL_AGAIN_SECONDS)
            scheduler.poll()


def _result(ray: Any, reference: Any) -> WorkerCounts:
    try:
        kind, value = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise DataError(
            f"A Ray task was lost: {type(error).__name__}", where="ray",
            hint="check that the machines have enough memory, then run the same command again to continue",
        ) from error  # fmt: skip
    if kind != "finished":
        raise decode_error(kind, value)
    return WorkerCounts(*value)


def _work(assignment: Assignment) -> tuple[str, Any]:
    """The main function of a task."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a task has one CPU; the tokenizers library would use all
    try:
        if not (assignment.directory / RECIPE_NAME).exists():
            raise DataError(
                f"Host {socket.gethostname()} does not see the cache directory", where=str(assignment.directory),
                hint="set data.cache.directory to a path that all machines share",
            )  # fmt: skip
        scheduler = assignment.scheduler()
        with contextlib.suppress(KeyboardInterrupt):  # Ray cancels a task by raising it
            scheduler.run()
        return "finished", astuple(WorkerCounts.from_scheduler(scheduler))
    except VoroxError as error:
        return encode_error(error)
