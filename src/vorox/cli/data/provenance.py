"""``vorox data where`` and ``sql``: the documents and text of a step, and SQL queries."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json, print_table, print_text, print_wrapped
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.data.original_text import FoundText
    from vorox.data.provenance_queries import DocumentOrigin, RowOrigin


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
    """Show the documents that a step was trained on: files, bytes, tokens, optionally the text.

    `vorox data losses` sorts the documents of many steps by their loss.
    """
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
            print_wrapped([f"  {_document_line(document)}"])
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
            if found.targets is not None:
                entry |= {"targets": found.targets}
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
    print_text(found.marked_text or found.text)


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
        steps = None if samples is None else step_range(samples, "--samples")
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


def step_range(text: str, option: str) -> tuple[int, int]:
    """Return first and last step of a range ``A:B``.

    Raises:
        ConfigError: It is not a range of steps.
    """
    from vorox.core.errors import ConfigError

    first, separator, last = text.replace(",", "").replace("_", "").partition(":")
    if not separator or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise ConfigError(f"{text!r} is not a range of steps", where=option, hint="write it as 1:100")
    return int(first), int(last)
