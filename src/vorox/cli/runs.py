"""``vorox runs``: list, show, compare, plot, record and remove runs."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, Yes, confirm, print_json, print_table, print_wrapped
from vorox.cli.run_report import plot, report
from vorox.cli.training_record import record

if TYPE_CHECKING:
    from vorox.experiments.artifacts import RunSummary

app = typer.Typer(
    name="runs", help="List, show, compare, plot, record and remove runs.", no_args_is_help=True, add_completion=False
)

_CURVE_POINTS = 12


@app.command("list")
def list_(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List all runs, the most recently changed last."""
    from vorox.experiments.artifacts import list_runs

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


@app.command()
def show(run: RunName, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """Show the state, attempts, loss curve and checkpoints of a run."""
    from vorox.core.run_lookup import find_run, run_argument, run_attempts
    from vorox.experiments.artifacts import inspect_run, list_checkpoints
    from vorox.experiments.tracking import read_metrics
    from vorox.experiments.verdicts import read_verdicts

    directory = find_run(root, run)
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


@app.command()
def compare(
    run: RunName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The run to compare with.")],
    root: Root = DEFAULT_ROOT,
    every: Annotated[bool, typer.Option("--all", help="All metrics, not only the common ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, replay chains and metrics."""
    from vorox.core.config import differences
    from vorox.core.run_context import recorded_config
    from vorox.core.run_lookup import find_run
    from vorox.experiments.comparison import COMMON_METRICS, compare_metrics
    from vorox.experiments.tracking import read_metrics
    from vorox.training.replay import compare_chains

    first, second = find_run(root, run), find_run(root, other)
    settings = differences(recorded_config(first), recorded_config(second))
    chain = compare_chains(first, second)
    rows = compare_metrics(read_metrics(first), read_metrics(second))
    if as_json:
        print_json(
            {
                "runs": [first.name, second.name],
                "settings": [{"key": item.key, "values": [item.before, item.after]} for item in settings],
                "chain": chain,
                "metrics": [asdict(row) for row in rows],
            }
        )
        return
    typer.echo(f"A  {first.name}\nB  {second.name}\n")
    typer.echo("Settings that differ" if settings else "Settings are equal")
    print_wrapped(f"  {item}" for item in settings)
    print_wrapped(["", chain["verdict"], ""])
    if not every:
        by_name = {row.name: row for row in rows}
        by_source = [name for name in by_name if name.startswith("eval/sources/") and name.endswith("/loss")]
        rows = [by_name[name] for name in (*COMMON_METRICS[:2], *by_source, *COMMON_METRICS[2:]) if name in by_name]
    table = [
        [row.name, *(_last(row.name, value) for value in row.last), *(_best(row.name, value) for value in row.best)]
        for row in rows
    ]
    print_table(["METRIC", "LAST-A", "LAST-B", "BEST-A", "BEST-B"], table, right="LAST-A LAST-B BEST-A BEST-B")
    if not every:
        typer.echo("\nUse --all for all metrics.")


def _last(name: str, found: tuple[int, float] | None) -> str:
    if found is None:
        return humanize.UNKNOWN
    if name.endswith("_bytes"):
        return humanize.size(found[1])
    return humanize.count(found[1]) if 1e4 <= abs(found[1]) < 1e15 else f"{found[1]:.4g}"


def _best(name: str, found: tuple[int, float] | None) -> str:
    return humanize.UNKNOWN if found is None else f"{_last(name, found)} @{found[0]:,}"


app.command()(plot)
app.command()(report)
app.command()(record)


@app.command()
def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN ...]", help="Run ids or prefixes of them, paths, or 'latest'.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All runs that ended without a checkpoint: refused, failed or killed.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    yes: Yes = False,
    keep_metadata: Annotated[
        bool, typer.Option("--keep-metadata", help="Keep the rows of the runs in a shared metadata database.")
    ] = False,
    mirror: Annotated[bool, typer.Option("--mirror", help="Also remove their mirrors.")] = False,
) -> None:
    """Remove runs, their checkpoints and their rows in a shared metadata database. Running ones are refused."""
    from vorox.core.errors import ConfigError, VoroxError
    from vorox.core.run_lookup import find_run
    from vorox.experiments.artifacts import inspect_run, list_failed_runs
    from vorox.training.mirror import mirror_uri

    if not names and not failed:
        raise ConfigError("No run is named", where="vorox runs remove", hint="name runs, or add --failed")
    chosen = {run.directory.resolve(): run for run in (inspect_run(find_run(root, name)) for name in names or ())}
    if failed:
        chosen |= {run.directory.resolve(): run for run in list_failed_runs(Path(root))}
    if not chosen:
        typer.echo(f"No run in {Path(root).resolve()} ended without a checkpoint.")
        return
    lines: list[str] = []
    for run in chosen.values():
        uri = mirror_uri(run.directory) if mirror else None
        if mirror and uri is None:
            raise ConfigError(f"Run {run.run_id} has no mirror", where="--mirror", hint="remove --mirror")
        what = f"{run.run_id} (step {run.step:,}, {humanize.size(run.size_bytes)})"
        lines.append(what + (f" and its mirror {uri}" if uri else ""))
    if not any(run.state == "running" for run in chosen.values()):  # a running one is refused without a prompt
        confirm(
            f"Remove {lines[0]}?" if len(lines) == 1 else "\n".join([*lines, f"Remove these {len(lines)}?"]), yes=yes
        )
    removed: list[str] = []
    for run in chosen.values():
        try:
            remove_one(run, keep_metadata=keep_metadata, mirror=mirror)
        except VoroxError as error:
            error.saved = f"already removed: {', '.join(removed)}" if removed else error.saved or "nothing was removed"
            raise
        removed.append(run.run_id)


def remove_one(run: RunSummary, *, keep_metadata: bool, mirror: bool) -> None:
    """Remove a run and its rows in a shared metadata database, and print what was removed."""
    from vorox.experiments.artifacts import remove_run
    from vorox.training.metadata_database import forget_run
    from vorox.training.mirror import mirror_uri, remove_mirror

    notes: list[str] = []

    def first() -> None:
        uri = mirror_uri(run.directory)
        if uri is not None:
            note = f"Its mirror {uri} was kept (use --mirror to remove it)."
            if mirror:
                note = f"Its mirror of {humanize.size(remove_mirror(uri))} was removed as well."
            notes.append(note)
        if not keep_metadata:
            notes.append(forget_run(run.directory))

    size_bytes = remove_run(run.directory, first=first)
    typer.echo(f"Removed {run.run_id} ({humanize.size(size_bytes)}). {' '.join(filter(None, notes))}".rstrip())


def _summary_json(run: RunSummary) -> dict[str, Any]:
    return {**asdict(run), "directory": str(run.directory), "age_seconds": round(time.time() - run.changed_at, 1)}
