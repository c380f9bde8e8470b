"""Resume: choose a checkpoint and restore its state.

``restore`` restores the engine, and reads progress, plan and replay chain; ``session.open_session`` positions the
loader at the cursor. In: the run directory, the current configuration (``resume_settings.py`` decides what may
change) and workload. Out: a ``RestoredRun`` with the engine in the state of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.batch import DataCursor, Progress
from vorox.core.config import config_digest
from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.run_layout import RunLayout, run_of_checkpoint, step_directories
from vorox.data.order.plan import DataPlan
from vorox.models.huggingface.config import huggingface_files, image_processor_files
from vorox.models.stored.spec import spec_differences
from vorox.records.log import RunLog
from vorox.records.replay_chain import check_chain
from vorox.records.run_context import RunContext
from vorox.training import user_functions
from vorox.training.checkpoints.store import (
    Checkpoint,
    RunState,
    latest_valid,
    quarantine,
    quarantine_corrupt,
    read_state,
    verify,
)
from vorox.training.origin.model_origin import explaining_moved_model
from vorox.training.resume.resume_settings import settings_for_manifest
from vorox.training.steps.loss_spikes import Rollback
from vorox.training.steps.workload import Workload
from vorox.training.weights.dpo_reference import check_reference, describe_reference
from vorox.training.weights.init_from import init_from_weights, with_recorded_weights
from vorox.training.weights.teacher import check_teacher, describe_teacher


def choose_checkpoint(run: RunContext, log: RunLog, checkpoint: Path | None) -> Checkpoint | None:
    """Return the verified checkpoint to resume from: the given one, else the newest valid one; ``None`` without any.

    Corrupt checkpoints are quarantined once the attempt begins.

    Raises:
        CheckpointError: The given one is invalid, or there are checkpoints but none is valid.
    """
    if checkpoint is not None:
        return verify(checkpoint)
    on_corrupt = quarantine_corrupt(log)
    return latest_valid(run.directory, on_corrupt=lambda path, error: run.at_begin(lambda: on_corrupt(path, error)))


def choose_checkpoint_before(run_directory: Path, log: RunLog, rollback: Rollback) -> Checkpoint | None:
    """Return the verified checkpoint to return to: the newest without the undone steps, else the oldest that is kept.

    ``None`` is the state before step 1, if the run has no checkpoint yet.

    Raises:
        CheckpointError: None of them is valid.
    """
    on_corrupt = quarantine_corrupt(log)
    found = latest_valid(run_directory, at_or_before=rollback.target, on_corrupt=on_corrupt)
    if found is not None:
        return found
    for path in step_directories(run_directory).values():
        try:
            return verify(path)
        except UnreadableCheckpointError:
            raise
        except CheckpointError as error:
            on_corrupt(path, error)
    return latest_valid(run_directory)


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """A run restored from a checkpoint; the engine holds its state.

    Attributes:
        state: Progress and length.
        plan: The data plan; it extends the one in the checkpoint.
        last_recorded_step: The last step in the replay chain, which may be beyond the checkpoint.
    """

    state: RunState
    plan: DataPlan
    last_recorded_step: int


def restore(workload: Workload, run_directory: Path, found: Checkpoint) -> RestoredRun:
    """Restore engine, plan, cursor and replay chain from a verified checkpoint; nothing is written.

    Raises:
        CheckpointError: It belongs to a different model or data plan.
        DataError: The plan is missing or damaged, or the replay chain belongs to a different run history.
    """
    plan = DataPlan.open(RunLayout(run_directory).plan)
    workload.engine.adopt_environment(found.metadata["environment"])
    load_run(workload, found)
    changed = environment_differences(found.metadata["environment"], environment(workload.engine))
    if changed:
        workload.log.event(
            "environment_changed",
            f"Not bit-exact from step {found.step:,} on, environment changed: " + "; ".join(changed),
            level="warning",
            changes=changed,
        )
    state = read_state(found.path)
    check_plan(plan, state.progress.cursor)
    return RestoredRun(state, plan, _check_chain(run_directory, state.progress, workload.log))


def _check_chain(run_directory: Path, progress: Progress, log: RunLog) -> int:
    """Return the last step in the replay chain; report steps up to the checkpoint whose record is lost.

    Raises:
        DataError: The chain belongs to a different run history.
    """
    chain = check_chain(run_directory, progress)
    damage = chain.damage(progress.step)
    if damage:
        log.event(
            "chain_damaged",
            f"{chain.path.name} is damaged: {damage}; training continues, but replay cannot verify these steps "
            "unless the file is restored from a copy",
            level="warning",
        )
    return chain.last_step


def quarantine_later_checkpoints(run_directory: Path, step: int, log: RunLog) -> None:
    """Quarantine the checkpoints of later steps, which the resumed run will reach again."""
    for later, path in step_directories(run_directory).items():
        if later > step:
            renamed = quarantine(path, "replaced", f"the run was resumed from step {step}")
            text = f"Quarantined {path.name} of an abandoned attempt as {renamed.name}"
            log.event("checkpoint_replaced", text, level="warning")


def load_run(workload: Workload, checkpoint: Checkpoint) -> None:
    """Load a verified checkpoint into the engine of a run; with DPO, read the reference again before.

    Raises:
        CheckpointError: As ``load``; or the reference has changed.
    """
    config, engine = workload.config, workload.engine
    if config.loss.name == "dpo":
        run = run_of_checkpoint(checkpoint.path)
        with explaining_moved_model(run):
            init_from_weights(with_recorded_weights(config, run), workload.spec, engine)
        check_reference(config, engine, checkpoint.metadata)
    load(engine, checkpoint, workload.spec.to_json())


def load(engine: Engine, checkpoint: Checkpoint, spec: Mapping[str, Any]) -> None:
    """Load a verified checkpoint and check the engine's fingerprint.

    Raises:
        CheckpointError: It belongs to a different model, or the loaded state differs from the saved one.
    """
    check_teacher(engine, checkpoint.metadata)
    recorded = checkpoint.metadata["spec"]
    differing = spec_differences(recorded, spec)
    if differing:
        raise CheckpointError(
            f"Checkpoint belongs to a different model: {', '.join(differing)}", where=str(checkpoint.path)
        )
    engine.load(checkpoint.path)
    saved = checkpoint.metadata["fingerprint"]
    fingerprint = engine.fingerprint()
    if fingerprint != saved:
        raise CheckpointError(
            f"Loaded state has fingerprint {fingerprint}, the saved one {saved}",
            where=str(checkpoint.path),
            hint="its files were changed after the save; use another checkpoint",
        )


def manifest_metadata(workload: Workload) -> dict[str, Any]:
    """Return the metadata that the manifest of every checkpoint records, and that a resume compares."""
    return {
        "backend": workload.config.backend,
        "spec": workload.spec.to_json(),
        "config_digest": config_digest(workload.config),
        "settings": settings_for_manifest(workload.config),
        "tokenizer": workload.corpus.tokenizer.fingerprint,
        "environment": environment(workload.engine),
        **describe_reference(workload.config, workload.engine),
        **describe_teacher(workload.engine),
        user_functions.MANIFEST_KEY: user_functions.identities(workload.config),
    }


def companions(workload: Workload) -> dict[str, bytes]:
    """Return the files of every checkpoint that other programs read: ``config.json``, tokenizer, image processor."""
    tokenizer = workload.corpus.tokenizer
    return {
        **huggingface_files(workload.spec, special_ids=tokenizer.model_ids()),
        **image_processor_files(workload.config.model),
        **tokenizer.files(workload.spec.max_positions_tokens),
    }


def environment(engine: Engine) -> dict[str, str | int | bool]:
    """Return what a manifest records of the engine's environment."""
    return dict(sorted(engine.environment().items()))


def environment_differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return readable descriptions of what changed."""
    return [
        f"{key} was {recorded.get(key, 'absent')}, is {current.get(key, 'absent')}"
        for key in sorted({*recorded, *current})
        if recorded.get(key) != current.get(key)
    ]


def check_plan(plan: DataPlan, cursor: DataCursor) -> None:
    """Check that a plan starts with the events that the checkpoint of a data cursor was written under.

    Raises:
        CheckpointError: The plan was changed, truncated or replaced.
    """
    if (plan.digest_at(cursor.plan_events), plan.start.seed) != (cursor.plan_digest, cursor.seed):
        raise CheckpointError(
            f"Checkpoint was written under another data plan ({cursor.plan_digest[:16]} "
            f"after {cursor.plan_events} events, seed {cursor.seed})",
            where=str(plan.path),
            hint="restore plan.jsonl from a copy; without it the order of the data is unknown",
        )
