"""Workers as Ray tasks: on this machine, or wherever a cluster has room.

The tasks build like any other scheduler and meet through the leases of the cache's directory, which all machines must
see, like the source, under the same names. Ray moves no text and no rows, only assignments and counts; it is imported
here and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Generator
from dataclasses import astuple
from typing import Any

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.installation import install_command
from vorox.data.cache.recipe import RECIPE_NAME
from vorox.data.cache.scheduler import BuildScheduler
from vorox.data.cache.workers import Assignment, Counts, decode_error, encode_error

_POLL_SECONDS = 0.5
_RETRIES_OF_A_LOST_TASK = 3
_CANCEL_AGAIN_SECONDS = 3.0
_DRAIN_SECONDS = 30.0


def run_on_ray(scheduler: BuildScheduler, num_workers: int) -> None:
    """Build with Ray tasks until nothing is missing or a stop is requested.

    Joins the cluster that ``ray.init`` was called for, or the one of ``$RAY_ADDRESS``; else starts one on this machine
    for the time of the build.

    Args:
        scheduler: What is to be done; its counts and its manifest are those of all tasks afterwards.
        num_workers: How many tasks, each of one CPU.

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
    with _cluster(ray):
        task = ray.remote(_work).options(num_cpus=1, max_retries=_RETRIES_OF_A_LOST_TASK)
        assignment = ray.put(Assignment.of(scheduler))
        pending = [task.remote(assignment) for _ in range(num_workers)]
        counts: list[Counts] = []
        try:
            while pending and not scheduler.is_stopped():
                done, pending = ray.wait(pending, timeout=_POLL_SECONDS)
                counts += [_result(ray, reference) for reference in done]
                Counts.sum(counts).apply(scheduler)
        finally:
            deadline = time.monotonic() + _DRAIN_SECONDS
            while pending and time.monotonic() < deadline:  # an interrupt at the wrong instant is lost in a library
                for reference in pending:
                    ray.cancel(reference)
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=_CANCEL_AGAIN_SECONDS)
            scheduler.poll()


@contextlib.contextmanager
def _cluster(ray: Any) -> Generator[None]:
    if ray.is_initialized():
        yield
        return
    # Ray prints on standard error where its dashboard is and what else to install; nobody asked.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        options["include_dashboard"] = False
    ray.init(**options)
    try:
        yield
    finally:
        ray.shutdown()


def _result(ray: Any, reference: Any) -> Counts:
    try:
        kind, value = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise DataError(
            f"a Ray task was lost: {type(error).__name__}", where="ray",
            hint="check that the machines have enough memory, and run the same command again to continue",
        ) from error  # fmt: skip
    if kind != "finished":
        raise decode_error(kind, value)
    return Counts(*value)


def _work(assignment: Assignment) -> tuple[str, Any]:
    """The life of a task."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a task was given one CPU; the tokenizers library would take all
    try:
        if not (assignment.directory / RECIPE_NAME).exists():
            raise DataError(
                f"{socket.gethostname()} does not see the cache directory", where=str(assignment.directory),
                hint="set data.cache.directory to a place that all machines share",
            )  # fmt: skip
        scheduler = assignment.scheduler()
        with contextlib.suppress(KeyboardInterrupt):  # how Ray cancels a task
            scheduler.run()
        return "finished", astuple(Counts.of(scheduler))
    except VoroxError as error:
        return encode_error(error)
