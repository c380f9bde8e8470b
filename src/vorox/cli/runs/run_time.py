"""``vorox runs time``: the time of a run by class and attempt, its goodput, and other save intervals."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.pluralize import pluralize
from vorox.records.run_lookup import find_run
from vorox.training.reports.run_time import CLASSES, AttemptTime, RunTime, TimeClass, account
from vorox.training.reports.save_intervals import IntervalOutcome, SaveIntervals

_MEANINGS: dict[TimeClass, str] = {
    "compute": "steps that count",
    "compile": "what first steps took longer than usual ones",
    "data": "waiting for batches, and building data before the first step",
    "save": "training held up by checkpoints, and the end of attempts",
    "evaluation": "validation, samples and tasks",
    "redone": "steps that were lost and done again",
    "waiting": "waiting for other ranks",
    "restart": "from the start of a process to its first step",
    "absent": "no process",
    "unknown": "on no record",
}


def time(run: str, save_every: list[int] | None, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    found = account(directory)
    intervals = SaveIntervals(found)
    outcomes = [] if intervals.reason else _outcomes(intervals, save_every or [])
    if as_json:
        print_json(_as_json(directory.resolve().name, found, intervals, outcomes))
        return
    _print_classes(humanize.printable(directory.resolve().name), found)
    _print_attempts(found)
    _print_intervals(found, intervals, outcomes)
    print_wrapped([f"Note: {note}." for note in found.notes])


def _outcomes(intervals: SaveIntervals, save_every: list[int]) -> list[IntervalOutcome]:
    known = {found.every_steps: found for found in intervals.table()}
    known |= {every: intervals.outcome(every) for every in save_every}
    return [known[every] for every in sorted(known)]


def _as_json(name: str, found: RunTime, intervals: SaveIntervals, outcomes: list[IntervalOutcome]) -> dict[str, Any]:
    return {
        "run": name,
        "is_running": found.is_running,
        "wall_seconds": found.wall_seconds,
        "seconds": found.stated_seconds,
        "goodput_fraction": found.goodput_fraction,
        "unsaved_steps": found.num_unsaved_steps,
        "attempts": [
            {**asdict(attempt), "wall_seconds": attempt.wall_seconds, "ended_at": attempt.ended_at}
            for attempt in found.attempts
        ],
        "absent_seconds": list(found.absent_seconds),
        "save_intervals": {
            "recorded_steps": intervals.recorded,
            "not_computed_because": intervals.reason or None,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        },
        "notes": list(found.notes),
    }


def _print_classes(name: str, found: RunTime) -> None:
    first, last = found.attempts[0].started_at, found.attempts[-1].ended_at
    until = "now" if found.is_running else _moment(last)
    typer.echo(f"{name}: {pluralize(len(found.attempts), 'attempt')}, {_moment(first)} to {until}\n")
    seconds, wall = found.stated_seconds, found.wall_seconds
    rows = [
        [name, humanize.duration(seconds[name]), _share(seconds[name], wall), _MEANINGS[name]]
        for name in CLASSES
        if name != "unknown" or seconds[name]
    ]
    rows.append(["wall", humanize.duration(wall), _share(wall, wall), "from the first start to the last end"])
    print_table(["CLASS", "TIME", "SHARE", "WHAT"], rows, right="TIME SHARE", optional="WHAT")
    if found.goodput_fraction is None:
        typer.echo("\nGoodput: unknown, because the record does not explain all of the time")
    else:
        typer.echo(f"\nGoodput: {found.goodput_fraction:.1%} of the wall time computed steps that count")
    if found.num_unsaved_steps:
        steps = pluralize(found.num_unsaved_steps, "step")
        typer.echo(f"No checkpoint holds the last {steps}: a resume will do them again")


def _print_attempts(found: RunTime) -> None:
    typer.echo("")
    rows: list[list[str]] = []
    for attempt, absent in zip(found.attempts, (*found.absent_seconds, None), strict=True):
        rows.append([
            str(attempt.number), attempt.outcome, _steps(attempt), humanize.duration(attempt.wall_seconds),
            *(_known(attempt, name) for name in ("compute", "restart", "save")),
            _known(attempt, "redone") + (f" ({attempt.num_lost_steps:,})" if attempt.num_lost_steps else ""),
            humanize.UNKNOWN if absent is None else humanize.duration(absent),
        ])  # fmt: skip
    titles = ["ATTEMPT", "OUTCOME", "STEPS", "WALL", "COMPUTE", "RESTART", "SAVE", "REDONE", "ABSENT"]
    print_table(titles, rows, right=" ".join(titles[2:]), optional="SAVE COMPUTE OUTCOME")


def _print_intervals(found: RunTime, intervals: SaveIntervals, outcomes: list[IntervalOutcome]) -> None:
    if intervals.reason:
        typer.echo(f"\nOther save intervals are not computed for this run: {intervals.reason}")
        return
    has_lost = any(attempt.num_lost_steps for attempt in found.attempts)
    best = max(outcomes, key=lambda outcome: outcome.goodput_fraction)
    rows = [
        [
            f"{outcome.every_steps:,}",
            f"{outcome.goodput_fraction:.1%}",
            humanize.duration(outcome.wall_seconds),
            humanize.duration(outcome.redone_seconds),
            humanize.duration(outcome.save_seconds),
            ", ".join(
                word
                for word, applies in (
                    ("as recorded", outcome.every_steps == intervals.recorded),
                    ("best", has_lost and outcome.every_steps == best.every_steps),
                )
                if applies
            ),
        ]
        for outcome in outcomes
    ]
    typer.echo("\nThe recorded attempts, computed again with a save every so many steps:\n")
    titles = ["EVERY", "GOODPUT", "WALL", "REDONE", "SAVE", ""]
    print_table(titles, rows, right="EVERY GOODPUT WALL REDONE SAVE")
    if not has_lost:
        typer.echo("No steps were lost, so fewer saves always gain here; saves protect against failures to come.")


def _known(attempt: AttemptTime, name: TimeClass) -> str:
    return humanize.duration(attempt.seconds[name]) if name in attempt.seconds else humanize.UNKNOWN


def _steps(attempt: AttemptTime) -> str:
    if attempt.first_step is None or attempt.last_step is None:
        return humanize.UNKNOWN if "unknown" in attempt.seconds else "none"
    return f"{attempt.first_step:,}-{attempt.last_step:,}"


def _share(seconds: float | None, wall: float) -> str:
    return humanize.percent(seconds / wall, 1) if seconds is not None and wall > 0 else humanize.UNKNOWN


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
