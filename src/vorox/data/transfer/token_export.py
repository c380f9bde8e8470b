"""Export of a corpus's tokens for other trainers, with a manifest, complete or not at all.

A prepared corpus goes in; a directory comes out with files of the requested form, the tokenizer, and ``MANIFEST.json``,
which lists every file with its hash and the caches it was made from. Packing had split and scattered the documents;
the segments of the rows map each piece to its document. Tokens are read through the cache reader, so every block is
verified. Invariants: documents are whole and in the order of their source, their counts equal those of the cache, and
the same cache gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema.data import Split
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.corpus import Corpus
from vorox.data.documents import DocumentSpan
from vorox.data.rows import TokenArray
from vorox.data.text.holdout import SPLITS
from vorox.data.transfer.token_formats import DEFAULT_SHARD_TOKENS, WRITERS, Destination, ExportedFile, TokenFormat

ExportProgress = Callable[[str, int, int], None]
"""Called with (file group, tokens done, total tokens)."""

_SPLIT_NAMES: dict[Split, str] = {"train": "train", "validation": "val"}
_BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported.

    Attributes:
        directory: The exported directory.
        files: All token files, in the order of the sources.
        documents: Number of documents.
        tokens: Number of tokens, end-of-text tokens included.
    """

    directory: Path
    files: tuple[ExportedFile, ...]
    documents: int
    tokens: int


def export_tokens(
    corpus: Corpus,
    to: TokenFormat,
    output: Path,
    *,
    splits: Sequence[Split] = SPLITS,
    shard_tokens: int | None = None,
    on_progress: ExportProgress | None = None,
) -> ExportReport:
    """Write the tokens of a corpus in the format of another trainer.

    Args:
        corpus: A corpus with complete caches.
        to: ``bin``, ``mds`` or ``npy``.
        output: A directory that does not exist yet.
        splits: The exported splits.
        shard_tokens: Maximum tokens per shard; ``None`` uses the format's default. ``npy`` has no shards.
        on_progress: Called while tokens are written.

    Raises:
        ConfigError: The directory exists, the format has no shards, or a source has conversations.
        DataError: A cache is damaged, no validation text is held out, or the files cannot be written.
    """
    if to == "npy" and shard_tokens is not None:
        raise ConfigError("npy has no shards", where="--shard-tokens", hint="omit it, or export to bin or mds")
    pictures = [cache.source.config.name for cache in corpus.caches if cache.reader.recipe.images is not None]
    if pictures:
        raise ConfigError(
            f"Source {pictures[0]!r} has rows with images, which these formats cannot hold", where="model.vision",
            hint="export the tokens of a model without an image encoder",
        )  # fmt: skip
    chats = [cache.source.config.name for cache in corpus.caches if cache.source.config.chat_fields]
    if chats:
        raise ConfigError(
            f"Source {chats[0]!r} has conversations, whose loss mask these formats cannot hold", where="data.sources",
            hint="leave the source out",
        )  # fmt: skip
    output = output.expanduser().absolute()
    if output.exists():
        raise ConfigError(
            "The output directory exists already", where=str(output), hint="choose another one, or remove it"
        )
    caches = list(_caches(corpus, splits))
    if not caches:
        raise DataError("No validation text is held out, so there is none to export", where="data.validation")
    try:
        with StagedDirectory(output) as directory:
            digests = [reader.digest for _, _, reader in caches]  # refuses incomplete caches before any work
            exported = [
                _export_cache(directory, to, shard_tokens, *cache, digest, on_progress or _ignore)
                for cache, digest in zip(caches, digests, strict=True)
            ]
            for file_name, content in corpus.tokenizer.files().items():
                directory.write(f"tokenizer/{file_name}", content)
            directory.commit(_manifest(corpus, to, [content for _, content in exported]))
    except OSError as error:
        raise DataError(
            f"The export cannot be written: {error.strerror or error}", where=str(error.filename or output),
            hint="make room and grant write permission, then run it again", saved="no partial export remains",
        ) from error  # fmt: skip
    files = tuple(file for cache_files, _ in exported for file in cache_files)
    return ExportReport(output, files, sum(file.documents for file in files), sum(file.tokens for file in files))


def _export_cache(
    directory: StagedDirectory, to: TokenFormat, shard_tokens: int | None, name: str, split: Split,
    reader: CacheReader, digest: str, on_progress: ExportProgress,
) -> tuple[list[ExportedFile], dict[str, object]]:  # fmt: skip
    """Export one cache; return its files and its entry in the manifest."""
    destination = _destination(directory, name, split, reader, to, shard_tokens)
    files = WRITERS[to](_tokens(reader, destination, on_progress), destination)
    _check_complete(files, destination, reader)
    content: dict[str, object] = {
        "source": name,
        "split": split,
        "cache": digest,
        "documents": destination.num_documents,
        "tokens": destination.num_tokens,
        "files": [asdict(file) for file in files],
    }
    return files, content


