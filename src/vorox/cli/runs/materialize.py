"""``vorox checkpoints materialize``: compute the checkpoints of steps that none was kept of."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer

from vorox.cli.launch.rank_launcher import launch_ranks
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.processes.process_start import process_started_at
from vorox.records.run_lookup import find_run, split_step
from vorox.run import states_of_run, with_states, workload_of_run
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.materialize import Materialized, Proof, open_range, steps_every
from vorox.training.materialize import materialize as write_checkpoints
from vorox.training.re_execution import ReExecution, cost_of

_PROOFS: dict[Proof, str] = {
    "fingerprint": "it has the fingerprint that the run recorded",
    "next step": "the step after it has the recorded bits",
    "own step": "it is the last recorded step, which has the recorded bits; no later one proves its update",
}


def materialize(
    run: str,
    steps: list[int] | None,
    every: int | None,
    to: Path | None,
    plan: bool,
    nproc: int,
    root: str,
    as_json: bool,
) -> None:
    directory = find_run(root, run)
    chosen = _chosen(directory, steps or [], every)
    if nproc > 1 and not plan:
        options = [word for step in chosen for word in ("--step", str(step))]
        command = ["checkpoints", "materialize", run, *options, "--root", str(root), *(["--json"] if as_json else [])]
        raise typer.Exit(launch_ranks(nproc, [*command, *([] if to is None else ["--to", str(to)])]))
    execution = open_range(directory, chosen)
    if plan:
        _print_cost(execution, len(chosen), as_json=as_json)
        return
    display = BuildDisplay()
    try:
        write = functools.partial(
            write_checkpoints,
            execution,
            functools.partial(workload_of_run, directory),
            chosen,
            to or Path("materialized", directory.name),
            on_step=lambda done, total: display.step("computing steps", done, total),
        )
        found = with_states(write, PrintedNotices())
    finally:
        display.close()
    if as_json:
        print_json([{**asdict(one), "path": str(one.path)} for one in found])
    else:
        _print(found)


def step_of(root: str, run: str, step: int | None) -> tuple[str, int]:
    """Split ``RUN@STEP``, or a run and ``--step``, into run and step.

    Raises:
        ConfigError: Neither names a step, or both do.
    """
    name, found = split_step(root, run, step)
    if found is None:
        raise ConfigError("No step is named", where=run, hint=f"write --step N, or {run}@N")
    return name, found


def state_after(run_directory: Path, step: int, root: str, nproc: int) -> Checkpoint:
    """Return the state of a run after a step; if it is not on disk, ``nproc`` ranks compute it into the cache.

    Args:
        run_directory: The run.
        step: Its finished steps.
        root: Parent directory of runs.
        nproc: Number of ranks.

    Raises:
        typer.Exit: The ranks have failed, and said why.
        VoroxError: As ``states_after``.
    """

    def compute(steps: Sequence[int], directory: Path) -> None:
        words = [word for one in steps for word in ("--step", str(one))]
        command = ["checkpoints", "materialize", str(run_directory), *words, "--to", str(directory), "--root", root]
        if code := launch_ranks(nproc, command, advice="", is_quiet=True):
            raise typer.Exit(code)

    ranks = None if nproc == 1 else compute
    return states_of_run(run_directory, [step], PrintedNotices(), ranks)[step]


def _chosen(run_directory: Path, steps: Sequence[int], every: int | None) -> list[int]:
    if bool(steps) == (every is not None):
        raise ConfigError(
            "Exactly one of --step and --every names the steps", where="vorox checkpoints materialize",
            hint="write --step 340, several times for several steps, or --every 50",
        )  # fmt: skip
    if every is None:
        return sorted(set(steps))
    return steps_every(run_directory, every)


def _print_cost(execution: ReExecution, num_checkpoints: int, *, as_json: bool) -> None:
    cost, imports_seconds = cost_of(execution), time.time() - process_started_at()  # this command's, as of the other
    if cost.seconds is not None:
        start_seconds = (cost.start_seconds or 0.0) + imports_seconds
        cost = replace(cost, start_seconds=start_seconds, seconds=cost.seconds + imports_seconds)
    size_bytes = None if cost.checkpoint_bytes is None else num_checkpoints * cost.checkpoint_bytes
    if as_json:
        print_json({**asdict(cost), "num_checkpoints": num_checkpoints, "size_bytes": size_bytes})
        return
    seconds = "" if cost.seconds is None else f", about {humanize.duration(cost.seconds)}"
    if cost.start_seconds is not None:
        seconds += f", of which {humanize.duration(cost.start_seconds)} to start"
    room = "" if size_bytes is None else f"; {humanize.size(size_bytes)} on disk"
    typer.echo(
        f"{pluralize(num_checkpoints, 'checkpoint')}: {pluralize(cost.num_steps, 'step')} to compute, from step "
        f"{execution.start_step:,} to {execution.last_step:,}{seconds}{room}"
    )


def _print(found: Sequence[Materialized]) -> None:
    for one in found:
        typer.echo(f"Step {one.step:,} is in {one.path}: {_PROOFS[one.proof]} ({one.fingerprint[:16]})")
