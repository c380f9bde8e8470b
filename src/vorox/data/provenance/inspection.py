"""Inspecting a corpus: sample rows, statistics and verification.

A prepared ``Corpus`` goes in; samples with their origin, statistics and errors come out. Nothing is changed. Invariant:
every number is counted from the stored rows, not copied from the build report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.platform.environment import usable_cores
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import Split
from vorox.data.cache.building.report import BuildReport
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.document_tokens import encode, framed
from vorox.data.chat.loss_mask import marked_text, target_ranges
from vorox.data.chat.template import rendered
from vorox.data.corpus.corpus import Corpus, CorpusCache
from vorox.data.documents import BadRecord, Document, DocumentSpan, Ranges, SourceFile
from vorox.data.images.reading import ImageFolder, load_images, placed
from vorox.data.images.tokens import FIRST_IMAGE_ID
from vorox.data.prefetch import map_ordered
from vorox.data.provenance.xz_baseline import CompressorBaseline, xz_baseline
from vorox.data.rows import RowBlock
from vorox.data.storage import StoredFile, content_hash, scheme_of
from vorox.data.text.formats import read_record
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source, found_elsewhere, on_disk
from vorox.data.tokenizers.token_stats import TokenStats, token_stats, warnings_of
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.apply import Applier
from vorox.data.transforms.registry import transforms_of

_BLOCK_ROWS = 1024
_TRACED_ROWS = 8
_SAMPLE_TOKENS = 48
_NAMED = 10

VerifyProgress = Callable[[str, int, int], None]
"""Callback for progress: (name of the check, bytes done, total bytes)."""


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """A fragment of a document in a row.

    Attributes:
        uri: The document's file.
        ordinal: Index of the document's record in the file.
        byte_offset: First byte of the record in the file.
        byte_length: Bytes of the record.
        document_token_offset: First token of the fragment within the document.
        num_tokens: Tokens of the fragment.
        text: The decoded tokens.
        targets: Ranges of its tokens that are trained on; ``None``: all but the first are.
        marked_text: The text with its targets between brackets; ``None`` like ``targets``.
    """

    uri: str
    ordinal: int
    byte_offset: int
    byte_length: int
    document_token_offset: int
    num_tokens: int
    text: str
    targets: Ranges | None = None
    marked_text: str | None = None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One packed row with the origin of each of its segments."""

    source: str
    split: Split
    row: int
    padding_tokens: int
    segments: tuple[SampleSegment, ...]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Statistics of one cache.

    Attributes:
        source: Name of the source.
        split: The split.
        report: Sizes, as committed.
        rows_counted: Number of evenly spaced rows that were counted.
        utilisation_fraction: Fraction of their tokens that are not padding.
        tokens: Statistics of the tokens.
        sample: The start of one row, decoded.
        warnings: Warnings for the user.
    """

    source: str
    split: Split
    report: BuildReport
    rows_counted: int
    utilisation_fraction: float
    tokens: TokenStats
    sample: str
    warnings: tuple[str, ...]


def _spaced_rows(reader: CacheReader, count: int) -> npt.NDArray[np.int64]:
    """Return ``count`` evenly spaced rows, or all rows if there are fewer."""
    count = min(count, reader.num_rows)
    return (np.arange(count, dtype=np.int64) * 2 + 1) * reader.num_rows // (2 * count)


def _segments(reader: CacheReader, row: int) -> tuple[RowBlock, list[tuple[int, int]]]:
    """Return a row, and the token range of each segment."""
    block = reader.read_rows(np.array([row], dtype=np.int64))
    ends = np.cumsum(block.segment_lengths, dtype=np.int64)
    return block, list(zip((ends - block.segment_lengths).tolist(), ends.tolist(), strict=True))


def peek(corpus: Corpus, num_rows: int = 3, *, split: Split = "train") -> list[SampleRow]:
    """Return evenly spaced rows of every source, decoded, with their documents."""
    samples: list[SampleRow] = []
    for cache in corpus.caches:
        reader = cache.reader
        for row in _spaced_rows(reader, num_rows).tolist() if cache.split == split else ():
            block, places = _segments(reader, row)
            documents = reader.documents_of(row)
            segments = tuple(
                _sample_segment(block, document, slice(start, end), corpus.tokenizer)
                for document, (start, end) in zip(documents, places, strict=True)
            )
            padding = reader.row_tokens - (places[-1][1] if places else 0)
            samples.append(SampleRow(cache.source.config.name, cache.split, row, padding, segments))
    return samples


def _sample_segment(block: RowBlock, document: DocumentSpan, part: slice, tokenizer: Tokenizer) -> SampleSegment:
    tokens = block.tokens_NC[0, part]
    sample = SampleSegment(
        document.uri,
        document.ordinal,
        document.byte_offset,
        document.byte_length,
        document.document_token_offset,
        document.length,
        "(erased from the cache)" if document.is_erased else tokenizer.decode(tokens),
    )
    if block.loss_mask_NC is None or document.is_erased:
        return sample
    targets = target_ranges(block.loss_mask_NC[0, part])
    return replace(sample, targets=targets, marked_text=marked_text(tokens, targets, tokenizer.decode))


def stats(corpus: Corpus, *, max_rows: int = 1 << 17) -> list[CacheStatistics]:
    """Return the statistics of every cache, counted over at most ``max_rows`` evenly spaced rows each."""
    return [_count(corpus.tokenizer, cache, max_rows) for cache in corpus.caches]


def _count(tokenizer: Tokenizer, cache: CorpusCache, max_rows: int) -> CacheStatistics:
    reader = cache.reader
    rows = _spaced_rows(reader, max_rows)
    counts = np.zeros(1 << (8 * reader.token_bytes) if reader.token_bytes == 2 else tokenizer.vocab_size, np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = reader.read_rows(rows[start : start + _BLOCK_ROWS])
        ends = np.append(np.int64(0), np.cumsum(block.segment_lengths, dtype=np.int64))
        real_N = ends[block.row_ptr[1:]] - ends[block.row_ptr[:-1]]
        kept = block.tokens_NC[np.arange(block.row_tokens)[None, :] < real_N[:, None]]
        kept = kept[kept < FIRST_IMAGE_ID]
        counts += np.bincount(kept, minlength=len(counts))
    stored = int(counts.sum())
    figures = token_stats(counts, tokenizer)
    sample = _segments(reader, int(_spaced_rows(reader, 1)[0]))[0].tokens_NC[0]
    return CacheStatistics(
        source=cache.source.config.name,
        split=cache.split,
        report=cache.report,
        rows_counted=len(rows),
        utilisation_fraction=stored / (len(rows) * reader.row_tokens),
        tokens=figures,
        sample=tokenizer.decode(sample[:_SAMPLE_TOKENS]),
        warnings=tuple(warnings_of(figures, tokenizer, stored)),
    )


def verify(corpus: Corpus, *, on_progress: VerifyProgress | None = None) -> list[Note]:
    """Verify the caches and the source files of a corpus; return notes on files that were found at other places.

    Three checks: every byte of every chunk against its hashes; every source file against its recorded hash; and a few
    rows of each cache end to end, by reading and tokenizing their documents again.

    Raises:
        DataError: A check failed; the message names everything that is damaged.
    """
    report = on_progress or _silent
    problems: list[DataError] = []
    notes: list[Note] = []
    verified: dict[tuple[str, tuple[SourceFile, ...]], Source | None] = {}

    def holds(check: Callable[[], None]) -> bool:
        try:
            check()
        except DataError as error:
            problems.append(error)
            return False
        return True

    def verify_files(source: Source) -> Source | None:
        try:
            found = _verify_files(on_disk(source), report)
        except DataError as error:
            problems.append(error)
            return None
        pairs = zip(source.files, found.stored, strict=True)
        moved = [f"{file.uri} (now {stored.uri})" for file, stored in pairs if stored.uri != file.uri]
        if moved:
            text = f"{pluralize(len(moved), 'file')} of source {source.config.name!r} moved: {_listed(moved)}"
            notes.append(Note("moved_files", text))
        return found

    for source in (cache.source for cache in corpus.caches):
        if (source.key, source.files) not in verified:
            verified[source.key, source.files] = verify_files(source)
    are_caches_intact = True
    for cache in corpus.caches:
        name = f"check {cache.source.config.name} {cache.split}"
        check = partial(cache.reader.verify, lambda done, total, name=name: report(name, done, total))
        are_caches_intact &= holds(check)
        found = verified[cache.source.key, cache.source.files]
        if found is not None:  # rows of a changed file would name it again
            are_caches_intact &= holds(partial(_verify_rows, corpus, replace(cache, source=found)))
    problems = list({(problem.what, problem.where): problem for problem in problems}.values())
    if len(problems) > 1:
        raise DataError(
            f"{len(problems)} checks failed: " + "; ".join(problem.what for problem in problems),
            where=", ".join(dict.fromkeys(problem.where for problem in problems)),
            hint="; ".join(dict.fromkeys(problem.hint for problem in problems)),
            saved="all caches, which are intact" if are_caches_intact else "",
        )
    if problems:
        problems[0].saved = problems[0].saved or ("all caches, which are intact" if are_caches_intact else "")
        raise problems[0]
    return notes


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _verify_files(source: Source, report: VerifyProgress) -> Source:
    """Compare the files of a source with their recorded hashes; return it with those that have moved where they are.

    Raises:
        DataError: The content of some is nowhere in the locations of the source; the message names them all.
    """
    pairs = list(zip(source.stored, source.files, strict=True))
    total, done = sum(file.size_bytes for _, file in pairs), 0

    def content(pair: tuple[StoredFile, SourceFile]) -> str | DataError:
        stored, file = pair
        is_pinned = stored.version is not None  # the store guarantees the content of a version
        try:
            return file.version if is_pinned else content_hash(stored)
        except DataError as error:
            return error

    changed: dict[int, str | DataError] = {}
    for index, ((_, file), found) in enumerate(map_ordered(content, pairs, usable_cores())):
        if found != file.version:
            changed[index] = found
        done += file.size_bytes
        report(f"check {source.config.name} files", done, total)
    if changed and not source.is_listed:
        source = found_elsewhere(source, list(changed))
        changed = {index: found for index, found in changed.items() if source.stored[index] == pairs[index][0]}
    if not changed:
        return source
    lost = [source.files[index].uri for index, found in changed.items() if isinstance(found, DataError)]
    other = [source.files[index].uri for index, found in changed.items() if not isinstance(found, DataError)]
    what = [f"{pluralize(len(lost), 'file')} cannot be read"] if lost else []
    if len(other) == 1:
        what.append("The file's content does not match its recorded hash")
    elif other:
        what.append(f"The content of {len(other):,} files does not match their recorded hashes")
    hint = "restore the file, or remove the folder `versions` of the cache root to build from the new file"
    if not source.is_listed:
        hint = (
            "restore what the run has read; its rows are in its caches, which are rebuilt from these files if they are "
            "lost. To train on the text as it is now, start a new run: vorox train CONFIG --resume never"
        )
    causes = [found for found in changed.values() if isinstance(found, DataError)]
    if causes and (source.is_listed or scheme_of(causes[0].where) is not None):
        hint = causes[0].hint or hint
    raise DataError("; ".join(what), where=_listed([*lost, *other]), hint=hint)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _verify_rows(corpus: Corpus, cache: CorpusCache) -> None:
    tokenizer = corpus.tokenizer.without_fast_path()  # independent of how the cache was built
    data, source, reader = corpus.config, cache.source, cache.reader
    transforms = transforms_of(data, source.config, cache.split, source.key)
    applier = Applier(transforms, data.transform_seed, reader.files, tokenizer)
    by_uri = {file.uri: stored for file, stored in zip(source.files, source.stored, strict=True)}
    paths = {file.uri: path for file, path in zip(source.files, source.relative_paths, strict=True)}
    for row in _spaced_rows(reader, _TRACED_ROWS).tolist():
        block, places = _segments(reader, row)
        tokens = block.tokens_NC[0]
        for document, (start, end) in zip(reader.documents_of(row), places, strict=True):
            if document.is_erased:
                continue
            at = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
            folder = ImageFolder.of(by_uri[document.uri].uri, paths[document.uri])
            record = placed(
                rendered(read_record(source.config, by_uri[document.uri], *at), source.chat_template), folder
            )
            place = f"{document.uri}, record {document.ordinal:,} at byte {document.byte_offset:,}"
            if isinstance(record, BadRecord):
                raise DataError(f"The record of row {row} is bad: {record.reason}", where=place)
            first, stored = document.document_token_offset, tokens[start:end].tolist()
            images = reader.recipe.images
            if isinstance(record, Document) and record.images and images is not None:
                record = load_images(record, images)
            encode_one = partial(encode, files=reader.files, encoder=tokenizer, images=images)
            made = applier.token_sequences(record, lambda made, encode=encode_one: encode(made)[1])
            whole = (framed(ids, reader.recipe).tolist() for ids in made)
            if not any(ids[first : first + document.length] == stored for ids in whole):
                raise DataError(
                    f"Row {row} of the cache does not match the tokens of this document", where=place,
                    hint="the tokenizer library, a transform or the file has changed; build into a new "
                    "data.cache.directory",
                )  # fmt: skip


def xz_bits_per_byte(corpus: Corpus) -> float | None:
    """Return xz's bits per byte on the validation text; ``None`` if nothing is held out."""
    baseline = validation_xz_baseline(corpus)
    return None if baseline is None else baseline.bits_per_byte


def validation_xz_baseline(corpus: Corpus) -> CompressorBaseline | None:
    """Return the xz baseline of the validation text of all sources; results are stored under the cache root.

    ``None`` for conversations: the loss covers their answers only, so it cannot be compared.
    """
    if any(source.config.chat_fields for source in corpus.validation_text):
        return None
    return xz_baseline(
        corpus.validation_text,
        unit_bytes=corpus.config.cache.unit_bytes,
        results=corpus.root / "baselines",
    )
