"""Materialise checkpoints: the exact state after any step, whether one was kept there or not, by re-execution.

Every step on the way must have the recorded bits. What a run saved has a fingerprint on record, which must be that of
the new state. Any other state is proven by the step after it, which is computed from it and must have the recorded bits
too; only the last recorded step of a run has none. Step 0 is the initial weights, made again as the run made them.

``states_after`` is what ``RUN@STEP`` stands for: kept checkpoints, states of the cache, and the rest computed into it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vorox.core.config import config_values
from vorox.core.errors import CheckpointError, ConfigError, DataError, UnreadableCheckpointError, VoroxError
from vorox.core.files import atomic
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.file_holder import FileLock
from vorox.core.pluralize import pluralize
from vorox.core.processes.process_start import process_started_at
from vorox.core.ranks.distributed_context import DistributedContext, membership
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.user_code import trusted_code
from vorox.core.user_code.trusted_code import mark_recorded
from vorox.records.executed_steps import executed_attempts
from vorox.records.replay_chain import examine_chain
from vorox.records.run_context import read_config
from vorox.records.run_lookup import run_argument
from vorox.records.step_environments import StepEnvironments
from vorox.training.checkpoints.materialized_cache import (
    StateNotOnDiskError,
    folder,
    remove_old_states,
    remove_state,
    verified_state,
)
from vorox.training.checkpoints.re_execution_times import ReExecutionTimes, record_times
from vorox.training.checkpoints.store import STATE_NAME, Checkpoint, verify
from vorox.training.export.derived import materialized
from vorox.training.re_execution import (
    TEMPORARY_SUFFIX,
    MakeWorkload,
    ReExecutedStep,
    ReExecution,
    cost_of,
    save_state,
)
from vorox.training.replay import ReplayReport, difference_error, first_difference
from vorox.training.resume import resume, resume_settings
from vorox.training.steps.workload import Workload
from vorox.training.weights.init_from import initialize_again

Proof = Literal["fingerprint", "next step", "own step"]
ComputeStates = Callable[[Sequence[int], Path], None]
"""Writes the states after steps into a folder, in ranks of its own."""
_NOTHING = "nothing was written"


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
    first, last, known = max(0, min(steps) - 1), max(1, *steps), last_recorded_step(run_directory)
    if last > known:
        raise _never_recorded(run_directory, last, known)
    execution = ReExecution(run_directory, first, last)
    if max(steps) and last not in execution.states and last < execution.recorded.last_known_step:
        with contextlib.suppress(VoroxError):  # the next step may have run with other processes, or be damaged
            return ReExecution(run_directory, first, last + 1)
    return execution


def _never_recorded(run_directory: Path, step: int, known: int) -> ConfigError:
    listed = f"list the kept ones with `vorox checkpoints list {run_argument(run_directory)}`"
    hint = f"name a step from 0 to {known}; {listed}" if known else "train the run first"
    with contextlib.suppress(DataError):  # of a damaged record; the message only says less then
        if step <= max((attempt.last_step for attempt in executed_attempts(run_directory)), default=0):
            what = f"Step {step:,} was computed, but the run went back; it now has {pluralize(known, 'step')} on record"
            return ConfigError(what, where=str(run_directory), hint=hint, saved=_NOTHING)
    what = f"Run {run_directory.name} has no step {step:,}; it recorded {pluralize(known, 'step')}"
    return ConfigError(what, where=str(run_directory), hint=hint, saved=_NOTHING)


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
        steps: The steps; 0 is the initial state.
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
    unproven: tuple[Path, Path] | None = None
    began, ends = time.perf_counter(), list[float]()
    is_cached = directory.absolute() == folder(execution.run_directory).absolute()
    scratch = directory if is_cached else None  # where ``states_after`` removes what a kill leaves
    if membership() is not None:  # a rank: its imports are part of what a command with several processes takes
        began -= time.time() - process_started_at()
    try:
        if (target := targets.get(0)) is not None:
            unproven = _write_initial(execution, make_workload, _unproven(target)), target
        with contextlib.closing(execution.steps(make_workload, scratch=scratch)) as computed:
            for one in computed:
                dist = one.workload.distributed
                difference = first_difference(execution.recorded.entries[one.step], one.entry)
                if difference is not None:
                    execution.note_environment(one.workload, one.step)
                    start, environment = execution.start_step, tuple(execution.environment)
                    report = ReplayReport(start, execution.last_step, one.step - start - 1, 0, difference, environment)
                    raise difference_error(report, execution.run_directory)
                if unproven is not None:
                    found.append(_publish(*unproven, dist, "next step"))
                    unproven = None
                if (target := targets.get(one.step)) is not None:
                    unproven = _write(execution, one, _unproven(target)), target
                    if (recorded := _recorded_fingerprint(execution, one)) is not None:
                        _check(Checkpoint.read(unproven[0]), recorded)
                        found.append(_publish(*unproven, dist, "fingerprint"))
                        unproven = None
                if unproven is not None and one.step == execution.last_step:
                    found.append(_publish(*unproven, dist, "own step"))
                    unproven = None
                ends.append(time.perf_counter())
                on_step(one.step - execution.start_step, execution.last_step - execution.start_step)
    finally:
        if unproven is not None:
            shutil.rmtree(unproven[0], ignore_errors=True)
    member = membership()
    if (member is None or not member.rank) and len(ends) > 1:
        step_seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
        start_seconds = max(0.0, time.perf_counter() - began - len(ends) * step_seconds)
        record_times(execution.run_directory, ReExecutionTimes(start_seconds, step_seconds))
    return found


def _recorded_fingerprint(execution: ReExecution, one: ReExecutedStep) -> str | None:
    chain, fingerprint = execution.states.get(one.step, ("", ""))
    return fingerprint if chain == one.entry.chain else None


def _unproven(target: Path) -> Path:
    return target.with_name(f".{target.name}{TEMPORARY_SUFFIX}")


def _write(execution: ReExecution, one: ReExecutedStep, path: Path) -> Path:
    """Write a checkpoint on all ranks, as the run would have."""
    files = {**resume.companions(one.workload), STATE_NAME: atomic.pretty_json(one.state.to_json())}
    return _save(execution, one.workload, path, files, one.state.manifest(execution.eval_losses(one.step)))


def _write_initial(execution: ReExecution, make_workload: MakeWorkload, path: Path) -> Path:
    """Write the initial weights on all ranks; no run resumes from them, so they have no data position."""
    config, _ = resume_settings.config_in_force(execution.run_directory, 0)
    mark_recorded(config_values(config), execution.run_directory)
    with contextlib.closing(make_workload(config)) as workload:
        initialize_again(config, workload.spec, workload.engine, execution.run_directory)
        return _save(execution, workload, path, resume.companions(workload), {"step": 0, "chain": ""})


def _save(
    execution: ReExecution, workload: Workload, path: Path, files: Mapping[str, bytes], state: Mapping[str, Any]
) -> Path:
    """Write the state of an engine on all ranks; ``state`` is what the manifest says of it."""
    metadata = {**resume.manifest_metadata(workload), **state, **materialized(execution.run_directory)}
    try:
        if workload.distributed.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)  # of an attempt that was killed
        return save_state(workload, path, dict(sorted(files.items())), metadata).path
    except OSError as error:
        raise disk_error(error, str(path)) or CheckpointError(
            f"Checkpoint of step {state['step']:,} cannot be written: {error.strerror}",
            where=str(error.filename or path), hint="choose another --to DIR", saved="the run was not changed",
        ) from error  # fmt: skip


def _check(checkpoint: Checkpoint, recorded: str) -> None:
    found = str(checkpoint.metadata["fingerprint"])
    if found != recorded:
        raise CheckpointError(
            f"State after step {checkpoint.step:,} has the fingerprint {found[:16]}, the run saved {recorded[:16]}",
            where=str(checkpoint.path), saved=_NOTHING,
            hint="the engine computes other bits than the run did: use its versions and its machine",
        )  # fmt: skip


def _publish(written: Path, target: Path, dist: DistributedContext, proof: Proof) -> Materialized:
    """Let a checkpoint appear, on all ranks."""
    checkpoint = Checkpoint.read(written)
    dist.barrier("materialised state is proven")
    if dist.is_main:
        written.rename(target)
        trusted_code.trust(checkpoint.metadata, target)
        atomic.sync_directory(target.parent)
    dist.barrier("materialised state is there")
    return Materialized(checkpoint.step, target, str(checkpoint.metadata["fingerprint"]), proof)


def cost_line(execution: ReExecution, steps: Collection[int]) -> str:
    """Return the line that says which states are computed, and what that takes."""
    cost, last = cost_of(execution), f"{max(steps):,}"
    states = f"state after step {last}" if len(steps) == 1 else f"{len(steps)} states up to step {last}"
    seconds = "" if cost.seconds is None else f", about {_time(cost.seconds)}"
    return (
        f"Computing the {states} of run {execution.run_directory.name} again: "
        f"{pluralize(cost.num_steps, 'step')} from step {execution.start_step:,}{seconds}"
    )


def _time(seconds: float) -> str:
    return f"{max(1, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


class StateNotices:
    """What a search for states reports; this one reports nothing."""

    def corrupt(self, path: Path, error: Exception) -> None:
        """A checkpoint or a state of the cache is corrupt, and is not used."""

    def computes(self, execution: ReExecution, steps: Collection[int]) -> None:
        """States after ``steps`` are not on disk; their computation begins."""

    def progress(self, done: int, total: int) -> None:
        """A number of steps of all is computed."""

    def ends(self) -> None:
        """The computation has ended, well or not."""


def states_after(
    run_directory: Path,
    steps: Collection[int],
    make_workload: MakeWorkload,
    notices: StateNotices,
    ranks: ComputeStates | None = None,
) -> dict[int, Checkpoint]:
    """Return the states after steps, verified: kept checkpoints, those of the cache, and the rest computed into it.

    The cache keeps the states of a run that were used last, as many as the run keeps checkpoints
    (``checkpoint.keep_last``). What a killed computation left there is removed by the next one.

    Args:
        run_directory: The run.
        steps: The steps.
        make_workload: As of ``ReExecution.steps``.
        notices: Receives what happens.
        ranks: Computes states in several ranks. Default: this process computes them.

    Raises:
        StateNotOnDiskError: This process cannot compute one, because several ranks have to.
        VoroxError: As ``materialize``; or the cache cannot be written.
    """
    found = states_on_disk(run_directory, steps, notices)
    missing = [step for step, state in found.items() if state is None]
    if missing:
        directory = folder(run_directory)
        if ranks is None:
            _check_ranks(run_directory, missing)
        execution = open_range(run_directory, missing)
        with _locked(directory, run_directory, missing[0]):
            if any(_cached(run_directory, step, notices) is None for step in missing):  # no other process was faster
                for step in missing:
                    remove_state(directory / RunLayout(run_directory).checkpoint(step).name)
                for left in directory.glob(f".*{TEMPORARY_SUFFIX}"):
                    shutil.rmtree(left, ignore_errors=True)
                notices.computes(execution, missing)
                try:
                    if ranks is None:
                        materialize(execution, make_workload, missing, directory, on_step=notices.progress)
                    else:
                        ranks(missing, directory)
                finally:
                    notices.ends()
            found |= {step: verified_state(run_directory, step) for step in missing}
            remove_old_states(directory, max(len(steps), read_config(run_directory).checkpoint.keep_last))
    return {step: state for step, state in found.items() if state is not None}


def states_on_disk(run_directory: Path, steps: Collection[int], notices: StateNotices) -> dict[int, Checkpoint | None]:
    """Return the states after steps, by step: verified kept checkpoints and those of the cache; ``None`` for others."""
    return {
        step: _kept(run_directory, step, notices) or _cached(run_directory, step, notices) for step in sorted({*steps})
    }


def _kept(run_directory: Path, step: int, notices: StateNotices) -> Checkpoint | None:
    path = step_directories(run_directory).get(step)
    return None if path is None else _valid(lambda: verify(path), path, notices)


def _cached(run_directory: Path, step: int, notices: StateNotices) -> Checkpoint | None:
    return _valid(lambda: verified_state(run_directory, step), folder(run_directory), notices)


def _valid(read: Callable[[], Checkpoint | None], path: Path, notices: StateNotices) -> Checkpoint | None:
    try:
        return read()
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        notices.corrupt(path, error)
        return None


def _check_ranks(run_directory: Path, steps: Collection[int]) -> None:
    """Check that one process, and this one, computes the bits of the steps.

    Raises:
        StateNotOnDiskError: Several ranks have to; the hint has the command.
    """
    member, environments = membership(), StepEnvironments.of_run(run_directory)
    for step in steps:
        is_any_world = environments.at(max(1, step)).get("determinism") == "bitwise-any-world"
        count = environments.num_processes(max(1, step))
        if (member is not None and member.world_size != 1) or not (is_any_world or count in (None, 1)):
            raise StateNotOnDiskError(run_directory, step)


@contextlib.contextmanager
def _locked(directory: Path, run_directory: Path, step: int) -> Generator[None]:
    """Keep other processes from computing states of the same run at the same time.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    try:
        atomic.make_directory(directory)
        lock = FileLock(directory / RunLayout.lock.name).acquire()
    except OSError as error:
        run = run_argument(run_directory)
        raise disk_error(error, str(directory)) or CheckpointError(
            f"State after step {step:,} cannot be cached: {error.strerror}", where=str(directory), saved=_NOTHING,
            hint=f"write it elsewhere, and name that: vorox checkpoints materialize {run} --step {step} --to DIR",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        lock.release()


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
