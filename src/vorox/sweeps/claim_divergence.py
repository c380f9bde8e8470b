"""A divergence on record: what the records say of it, and whether the steps that lead to it give it again.

The arm that diverged loses the pair, so the record of a divergence is worth forging. A run goes in; what does not
agree comes out. The failure, the record of the step and the end of the replay chain must name one step and its bits.
Then all steps are computed again: they must have the recorded bits, and the last ones must not be finite, more of them
in a row than ``train.max_nonfinite_steps`` allows. No kept state is trusted: the claim names none of this run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from vorox.core.errors import VoroxError
from vorox.core.files.json_reader import MalformedJson, read_json
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import ChainEntry, bits, examine_chain, number
from vorox.records.step_environments import StepEnvironments
from vorox.training.re_execution import MakeWorkload, ReExecutedStep, ReExecution
from vorox.training.replay import ReplayDifference, first_difference


def divergence_gap(directory: Path) -> str:
    """Return why the records of a run do not show that its loss or gradient was not finite; empty if they do."""
    layout, chain = RunLayout(directory), examine_chain(directory)
    last = chain.entries.get(chain.last_step)
    if last is None:
        return "no step is recorded"
    if all(math.isfinite(number(value)) for value in (last.loss, last.grad_norm)):
        return f"loss and gradient norm of its last recorded step, {last.step:,}, are finite"
    try:
        record = read_json(layout.nonfinite_record(last.step), {"batch_digest": str})
        failure = read_json(layout.failure, {"error": str, "where": str})
    except (OSError, MalformedJson) as error:
        return f"a record of the failure is missing or damaged: {error}"
    where = f"step {last.step:,}"
    is_named = failure["where"] == where or failure["where"].startswith(f"{where}, recorded")
    if failure["error"] != "NumericalError" or not is_named:
        return f"failure.json does not name a numerical error of {where}, the last one of the chain"
    if not _is_record_of(record, last):
        return f"the record in nonfinite/ of step {last.step:,} is not of the step in the chain"
    return ""


def _is_record_of(record: dict[str, object], entry: ChainEntry) -> bool:
    found = [(record.get("loss"), entry.loss), (record.get("grad_norm"), entry.grad_norm)]
    return record["batch_digest"] == entry.batch and all(
        isinstance(value, float | int | str | None) and _bits(value) == expected for value, expected in found
    )


def _bits(value: float | str | None) -> str:
    """Return the bits of a number in a record, where one that is not finite is a text."""
    with contextlib.suppress(TypeError, ValueError):
        return bits(float("nan" if value is None else value))
    return ""


def compared_steps(
    execution: ReExecution, make_workload: MakeWorkload
) -> Iterator[tuple[ReExecutedStep, ReplayDifference | None]]:
    """Compute steps again; yield each with its first difference from the record.

    Where bits need not repeat, only other rows are a difference. That is decided by the engine that computes here, and
    not by what the run says of itself: its word counts for everything but ``determinism``.
    """
    environments = StepEnvironments.of_run(execution.run_directory)
    with contextlib.closing(execution.steps(make_workload)) as steps:
        for step in steps:
            difference = first_difference(execution.recorded.entries[step.step], step.entry)
            recorded, here = environments.at(step.step), step.workload.engine.environment()
            repeats = str(here.get("determinism")).startswith("bitwise")
            repeats &= all(recorded.get(key) == value for key, value in here.items() if key != "determinism")
            yield step, difference if difference and (repeats or difference.quantity == "batch") else None


def divergence_findings(directory: Path, make_workload: MakeWorkload) -> Iterator[str]:
    """Yield why the divergence of a run is not proven.

    Args:
        directory: The run.
        make_workload: Opens corpus, model and engine of a configuration, without building caches.
    """
    if gap := divergence_gap(directory):
        yield f"its divergence is not proven: {gap}"
        return
    last = examine_chain(directory).last_step
    try:
        yield from _computed_again(ReExecution(directory, 0, last), make_workload)
    except VoroxError as error:
        yield f"its divergence at step {last:,} is not proven, for the step cannot be computed again: {error.what}"


def _computed_again(execution: ReExecution, make_workload: MakeWorkload) -> Iterator[str]:
    count, limit, last = 0, 0, execution.last_step
    for step, difference in compared_steps(execution, make_workload):
        if difference is not None:
            yield f"its divergence at step {last:,} is not proven: computed again, {difference}"
            return
        count, limit = step.state.nonfinite_in_a_row, step.workload.config.train.max_nonfinite_steps
    if count <= limit:
        yield f"it did not diverge: {count} steps up to {last:,} are not finite, and {limit} are skipped"
