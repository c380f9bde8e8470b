"""Replay: recompute steps of a run and compare every number with the replay chain.

In: a run directory, which is not changed, and the current caches and engine. Out: a ``ReplayReport``: bit-exact, or the
first step and quantity that differ. A replay starts from the newest valid checkpoint at or before the first requested
state, or from the initial weights. A state is named by its finished steps: from state A to state B are steps A+1 to B.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.batch import Progress
from vorox.core.config import config_digest
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import run_argument
from vorox.core.schema import RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.corpus import plan_start
from vorox.data.loader import first_cursor
from vorox.data.plan import DataPlan
from vorox.data.plan_events import encode_event
from vorox.training import resume, resume_settings
from vorox.training.checkpoints.init_from import init_from_weights
from vorox.training.checkpoints.store import Checkpoint, latest_valid, read_state, step_directories
from vorox.training.dataloading import training_batches
from vorox.training.loss_spikes import LossSpikes, losses_before
from vorox.training.replay_chain import ChainEntry, RecordedChain, examine_chain, number, read_chain
from vorox.training.run_plan import plan_readers
from vorox.training.schedule import Horizon, Schedule, horizon
from vorox.training.step_sync import batch_digest
from vorox.training.user_functions import changed_functions, recorded_taps
from vorox.training.workload import Workload

OnStep = Callable[[int, int], None]
"""Called with the number of compared steps and the total."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first difference from the record.

    Attributes:
        step: The step, from 1.
        quantity: ``batch``, ``loss``, ``grad_norm``, ``chain`` or ``state``.
        recorded: The recorded value, as text.
        found: The recomputed value.
    """

    step: int
    quantity: str
    recorded: str
    found: str

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.quantity} was {self.recorded}, is {self.found}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        start_step: The state that it started from.
        last_step: The state that it was to reach.
        num_steps: Bit-exact steps.
        num_states: Checkpoints on the way whose whole state is bit-exact.
        difference: The difference that ended it; ``None`` if there is none.
        environment: Differences of engine, machine and user functions, as text.
    """

    start_step: int
    last_step: int
    num_steps: int
    num_states: int
    difference: ReplayDifference | None
    environment: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"bit-exact, {pluralize(self.num_steps, 'step')}"
        text = f"differs after {self.num_steps:,} bit-exact steps; {self.difference}"
        return text + (f" (the environment changed: {'; '.join(self.environment)})" if self.environment else "")


def replay(
    run_directory: Path,
    make_workload: Callable[[RunConfig], Workload],
    *,
    first_step: int = 0,
    last_step: int | None = None,
    on_step: OnStep | None = None,
) -> ReplayReport:
    """Recompute the steps between two states.

    Args:
        run_directory: The run; it may be live, and nothing is written into it.
        make_workload: Opens corpus, model and engine of a configuration, without building caches.
        first_step: State to start from, in finished steps.
        last_step: State to end with; ``None`` is the last recorded one.
        on_step: Called after every step.

    Raises:
        ConfigError: The range is not recorded, or the configuration changed within it.
        CheckpointError: No checkpoint to start from is valid, or it is not of this run's plan.
        DataError: A cache, the plan or the chain differs from the record.
    """
    recorded = examine_chain(run_directory, max(step_directories(run_directory), default=0))
    last_step = _check_range(recorded, first_step, last_step, run_directory)
    checkpoint = latest_valid(run_directory, at_or_before=first_step)
    start = 0 if checkpoint is None else checkpoint.step
    _check_start(recorded, start, first_step, last_step, run_directory)
    config, _ = resume_settings.config_in_force(run_directory, start)
    if checkpoint is not None and not _made_with(run_directory, checkpoint):
        raise ConfigError(
            f"Checkpoint of step {checkpoint.step:,} was written under another configuration",
            where=str(RunLayout(run_directory).config),
            hint="restore the run's config.yaml from a copy, or start from a later state",
        )
    with (
        contextlib.closing(make_workload(config)) as workload,
        tempfile.TemporaryDirectory(prefix="vorox-replay-") as scratch,
    ):
        plan = _copy_of_plan(run_directory, Path(scratch), workload)
        progress = _start(workload, plan, checkpoint)
        return _compare(run_directory, workload, plan, progress, last_step, recorded, on_step or _ignore_progress)