def _manifest(corpus: Corpus, to: TokenFormat, contents: list[dict[str, object]]) -> dict[str, object]:
    return {
        "kind": "vorox-export/1",
        "form": to,
        "dtype": str(corpus.tokenizer.dtype.__name__),
        "tokenizer": corpus.tokenizer.fingerprint,
        "vocab_size": corpus.tokenizer.vocab_size,
        "end_of_text_id": corpus.tokenizer.end_of_text_id,
        "contents": contents,
    }


def _ignore(what: str, done: int, total: int) -> None:
    del what, done, total


def _caches(corpus: Corpus, splits: Sequence[Split]) -> Iterator[tuple[str, Split, CacheReader]]:
    for cache in corpus.caches:
        if cache.split in splits:
            yield cache.source.config.name, cache.split, cache.reader


def _destination(
    directory: StagedDirectory, name: str, split: Split, reader: CacheReader, to: TokenFormat, shard_tokens: int | None
) -> Destination:
    units = reader.manifest.units
    return Destination(
        directory=directory,
        source=name,
        split=_SPLIT_NAMES[split],
        dtype=f"uint{8 * reader.token_bytes}",
        num_tokens=int(units["tokens"].sum(dtype="int64")),
        num_documents=int(units["documents"].sum(dtype="int64")),
        shard_tokens=shard_tokens or DEFAULT_SHARD_TOKENS.get(to, 1),
    )


def _tokens(reader: CacheReader, destination: Destination, report: ExportProgress) -> Iterator[TokenArray]:
    done = 0
    for document in whole_documents(reader):
        yield document.tokens
        done += len(document.tokens)
        report(f"export {destination.source} {destination.split}", done, destination.num_tokens)


def _check_complete(files: Sequence[ExportedFile], destination: Destination, reader: CacheReader) -> None:
    found = (sum(file.documents for file in files), sum(file.tokens for file in files))
    if found != (destination.num_documents, destination.num_tokens):
        if reader.recipe.transforms:
            raise DataError(
                "The transforms made texts of equal size of one record, which the rows do not tell apart",
                where=str(reader.directory),
                hint="export from a cache with one text for each record, or write the texts to files and export those",
            )
        raise DataError(
            f"The rows contain {found[0]:,} documents with {found[1]:,} tokens, but the manifest lists "
            f"{destination.num_documents:,} with {destination.num_tokens:,}",
            where=str(reader.directory), hint="run `vorox data verify` on the same configuration",
        )  # fmt: skip


@dataclass(slots=True)
class WholeDocument:
    """A document of a cache, reassembled from its pieces.

    Attributes:
        uri: The file it comes from.
        ordinal: Number of the record within the file.
        tokens: All its tokens, the end-of-text token included.
    """

    uri: str
    ordinal: int
    tokens: TokenArray
    _pieces: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, span: DocumentSpan, tokens: TokenArray) -> None:
        cast(Any, self.tokens)[span.document_token_offset : span.document_token_offset + span.length] = tokens
        self._pieces.append((span.document_token_offset, span.document_token_offset + span.length))

    def is_whole(self) -> bool:
        covered = 0
        for start, end in sorted(self._pieces):
            if start > covered:
                return False
            covered = max(covered, end)
        return covered == len(self.tokens)


def whole_documents(reader: CacheReader) -> Iterator[WholeDocument]:
    """Yield every document of a complete cache once, in the order of the source; one unit is in memory at a time.

    Raises:
        DataError: A chunk is missing or damaged, or a document lacks tokens or was erased.
    """
    starts = reader.unit_row_starts
    for unit in range(len(starts) - 1):
        yield from _documents_of_unit(reader, int(starts[unit]), int(starts[unit + 1]))


def _documents_of_unit(reader: CacheReader, first_row: int, end_row: int) -> list[WholeDocument]:
    documents: dict[tuple[int, int, int], WholeDocument] = {}  # transforms may make several of a record
    for first in range(first_row, end_row, _BLOCK_ROWS):
        rows = np.arange(first, min(first + _BLOCK_ROWS, end_row), dtype=np.int64)
        block = reader.read_rows(rows)
        for index, row in enumerate(rows.tolist()):
            begin = 0
            for span in reader.documents_of(row):
                key = (span.file_index, span.ordinal, span.copy)
                if span.is_erased:
                    raise DataError(
                        f"Document {span.uri}:{span.ordinal} was erased from the cache, so it cannot be exported",
                        where=str(reader.directory),
                        hint="remove it from the source, and set data.cache.directory to another directory",
                    )
                if key not in documents:
                    tokens = cast(TokenArray, np.empty(span.document_tokens, block.tokens_NC.dtype))
                    documents[key] = WholeDocument(span.uri, span.ordinal, tokens)
                documents[key].add(span, block.tokens_NC[index, begin : begin + span.length])
                begin += span.length
    ordered = [documents[key] for key in sorted(documents)]
    for document in ordered:
        if not document.is_whole():
            raise DataError(
                f"Record {document.ordinal + 1} of {document.uri} is incomplete in the cache",
                where=str(reader.directory), hint="run `vorox data verify`, then `vorox data build` with --repair",
            )  # fmt: skip
    return ordered
