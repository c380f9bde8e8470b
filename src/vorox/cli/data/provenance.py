"""``vorox data where``, ``when`` and ``sql``: the text of a step, the steps of a text, and SQL queries."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json, print_table
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.data.original_text import FoundText
    from vorox.data.provenance_queries import DocumentOrigin, Occurrence, RowOrigin

_MOST_LINES = 40
_BAR = "\N{BOX DRAWINGS LIGHT VERTICAL}"


def where(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=1, help="The step, from 1, as in the log.")],
    slot: Annotated[
        int | None, typer.Option("--slot", min=0, help="Only this row of the step, from 0. Default: all.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Also print the text, read from the source files.")] = False,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the documents that a step was trained on: files, bytes, tokens, optionally the text."""
    from vorox.core.run_lookup import find_run
    from vorox.data import provenance_queries

    texts: dict[tuple[int, int], FoundText] = {}
    with provenance_queries.RunDataIndex.open(find_run(root, run)) as run_data:
        rows = provenance_queries.where(run_data, step, slot)
        if text:
            from vorox.data.original_text import TextFinder

            with contextlib.closing(TextFinder(run_data)) as finder:
                texts = {
                    (row.position, part): finder.find(row, document)
                    for row in rows
                    for part, document in enumerate(row.documents)
                }
    if as_json:
        print_json([_row_json(row, texts) for row in rows])
        return
    for row in rows:
        typer.echo(
            f"step {row.step:,}, slot {row.slot}: {row.source}, epoch {row.epoch}, row {row.row:,}, "
            + pluralize(row.num_tokens, "token")
            + (f" and {row.padding_tokens:,} of padding" if row.padding_tokens else "")
        )
        for part, document in enumerate(row.documents):
            typer.echo(f"  {_document_line(document)}")
            _print_text(texts.get((row.position, part)))


def _row_json(row: RowOrigin, texts: dict[tuple[int, int], FoundText]) -> dict[str, Any]:
    documents: list[dict[str, Any]] = []
    for part, document in enumerate(row.documents):
        found = texts.get((row.position, part))
        entry = {**asdict(document), "text_xxh3": f"{document.text_xxh3:016x}"}
        if found is not None:
            entry |= {
                "text": found.text,
                "text_origin": found.origin,
                "text_not_from_source_because": found.why or None,
            }
        documents.append(entry)
    return {**asdict(row), "documents": documents}


def _document_line(document: DocumentOrigin) -> str:
    last = document.first_token + document.num_tokens
    whole = "all" if document.num_tokens == document.document_tokens else f"{document.first_token:,} to {last:,} of"
    return (
        f"{document.uri}, record {document.ordinal:,}, bytes {document.byte_offset:,} to "
        f"{document.byte_offset + document.byte_length:,}: {whole} {pluralize(document.document_tokens, 'token')}"
    )


def _print_text(found: FoundText | None) -> None:
    if found is None:
        return
    if found.origin == "cache":
        typer.echo(f"    (decoded from the cache: {found.why})")
    for line in humanize.printable(found.text).split("\n"):
        typer.echo(f"    {_BAR} {line}")


def when(
    run: RunName,
    source: Annotated[str, typer.Option("--source", help="The file, or the end of its name.")],
    byte: Annotated[int | None, typer.Option("--byte", min=0, help="Only the document with this byte.")] = None,
    record: Annotated[
        int | None, typer.Option("--record", min=0, help="Only the document with this index in the file, from 0.")
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show which steps were trained on a file or on one of its documents, and whether they are still in the run."""
    from vorox.core.run_lookup import find_run
    from vorox.data import provenance_queries

    with provenance_queries.RunDataIndex.open(find_run(root, run)) as run_data:
        found = provenance_queries.when(run_data, source, byte, ordinal=record)
        is_held_out = not found and provenance_queries.is_held_out(run_data, source)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    shown = [one for one in found if one.state != "beyond"]
    if shown:
        _print_occurrences(shown)
    elif is_held_out:
        typer.echo("No step: the file is held out for validation (data.validation.sources).")
    else:
        typer.echo(
            "No step: no row of this run's training caches contains it. It is held out for validation, was filtered "
            "or quarantined, or is between records."
            if not found
            else "No step of this run."
        )
    if byte is not None and shown:
        typer.echo(_granularity(byte, {one.granularity for one in shown}))
    if len(found) > len(shown):
        beyond = len(found) - len(shown)
        typer.echo(f"The plan has it {beyond:,} more time{'s' * (beyond > 1)} after the run's last step.")


def _granularity(byte: int, known: set[str]) -> str:
    """Describe the granularity of the result."""
    if known == {"byte"}:
        return f"Each of these rows contains byte {byte:,}."
    if "row group" in known:
        return (
            f"In Parquet, byte {byte:,} means its row group: these are the rows of all its records. Use --record N for "
            "one record."
        )
    return (
        f"These are all rows of the record with byte {byte:,}. Its text differs from its bytes (jsonl, csv, a "
        "transform), so the row with this byte cannot be determined."
    )


def _print_occurrences(found: Sequence[Occurrence]) -> None:
    rows = [
        [
            f"{one.step:,}",
            f"{one.slot}",
            f"{one.epoch}",
            one.source,
            f"{one.row:,}",
            one.state.replace("_", " "),
            humanize.UNKNOWN if one.attempt is None else f"{one.attempt}",
        ]
        for one in found[:_MOST_LINES]
    ]
    uris = sorted({one.uri for one in found})
    typer.echo("\n".join(uris))
    print_table(
        ["STEP", "SLOT", "EPOCH", "SOURCE", "ROW", "STATE", "ATTEMPT"], rows, right="STEP SLOT EPOCH ROW ATTEMPT"
    )
    if len(found) > _MOST_LINES:
        typer.echo(f"... and {len(found) - _MOST_LINES:,} more; use --json for all")


def sql(
    run: RunName,
    words: Annotated[
        list[str], typer.Argument(metavar="STATEMENT", help="For example select '*' from consumed, quoted or not.")
    ],
    samples: Annotated[
        str | None,
        typer.Option("--samples", metavar="A:B", help="First write the rows of steps A to B into the table sample."),
    ] = None,
    inventory: Annotated[
        bool, typer.Option("--inventory", help="First write the files, units and chunks of the run's caches.")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="First add data of the run directory that the database lacks.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Run a read-only SQL query on the run's metadata database."""
    statement = " ".join(words)
    from vorox.core.run_lookup import find_run
    from vorox.experiments.metadata import MetadataCache
    from vorox.training.metadata_database import existing_target, refresh_database

    directory = find_run(root, run)
    if refresh or inventory or samples is not None:
        steps = None if samples is None else _steps(samples)
        refresh_database(directory, inventory=inventory, sample_steps=steps)
    found = MetadataCache.query(existing_target(directory), statement)
    if as_json:
        print_json(found.records())
        return
    if not found.rows:
        typer.echo("No rows")
        return
    cells = [[humanize.UNKNOWN if value is None else str(value) for value in row] for row in found.rows]
    numbers = [index for index in range(len(found.columns)) if isinstance(found.rows[0][index], int | float)]
    print_table(found.columns, cells, right=" ".join(found.columns[index] for index in numbers))


def _steps(text: str) -> tuple[int, int]:
    from vorox.core.errors import ConfigError

    first, separator, last = text.replace(",", "").replace("_", "").partition(":")
    if not separator or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise ConfigError(f"{text!r} is not a range of steps", where="--samples", hint="write it as 1:100")
    return int(first), int(last)