def _made_with(run_directory: Path, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was written under the configuration in force at its step, or under the previous one."""
    in_force = (resume_settings.config_in_force(run_directory, at)[0] for at in (checkpoint.step, checkpoint.step - 1))
    return any(resume_settings.is_made_with(checkpoint, config) for config in in_force)


def _check_range(recorded: RecordedChain, first_step: int, last_step: int | None, run_directory: Path) -> int:
    """Check that a range can be replayed; return its last step."""
    known = max([*recorded.entries, *(gap[-1] for gap in recorded.missing)], default=0)
    last_step = known if last_step is None else last_step
    if not known:
        raise DataError("No step is recorded", where=str(recorded.path), hint="train the run first")
    if not 0 <= first_step < last_step <= known:
        raise ConfigError(
            f"--from {first_step} --to {last_step} is not a range of this run; it recorded {pluralize(known, 'step')}",
            where=str(recorded.path),
            hint=_possible_replays(run_directory, known),
        )
    changed_at = resume_settings.next_change(run_directory, first_step)
    if changed_at is not None and changed_at < last_step:
        raise ConfigError(
            f"Settings of this run changed at step {changed_at:,}; a replay of steps {first_step:,} to {last_step:,} "
            "would need both configurations",
            where=str(RunLayout(run_directory).configs),
            hint=_possible_replays(run_directory, known),
        )
    return last_step


def _possible_replays(run_directory: Path, known: int) -> str:
    """Return a hint with the commands that replay as many steps as possible, each under one configuration."""
    starts: dict[int, int] = {}
    for start in (0, *step_directories(run_directory)):
        end = min(known, resume_settings.next_change(run_directory, start) or known)
        if start < end:
            starts.setdefault(end, start)
    run, gaps, end_before = run_argument(run_directory), list[str](), 0
    for end, start in (*starts.items(), (known, known)):
        if start > end_before:
            gaps.append(f"{end_before + 1:,} to {start:,}")
        end_before = end
    commands = " and ".join(f"`vorox replay {run} --from {start} --to {end}`" for end, start in starts.items())
    return f"run {commands}" + (f"; no checkpoint is left for steps {' and '.join(gaps)}" if gaps else "")


def _check_start(recorded: RecordedChain, start: int, first_step: int, last_step: int, run_directory: Path) -> None:
    """Check that all steps from the checkpoint on are recorded, under one configuration."""
    kept = list(step_directories(run_directory))
    changed_at = resume_settings.next_change(run_directory, start)
    if changed_at is not None and changed_at <= first_step:
        raise ConfigError(
            f"Step {first_step:,} has no checkpoint; the way from step {start:,} leads through step {changed_at:,}, at "
            "which settings of this run changed",
            where=str(RunLayout(run_directory).configs),
            hint=_possible_replays(run_directory, max(recorded.entries)),
        )
    damage = recorded.first_damage(start + 1, last_step)
    if damage is not None:
        step, what = damage
        beyond = [
            state for state in kept if step <= state < last_step and not recorded.first_damage(state + 1, last_step)
        ]
        others = [f"--from {start} --to {step - 1}"] * (step > start + 1) + [f"--from {state}" for state in beyond[:1]]
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


def _start(workload: Workload, plan: DataPlan, checkpoint: Checkpoint | None) -> Progress:
    """Load the state to start from; return its progress."""
    if checkpoint is None:
        init_from_weights(workload.config, workload.spec, workload.engine)
        return Progress(0, 0, first_cursor(plan, workload.config.run.seed))
    resume.load_run(workload, checkpoint)
    progress = read_state(checkpoint.path).progress
    resume.check_plan(plan, progress.cursor)
    return progress


def _schedules(run_directory: Path, workload: Workload, plan: DataPlan, start: int) -> Callable[[int], Schedule]:
    """Return a function from a step (from 1) to its schedule, under the length recorded for that step.

    Plans of earlier versions lack the warm-up or the length; up to a change of the length, these come from a checkpoint
    of the same configuration.
    """
    config, changed_at = workload.config, resume_settings.config_in_force(run_directory, start)[1]

    def unrecorded_error() -> DataError:
        return DataError(
            "Length of the run is not recorded for these steps, and the caches may have changed since",
            where=str(plan.path),
            hint="an earlier version trained them; replay from a state whose checkpoint is kept "
            f"(vorox checkpoints list {run_argument(run_directory)})",
        )

    @functools.cache
    def unrecorded() -> Horizon:
        digest = config_digest(config)
        for metadata in _manifests(run_directory).values():
            if metadata["config_digest"] == digest:
                return Horizon.from_json(metadata["horizon"])
        if config.train.num_epochs is not None or config.schedule.warmup_fraction is not None:
            raise unrecorded_error()
        return horizon(config, num_train_rows=0, full_dataset_tokens=0)  # neither is used

    def schedule_of(step: int) -> Schedule:
        known = plan.horizon_at(plan.start.batch_sizes.position_of(step - 1))
        is_recorded = known is not None and known.warmup_steps is not None
        if not is_recorded and changed_at is not None and step > changed_at:
            raise unrecorded_error()
        if known is None:
            return Schedule.from_config(config.schedule, config.optimizer, unrecorded())
        warmup_steps = unrecorded().warmup_steps if known.warmup_steps is None else known.warmup_steps
        tokens_per_step = config.train.global_batch_sequences * config.data.sequence_length_tokens
        length = Horizon(known.total_steps, warmup_steps, tokens_per_step)
        return Schedule.from_config(config.schedule, config.optimizer, length)

    return schedule_of


def _manifests(run_directory: Path) -> dict[int, Mapping[str, Any]]:
    """Return the metadata of every checkpoint with an intact manifest, by step."""
    found: dict[int, Mapping[str, Any]] = {}
    for step, path in step_directories(run_directory).items():
        with contextlib.suppress(CheckpointError):
            found[step] = read_manifest(path)["metadata"]
    return found


def _compare(
    run_directory: Path,
    workload: Workload,
    plan: DataPlan,
    progress: Progress,
    last_step: int,
    chain: RecordedChain,
    on_step: OnStep,
) -> ReplayReport:
    config, engine, recorded = workload.config, workload.engine, chain.entries
    manifests, start = _manifests(run_directory), progress.step
    schedule_of = _schedules(run_directory, workload, plan, start)
    environments = [metadata["environment"] for metadata in manifests.values()]
    if environments:
        engine.adopt_environment(environments[0])
    changes = resume.environment_differences(environments[0], resume.environment(engine)) if environments else []
    changes += changed_functions(next(iter(manifests.values()), dict[str, Any]()), config)
    taps = dict.fromkeys(tap for attempt in recorded_taps(run_directory) for tap in attempt)
    changes += [f"the run had a tap, which a replay does not attach: {tap}" for tap in taps]
    head, num_states = progress.chain, 0
    known = losses_before(recorded, start, config.train)
    spikes = LossSpikes(config.train, known, 0, plan.state.rollbacks, plan.start.batch_sizes)
    if start in recorded and start not in chain.changed and recorded[start].chain != head:
        raise DataError(
            f"Replay chain has {recorded[start].chain} at step {start:,}, the checkpoint {head}",
            where=str(RunLayout(run_directory).chain),
            hint="one of the two was changed; restore it from a copy",
        )

    def report(step: int, difference: ReplayDifference | None) -> ReplayReport:
        exact = step - start - (difference is not None)
        return ReplayReport(start, last_step, exact, num_states, difference, tuple(changes))

    with training_batches(config, workload.corpus, plan, engine.data_shard, progress.cursor) as batches:
        for step in range(start + 1, last_step + 1):
            batch = next(batches)
            schedule = schedule_of(step)
            lr, weight_decay = schedule.lr(step - 1), schedule.weight_decay(step - 1)
            max_loss = spikes.max_loss(step)
            values = engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss).fetch()
            spikes.record(step, values, max_loss)
            digest = batch_digest(workload.distributed, engine.data_shard, batch)
            entry = ChainEntry.following(head, step, digest, values)
            difference = first_difference(recorded[step], entry)
            if difference is None and step in manifests and manifests[step]["chain"] == entry.chain:
                saved = manifests[step]["fingerprint"]
                difference = _state_difference(step, saved, engine.fingerprint(saved))
                num_states += difference is None
            if difference is not None:
                return report(step, difference)
            head = entry.chain
            on_step(step - start, last_step - start)
    return report(last_step, None)


def first_difference(recorded: ChainEntry, found: ChainEntry) -> ReplayDifference | None:
    """Return the first quantity of a step that differs, in order of computation."""
    step = recorded.step
    if recorded.batch != found.batch:
        return ReplayDifference(step, "batch", recorded.batch, found.batch)
    if recorded.loss != found.loss:
        return ReplayDifference(step, "loss", _exactly(recorded.loss), _exactly(found.loss))
    if recorded.grad_norm != found.grad_norm:
        return ReplayDifference(step, "grad_norm", _exactly(recorded.grad_norm), _exactly(found.grad_norm))
    if recorded.chain != found.chain:
        return ReplayDifference(step, "chain", recorded.chain, found.chain)
    return None


def compare_chains(first: Path, second: Path) -> dict[str, Any]:
    """Return the verdict on two runs' replay chains: bit-equal steps, and the first difference."""
    try:
        chains = read_chain(first), read_chain(second)
    except DataError as error:
        return {"num_equal_steps": None, "difference": None, "verdict": f"Chains cannot be compared: {error}"}
    shared = sorted(set(chains[0]) & set(chains[1]))
    if not shared:
        return {"num_equal_steps": None, "difference": None, "verdict": "No step is recorded in both runs"}
    for num_equal, step in enumerate(shared):
        found = first_difference(chains[0][step], chains[1][step])
        if found is not None:
            verdict = f"Bit-equal for {pluralize(num_equal, 'step')}; {found.quantity} differs at step {step:,}"
            difference = {"step": step, "quantity": found.quantity, "values": [found.recorded, found.found]}
            return {"num_equal_steps": num_equal, "difference": difference, "verdict": verdict}
    verdict = f"Bit-equal for all {pluralize(len(shared), 'shared step')}"
    return {"num_equal_steps": len(shared), "difference": None, "verdict": verdict}


def _state_difference(step: int, recorded: str, found: str) -> ReplayDifference | None:
    return None if recorded == found else ReplayDifference(step, "state", recorded, found)


def _exactly(bits: str) -> str:
    return f"{number(bits)!r} ({bits})"


def _ignore_progress(num_steps: int, total: int) -> None:
    del num_steps, total
