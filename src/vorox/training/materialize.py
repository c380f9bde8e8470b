"""Materialise checkpoints: the exact state after any step, whether one was kept there or not, by re-execution.

Every step on the way must have the recorded bits. What a run saved has a fingerprint on record, which must be that of
the new state. Any other state is proven by the step after it, which is computed from it and must have the recorded bits
too; only the last recorded step of a run has none.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vorox.core.errors import CheckpointError, ConfigError, VoroxError
from vorox.core.files import atomic
from vorox.core.files.disk_errors import disk_error
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.user_code import trusted_code
from vorox.records.replay_chain import examine_chain
from vorox.records.run_lookup import run_argument
from vorox.training.checkpoints.store import STATE_NAME, Checkpoint
from vorox.training.export.derived import materialized
from vorox.training.re_execution import MakeWorkload, ReExecutedStep, ReExecution, save_state
from vorox.training.replay import ReplayReport, difference_error, first_difference
from vorox.training.resume import resume

Proof = Literal["fingerprint", "next step", "own step"]


@dataclass(frozen=True, slots=True)
class Materialized:
    """A checkpoint that was computed again.

    Attributes:
        step: Its step.
        path: Its directory.
        fingerprint: Of its state.
        proof: What on record it agrees with.
    """

    step: int
    path: Path
    fingerprint: str
    proof: Proof


def open_range(run_directory: Path, steps: Collection[int]) -> ReExecution:
    """Return the re-execution that reaches all of ``steps``, and where their proof needs it the step after them.

    Raises:
        VoroxError: As ``ReExecution``.
    """
    first, last, known = min(steps) - 1, max(steps), last_recorded_step(run_directory)
    if first < 0 or last > known:
        raise ConfigError(
            f"The run has no step {last if last > known else first + 1:,}; it recorded {pluralize(known, 'step')}",
            where="--step", hint=f"name steps from 1 to {known}", saved="nothing was written",
        )  # fmt: skip
    execution = ReExecution(run_directory, first, last)
    if last not in execution.states and last < execution.recorded.last_known_step:
        with contextlib.suppress(VoroxError):  # the next step may have run with other processes, or be damaged
            return ReExecution(run_directory, first, last + 1)
    return execution


def materialize(
    execution: ReExecution,
    make_workload: MakeWorkload,
    steps: Collection[int],
    directory: Path,
    *,
    on_step: Callable[[int, int], None],
) -> list[Materialized]:
    """Write the checkpoints of ``steps`` as ``directory/step-00000340``, each as the run would have written it.

    Args:
        execution: Of ``open_range``.
        make_workload: As of ``ReExecution.steps``.
        steps: The steps.
        directory: Their parent; it need not exist.
        on_step: Called after every step with the number of computed steps and of all.

    Returns:
        What was written. A checkpoint appears only once it is proven.

    Raises:
        VoroxError: A step differs from the record, by its quantity (``replay.difference_error``).
        CheckpointError: A checkpoint lies there already, or cannot be written.
    """
    targets = {step: directory / RunLayout(execution.run_directory).checkpoint(step).name for step in steps}
    for path in targets.values():
        if path.exists():
            raise CheckpointError(f"{path.name} is already there", where=str(path), hint="choose another --to DIR")
    found: list[Materialized] = []
    unproven: tuple[Path, Path, ReExecutedStep] | None = None
    try:
        with contextlib.closing(execution.steps(make_workload)) as computed:
            for one in computed:
                difference = first_difference(execution.recorded.entries[one.step], one.entry)
                if difference is not None:
                    execution.note_environment(one.workload, one.step)
                    start, environment = execution.start_step, tuple(execution.environment)
                    report = ReplayReport(start, execution.last_step, one.step - start - 1, 0, difference, environment)
                    raise difference_error(report, execution.run_directory)
                if unproven is not None:
                    found.append(_publish(*unproven, "next step"))
                    unproven = None
                if (target := targets.get(one.step)) is not None:
                    unproven = _write(execution, one, target.with_name(f".{target.name}.unproven")), target, one
                    if (recorded := _recorded_fingerprint(execution, one)) is not None:
                        _check(Checkpoint.read(unproven[0]), recorded)
                        found.append(_publish(*unproven, "fingerprint"))
                        unproven = None
                on_step(one.step - execution.start_step, execution.last_step - execution.start_step)
            if unproven is not None:
                found.append(_publish(*unproven, "own step"))
                unproven = None
    finally:
        if unproven is not None:
            shutil.rmtree(unproven[0], ignore_errors=True)
    return found


def _recorded_fingerprint(execution: ReExecution, one: ReExecutedStep) -> str | None:
    chain, fingerprint = execution.states.get(one.step, ("", ""))
    return fingerprint if chain == one.entry.chain else None


def _write(execution: ReExecution, one: ReExecutedStep, path: Path) -> Path:
    """Write a checkpoint on all ranks, as the run would have."""
    files = {**resume.companions(one.workload), STATE_NAME: atomic.pretty_json(one.state.to_json())}
    metadata = {
        **resume.manifest_metadata(one.workload),
        **one.state.manifest(execution.eval_losses(one.step)),
        **materialized(execution.run_directory),
    }
    try:
        if one.workload.distributed.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)  # of an attempt that was killed
        return save_state(one.workload, path, dict(sorted(files.items())), metadata).path
    except OSError as error:
        raise disk_error(error, str(path)) or CheckpointError(
            f"Checkpoint of step {one.step:,} cannot be written: {error.strerror}",
            where=str(error.filename or path), hint="choose another --to DIR", saved="the run was not changed",
        ) from error  # fmt: skip


def _check(checkpoint: Checkpoint, recorded: str) -> None:
    found = str(checkpoint.metadata["fingerprint"])
    if found != recorded:
        raise CheckpointError(
            f"State after step {checkpoint.step:,} has the fingerprint {found[:16]}, the run saved {recorded[:16]}",
            where=str(checkpoint.path), saved="nothing was written",
            hint="the engine computes other bits than the run did: use its versions and its machine",
        )  # fmt: skip


def _publish(written: Path, target: Path, one: ReExecutedStep, proof: Proof) -> Materialized:
    """Let a checkpoint appear, on all ranks."""
    dist, checkpoint = one.workload.distributed, Checkpoint.read(written)
    dist.barrier("materialised state is proven")
    if dist.is_main:
        written.rename(target)
        trusted_code.trust(checkpoint.metadata, target)
        atomic.sync_directory(target.parent)
    dist.barrier("materialised state is there")
    return Materialized(checkpoint.step, target, str(checkpoint.metadata["fingerprint"]), proof)


def last_recorded_step(run_directory: Path) -> int:
    """Return the last step that the chain or a checkpoint of the run proves."""
    return examine_chain(run_directory, max(step_directories(run_directory), default=0)).last_known_step


def steps_every(run_directory: Path, interval: int) -> list[int]:
    """Return the multiples of an interval up to the last recorded step.

    Raises:
        ConfigError: There are none.
    """
    last = last_recorded_step(run_directory)
    if interval > last:
        raise ConfigError(
            f"--every {interval:,} names no step of a run of {pluralize(last, 'step')}", where="--every",
            hint=f"vorox checkpoints materialize {run_argument(run_directory)} --step {last}",
        )  # fmt: skip
    return list(range(interval, last + 1, interval))
