"""``vorox data export`` and ``download``: token data in the formats of other trainers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.data.loading import ConfigArguments, load_with_tokenizer, progress_display
from vorox.cli.output import AsJson, print_json, print_table
from vorox.core.pluralize import pluralize


def export(
    arguments: ConfigArguments,
    to: Annotated[Literal["bin", "mds", "npy"], typer.Option("--to", help="llm.c shards, MDS, or flat numpy arrays.")],
    output: Annotated[Path, typer.Option("--output", help="New directory.")],
    split: Annotated[
        Literal["train", "validation"] | None, typer.Option(help="Only this split. Default: both.")
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", min=1, help="Maximum number of tokens per shard.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export complete caches to the format of another trainer, with a manifest."""
    from vorox.data.corpus import prepare
    from vorox.data.transfer.token_export import export_tokens

    config, tokenizer = load_with_tokenizer(arguments, ("--to", "--output", "--split", "--shard-tokens", "--json"))
    splits: tuple[Literal["train", "validation"], ...] = ("train", "validation") if split is None else (split,)
    with progress_display() as display:
        corpus = prepare(config, on_progress=display, build=False, tokenizer=tokenizer)
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


def download(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="fineweb10B, fineweb100B, finewebedu10B, or hf://datasets/OWNER/NAME/GLOB."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", help="Target directory.")],
    shards: Annotated[
        int | None, typer.Option("--shards", min=0, help="Maximum number of training shards or files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download token shards or other files from the Hugging Face Hub. Interrupted downloads resume."""
    from vorox.data.transfer.download import download as download_files

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
