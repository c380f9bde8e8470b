"""Builders as Ray tasks: on this machine, or wherever a cluster has room.

The driver's builder goes in; its tasks are builders like any other, which meet through the leases of the cache's
directory. All machines must see that directory and the source under the same names; one that does not says so.
Ray is imported here and nowhere else. Invariant: Ray moves no text and no rows, only the work to do and the counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.installation import install_command
from vorox.data.cache.builder import Builder, BuildOptions
from vorox.data.cache.inventory import read_units
from vorox.data.cache.recipe import RECIPE_NAME
from vorox.data.cache.unit_work import UnitWork
from vorox.data.cache.workers import Counts, described, error_of, sum_of

_LOOK_EVERY_SECONDS = 0.5
_RETRIES_OF_A_LOST_TASK = 3
_ASK_AGAIN_SECONDS = 3.0
_DRAIN_SECONDS = 30.0


def run_on_ray(builder: Builder, num_workers: int) -> None:
    """Build with Ray tasks until nothing is missing or the builder is asked to stop.

    Joins the cluster that ``ray.init`` was called for, or the one of ``$RAY_ADDRESS``; else starts one on this machine
    for the time of the build.

    Args:
        builder: Says what is to be done; its counts and its manifest are those of all workers afterwards.
        num_workers: How many tasks, each of one CPU.

    Raises:
        ConfigError: Ray is not installed.
        DataError: A task met something that stops the build.
    """
    ray = _ray()
    with _cluster(ray):
        task = ray.remote(_work).options(num_cpus=1, max_retries=_RETRIES_OF_A_LOST_TASK)
        work = ray.put(builder.work)
        pending = [
            task.remote(str(builder.directory), work, builder.options, builder.num_units) for _ in range(num_workers)
        ]
        counts = [Counts()]
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_LOOK_EVERY_SECONDS)
                for reference in done:
                    counts.append(_result(ray, reference))
                total = sum_of(counts)
                builder.units_built, builder.units_adopted = total.units_built, total.units_adopted
                builder.look(documents=total.documents, text_bytes=total.text_bytes, tokens=total.tokens)
                if builder.is_stopped():
                    break
        finally:
            _cancel(ray, pending)
            builder.look()


def _cancel(ray: Any, pending: list[Any]) -> None:
    """End tasks, asking again while they go on: an interrupt that comes at the wrong instant is lost in a library."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while pending and time.monotonic() < deadline:
        for reference in pending:
            ray.cancel(reference)
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=_ASK_AGAIN_SECONDS)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--executor ray needs Ray, which is not installed", where="executor", hint=install_command("ray")
        ) from error
    return ray


@contextlib.contextmanager
def _cluster(ray: Any) -> Generator[None]:
    if ray.is_initialized():
        yield
        return
    # Ray says on standard error where its dashboard is and what it would like to be installed; nobody asked.
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
            hint="see that the machines have enough memory, and run the same command again: it goes on from there",
        ) from error  # fmt: skip
    if kind != "finished":
        raise error_of(kind, value)
    return Counts(*value)


def _work(directory_name: str, work: UnitWork, options: BuildOptions, num_units: int) -> tuple[str, Any]:
    """The life of a task."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a task was given one CPU; the tokenizers library would take all
    directory = Path(directory_name)
    try:
        if not (directory / RECIPE_NAME).exists():
            raise DataError(
                f"{socket.gethostname()} does not see the cache directory", where=directory_name,
                hint="set data.cache.directory to a place that all machines share",
            )  # fmt: skip
        builder = Builder(directory, work, read_units(directory)[:num_units], options)
        with contextlib.suppress(KeyboardInterrupt):  # how Ray cancels a task
            builder.run()
        progress = builder.progress
        counts = (progress.documents, progress.text_bytes, progress.tokens)
        return "finished", (*counts, builder.units_built, builder.units_adopted)
    except VoroxError as error:
        return described(error)
