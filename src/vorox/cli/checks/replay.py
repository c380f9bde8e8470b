"""``vorox replay``: recompute steps of a run and compare them bit for bit."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path

import typer

from vorox.cli.data.provenance import chosen_steps
from vorox.cli.launch.rank_launcher import is_main_rank, launch_ranks
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.experiments.verdicts import record_verdict
from vorox.records.run_lookup import find_run
from vorox.run import with_states, workload_of_run
from vorox.training import replay as replaying
from vorox.training.replay import ReplayReport, difference_error


def replay(
    run: str,
    first_step: int,
    last_step: int | None,
    step: int | None,
    steps: str | None,
    nproc: int,
    root: str,
    as_json: bool,
) -> None:
    chosen = chosen_steps(step, steps)
    if chosen is not None:
        _refuse_both(first_step, last_step)
        first_step, last_step = chosen[0] - 1, chosen[1]
    if nproc > 1:
        command = ["replay", run, "--from", str(first_step), "--root", str(root), *(["--json"] if as_json else [])]
        raise typer.Exit(launch_ranks(nproc, [*command, *([] if last_step is None else ["--to", str(last_step)])]))
    directory = find_run(root, run)
    display = BuildDisplay()
    try:
        replay_steps = functools.partial(
            replaying.replay,
            directory,
            functools.partial(workload_of_run, directory),
            first_step=first_step,
            last_step=last_step,
            on_step=lambda done, total: display.step("replaying", done, total),
        )
        report = with_states(replay_steps, PrintedNotices())
    finally:
        display.close()
    _record(directory, report)
    if as_json:
        print_json({**asdict(report), "run": directory.name, "is_exact": report.is_exact})
    else:
        typer.echo(str(report))
    if report.difference is not None:
        raise difference_error(report, directory)
    if not as_json:
        typer.echo(f"Replayed {_range(report)}")


def _refuse_both(first_step: int, last_step: int | None) -> None:
    if first_step or last_step is not None:
        raise ConfigError(
            "--step and --steps replace --from and --to",
            where="vorox replay",
            hint="keep --steps A:B, or --from and --to",
        )


def _range(report: ReplayReport) -> str:
    states = f", {pluralize(report.num_states, 'checkpoint')} compared" if report.num_states else ""
    return f"from step {report.start_step:,} to step {report.last_step:,}{states}"


def _record(run_directory: Path, report: ReplayReport) -> None:
    """Record the verdict in the run, unless it cannot be written, as a copy on read-only storage."""
    if is_main_rank():
        record_verdict(run_directory, "replay", passed=report.is_exact, text=f"{report}; {_range(report)}")
