"""The token data of a corpus for other trainers, with a manifest, all at once or not at all.

A prepared corpus goes in; a directory with the files of the form asked for comes out, with the tokenizer beside them
and ``MANIFEST.json``, which names every file with its hash and says what it was made of. Tokens are read through the
cache reader, so every block is verified. Invariants: documents stay whole and in the order of their source, their
number and that of their tokens are those of the cache, and the same cache gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vorox.core.atomic import make_directory
from vorox.core.errors import ConfigError, DataError
from vorox.core.staged_directory import StagedDirectory
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus import Corpus
from vorox.data.rows import TokenArray
from vorox.data.text.holdout import SPLITS, Split
from vorox.data.transfer.token_formats import SHARD_TOKENS, WRITERS, Destination, Form, WrittenFile
from vorox.data.transfer.whole_documents import whole_documents

ExportProgress = Callable[[str, int, int], None]
"""Called with (what is written, tokens done, tokens)."""

_PARTS: dict[Split, str] = {"train": "train", "validation": "val"}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported.

    Attributes:
        directory: Where it is.
        files: All files with tokens, in the order of the sources.
        documents: Documents in them.
        tokens: Tokens in them, ends of text included.
    """

    directory: Path
    files: tuple[WrittenFile, ...]
    documents: int
    tokens: int


def export(
    corpus: Corpus,
    to: Form,
    output: Path,
    *,
    splits: Sequence[Split] = SPLITS,
    shard_tokens: int | None = None,
    on_progress: ExportProgress | None = None,
) -> ExportReport:
    """Write the tokens of a corpus in the form of another trainer.

    Args:
        corpus: Its caches are complete.
        to: ``bin``, ``mds`` or ``npy``.
        output: A directory that does not exist yet.
        splits: Which parts.
        shard_tokens: The most tokens of a shard; None for what is usual. ``npy`` has no shards.
        on_progress: Told while tokens are written.

    Raises:
        ConfigError: The directory exists, or the form has no shards.
        DataError: A cache is damaged, nothing is held out, or the disk does not take the files.
    """
    if to == "npy" and shard_tokens is not None:
        raise ConfigError("npy has no shards", where="--shard-tokens", hint="leave it out, or export to bin or mds")
    output = output.expanduser().absolute()
    if output.exists():
        raise ConfigError(
            "the directory is there already", where=str(output), hint="name one that is not, or remove it"
        )
    caches = list(_caches(corpus, splits))
    if not caches:
        raise DataError("nothing is held out, so there is no validation text to export", where="data.validation")
    try:
        make_directory(output.parent)
        with StagedDirectory(output) as directory:
            digests = [reader.digest for _, _, reader in caches]  # refuses what is not complete, before all work
            parts = [
                _export_cache(directory, to, shard_tokens, *cache, digest, on_progress or _silent)
                for cache, digest in zip(caches, digests, strict=True)
            ]
            for file_name, content in corpus.tokenizer.files().items():
                directory.write(f"tokenizer/{file_name}", content)
            directory.commit(_manifest(corpus, to, [content for _, content in parts]))
    except OSError as error:
        raise DataError(
            f"the export cannot be written: {error.strerror or error}", where=str(error.filename or output),
            hint="make room and give write permission, then run it again", saved="nothing was left behind",
        ) from error  # fmt: skip
    files = tuple(file for written, _ in parts for file in written)
    return ExportReport(output, files, sum(file.documents for file in files), sum(file.tokens for file in files))


def _export_cache(
    directory: StagedDirectory, to: Form, shard_tokens: int | None, name: str, split: Split, reader: CacheReader,
    digest: str, on_progress: ExportProgress,
) -> tuple[list[WrittenFile], dict[str, object]]:  # fmt: skip
    """The files of one cache, and what the manifest says of them."""
    destination = _destination(directory, name, split, reader, to, shard_tokens)
    written = WRITERS[to](_tokens(reader, destination, on_progress), destination)
    _check_complete(written, destination, reader)
    content: dict[str, object] = {
        "source": name,
        "split": split,
        "cache": digest,
        "documents": destination.num_documents,
        "tokens": destination.num_tokens,
        "files": [asdict(file) for file in written],
    }
    return written, content


def _manifest(corpus: Corpus, to: Form, contents: list[dict[str, object]]) -> dict[str, object]:
    return {
        "kind": "vorox-export/1",
        "form": to,
        "dtype": str(corpus.tokenizer.dtype.__name__),
        "tokenizer": corpus.tokenizer.fingerprint,
        "vocab_size": corpus.tokenizer.vocab_size,
        "end_of_text_id": corpus.tokenizer.end_of_text_id,
        "contents": contents,
    }


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _caches(corpus: Corpus, splits: Sequence[Split]) -> Iterator[tuple[str, Split, CacheReader]]:
    for cache in corpus.caches:
        if cache.split in splits:
            yield cache.source.config.name, cache.split, cache.reader


def _destination(
    directory: StagedDirectory, name: str, split: Split, reader: CacheReader, to: Form, shard_tokens: int | None
) -> Destination:
    units = reader.manifest.units
    return Destination(
        directory=directory,
        source=name,
        part=_PARTS[split],
        dtype=f"uint{8 * reader.token_bytes}",
        num_tokens=int(units["tokens"].sum(dtype="int64")),
        num_documents=int(units["documents"].sum(dtype="int64")),
        shard_tokens=shard_tokens or SHARD_TOKENS.get(to, 1),
    )


def _tokens(reader: CacheReader, to: Destination, report: ExportProgress) -> Iterator[TokenArray]:
    done = 0
    for document in whole_documents(reader):
        yield document.tokens
        done += len(document.tokens)
        report(f"export {to.source} {to.part}", done, to.num_tokens)


def _check_complete(written: Sequence[WrittenFile], to: Destination, reader: CacheReader) -> None:
    found = (sum(file.documents for file in written), sum(file.tokens for file in written))
    if found != (to.num_documents, to.num_tokens):
        raise DataError(
            f"the rows hold {found[0]:,} documents of {found[1]:,} tokens, the manifest says {to.num_documents:,} of "
            f"{to.num_tokens:,}",
            where=str(reader.directory), hint="run `vorox data verify` on the same configuration",
        )  # fmt: skip
