"""``vorox runs list`` and ``show``: the runs of a folder, and one of them."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.errors import ConfigError
from vorox.experiments.artifacts import RunSummary, inspect_run, list_checkpoints, list_runs
from vorox.experiments.tracking import read_metrics
from vorox.experiments.verdicts import read_verdicts
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run, fork_lines, run_argument, run_attempts

_CURVE_POINTS = 12


def list_(root: str, as_json: bool) -> None:
    runs = sorted(list_runs(Path(root)), key=lambda run: (run.changed_at, run.run_id))
    if as_json:
        print_json([_summary_json(run) for run in runs])
        return
    if not runs:
        typer.echo(f"No runs in {Path(root).resolve()}. Start one with `vorox train quickstart`.")
        return
    rows = [
        [
            run.run_id,
            run.state,
            f"{run.step:,}/{humanize.UNKNOWN if run.total_steps is None else format(run.total_steps, ',')}",
            humanize.number(run.loss),
            humanize.number(run.eval_loss),
            humanize.UNKNOWN if run.checkpoint_step is None else f"{run.checkpoint_step:,}",
            humanize.size(run.size_bytes),
            humanize.duration(time.time() - run.changed_at),
        ]
        for run in runs
    ]
    titles = ["RUN", "STATE", "STEP", "LOSS", "EVAL", "SAVED", "SIZE", "CHANGED"]
    print_table(titles, rows, right="STEP LOSS EVAL SAVED SIZE CHANGED", optional="SAVED SIZE LOSS CHANGED")
    print_wrapped(f"{run.run_id}: unreadable, because {run.problem}" for run in runs if run.problem)


def show(run: str, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    with contextlib.suppress(ConfigError):
        recorded_config(directory)  # marks its functions, for --trust-code
    summary, attempts = inspect_run(directory), run_attempts(directory)
    metrics, checkpoints, verdicts = read_metrics(directory), list_checkpoints(directory), read_verdicts(directory)
    if as_json:
        print_json(
            {
                **_summary_json(summary),
                "attempts": attempts,
                "metrics": [{"step": step, **values} for step, values in metrics.items()],
                "checkpoints": [{**asdict(entry), "path": str(entry.path)} for entry in checkpoints],
                "verdicts": [asdict(verdict) for verdict in verdicts],
            }
        )
        return
    print_wrapped(head_lines(summary))
    typer.echo("\nattempts")
    for attempt in attempts:
        is_running = summary.state == "running" and attempt is attempts[-1]
        print_wrapped(_attempt_lines(attempt, is_running=is_running))
    if metrics:
        typer.echo("\ncurve")
        _print_curve(metrics)
    if checkpoints:
        kept = ", ".join(f"{entry.step:,}" for entry in checkpoints if entry.state != "quarantined")
        verify = f"vorox checkpoints verify {run_argument(directory)}"
        print_wrapped(["", "checkpoints", f"  steps      {kept or 'none in use'}", f"  verify     {verify}"])
    if verdicts:
        lines = [f"  {_without_milliseconds(one.time)} {one.kind}: {one.text}" for one in verdicts]
        print_wrapped(["", "verdicts", *lines])


def head_lines(run: RunSummary) -> list[str]:
    """Return state, step, loss and directory of a run, and why its last attempt failed."""
    total = humanize.UNKNOWN if run.total_steps is None else f"{run.total_steps:,}"
    lines = [
        run.run_id,
        f"  state      {run.state}" + (f" ({run.holder})" if run.holder else ""),
        f"  step       {run.step:,} of {total}",
        f"  loss       {humanize.number(run.loss)}, validation {humanize.number(run.eval_loss)}",
        f"  directory  {run.directory}  ({humanize.size(run.size_bytes)})",
    ]
    lines += [f"  origin     {line}" for line in fork_lines(run.directory)]
    if run.problem:
        lines.append(f"  problem    {run.problem}")
    if run.failure is not None and run.state != "running":
        lines += [
            f"  failure    {run.failure.get('what', '')}  [exit {run.failure.get('exit_code', '')}]",
            f"    where    {run.failure.get('where') or humanize.UNKNOWN}",
            f"    saved    {run.failure.get('saved') or humanize.UNKNOWN}",
            f"    do       {run.failure.get('hint') or humanize.UNKNOWN}",
        ]
    return lines


def _attempt_lines(attempt: dict[str, Any], *, is_running: bool) -> list[str]:
    code = attempt.get("code") or attempt.get("git") or {}
    commit = str(code.get("commit", ""))[:10] or "no commit"
    dirty = " with uncommitted changes" if code.get("dirty") else ""
    command = " ".join(str(word) for word in attempt.get("argv", []))
    started, ended = (_without_milliseconds(attempt.get(key)) for key in ("started_at", "ended_at"))
    outcome = str(attempt.get("outcome"))
    if outcome == "running" and not is_running:
        outcome = "killed"  # its process could not record the end
    ended = ended or ("now" if outcome == "running" else "an unknown time")
    return [
        f"  {attempt.get('attempt')}. {started} to {ended}: {outcome}, {commit}{dirty}",
        f"     {command}",
    ]


def _without_milliseconds(time: object) -> str:
    return "" if time is None else re.sub(r"\.\d+Z$", "Z", str(time))


def _print_curve(metrics: dict[int, dict[str, float]]) -> None:
    """Print the latest validated steps and an even spread of other steps."""
    steps = list(metrics)
    spread = {steps[round(i * (len(steps) - 1) / (_CURVE_POINTS - 1))] for i in range(_CURVE_POINTS)}
    validated = [step for step in steps if "eval/loss" in metrics[step]]
    chosen = sorted(spread | set(validated[-_CURVE_POINTS:]))
    rows = [
        [
            f"{step:,}",
            humanize.number(metrics[step].get("loss")),
            humanize.number(metrics[step].get("eval/loss"), 4),
            humanize.number(metrics[step].get("eval/bits_per_byte"), 3),
            humanize.small(metrics[step].get("learning_rate")),
            humanize.small(metrics[step].get("grad_norm")),
            humanize.count(metrics[step].get("tokens_per_second")),
        ]
        for step in chosen
    ]
    titles = ["STEP", "LOSS", "EVAL", "BITS/BYTE", "LR", "GNORM", "TOK/S"]
    print_table(titles, rows, right=" ".join(titles), optional="GNORM LR")


def _summary_json(run: RunSummary) -> dict[str, Any]:
    return {**asdict(run), "directory": str(run.directory), "age_seconds": round(time.time() - run.changed_at, 1)}
