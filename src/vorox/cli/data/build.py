"""``vorox data build``: make the tokenizer and the caches of a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli import quantities
from vorox.cli.data.loading import Words, load, report_json, showing, tell
from vorox.cli.output import AsJson, print_json, print_table


def build(
    words: Words,
    repair: Annotated[
        bool, typer.Option("--repair", help="Check every chunk first, build damaged ones again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the tokenizer and the caches that a run of this configuration reads."""
    from vorox.data.dataset import prepare

    config = load(words, ("--repair", "--json"))
    with showing() as display:
        corpus = prepare(config, on_progress=display, repair=repair)
    tell(corpus)
    if as_json:
        print_json(
            {"root": str(corpus.root), "caches": {name: report_json(report) for name, report in corpus.reports.items()}}
        )
        return
    rows = [
        [
            name,
            f"{report.documents:,}",
            quantities.size(report.text_bytes),
            quantities.count(report.tokens),
            f"{report.rows:,}",
            quantities.percent(report.utilisation_fraction, 2),
            quantities.size(report.compressed_bytes),
            quantities.percent(report.ratio_to_uint16),
            f"{report.units_built:,}/{report.units:,}",
            f"{report.quarantined:,}",
        ]
        for name, report in corpus.reports.items()
    ]
    titles = ["CACHE", "DOCUMENTS", "TEXT", "TOKENS", "ROWS", "FULL", "SIZE", "OF-UINT16", "BUILT", "BAD"]
    print_table(titles, rows, right=" ".join(titles[1:]))
    seconds = sum(report.seconds for report in corpus.reports.values())
    built_bytes = sum(report.built_text_bytes for report in corpus.reports.values())
    speed = f", {built_bytes / 1e6 / seconds:.1f} MB/s" if built_bytes and seconds > 0 else ""
    typer.echo(f"\nready in {corpus.root}: {quantities.duration(seconds)} of building{speed}")
