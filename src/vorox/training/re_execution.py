"""Re-execution: compute recorded steps of a run again, from the newest state before them, as they were or changed.

In: a run directory, which is not changed, and the current caches and engine. Out: every step with what it computed, and
the engine with the state after it. A state is named by its finished steps: from state A to state B are steps A+1 to B.
A change masks documents in these steps (``document_masks.py``), so that all else is what it was.

Where a resume changed settings, this does what the resume did: it saves the state, in a temporary directory, and loads
it into an engine of the settings that are in force from there on. So no step depends on a checkpoint at such a change,
which retention may remove. No re-execution can follow a change of the number of processes: retention keeps the
checkpoint there, and a range over both sides is refused.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vorox.core.batch import Batch, Progress
from vorox.core.batch_sizes import BatchStage
from vorox.core.config import config_values
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.core.user_code.trusted_code import mark_recorded
from vorox.data.corpus.corpus import plan_start
from vorox.data.order.loader import first_cursor
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MaskedDocument, MaskEvent, encode_event
from vorox.records.replay_chain import ChainEntry, RecordedChain, examine_chain, read_states
from vorox.records.run_lookup import run_argument
from vorox.records.step_environments import StepEnvironments
from vorox.training.checkpoints.re_execution_times import expected_times
from vorox.training.checkpoints.store import (
    Checkpoint,
    RunState,
    commit_checkpoint,
    latest_valid,
    read_state,
    write_shards,
)
from vorox.training.loop.step_sync import RankRows
from vorox.training.mirror import mirror_uri
from vorox.training.resume import resume, resume_settings
from vorox.training.steps.dataloading import training_batches
from vorox.training.steps.evaluate import recorded_losses
from vorox.training.steps.loss_spikes import LossSpikes, losses_before
from vorox.training.steps.pending_steps import count_nonfinite
from vorox.training.steps.run_plan import plan_readers
from vorox.training.steps.schedule import Horizon, Schedule
from vorox.training.steps.workload import Workload
from vorox.training.user_functions import changed_functions, recorded_taps
from vorox.training.weights.init_from import initialize_again

MakeWorkload = Callable[[RunConfig], Workload]
"""Opens corpus, model and engine of a configuration, without building caches."""
TEMPORARY_SUFFIX = ".unproven"
"""Of hidden folders that a killed computation may leave."""


@dataclass(frozen=True, slots=True)
class ReExecutedStep:
    """A step that was computed again.

    Attributes:
        entry: What it computed, as the replay chain records it.
        state: The state after it, besides that of the engine.
        workload: Its engine holds this state until the iterator advances.
    """

    entry: ChainEntry
    state: RunState
    workload: Workload

    @property
    def step(self) -> int:
        """Its number, from 1."""
        return self.entry.step


class ReExecution:
    """A range of steps that can be computed again; opening it computes nothing.

    Args:
        run_directory: The run; it may be live, and nothing is written into it.
        first_step: State to start from, in finished steps.
        last_step: State to end with; ``None`` is the last recorded one.
        start: A checkpoint of the run to begin with, such as a materialised one. Default: the newest valid one up to
            ``first_step``.

    Attributes:
        recorded: The replay chain of the run.
        checkpoint: Where it begins; ``None``: the initial weights.
        start_step: The state that it holds, where the re-execution begins.
        last_step: The state that it ends with.
        states: Chain and fingerprint of every state that a checkpoint had, kept or not, by step.
        environment: Differences of engine, machine and user functions that were met so far, as text.
        masked: Documents that are masked in the steps after ``first_step``, besides those of the plan.

    Raises:
        ConfigError: The range is not recorded, or ran with several numbers of processes.
        CheckpointError: No checkpoint to start from is valid.
        DataError: The chain is damaged in the range.
    """

    def __init__(
        self, run_directory: Path, first_step: int = 0, last_step: int | None = None, *, start: Checkpoint | None = None
    ) -> None:
        self.run_directory, self.first_step = run_directory, first_step
        self.recorded = examine_chain(run_directory, max(step_directories(run_directory), default=0))
        self.last_step = _check_range(self.recorded, first_step, last_step, run_directory)
        self.checkpoint = start or _checkpoint_before(run_directory, first_step, self.last_step)
        self.start_step = 0 if self.checkpoint is None else self.checkpoint.step
        _check_processes(run_directory, self.start_step, first_step, self.last_step)
        _check_start(self.recorded, self.start_step, self.last_step, run_directory)
        if self.checkpoint is not None and not _made_with(run_directory, self.checkpoint):
            raise ConfigError(
                f"Checkpoint of step {self.checkpoint.step:,} was written under another configuration",
                where=str(RunLayout(run_directory).config),
                hint="restore the run's config.yaml from a copy, or start from a later state",
            )
        self._manifests = _manifests(run_directory)
        kept = {step: (str(found["chain"]), str(found["fingerprint"])) for step, found in self._manifests.items()}
        self.states = {step: found[:2] for step, found in read_states(run_directory).items()} | kept
        self._environments = StepEnvironments.of_run(run_directory)
        self.environment = dict[str, None]()
        self._eval_losses = recorded_losses(run_directory)
        self.masked: tuple[MaskedDocument, ...] = ()

    def without(self, documents: Sequence[MaskedDocument]) -> ReExecution:
        """Return the same range with documents masked in the steps after ``first_step``."""
        changed = copy.copy(self)
        changed.masked, changed.environment = tuple(documents), dict[str, None]()
        return changed

    def steps(
        self,
        make_workload: MakeWorkload,
        before_step: Callable[[Workload, Batch], None] | None = None,
        *,
        scratch: Path | None = None,
    ) -> Generator[ReExecutedStep]:
        """Compute the steps; close the iterator to stop before the last one.

        Args:
            make_workload: Makes what computes them, once for each part of the range with its own settings.
            before_step: Called before each step, with its batch; the engine holds the state that it starts from.
            scratch: Where the temporary folder is made. Default: where the system has them.

        Raises:
            CheckpointError: The checkpoint is not of this run's plan.
            DataError: A cache, the plan or the chain differs from the record.
        """
        with tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, ".vorox-re-execution-", scratch) as temporary:
            checkpoint, state = self.checkpoint, None
            while state is None or state.progress.step < self.last_step:
                start = self.start_step if state is None else state.progress.step
                config, _ = resume_settings.config_in_force(self.run_directory, start)
                mark_recorded(config_values(config), self.run_directory)
                changed_at = resume_settings.next_change(self.run_directory, start)
                end = self.last_step if changed_at is None else min(changed_at, self.last_step)
                with contextlib.closing(make_workload(config)) as workload:
                    plan = _copy_of_plan(self.run_directory, Path(temporary), workload)
                    if self.masked:
                        plan.add([MaskEvent(plan.start.batch_sizes.position_of(self.first_step), self.masked)])
                    if state is None:
                        state = _start(workload, plan, checkpoint, self.run_directory)
                    else:
                        assert checkpoint is not None
                        resume.load_run(workload, checkpoint)
                    self._adopt_environment(workload, start)
                    for step in self._steps_of(workload, plan, state, end, before_step):
                        state = step.state
                        yield step
                    if end < self.last_step:
                        metadata = {**resume.manifest_metadata(workload), "step": end}
                        checkpoint = save_state(workload, RunLayout(Path(temporary)).checkpoint(end), {}, metadata)

    def _adopt_environment(self, workload: Workload, start: int) -> None:
        """Let the engine compute as the run did in its next step, where it had a choice; note what differs."""
        later = [step for step in self._manifests if step > start]
        nearest = self._manifests.get(min(later, default=max(self._manifests, default=0)))
        recorded = self._environments.at(start + 1) or (nearest or {}).get("environment")
        changes = list[str]()
        if recorded:
            workload.engine.adopt_environment(recorded)
            changes += resume.environment_differences(recorded, resume.environment(workload.engine))
        changes += changed_functions(nearest or {}, workload.config)
        taps = dict.fromkeys(tap for attempt in recorded_taps(self.run_directory) for tap in attempt)
        changes += [f"the run had a tap, which a replay does not attach: {tap}" for tap in taps]
        self.environment |= dict.fromkeys(changes)

    def _length(self, workload: Workload, plan: DataPlan, step: int) -> Horizon:
        """Return the length of the run at a step (from 1), with the estimate of its text that a checkpoint recorded."""
        length = _planned_length(workload, plan, step)
        later = (known for at, known in sorted(self._manifests.items()) if at >= step)
        for known in (*later, *(self._manifests[at] for at in sorted(self._manifests, reverse=True))):
            recorded = Horizon.from_json(known["horizon"])
            if (recorded.total_steps, recorded.warmup_steps) == (length.total_steps, length.warmup_steps):
                return recorded
        return length

    def eval_losses(self, step: int) -> dict[int, float]:
        """Return the recorded validation losses that a checkpoint of a step knows: it is saved before its own."""
        return {at: loss for at, loss in self._eval_losses.items() if at < step and math.isfinite(loss)}

    def _best_eval_loss(self, start: RunState, step: int) -> float | None:
        known = [*self.eval_losses(step).values()]
        if start.progress.best_eval_loss is not None:
            known.append(start.progress.best_eval_loss)
        return min(known, default=None)

    def note_environment(self, workload: Workload, step: int) -> None:
        """Note what differs between the environment of a recorded step and this one."""
        if then := self._environments.at(step):
            now = resume.environment(workload.engine)
            self.environment |= dict.fromkeys(resume.environment_differences(then, now))

    def _steps_of(
        self,
        workload: Workload,
        plan: DataPlan,
        state: RunState,
        end: int,
        before_step: Callable[[Workload, Batch], None] | None,
    ) -> Iterator[ReExecutedStep]:
        """Compute the steps up to ``end``, under one configuration."""
        config, engine, recorded = workload.config, workload.engine, self.recorded.entries
        progress, num_nonfinite = state.progress, state.nonfinite_in_a_row
        start = progress.step
        rows, known = RankRows(workload.distributed, engine.data_shard), losses_before(recorded, start, config.train)
        spikes = LossSpikes(config.train, known, 0, plan.state.rollbacks, plan.start.batch_sizes)
        is_as_recorded = start <= self.first_step or not self.masked
        if (
            is_as_recorded
            and start in recorded
            and start not in self.recorded.changed
            and (recorded[start].chain != progress.chain)
        ):
            raise DataError(
                f"Replay chain has {recorded[start].chain} at step {start:,}, the checkpoint {progress.chain}",
                where=str(RunLayout(self.run_directory).chain),
                hint="one of the two was changed; restore it from a copy",
            )
        with training_batches(config, workload.corpus, plan, engine.data_shard, progress.cursor) as batches:
            for step in range(start + 1, end + 1):
                batch = next(batches)
                length = self._length(workload, plan, step)
                schedule = Schedule.from_config(config.schedule, config.optimizer, length)
                lr, weight_decay = schedule.lr(step - 1), schedule.weight_decay(step - 1)
                max_loss = spikes.max_loss(step)
                if before_step is not None:
                    before_step(workload, batch)
                values = engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss).fetch()
                spikes.record(step, values, max_loss)
                entry = ChainEntry.following(progress.chain, step, rows.digest(batch), values)
                best = self._best_eval_loss(state, step)
                progress = replace(progress.advance(batch, engine.data_shard), chain=entry.chain, best_eval_loss=best)
                num_nonfinite = count_nonfinite(num_nonfinite, values)
                yield ReExecutedStep(entry, RunState(progress, length, num_nonfinite), workload)


@dataclass(frozen=True, slots=True)
class ReExecutionCost:
    """What a re-execution takes, before it starts.

    Attributes:
        num_steps: Steps to compute.
        start_seconds: Time to open data and model, to load the state and to write another; ``None``: not recorded.
        seconds: Time of all, as the last re-execution or the run took it; ``None``: not recorded.
        checkpoint_bytes: Size of the newest checkpoint; ``None``: none is kept.
    """

    num_steps: int
    start_seconds: float | None
    seconds: float | None
    checkpoint_bytes: int | None


def cost_of(execution: ReExecution) -> ReExecutionCost:
    """Return what a re-execution takes."""
    num_steps = execution.last_step - execution.start_step
    times = expected_times(execution.run_directory, execution.start_step, execution.last_step)
    kept = step_directories(execution.run_directory)
    newest = kept.get(max(kept, default=0))
    return ReExecutionCost(
        num_steps,
        times.start_seconds,
        times.seconds(num_steps),
        None if newest is None else sum(path.stat().st_size for path in newest.iterdir()),
    )


def nproc_option(run_directory: Path, step: int) -> str:
    """Return the option of ``vorox replay`` for the processes of a step, with a space before; empty for one process."""
    count = StepEnvironments.of_run(run_directory).num_processes(step)
    return "" if count is None or count == 1 else f" --nproc {count}"


def _check_processes(run_directory: Path, start: int, first_step: int, last_step: int) -> None:
    """Check that all steps from the checkpoint on ran with the same number of processes.

    Raises:
        ConfigError: They did not; the hint has the commands for the parts of the range.
    """
    environments = StepEnvironments.of_run(run_directory)
    spans = environments.spans(start, last_step)
    if len(spans) == 1:
        return
    origins = {0, *step_directories(run_directory)}
    parts: list[str] = []
    missing: list[int] = []
    for first, end, _ in environments.spans(first_step, last_step):
        if (begin := _first_replayable(environments, origins, first, end)) is not None:
            option = nproc_option(run_directory, end)
            parts.append(f"vorox replay {run_argument(run_directory)} --from {begin} --to {end}{option}")
        else:
            missing.append(max((state for state in environments.changes if state <= first), default=first))
    hints = ["run " + ", then ".join(parts)] if parts else []
    if missing:
        hints.append(_restore_hint(run_directory, missing))
    ran = ", ".join(
        f"steps {first + 1:,} to {end:,} ran with "
        + ("an unknown number" if count is None else pluralize(count, "process", "processes"))
        for first, end, count in spans
    )
    raise ConfigError(
        f"One replay has one number of processes, but {ran}",
        where=str(RunLayout(run_directory).record), saved="the run was not changed",
        hint=", then ".join(hints),
    )  # fmt: skip


def _restore_hint(run_directory: Path, steps: Sequence[int]) -> str:
    """Return how to get back the checkpoints from which the remaining steps can be replayed."""
    lacking = f"no checkpoint is left to start from for the steps after {' and '.join(f'{step:,}' for step in steps)}: "
    if mirror_uri(run_directory) is None:
        return f"{lacking}put back the checkpoint there from a copy into {RunLayout(run_directory).checkpoints}"
    run = run_argument(run_directory)
    names = " && ".join(f"vorox checkpoints restore {run} --step {step}" for step in steps)
    return f"{lacking}restore the one there from the mirror with `{names}`, and run this command again"


def _first_replayable(environments: StepEnvironments, origins: Collection[int], first: int, end: int) -> int | None:
    """Return the first state from which a replay to ``end`` needs one number of processes; ``None``: there is none."""
    for state in sorted({first, *(origin for origin in origins if first < origin < end)}):
        start = max((origin for origin in origins if origin <= state), default=None)
        if start is not None and len(environments.spans(start, end)) == 1:
            return state
    return None


def _checkpoint_before(run_directory: Path, first_step: int, last_step: int) -> Checkpoint | None:
    """Return the newest valid checkpoint up to a step; ``None``: the initial weights, because there is none.

    Raises:
        CheckpointError: There are some, but all are corrupt.
    """
    corrupt: list[CheckpointError] = []
    found = latest_valid(run_directory, at_or_before=first_step, on_corrupt=lambda _, error: corrupt.append(error))
    if found is None and corrupt:
        run = run_argument(run_directory)
        raise CheckpointError(
            f"No checkpoint up to step {first_step:,} is valid: {'; '.join(map(str, corrupt))}",
            where=str(RunLayout(run_directory).checkpoints), saved="the run was not changed",
            hint=f"replay from the initial weights (vorox replay {run} --from 0 --to {last_step}"
            f"{nproc_option(run_directory, last_step)}), or restore the "
            f"checkpoint from a copy",
        )  # fmt: skip
    return found


def save_state(workload: Workload, path: Path, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> Checkpoint:
    """Save the engine's state as a checkpoint outside the run; on all ranks."""
    dist, snapshot = workload.distributed, workload.engine.snapshot(detached=False)
    path = Path(dist.broadcast("re-executed state", str(path)))
    if dist.is_main:
        commit_checkpoint(path, snapshot, files, metadata, dist)
    else:
        write_shards(snapshot, dist)
    dist.barrier("re-executed state saved")
    return Checkpoint.read(path)


