"""``vorox data export`` and ``download``: token data in the formats of other trainers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from vorox.cli.data.loading import load_with_tokenizer, prepare_built, progress_display
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import Split
from vorox.data.text.holdout import SPLITS
from vorox.data.transfer.download import download as download_files
from vorox.data.transfer.token_export import export_tokens
from vorox.data.transfer.token_formats import TokenFormat


def export(
    arguments: list[str],
    to: TokenFormat,
    output: Path,
    split: Split | None,
    shard_tokens: int | None,
    as_json: bool,
) -> None:
    config, tokenizer = load_with_tokenizer(arguments, ("--to", "--output", "--split", "--shard-tokens", "--json"))
    splits: tuple[Split, ...] = SPLITS if split is None else (split,)
    with progress_display() as display:
        corpus = prepare_built(
            arguments, ("--to", "--output", "--split", "--shard-tokens", "--json"), config, tokenizer, display
        )
        report = export_tokens(corpus, to, output, splits=splits, shard_tokens=shard_tokens, on_progress=display.step)
    if as_json:
        print_json({**asdict(report), "directory": str(report.directory)})
        return
    rows = [
        [file.name, f"{file.documents:,}", f"{file.tokens:,}", humanize.size(file.size_bytes), file.sha256[:12]]
        for file in report.files
    ]
    titles = ["FILE", "DOCUMENTS", "TOKENS", "SIZE", "SHA256"]
    print_table(titles, rows, right="DOCUMENTS TOKENS SIZE")
    typer.echo(
        f"\n{pluralize(report.documents, 'document')}, {pluralize(report.tokens, 'token')} in {report.directory}"
    )


def download(name: str, output: Path, shards: int | None, as_json: bool) -> None:
    with progress_display() as display:
        report = download_files(name, output, shards=shards, on_progress=display.step)
    if as_json:
        print_json({**asdict(report), "directory": str(report.directory)})
        return
    rows = [
        [file.name, humanize.size(file.size_bytes), humanize.size(file.fetched_bytes), file.version[:17]]
        for file in report.files
    ]
    print_table(["FILE", "SIZE", "FETCHED", "VERSION"], rows, right="SIZE FETCHED")
    size = humanize.size(sum(file.size_bytes for file in report.files))
    typer.echo(f"\n{pluralize(len(report.files), 'file')}, {size}, commit {report.commit[:12]}, in {report.directory}")
