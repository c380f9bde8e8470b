"""``vorox eval --exposure``: the scores on records that training read and did not, and the loss around the reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from vorox.api.checkpoints import find_checkpoint, holds_derived
from vorox.api.model import Model, is_pretrained
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_table
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, run_of_checkpoint
from vorox.core.schema.train import Weights
from vorox.data.provenance.contamination import MOSTLY_FRACTION, NGRAM_TOKENS, EvaluationRecord
from vorox.data.provenance.exposures import Exposures, RecordExposure, find_exposures
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.records.run_lookup import find_run, split_step
from vorox.run import states_of_run
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.evaluation.exposure import (
    ExposureLoss,
    GroupScore,
    LossPlan,
    by_task,
    count_groups,
    evaluation_records,
    group_of,
    group_scores,
    loss_plan,
    mean_beyond,
    measure_losses,
    sample_scores,
)
from vorox.training.materialize import StateNotices, open_range, states_on_disk
from vorox.training.re_execution import ReExecutionCost, cost_of

MEASURED_EXPOSURES = 5
"""Seen records of a task whose loss is measured, by default."""
_IN_REPORT = ("ngram_tokens", "seen_fraction", "num_steps", "num_rows", "states")
_MOST_LINES = 20
_MOST_STEPS = 4
_NOTHING = "nothing was computed or written"


@dataclass(frozen=True, slots=True)
class ExposureOptions:
    """The options of ``--exposure``, each ``None`` if it was not given."""

    is_wanted: bool
    num_measured: int | None
    ngram_tokens: int | None
    only_plan: bool

    def check(self) -> None:
        given = {
            "--exposures": self.num_measured is not None, "--ngram-tokens": self.ngram_tokens is not None,
            "--plan": self.only_plan,
        }  # fmt: skip
        unread = [name for name, is_given in given.items() if is_given]
        if unread and not self.is_wanted:
            raise ConfigError(f"{unread[0]} is an option of --exposure", where=unread[0], hint="add --exposure")


@dataclass(frozen=True, slots=True)
class ExposureStudy:
    """What is known before a model is loaded: the exposures of all records, and the losses that will be measured.

    Attributes:
        directory: The run.
        step: The evaluated state.
        ngram_tokens: Length of an n-gram.
        records: The records of all tasks.
        found: Their exposures.
        plans: The losses to measure, by task.
        samples: What the harness logs of the records, by task; filled by the evaluation.
    """

    directory: Path
    step: int
    ngram_tokens: int
    records: Sequence[EvaluationRecord]
    found: Exposures
    plans: Mapping[str, LossPlan]
    samples: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict[str, Sequence[Mapping[str, Any]]])

    @property
    def steps(self) -> set[int]:
        """The states of the losses."""
        return {step for plan in self.plans.values() for step in plan.steps}


def study_exposure(
    run: str, step: int | None, root: str, tasks: Mapping[str, Any], limit: int | None, options: ExposureOptions
) -> ExposureStudy:
    """Find the records of tasks in the rows that a run was trained on; no state is computed.

    Raises:
        ConfigError: It is no run, the step was never run, or no task has a record.
        DataError: A cache is missing or damaged.
    """
    directory, at = _run_and_step(run, step, root)
    records = evaluation_records(tasks, limit, load_tokenizer(RunLayout(directory).tokenizer))
    if not any(len(record.ids) for record in records):
        raise ConfigError(
            f"No record of {', '.join(tasks)} has a text to search for", where="--tasks", saved=_NOTHING,
            hint="the text of a record is its doc_to_text and the right doc_to_target: check both in the task",
        )  # fmt: skip
    ngram_tokens = NGRAM_TOKENS if options.ngram_tokens is None else options.ngram_tokens
    with RunDataIndex.open(directory) as run_data:
        found = find_exposures(run_data, records, last_step=at, ngram_tokens=ngram_tokens)
    count = MEASURED_EXPOSURES if options.num_measured is None else options.num_measured
    plans = {task: loss_plan(own, count) for task, own in by_task(found.records).items()}
    return ExposureStudy(directory, at, ngram_tokens, records, found, plans)


def _run_and_step(run: str, step: int | None, root: str) -> tuple[Path, int]:
    name, named_step = split_step(root, run, step)
    if holds_derived(name) or is_pretrained(name) or Path(name).is_file():
        raise ConfigError(
            f"{name} is no run, so what it was trained on is not on record here", where="--exposure", saved=_NOTHING,
            hint="name the run, as RUN or RUN@STEP; without --exposure, the model alone is evaluated",
        )  # fmt: skip
    if named_step is None:
        found = find_checkpoint(name, None, root, PrintedNotices())
        assert found.run is not None, "derived weights are refused above"
        return found.run, found.checkpoint.step
    directory = run_of_checkpoint(Path(name)) or find_run(root, name)
    open_range(directory, [named_step])  # refuses a step that was never run
    return directory, named_step


def print_plan(study: ExposureStudy) -> None:
    """Print what was found, and what the losses take."""
    for line in [_title(study), *_counts(study), cost(study)[0]]:
        typer.echo(line)


def cost(study: ExposureStudy) -> tuple[str, ReExecutionCost | None, int]:
    """Return what the evaluation takes as a line, the cost of the states that are not on disk, and their number."""
    needed = {*study.steps, study.step}
    on_disk = states_on_disk(study.directory, needed, StateNotices())
    missing = [step for step, state in on_disk.items() if state is None]
    num_exposures = sum(len(plan.intervals) for plan in study.plans.values())
    what = f"Loss before and after {pluralize(num_exposures, 'exposure') if num_exposures else 'exposures: none'}"
    if not missing:
        return f"{what}; the {pluralize(len(needed), 'state')} that it takes: on disk", None, 0
    execution = open_range(study.directory, missing)
    found = cost_of(execution)
    seconds = "" if found.seconds is None else f", about {humanize.duration(found.seconds)}"
    room = (
        "" if found.checkpoint_bytes is None else f", {humanize.size(len(missing) * found.checkpoint_bytes)} of cache"
    )
    line = (
        f"{what}; {len(missing)} of {pluralize(len(needed), 'state')} to compute again: "
        f"{pluralize(found.num_steps, 'step')} from step {execution.start_step:,}{seconds}{room}"
    )
    return line, found, len(missing)


def plan_json(study: ExposureStudy) -> dict[str, Any]:
    """Return what ``--plan --json`` prints."""
    _, found, num_missing = cost(study)
    return {
        "run": study.directory.name, "step": study.step, "ngram_tokens": study.ngram_tokens,
        "seen_fraction": MOSTLY_FRACTION, "num_steps": study.found.num_steps, "num_rows": study.found.num_rows,
        "records": {task: dict(count_groups(own)) for task, own in by_task(study.found.records).items()},
        "states": sorted(study.steps), "num_missing_states": num_missing,
        "cost": None if found is None else asdict(found),
    }  # fmt: skip


def find_states(study: ExposureStudy) -> dict[int, Checkpoint]:
    """Return the states that the losses need, computed again where they are not on disk."""
    if not study.steps:
        return {}
    # With the evaluated state in one call: a second one might remove states of the first from the cache.
    return states_of_run(study.directory, {*study.steps, study.step}, PrintedNotices())


def report_exposure(
    study: ExposureStudy, model: Model, tasks: Mapping[str, Any], states: Mapping[int, Checkpoint], weights: Weights,
    batch_size: int, *, is_shown: bool,
) -> dict[str, Any]:  # fmt: skip
    """Measure the losses of the finished tasks; print all that was found, unless it is for ``--json``, and return it.

    Args:
        study: What was found before.
        model: The evaluated model; its state changes.
        tasks: The tasks.
        states: As ``find_states`` returns them.
        weights: The parameters, or their moving average.
        batch_size: Largest number of sequences in a batch.
        is_shown: Whether to print it.
    """
    records = {task: own for task, own in by_task(study.found.records).items() if task in study.samples}
    scores = {task: group_scores(tasks[task], own, study.samples[task]) for task, own in records.items()}
    display = BuildDisplay()
    try:
        losses = measure_losses(
            model, [study.plans[task] for task in records], study.records, states, weights=weights,
            batch_size=batch_size, on_state=lambda done, total: display.step("measuring states", done, total),
        )  # fmt: skip
    finally:
        display.close()
    if is_shown:
        _print(study, records, scores, losses)
    return {
        **{key: value for key, value in plan_json(study).items() if key in _IN_REPORT},
        "tasks": {
            task: {
                "groups": [asdict(score) for score in scores[task]],
                "records": _records_json(own, study.samples[task]),
            }
            for task, own in records.items()
        },
        "losses": [_loss_json(one) for one in losses],
    }  # fmt: skip


def _records_json(
    records: Sequence[RecordExposure], samples: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:  # fmt: skip
    scores = sample_scores(samples)
    return [
        {
            "id": record.ordinal, "group": group_of(record), "num_tokens": record.num_tokens,
            "matched_tokens": record.matched_tokens, "scores": scores.get(record.ordinal, {}),
            "steps": sorted({step for one in record.exposures for step in one.steps}),
            "exposures": [
                {"document": f"{one.uri}:{one.ordinal}", "source": one.source, "epoch": one.epoch, "steps": one.steps}
                for one in record.exposures
            ],
        }
        for record in records
    ]  # fmt: skip


def _loss_json(one: ExposureLoss) -> dict[str, Any]:
    interval = one.interval
    return {
        "task": interval.record.uri, "id": interval.record.ordinal, "before_step": interval.before_step,
        "after_step": interval.after_step, "losses": asdict(one.losses),
        "control": None if one.control is None else asdict(one.control), "beyond_control": one.beyond_control,
    }  # fmt: skip


def _title(study: ExposureStudy) -> str:
    found = study.found
    return (
        f"Searched {pluralize(found.num_rows, 'row')} of {pluralize(found.num_steps, 'step')} up to step "
        f"{study.step:,}. A record counts as seen if one document has {MOSTLY_FRACTION:.0%} of its tokens in sequences "
        f"of {study.ngram_tokens} or more"
    )


def _counts(study: ExposureStudy) -> list[str]:
    lines: list[str] = []
    for task, own in by_task(study.found.records).items():
        count = count_groups(own)
        seen = f"{count['seen']:,}" if count["seen"] else "none"
        others = [f"{count[group]:,} {group}" for group in ("partly seen", "too short") if count[group]]
        tail = "".join(f", {text}" for text in others)
        lines.append(f"{task}: training saw {seen} of the {pluralize(len(own), 'record')}{tail}")
    return lines


def _print(
    study: ExposureStudy,
    records: Mapping[str, Sequence[RecordExposure]],
    scores: Mapping[str, Sequence[GroupScore]],
    losses: Sequence[ExposureLoss],
) -> None:
    typer.echo()
    rows = [
        [
            task, score.group, f"{score.num_records:,}", _step(score.first_step), _step(score.last_step), name,
            "" if value is None else f"{value:.6g}", "" if error is None else f"{error:.2g}",
        ]
        for task, own in scores.items() for score in own
        for name, value, error in _with_errors(score.metrics)
    ]  # fmt: skip
    if rows:
        titles = ["TASK", "RECORDS", "COUNT", "FIRST STEP", "LAST STEP", "METRIC", "VALUE", "STDERR"]
        print_table(titles, rows, right="COUNT VALUE STDERR")
    seen = [one for own in records.values() for one in own if one.exposures]
    if seen:
        typer.echo()
        table = [
            [
                f"{one.uri}:{one.ordinal}", f"{len(one.exposures):,}",
                _listed(sorted({step for read in one.exposures for step in read.steps})),
                f"{one.exposures[0].uri.rpartition('/')[2]}:{one.exposures[0].ordinal}",
            ]
            for one in seen[:_MOST_LINES]
        ]  # fmt: skip
        print_table(["RECORD", "TIMES", "STEPS", "FIRST DOCUMENT"], table, right="TIMES")
        if len(seen) > _MOST_LINES:
            typer.echo(f"... and {len(seen) - _MOST_LINES:,} more; --json has all, with all documents")
    _print_losses(study, losses)


def _print_losses(study: ExposureStudy, losses: Sequence[ExposureLoss]) -> None:
    if not losses:
        return
    typer.echo(f"\nLoss per token before and after the first exposure, and at step {study.step:,}")
    rows = [
        [
            f"{one.interval.record.uri}:{one.interval.record.ordinal}",
            f"{one.interval.before_step:,} to {one.interval.after_step:,}",
            f"{one.losses.before:.4f}", f"{one.losses.after:.4f}", f"{one.losses.end:.4f}",
            *("" if value is None else f"{value:+.4f}" for value in (one.drop, one.control_drop, one.beyond_control)),
        ]
        for one in losses
    ]  # fmt: skip
    titles = ["RECORD", "STATES", "BEFORE", "AFTER", "END", "DROP", "CONTROL", "BEYOND"]
    print_table(titles, rows, right="BEFORE AFTER END DROP CONTROL BEYOND")
    found = mean_beyond(losses)
    if found is None:
        typer.echo(
            "No record of these tasks is unseen, so there is no control: a part of the drop is ordinary progress"
        )
        return
    mean, error = found
    num_controls = max(len(plan.controls) for plan in study.plans.values())
    typer.echo(
        f"CONTROL is the mean drop of up to {pluralize(num_controls, 'record')} of the same task that training did not "
        f"see. BEYOND is the rest of the drop; its mean is {mean:+.4f}"
        + ("" if error is None else f", with a standard error of {error:.4f}")
    )


def _with_errors(metrics: Mapping[str, float]) -> list[tuple[str, float | None, float | None]]:
    names = [name for name in metrics if "_stderr" not in name]
    return [(name, metrics[name], standard_error(metrics, name)) for name in names] or [("", None, None)]


def standard_error(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the standard error of a metric; ``None``: the harness gives none."""
    metric, _, filter_name = name.partition(".")
    return metrics.get(f"{metric}_stderr.{filter_name}" if filter_name else f"{metric}_stderr")


def _step(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _listed(steps: Sequence[int]) -> str:
    more = len(steps) - _MOST_STEPS
    return ", ".join(f"{step:,}" for step in steps[:_MOST_STEPS]) + (f" and {more:,} more" if more > 0 else "")