def _made_with(run_directory: Path, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was written under the configuration in force at its step, or under the previous one."""
    in_force = (resume_settings.config_in_force(run_directory, at)[0] for at in (checkpoint.step, checkpoint.step - 1))
    return any(resume_settings.is_made_with(checkpoint, config) for config in in_force)


def _check_range(recorded: RecordedChain, first_step: int, last_step: int | None, run_directory: Path) -> int:
    """Check that a range can be replayed; return its last step."""
    known = recorded.last_known_step
    last_step = known if last_step is None else last_step
    if not known:
        raise DataError("No step is recorded", where=str(recorded.path), hint="train the run first")
    if not 0 <= first_step < last_step <= known:
        raise ConfigError(
            f"--from {first_step} --to {last_step} is not a range of this run; it recorded {pluralize(known, 'step')}",
            where=str(recorded.path),
            hint=f"run `vorox replay {run_argument(run_directory)} --from 0 --to {known}"
            f"{nproc_option(run_directory, known)}`, or a part of it",
        )
    return last_step


def _check_start(recorded: RecordedChain, start: int, last_step: int, run_directory: Path) -> None:
    """Check that all steps from the checkpoint on are recorded."""
    kept = list(step_directories(run_directory))
    damage = recorded.first_damage(start + 1, last_step)
    if damage is not None:
        step, what = damage
        beyond = [
            state for state in kept if step <= state < last_step and not recorded.first_damage(state + 1, last_step)
        ]
        others = [f"--from {start} --to {step - 1}"] * (step > start + 1) + [f"--from {state}" for state in beyond[:1]]
        others = [words + nproc_option(run_directory, last_step) for words in others]
        raise DataError(
            f"Step {step:,} cannot be compared: it {what}",
            where=str(recorded.path),
            hint="restore the file from a copy" + "".join(f", or replay with {words}" for words in others),
        )


def _copy_of_plan(run_directory: Path, scratch: Path, workload: Workload) -> DataPlan:
    """Copy the run's plan, which a live run may extend, and check it against configuration and caches."""
    original = RunLayout(run_directory).plan
    DataPlan.open(original)
    copy = RunLayout(scratch).plan
    copy.write_bytes(original.read_bytes())
    plan = DataPlan.open(copy)
    recorded, wanted = encode_event(plan.start), encode_event(plan_start(workload.config, workload.corpus, plan))
    for key in sorted({*recorded, *wanted} - {"sources"}):
        if recorded.get(key) != wanted.get(key):
            raise ConfigError(
                f"Plan has {key} = {recorded.get(key)}, the configuration {wanted.get(key)}",
                where=str(original), hint="restore the run's config.yaml from a copy",
            )  # fmt: skip
    plan.check(plan_readers(plan, workload.corpus))
    return plan


def _start(workload: Workload, plan: DataPlan, checkpoint: Checkpoint | None, run_directory: Path) -> RunState:
    """Load the state to start from."""
    if checkpoint is None:
        initialize_again(workload.config, workload.spec, workload.engine, run_directory)
        return RunState(
            Progress(0, 0, first_cursor(plan, workload.config.run.seed)), _planned_length(workload, plan, 1)
        )
    resume.load_run(workload, checkpoint)
    state = read_state(checkpoint.path)
    resume.check_plan(plan, state.progress.cursor)
    return state


def _planned_length(workload: Workload, plan: DataPlan, step: int) -> Horizon:
    """Return the length of the run that is recorded for a step (from 1).

    Raises:
        DataError: The plan does not record it.
    """
    config, known = workload.config, plan.horizon_at(plan.start.batch_sizes.position_of(step - 1))
    if known is None:
        raise DataError(
            f"Length of the run is not recorded for step {step:,}", where=RunLayout.plan.name,
            hint="restore plan.jsonl from a copy",
        )  # fmt: skip
    row_tokens = config.data.sequence_length_tokens
    stages = (BatchStage(stage.start_step, stage.rows * row_tokens) for stage in plan.start.batch_stages)
    tokens_per_step = config.train.global_batch_sequences * row_tokens
    return Horizon(known.total_steps, known.warmup_steps, tokens_per_step, batch_stages=tuple(stages))


def _manifests(run_directory: Path) -> dict[int, Mapping[str, Any]]:
    """Return the metadata of every checkpoint with an intact manifest, by step."""
    found: dict[int, Mapping[str, Any]] = {}
    for step, path in step_directories(run_directory).items():
        with contextlib.suppress(CheckpointError):
            found[step] = Checkpoint.read(path).metadata
    return found
