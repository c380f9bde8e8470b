"""``vorox runs compare``: settings, replay chains and metrics of two runs."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.config import differences
from vorox.experiments.comparison import COMMON_METRICS, compare_metrics
from vorox.experiments.tracking import read_metrics
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run
from vorox.training.replay import compare_chains


def compare(run: str, other: str, root: str, every: bool, as_json: bool) -> None:
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
