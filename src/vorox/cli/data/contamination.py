"""``vorox data contamination``: evaluation records that a run was trained on, and the steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json, print_table
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.data.contamination import Contamination, SharedDocument

_MOST_LINES = 20
_MOST_STEPS = 4


def contamination(
    run: RunName,
    against: Annotated[
        list[str], typer.Option("--against", help="File, folder or glob of the evaluation set; repeatable.")
    ],
    field: Annotated[
        str | None, typer.Option("--field", help="Its text column, if it is ambiguous (jsonl, csv, parquet).")
    ] = None,
    ngram_tokens: Annotated[
        int, typer.Option("--ngram-tokens", min=1, help="Length of the n-grams that are compared.")
    ] = 13,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Find records of an evaluation set in the text that a run was trained on, and the steps that saw them."""
    from vorox.core.run_layout import RunLayout
    from vorox.core.run_lookup import find_run
    from vorox.data.contamination import find_contamination
    from vorox.data.evaluation_records import read_evaluation_records
    from vorox.data.run_data_index import RunDataIndex
    from vorox.data.tokenizers.loading import load

    directory = find_run(root, run)
    with RunDataIndex.open(directory) as run_data:
        records = read_evaluation_records(against, load(RunLayout(directory).tokenizer), text_field=field)
        found = find_contamination(run_data, records, ngram_tokens=ngram_tokens)
    if as_json:
        records_json = [{**asdict(record), "fraction": record.fraction} for record in found.records]
        print_json({**asdict(found), "ngram_tokens": ngram_tokens, "records": records_json})
        return
    _print(found, ngram_tokens)


def _print(found: Contamination, ngram_tokens: int) -> None:
    from vorox.data.contamination import MOSTLY_FRACTION

    mostly = sum(record.fraction >= MOSTLY_FRACTION for record in found.records)
    typer.echo(
        f"{len(found.records):,} of {pluralize(found.num_records, 'record')} share {ngram_tokens} tokens or more in "
        f"sequence with {pluralize(found.num_rows, 'row')} of {pluralize(found.num_steps, 'step')}; "
        f"{mostly:,} of them by {MOSTLY_FRACTION:.0%} or more of their tokens"
    )
    if found.num_short_records:
        typer.echo(f"{pluralize(found.num_short_records, 'record')} shorter than {ngram_tokens} tokens: not compared")
    if not found.records:
        return
    rows = [
        [
            f"{record.fraction:.0%}",
            f"{record.contaminated_tokens:,}/{record.num_tokens:,}",
            f"{record.uri.rpartition('/')[2]}:{record.ordinal}",
            f"{record.documents[0].uri.rpartition('/')[2]}:{record.documents[0].ordinal}",
            _steps(record.documents[0]),
        ]
        for record in found.records[:_MOST_LINES]
    ]
    print_table(["SHARE", "TOKENS", "RECORD", "DOCUMENT", "STEPS"], rows, right="SHARE TOKENS")
    if len(found.records) > _MOST_LINES:
        typer.echo(f"... and {len(found.records) - _MOST_LINES:,} more; use --json for all, with all documents")


def _steps(document: SharedDocument) -> str:
    shown = ", ".join(f"{step:,}" for step in document.steps[:_MOST_STEPS])
    more = len(document.steps) - _MOST_STEPS
    return f"{shown} and {more:,} more" if more > 0 else shown
