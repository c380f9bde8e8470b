"""Replay: compute steps of a run again and compare every number with the replay chain.

Out: a ``ReplayReport``: bit-exact, or the first step and quantity that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.errors import CheckpointError, DataError, NumericalError, VoroxError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import step_directories
from vorox.records.replay_chain import ChainEntry, examine_chain, number
from vorox.records.run_lookup import run_argument
from vorox.training.re_execution import MakeWorkload, ReExecutedStep, ReExecution, nproc_option

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
        num_states: States of checkpoints on the way, kept or not, that are bit-exact as a whole.
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
    make_workload: MakeWorkload,
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
        ConfigError: The range is not recorded.
        CheckpointError: No checkpoint to start from is valid, or it is not of this run's plan.
        DataError: A cache, the plan or the chain differs from the record.
    """
    execution = ReExecution(run_directory, first_step, last_step)
    found = _Comparison(execution, on_step or _ignore_progress)
    with contextlib.closing(execution.steps(make_workload)) as steps:
        for step in steps:
            if not found.add(step):
                break
    return found.report()


class _Comparison:
    """The steps compared so far.

    Args:
        execution: What computes them.
        on_step: Called after every step.
    """

    def __init__(self, execution: ReExecution, on_step: OnStep) -> None:
        self._execution, self._on_step = execution, on_step
        self._step = execution.start_step
        self._num_states, self._difference = 0, None

    def add(self, computed: ReExecutedStep) -> bool:
        """Compare a step; return whether it is bit-exact."""
        execution, entry = self._execution, computed.entry
        step = self._step = entry.step
        self._difference = first_difference(execution.recorded.entries[step], entry)
        chain, saved = execution.states.get(step, ("", ""))
        if self._difference is None and chain == entry.chain:
            self._difference = state_difference(step, saved, computed.workload.engine.fingerprint())
            self._num_states += self._difference is None
        if self._difference is not None:
            execution.note_environment(computed.workload, step)
            return False
        self._on_step(step - execution.start_step, execution.last_step - execution.start_step)
        return True

    def report(self) -> ReplayReport:
        start, last = self._execution.start_step, self._execution.last_step
        exact = self._step - start - (self._difference is not None)
        environment = tuple(self._execution.environment)
        return ReplayReport(start, last, exact, self._num_states, self._difference, environment)


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


def difference_error(report: ReplayReport, run_directory: Path) -> VoroxError:
    """Return the error for the step of a report that differs from the record."""
    difference = report.difference
    assert difference is not None
    kinds = {"batch": DataError, "state": CheckpointError}
    hint = "the environment changed: " + "; ".join(report.environment) if report.environment else ""
    if any(change.startswith("num_processes ") for change in report.environment):
        nproc = nproc_option(run_directory, difference.step) or " --nproc 1"
        span = f"--from {report.start_step} --to {report.last_step}"
        command = f"vorox replay {run_argument(run_directory)} {span}{nproc}"
        hint = f"replay with as many processes as the run had: {command} ({hint})"
    return kinds.get(difference.quantity, NumericalError)(
        f"Replay differs at {difference}",
        where=str(run_directory),
        hint=hint or "the code, a cache or a checkpoint has changed since the run recorded this step",
        saved="the run was not changed",
    )


def compare_chains(first: Path, second: Path) -> dict[str, Any]:
    """Return the verdict on two runs' replay chains: bit-equal steps, the first difference, and what is missing."""
    found: dict[str, Any] = {"num_equal_steps": None, "difference": None, "missing": ["", ""]}
    try:
        chains = [examine_chain(path, max(step_directories(path), default=0)) for path in (first, second)]
    except (DataError, CheckpointError) as error:
        return {**found, "verdict": f"Chains cannot be compared: {error}"}
    missing = found["missing"] = [chain.damage(chain.last_known_step) for chain in chains]
    lost = "".join(f". In {path.name}, {text}" for path, text in zip((first, second), missing, strict=True) if text)
    if chains[0].changed or chains[1].changed:
        return {**found, "verdict": f"Chains cannot be compared{lost}"}
    shared = sorted(set(chains[0].entries) & set(chains[1].entries))
    if not shared:
        return {**found, "verdict": f"No step is recorded in both runs{lost}"}
    for num_equal, step in enumerate(shared):
        differing = first_difference(chains[0].entries[step], chains[1].entries[step])
        if differing is not None:
            verdict = (
                f"Bit-equal for {pluralize(num_equal, 'step')}; {differing.quantity} differs at step {step:,}{lost}"
            )
            values = [differing.recorded, differing.found]
            difference = {"step": step, "quantity": differing.quantity, "values": values}
            return {**found, "num_equal_steps": num_equal, "difference": difference, "verdict": verdict}
    verdict = f"Bit-equal for all {pluralize(len(shared), 'shared step')}{lost}"
    return {**found, "num_equal_steps": len(shared), "verdict": verdict}


def state_difference(step: int, recorded: str, found: str) -> ReplayDifference | None:
    """Return the difference between the fingerprints of a state; ``None`` if there is none."""
    return None if recorded == found else ReplayDifference(step, "state", recorded, found)


def _exactly(bits: str) -> str:
    return f"{number(bits)!r} ({bits})"


def _ignore_progress(num_steps: int, total: int) -> None:
    del num_steps, total
