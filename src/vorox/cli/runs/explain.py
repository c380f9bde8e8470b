"""``vorox explain``: the documents that caused what a step computed."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path

import typer

from vorox.cli.launch.rank_launcher import is_main_rank, launch_ranks
from vorox.cli.runs.materialize import state_after, step_of
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import step_directories
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import examine_chain, number
from vorox.records.run_lookup import find_run
from vorox.run import workload_of_run
from vorox.training.checkpoints.store import verify
from vorox.training.explain import (
    Explanation,
    NonfiniteCause,
    Quantity,
    documents_of_step,
    last_step,
    most_trials,
    nonfinite_quantity,
    trials_for_one,
)
from vorox.training.explain import explain as explain_step
from vorox.training.materialize import open_range
from vorox.training.re_execution import ReExecution, cost_of

_NAMES: dict[Quantity, str] = {
    "grad_norm": "gradient norm", "loss": "loss", "next_loss": "damage to the loss of the next steps",
}  # fmt: skip
_MOST_LAYERS = 5


def explain(
    run: str,
    step: int | None,
    by: Quantity | None,
    next_steps: int,
    limit: int,
    nproc: int,
    plan: bool,
    state: Path | None,
    root: str,
    as_json: bool,
) -> None:
    run, step = step_of(root, run, step)
    directory = find_run(root, run)
    with RunDataIndex.open(directory) as run_data:
        last = last_step(run_data, step, by, next_steps)
        if plan:
            is_finite = nonfinite_quantity(examine_chain(directory).entries[step]) is None
            num_documents = len(documents_of_step(run_data, step))
            _print_plan(directory, step, last - step, num_documents, is_finite=is_finite, as_json=as_json)
            return
        start = None if state is None else verify(state)
        if start is None and step > 1:
            start = state_after(directory, step - 1, root, nproc)
        if nproc > 1:
            words = ["explain", str(directory), "--step", str(step), "--next", str(next_steps)]
            words += [] if by is None else ["--by", by]
            words += ["--limit", str(limit), *(["--json"] if as_json else [])]
            words += [] if start is None else ["--state", str(start.path)]
            raise typer.Exit(launch_ranks(nproc, words, advice=""))
        display = BuildDisplay()
        try:
            found = explain_step(
                run_data, step, functools.partial(workload_of_run, directory), quantity=by, num_next_steps=next_steps,
                start=start,
                on_trial=lambda done, total: display.step("computing the step without documents", done, total),
            )  # fmt: skip
        finally:
            display.close()
    if not is_main_rank():
        return
    if as_json:
        print_json({"run": directory.name, **asdict(found)})
        return
    _print(found, limit)


def _print(found: Explanation, limit: int) -> None:
    loss, norm = number(found.entry.loss), number(found.entry.grad_norm)
    what = _NAMES[found.quantity]
    typer.echo(f"Step {found.step:,}: loss {loss:.4f}, gradient norm {norm:.4g}")
    if found.nonfinite is not None:
        _print_nonfinite(found.nonfinite, what, len(found.documents))
        return
    if found.quantity == "next_loss":
        usual = f"Its update changed the loss of the next steps by {found.excess:+.4f}"
    else:
        usual = f"In the steps before, the {what} was usually {found.usual:.4g}"
    print_wrapped([f"{usual}{'' if found.is_unusual else ': not unusual'}"])
    if found.culprit is not None:
        effect = found.culprit.effect
        without = found.excess if effect is None else found.usual + found.excess - effect.of(found.quantity)
        print_wrapped([f"Caused by {found.culprit.name}: without it the {what} is {without:.4g}"])
    elif found.is_unusual:
        typer.echo("No single document causes it")
    tested = [one for one in found.documents if one.effect is not None]
    rows = [
        [
            f"{effect.grad_norm:+.4g}",
            f"{effect.loss:+.4f}",
            humanize.UNKNOWN if effect.next_loss is None else f"{effect.next_loss:+.5f}",
            f"{one.num_tokens:,}",
            one.name,
        ]
        for one in tested[:limit]
        for effect in [one.effect]
        if effect is not None
    ]
    typer.echo("\nWhat each document added")
    print_table(["GNORM", "LOSS", "NEXT-LOSS", "TOKENS", "DOCUMENT"], rows, right="GNORM LOSS NEXT-LOSS TOKENS")
    if len(found.documents) > len(tested):
        typer.echo(f"{pluralize(len(found.documents) - len(tested), 'other document')} added less, in halves")
    if found.layers:
        layers = [
            [f"{one.norm:.4g}", humanize.UNKNOWN if one.norm_without is None else f"{one.norm_without:.4g}", one.name]
            for one in found.layers[:_MOST_LAYERS]
        ]
        typer.echo("\nWhere the gradient norm arises")
        print_table(["GNORM", "WITHOUT-IT", "LAYER"], layers, right="GNORM WITHOUT-IT")


def _print_nonfinite(cause: NonfiniteCause, what: str, num_documents: int) -> None:
    if cause.origin:
        print_wrapped([f"The first value that is not finite: {cause.origin}"])
    named = cause.documents
    if not named:
        typer.echo(f"No document causes it: it is not finite with all {num_documents:,} documents masked")
    elif len(named) == 1:
        print_wrapped([f"Caused by {named[0].name}: without it the {what} is {cause.value:.4g}"])
    else:
        typer.echo(f"Caused by {len(named):,} documents: without them the {what} is {cause.value:.4g}")
        print_wrapped(f"  {one.name}" for one in named)


def _print_plan(
    directory: Path, step: int, next_steps: int, num_documents: int, *, is_finite: bool, as_json: bool
) -> None:
    trials = 1 + (most_trials(num_documents) if is_finite else trials_for_one(num_documents))
    is_kept = step == 1 or step - 1 in step_directories(directory)
    cost = cost_of(ReExecution(directory, step - 1, step) if is_kept else open_range(directory, [step - 1]))
    before = 0 if is_kept else cost.num_steps
    num_steps = before + trials * (1 + next_steps)
    seconds = None
    if cost.seconds is not None:
        start_seconds = cost.start_seconds or 0.0
        num_starts = trials if step == 1 else 1 if is_kept else 2  # the initial weights are those of a new engine
        seconds = num_starts * start_seconds + (cost.seconds - start_seconds) / cost.num_steps * num_steps
    if as_json:
        print_json({"num_documents": num_documents, "num_steps": num_steps, "seconds": seconds})
        return
    took = "" if seconds is None else f", about {humanize.duration(seconds)}"
    steps = f"{pluralize(num_steps, 'step')} to compute{took}"
    steps = f"at most {steps}" if is_finite else f"{steps} if one of them is the cause, more if several are"
    typer.echo(f"{pluralize(num_documents, 'document')}: {steps}")
