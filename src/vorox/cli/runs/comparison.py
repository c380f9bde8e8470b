"""``vorox runs compare``: settings, replay chains and metrics of two runs; with ``--paired``, their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from vorox.api.model import find_model
from vorox.api.runs import open_run
from vorox.cli.data.provenance import chosen_steps
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.config import differences
from vorox.core.errors import ConfigError
from vorox.experiments.comparison import COMMON_METRICS, compare_metrics
from vorox.experiments.tracking import read_metrics
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run, fork_lines
from vorox.training.replay import compare_chains
from vorox.training.reports.paired_runs import (
    PairedLoss,
    PairedSpan,
    by_source,
    check_pair,
    last_shared_checkpoint,
    paired_documents,
    paired_spans,
)

_SPANS, _DOCUMENTS, _DEFAULT_STEPS = 10, 10, 10


def compare(run: str, other: str, root: str, every: bool, paired: bool, steps: str | None, as_json: bool) -> None:
    first, second = find_run(root, run), find_run(root, other)
    chosen = chosen_steps(None, steps)
    if chosen is not None and not paired:
        raise ConfigError("--steps names documents, which --paired compares", where="--steps", hint="add --paired")
    if paired:
        _compare_paired(first, second, root, chosen, as_json=as_json)
        return
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


def _compare_paired(first: Path, second: Path, root: str, chosen: tuple[int, int] | None, *, as_json: bool) -> None:
    check_pair(first, second)
    verdict, (spans, same_rows) = compare_chains(first, second), paired_spans(first, second, _SPANS)
    step = last_shared_checkpoint(first, second)
    documents, (start, end) = _paired_documents(first, second, step, root, chosen)
    sources = by_source(documents)
    if as_json:
        parts = {"spans": spans, "sources": sources, "documents": documents}
        found = {name: [asdict(one) for one in part] for name, part in parts.items()}
        print_json({"runs": [first.name, second.name], "chain": verdict, "step": step, "steps": [start, end], **found})
        return
    typer.echo(f"A  {first.name}\nB  {second.name}")
    print_wrapped(f"   {name}: {line}" for name, run in (("A", first), ("B", second)) for line in fork_lines(run))
    print_wrapped(["", verdict["verdict"]])
    if spans:
        _print_spans(spans, same_rows=same_rows)
    typer.echo(f"\nDocuments of steps {start:,} to {end:,}, under the weights of step {step:,}")
    _print_losses("SOURCE", sources)
    typer.echo("")
    _print_losses("DOCUMENT", documents[:_DOCUMENTS])


def _paired_documents(
    first: Path, second: Path, step: int, root: str, chosen: tuple[int, int] | None
) -> tuple[list[PairedLoss], tuple[int, int]]:
    """Return the documents that the first run read in some steps, under the weights of each run."""
    start, end = chosen or (max(1, step - _DEFAULT_STEPS + 1), step)
    with open_run(str(first), root=root) as opened:
        models = (
            find_model(str(one), step=step, root=root, device=None, notices=PrintedNotices()) for one in (first, second)
        )
        losses = [opened.document_losses(model, start, end - start + 1) for model in models]
    return paired_documents(*losses), (start, end)


def _print_spans(spans: Sequence[PairedSpan], *, same_rows: bool) -> None:
    rows = [
        [
            f"{one.first_step:,}" if one.first_step == one.last_step else f"{one.first_step:,} to {one.last_step:,}",
            *_losses(one.losses),
            f"{one.deviation:.5f}" if one.num_compared > 1 else humanize.UNKNOWN,
            f"{one.num_compared:,}",
        ]
        for one in spans
    ]
    which = "over the steps that read the same rows" if same_rows else "on other rows, whose noise is in the difference"
    typer.echo(f"\nLoss of training from the first difference on, {which}")
    titles = ["STEPS", "LOSS-A", "LOSS-B", "B-A", "DEVIATION", "COMPARED"]
    print_table(titles, rows, right="LOSS-A LOSS-B B-A DEVIATION COMPARED")


def _losses(losses: tuple[float, float] | None) -> list[str]:
    if losses is None:
        return [humanize.UNKNOWN] * 3
    first, second = losses
    return [f"{first:.4f}", f"{second:.4f}", f"{second - first:+.5f}"]


def _print_losses(title: str, losses: Sequence[PairedLoss]) -> None:
    rows = [[*_losses(one.losses), f"{one.num_target_tokens:,}", one.name] for one in losses]
    print_table(["LOSS-A", "LOSS-B", "B-A", "TOKENS", title], rows, right="LOSS-A LOSS-B B-A TOKENS")


def _last(name: str, found: tuple[int, float] | None) -> str:
    if found is None:
        return humanize.UNKNOWN
    if name.endswith("_bytes"):
        return humanize.size(found[1])
    return humanize.count(found[1]) if 1e4 <= abs(found[1]) < 1e15 else f"{found[1]:.4g}"


def _best(name: str, found: tuple[int, float] | None) -> str:
    return humanize.UNKNOWN if found is None else f"{_last(name, found)} @{found[0]:,}"
