"""``vorox replay``: recompute steps of a run and compare them bit for bit."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig
    from vorox.training.replay import ReplayReport
    from vorox.training.workload import Workload


def replay(
    run: RunName,
    first_step: Annotated[
        int, typer.Option("--from", min=0, help="Start from the checkpoint after this many steps.")
    ] = 0,
    last_step: Annotated[
        int | None, typer.Option("--to", min=1, help="Last step to replay. Default: the last recorded one.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; must equal the run's.")] = 1,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Recompute recorded steps from a checkpoint and compare every bit.

    The run is not changed; its verdicts.jsonl gets a line. The first difference
    is reported with its step and quantity; the exit code gives its kind: 4
    data, 5 saved state, 7 numbers.
    """
    from vorox.cli.build_display import BuildDisplay
    from vorox.core.run_lookup import find_run
    from vorox.training import replay as replaying

    if nproc > 1:
        from vorox.cli.rank_launcher import launch_ranks

        command = ["replay", run, "--from", str(first_step), "--root", str(root), *(["--json"] if as_json else [])]
        raise typer.Exit(launch_ranks(nproc, [*command, *([] if last_step is None else ["--to", str(last_step)])]))
    directory = find_run(root, run)
    display = BuildDisplay()
    try:
        report = replaying.replay(
            directory,
            functools.partial(_make_workload, directory),
            first_step=first_step,
            last_step=last_step,
            on_step=lambda done, total: display.step("replaying", done, total),
        )
    finally:
        display.close()
    _record(directory, report)
    if as_json:
        print_json({**asdict(report), "run": directory.name, "is_exact": report.is_exact})
    else:
        typer.echo(str(report))
    if report.difference is not None:
        raise _difference_error(report, str(directory))
    if not as_json:
        typer.echo(f"Replayed {_range(report)}")


def _range(report: ReplayReport) -> str:
    states = f", {pluralize(report.num_states, 'checkpoint')} compared" if report.num_states else ""
    return f"from step {report.start_step:,} to step {report.last_step:,}{states}"


def _record(run_directory: Path, report: ReplayReport) -> None:
    """Record the verdict in the run, unless it cannot be written, as a copy on read-only storage."""
    from vorox.cli.rank_launcher import is_main_rank
    from vorox.experiments.verdicts import record_verdict

    if is_main_rank():
        record_verdict(run_directory, "replay", passed=report.is_exact, text=f"{report}; {_range(report)}")


def _make_workload(run_directory: Path, config: RunConfig) -> Workload:
    from vorox import backends
    from vorox.core.log import RunLog
    from vorox.core.run_layout import RunLayout
    from vorox.run import make_workload

    kept, dist = RunLayout(run_directory).tokenizer, backends.connect(config)
    return make_workload(config, dist, RunLog(None), None, build=False, tokenizer_directory=kept)


def _difference_error(report: ReplayReport, where: str) -> Exception:
    from vorox.core.errors import CheckpointError, DataError, NumericalError

    assert report.difference is not None
    kinds = {"batch": DataError, "state": CheckpointError}
    hint = "the environment changed: " + "; ".join(report.environment) if report.environment else ""
    return kinds.get(report.difference.quantity, NumericalError)(
        f"Replay differs at {report.difference}",
        where=where,
        hint=hint or "the code, a cache or a checkpoint has changed since the run recorded this step",
        saved="the run was not changed",
    )
