"""Looking at a corpus: what is in it, how well it is packed, whether it is what it says.

A prepared ``Corpus`` goes in; samples with their origin, statistics and verdicts come out. Nothing is changed.
Invariant: every number is counted from the stored rows, not repeated from what the build reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.environment import usable_cores
from vorox.core.errors import DataError
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.report import BuildReport
from vorox.data.corpus import Corpus, CorpusCache
from vorox.data.documents import BadRecord, SourceFile
from vorox.data.prefetch import map_ordered
from vorox.data.rows import TokenArray
from vorox.data.storage import StoredFile, content_hash
from vorox.data.text.formats import read_record
from vorox.data.text.holdout import Split
from vorox.data.text.sources import Source
from vorox.data.token_stats import TokenStats, token_stats, warnings_of
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.apply import Applier
from vorox.data.transforms.registry import transforms_of
from vorox.data.xz_baseline import CompressorBaseline, xz_baseline

_BLOCK_ROWS = 1024
_TRACED_ROWS = 8
_SAMPLE_TOKENS = 48

VerifyProgress = Callable[[str, int, int], None]
"""Called with (``check`` and what is being checked, bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """A fragment of a document in a row.

    Attributes:
        uri: File that it comes from.
        ordinal: Number of the document's record within that file, from 0.
        byte_offset: First byte of the document's record in that file.
        byte_length: Bytes of the record.
        document_token_offset: Tokens of the document that lie before the fragment.
        num_tokens: Its tokens.
        text: They, decoded.
    """

    uri: str
    ordinal: int
    byte_offset: int
    byte_length: int
    document_token_offset: int
    num_tokens: int
    text: str


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
    """What one cache holds.

    Attributes:
        source: Name of the source.
        split: Which part of it.
        report: Sizes, as committed.
        rows_counted: Rows that the figures below were counted over, evenly spread.
        utilisation_fraction: Share of their positions that holds a token.
        tokens: What was counted of the tokens.
        sample: The beginning of one row's text, decoded.
        warnings: What a person should know before training on it.
    """

    source: str
    split: Split
    report: BuildReport
    rows_counted: int
    utilisation_fraction: float
    tokens: TokenStats
    sample: str
    warnings: tuple[str, ...]


def _spread(reader: CacheReader, count: int) -> npt.NDArray[np.int64]:
    """``count`` rows at even distances, all of them if there are fewer."""
    count = min(count, reader.num_rows)
    return (np.arange(count, dtype=np.int64) * 2 + 1) * reader.num_rows // (2 * count)


def _segments(reader: CacheReader, row: int) -> tuple[TokenArray, list[tuple[int, int]]]:
    """The tokens of a row, and where each segment lies in it."""
    block = reader.read_rows(np.array([row], dtype=np.int64))
    ends = np.cumsum(block.segment_lengths, dtype=np.int64)
    return block.tokens_NC[0], list(zip((ends - block.segment_lengths).tolist(), ends.tolist(), strict=True))


def peek(corpus: Corpus, num_rows: int = 3, *, split: Split = "train") -> list[SampleRow]:
    """Evenly spread rows of every source, decoded, with the documents that they come from."""
    samples: list[SampleRow] = []
    for cache in corpus.caches:
        reader = cache.reader
        for row in _spread(reader, num_rows).tolist() if cache.split == split else ():
            tokens, places = _segments(reader, row)
            documents = reader.documents_of(row)
            segments = tuple(
                SampleSegment(
                    document.uri,
                    document.ordinal,
                    document.byte_offset,
                    document.byte_length,
                    document.document_token_offset,
                    document.length,
                    corpus.tokenizer.decode(tokens[start:end]),
                )
                for document, (start, end) in zip(documents, places, strict=True)
            )
            padding = reader.row_tokens - (places[-1][1] if places else 0)
            samples.append(SampleRow(cache.source.config.name, cache.split, row, padding, segments))
    return samples


def stats(corpus: Corpus, *, max_rows: int = 1 << 17) -> list[CacheStatistics]:
    """Statistics of every cache, counted over at most ``max_rows`` evenly spread rows each."""
    return [_count(corpus.tokenizer, cache, max_rows) for cache in corpus.caches]


def _count(tokenizer: Tokenizer, cache: CorpusCache, max_rows: int) -> CacheStatistics:
    reader = cache.reader
    rows = _spread(reader, max_rows)
    counts = np.zeros(1 << (8 * reader.token_bytes) if reader.token_bytes == 2 else tokenizer.vocab_size, np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = reader.read_rows(rows[start : start + _BLOCK_ROWS])
        ends = np.append(np.int64(0), np.cumsum(block.segment_lengths, dtype=np.int64))
        real_N = ends[block.row_ptr[1:]] - ends[block.row_ptr[:-1]]
        kept = block.tokens_NC[np.arange(block.row_tokens)[None, :] < real_N[:, None]]
        counts += np.bincount(kept, minlength=len(counts))
    stored = int(counts.sum())
    figures = token_stats(counts, tokenizer)
    sample, _ = _segments(reader, int(_spread(reader, 1)[0]))
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


def verify(corpus: Corpus, *, on_progress: VerifyProgress | None = None) -> None:
    """Check everything that the corpus rests on.

    Every byte of every chunk against its hashes, every source file against its recorded content, and a few rows of
    each cache all the way back: their documents are read and tokenized again and must give the very tokens stored.

    Raises:
        DataError: Naming all that is damaged.
    """
    report = on_progress or _silent
    problems: list[DataError] = []

    def attempt(check: Callable[[], None]) -> None:
        try:
            check()
        except DataError as error:
            problems.append(error)

    for source in {cache.source.key: cache.source for cache in corpus.caches}.values():
        attempt(lambda source=source: _verify_files(source, report))
    for cache in corpus.caches:
        name = f"check {cache.source.config.name} {cache.split}"
        attempt(lambda cache=cache, name=name: cache.reader.verify(lambda done, total: report(name, done, total)))
        attempt(lambda cache=cache: _trace(corpus, cache))
    if len(problems) > 1:
        raise DataError(
            f"{len(problems)} checks failed: " + "; ".join(problem.what for problem in problems),
            where=", ".join(dict.fromkeys(problem.where for problem in problems)),
            hint="; ".join(dict.fromkeys(problem.hint for problem in problems)),
        )
    if problems:
        raise problems[0]


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _verify_files(source: Source, report: VerifyProgress) -> None:
    pairs = list(zip(source.stored, source.files, strict=True))
    total, done = sum(file.size_bytes for _, file in pairs), 0

    def content(pair: tuple[StoredFile, SourceFile]) -> str:
        stored, file = pair
        pinned = stored.version is not None  # by its store: what was listed just now is what it was
        return file.version if pinned else content_hash(stored)

    for (_, file), found in map_ordered(content, pairs, usable_cores()):
        if found != file.version:
            raise DataError(
                "the file's content is not what its recorded hash says", where=file.uri,
                hint="restore the file; or remove the folder `versions` of the cache root and build from it as it is",
            )  # fmt: skip
        done += file.size_bytes
        report(f"check {source.config.name} files", done, total)


def _trace(corpus: Corpus, cache: CorpusCache) -> None:
    tokenizer = corpus.tokenizer.without_fast_path()  # not the way by which the cache was built
    data, source, reader = corpus.config, cache.source, cache.reader
    transforms = transforms_of(data, source.config, cache.split, source.key)
    applier = Applier(transforms, data.transform_seed, reader.files, tokenizer)
    by_uri = {stored.uri: stored for stored in source.stored}
    for row in _spread(reader, _TRACED_ROWS).tolist():
        tokens, places = _segments(reader, row)
        for document, (start, end) in zip(reader.documents_of(row), places, strict=True):
            at = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
            record = read_record(source.config, by_uri[document.uri], *at)
            place = f"{document.uri}, record {document.ordinal:,} at byte {document.byte_offset:,}"
            if isinstance(record, BadRecord):
                raise DataError(f"row {row} comes from a record that is {record.reason}", where=place)
            first, stored = document.document_token_offset, tokens[start:end].tolist()
            made = applier.token_sequences(record, tokenizer.encode)
            ended = ([*ids.tolist(), tokenizer.end_of_text_id] for ids in made)
            if not any(ids[first : first + document.length] == stored for ids in ended):
                raise DataError(
                    f"row {row} of the cache does not hold the tokens of this document", where=place,
                    hint="the tokenizer's library, a transform or the file changed; build into another "
                    "data.cache.directory",
                )  # fmt: skip


def xz_bits_per_byte(corpus: Corpus) -> float | None:
    """Bits per byte of xz on the validation text: ``None`` when nothing is held out."""
    baseline = xz_of(corpus)
    return None if baseline is None else baseline.bits_per_byte


def xz_of(corpus: Corpus) -> CompressorBaseline | None:
    """What xz makes of the validation text of all sources, remembered under the root of the caches."""
    return xz_baseline(
        corpus.validation_text,
        unit_bytes=corpus.config.cache.unit_bytes,
        memory=corpus.root / "baselines",
    )
