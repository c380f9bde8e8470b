"""Provenance queries: the documents behind a step's rows (``where``), and the steps that saw a document (``when``).

A run's plan and caches go in, without a database, an engine or a network. Documents with their files, bytes and tokens
come out for the rows of a step; steps, slots and epochs for the bytes of a file, with the state of each step
(``core.attempts``). Nothing was recorded per row: the plan is evaluated or inverted, and the chunk says whose tokens a
row holds. Invariant: the two are inverse; ``when`` finds every position whose ``where`` names the document.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.attempts import StepInterval, intervals, read_attempts
from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.data.cache.reader import CacheReader
from vorox.data.difficulty_buckets import SourceReader, cache_of
from vorox.data.documents import DocumentSpan
from vorox.data.run_data_index import RunDataIndex, attempt_notes
from vorox.data.storage import canonical_uri
from vorox.data.text.formats import has_row_groups
from vorox.data.tokenizers.loading import load

__all__ = ["DocumentOrigin", "Occurrence", "RowOrigin", "RunDataIndex", "rows_at", "when", "where"]

_MAX_NAMES = 8

State = Literal["kept", "rolled_back", "open", "planned", "beyond"]
Granularity = Literal["byte", "record", "row group", "file"]
"""What a row is known to hold: the byte; tokens of its record, or in Parquet of its row group; tokens of the file."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """A stretch of one document's tokens in a row.

    Attributes:
        uri: File of the document.
        version: What pins the file's content.
        ordinal: Number of the record within the file, from 0.
        byte_offset: First byte of the record in the (decompressed) file.
        byte_length: Bytes of the record.
        first_token: First of the document's tokens that stands here.
        num_tokens: How many of them stand here.
        document_tokens: Tokens of the whole document, its end of text included.
        row_token: Where in the row they begin.
        text_xxh3: xxh3-64 of the whole document's text.
    """

    uri: str
    version: str
    ordinal: int
    byte_offset: int
    byte_length: int
    first_token: int
    num_tokens: int
    document_tokens: int
    row_token: int
    text_xxh3: int


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """What one slot of a step was trained on.

    Attributes:
        step: From 1.
        slot: Place in the global batch, from 0.
        position: Place in the run's data, from 0.
        source: Name of the source.
        source_index: The source, in the order of the plan's start.
        epoch: Pass over the source, from 0.
        row: Row of the source's cache.
        num_tokens: Tokens of documents in the row; the rest is padding.
        padding_tokens: Positions of padding.
        documents: In row order.
    """

    step: int
    slot: int
    position: int
    source: str
    source_index: int
    epoch: int
    row: int
    num_tokens: int
    padding_tokens: int
    documents: tuple[DocumentOrigin, ...]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that tokens of a document were, or will be, trained on.

    Attributes:
        uri: File of the document.
        source: Name of the source.
        step: From 1.
        slot: Place in the global batch, from 0.
        position: Place in the run's data.
        epoch: Pass over the source, from 0.
        row: Row of the source's cache.
        state: ``kept``, ``rolled_back`` (done by an attempt whose work was lost from there on), ``open`` (done, and in
            no checkpoint yet), ``planned`` (not done) or ``beyond`` (the plan covers it, the run ends before it).
        attempt: Which attempt did it; ``None`` where none did.
        granularity: How closely the row is known to match the query.
    """

    uri: str
    source: str
    step: int
    slot: int
    position: int
    epoch: int
    row: int
    state: State
    attempt: int | None
    granularity: Granularity


def where(run_data: RunDataIndex, step: int, slot: int | None = None) -> tuple[RowOrigin, ...]:
    """Return the documents behind the rows of a step.

    Args:
        run_data: The run.
        step: From 1.
        slot: Only this slot of the global batch; ``None`` for all, in order.

    Raises:
        ConfigError: There is no such step or slot.
        DataError: A chunk is missing or damaged.
    """
    positions = run_data.positions_of_step(step)
    if slot is not None and not 0 <= slot < len(positions):
        raise ConfigError(f"there is no slot {slot}: a step has the slots 0 to {len(positions) - 1}", where="--slot")
    chosen = positions if slot is None else positions[slot : slot + 1]
    return tuple(rows_at(run_data, np.array(chosen, np.int64)))


def rows_at(run_data: RunDataIndex, positions: Positions) -> Iterator[RowOrigin]:
    """Yield the rows at some positions, with their documents, in the order given."""
    found = run_data.plan.locate(positions)
    for number, position in enumerate(positions.tolist()):
        index = int(found.source_index[number])
        reader = run_data.readers[index]
        row = int(found.row[number]) + int(reader.unit_row_starts[found.unit_start[number]])
        documents = _documents(reader, row)
        num_tokens = sum(document.num_tokens for document in documents)
        step, slot = run_data.step_and_slot(position)
        yield RowOrigin(
            step=step,
            slot=slot,
            position=position,
            source=run_data.plan.sources[index].name,
            source_index=index,
            epoch=int(found.epoch[number]),
            row=_cache_row(reader, row),
            num_tokens=num_tokens,
            padding_tokens=reader.row_tokens - num_tokens,
            documents=documents,
        )


def _cache_row(reader: SourceReader, row: int) -> int:
    """Return the cache's number of a row of a source, which may be a bucket of the cache."""
    return row if isinstance(reader, CacheReader) else int(reader.base_rows(np.array([row]))[0])


def _documents(reader: SourceReader, row: int) -> tuple[DocumentOrigin, ...]:
    documents: list[DocumentOrigin] = []
    row_token = 0
    for span in reader.documents_of(row):
        documents.append(
            DocumentOrigin(
                uri=span.uri,
                version=reader.files[span.file_index].version,
                ordinal=span.ordinal,
                byte_offset=span.byte_offset,
                byte_length=span.byte_length,
                first_token=span.document_token_offset,
                num_tokens=span.length,
                document_tokens=span.document_tokens,
                row_token=row_token,
                text_xxh3=span.text_xxh3,
            )
        )
        row_token += span.length
    return tuple(documents)


def when(
    run_data: RunDataIndex, uri: str, byte: int | None = None, *, ordinal: int | None = None
) -> tuple[Occurrence, ...]:
    """Return every time that a file, or one of its documents, was or will be trained on, by step and slot.

    A step that several attempts did is there once for each; a document that was packed into several rows, or read in
    several epochs, once for each of them.

    Args:
        run_data: The run.
        uri: The file, or enough of the end of its name to identify it.
        byte: Only the document whose record has this byte; in Parquet, the documents of its row group. Of a document
            in several rows only those that hold the byte, where its tokens show that (see ``granularity``).
        ordinal: Only the document with this number within the file, from 0.

    Raises:
        ConfigError: There is no such file, or there are several.
        DataError: A chunk is missing or damaged.
    """
    history = intervals(read_attempts(run_data.directory))
    lengths = attempt_notes(run_data.directory, "total_steps")
    total_steps = next((steps for steps in lengths if type(steps) is int), None)
    places: list[tuple[int, str, str, int, Granularity]] = []
    for index, file_index in _files(run_data, uri):
        reader, source = run_data.readers[index], run_data.plan.sources[index].name
        rows = [(row, _cache_row(reader, row)) for row in reader.rows_of_document(file_index, byte, ordinal).tolist()]
        closest: Granularity = "file" if ordinal is None else "record"
        granularity: dict[int, Granularity] = dict.fromkeys([cache_row for _, cache_row in rows], closest)
        if byte is not None and ordinal is None:
            granularity = _rows_with_byte(run_data, cache_of(reader), file_index, byte)
        for row, cache_row in rows:
            if cache_row in granularity:
                positions, file = run_data.plan.positions_of(index, row, reader), reader.files[file_index]
                known = granularity[cache_row]
                places.extend((position, file.uri, source, cache_row, known) for position in positions.tolist())
    epochs = run_data.plan.locate(np.array([position for position, *_ in places], np.int64)).epoch
    found: list[Occurrence] = []
    for (position, full_uri, source, cache_row, known), epoch in zip(places, epochs.tolist(), strict=True):
        step, slot = run_data.step_and_slot(position)
        found += [
            Occurrence(full_uri, source, step, slot, position, epoch, cache_row, state, attempt, known)
            for state, attempt in _executions(history, step, total_steps)
        ]
    return tuple(sorted(found, key=lambda one: (one.position, one.attempt or 0)))


def _rows_with_byte(run_data: RunDataIndex, cache: CacheReader, file_index: int, byte: int) -> dict[int, Granularity]:
    """Return the rows of a cache that hold a byte of a file, and how closely that is known.

    No row that holds the byte is left out: where it cannot be traced to a token, all rows of its record are returned.
    """
    rows = cache.rows_of_document(file_index, byte).tolist()
    if has_row_groups(cache.recipe.source.get("format")):
        return dict.fromkeys(rows, "row group")
    pieces: list[tuple[int, int, DocumentSpan]] = []
    for row in rows:
        row_token = 0
        for span in cache.documents_of(row):
            if span.file_index == file_index and span.byte_offset <= byte < span.byte_offset + span.byte_length:
                pieces.append((row, row_token, span))
            row_token += span.length
    if any(span.length < span.document_tokens for _, _, span in pieces):
        token = _token_with_byte(run_data, cache, pieces, byte)
        if token is None:
            return dict.fromkeys([row for row, _, _ in pieces], "record")
        pieces = [(row, at, span) for row, at, span in pieces if 0 <= token - span.document_token_offset < span.length]
    return dict.fromkeys([row for row, _, _ in pieces], "byte")


def _token_with_byte(
    run_data: RunDataIndex, cache: CacheReader, pieces: Sequence[tuple[int, int, DocumentSpan]], byte: int
) -> int | None:
    """Return the token of a document that holds a byte; ``None`` where its text is not the bytes of its record.

    The tokens of all pieces are believed only if they decode to the text that was packed, and that is as long as the
    record: true for txt; false where a record wraps its text (jsonl, csv) or a transform changed it.
    """
    document = pieces[0][2]
    ids = np.full(document.document_tokens, -1, np.int64)
    for row, row_token, span in pieces:
        tokens = cache.read_rows(np.array([row], np.int64)).tokens_NC[0]
        if (span.ordinal, span.document_tokens) == (document.ordinal, document.document_tokens):
            first = span.document_token_offset
            ids[first : first + span.length] = tokens[row_token : row_token + span.length]
        else:
            return None
    try:
        tokenizer = load(RunLayout(run_data.directory).tokenizer)
    except DataError:
        return None
    if ids.min() < 0 or not tokenizer.lossless:
        return None
    text = tokenizer.decode(ids[:-1]).encode("utf-8", "replace")
    if len(text) != document.byte_length or xxhash.xxh3_64_intdigest(text) != document.text_xxh3:
        return None
    ends = np.cumsum(tokenizer.token_byte_lengths()[ids])
    return int(np.searchsorted(ends, byte - document.byte_offset, side="right"))


def _executions(history: Sequence[StepInterval], step: int, total_steps: int | None) -> list[tuple[State, int | None]]:
    """Return the state of a step, for each attempt that did it."""
    done: list[tuple[State, int | None]] = [
        (part.outcome, part.attempt) for part in history if part.first_step <= step <= part.last_step
    ]
    if any(state != "rolled_back" for state, _ in done):
        return done
    return [*done, ("planned" if total_steps is None or step <= total_steps else "beyond", None)]


def _files(run_data: RunDataIndex, name: str) -> list[tuple[int, int]]:
    """Return (source, file) of every file that a name matches: all have one URI.

    Raises:
        ConfigError: No file matches, or files of several URIs do.
    """
    names = {name, canonical_uri(name)} if "://" not in name else {name}
    listed = [
        (index, number, file.uri)
        for index, reader in enumerate(run_data.readers)
        for number, file in enumerate(reader.files)
    ]  # fmt: skip
    found = [entry for entry in listed if entry[2] in names]
    if not found:
        ends = "/" + name.lstrip("./").replace("\\", "/")
        found = [entry for entry in listed if ("/" + entry[2].replace("\\", "/").replace(":", "/")).endswith(ends)]
    uris = sorted({uri for _, _, uri in found})
    if len(uris) == 1:
        return [(index, number) for index, number, _ in found]
    if uris:
        more = f" and {len(uris) - _MAX_NAMES:,} more" if len(uris) > _MAX_NAMES else ""
        raise ConfigError(
            f"{name} is the end of {len(uris):,} names: {', '.join(uris[:_MAX_NAMES])}{more}",
            where="--source", hint="write more of the name",
        )  # fmt: skip
    if is_held_out(run_data, name):
        return []
    near = _nearest(name, sorted({uri for _, _, uri in listed}))
    hint = f"did you mean {' or '.join(near)}?" if near else "`vorox data peek` shows names of files"
    raise ConfigError(f"no file {name} in the {len(listed):,} files that this run reads", where="--source", hint=hint)


def is_held_out(run_data: RunDataIndex, name: str) -> bool:
    """Return whether a file, by the end of its name, is one of ``data.validation.sources``, which no step trains on."""
    names, ends = {name, canonical_uri(name)} if "://" not in name else {name}, "/" + name.lstrip("./")
    directories = [
        Path(path)
        for paths in attempt_notes(run_data.directory, "validation_caches")
        for path in cast("list[str]", paths)
    ]
    files = (file.uri for path in dict.fromkeys(directories) if path.is_dir() for file in CacheReader.open(path).files)
    return any(uri in names or uri.endswith(ends) for uri in files)


def _nearest(name: str, uris: Sequence[str]) -> list[str]:
    """Return up to three URIs whose file names, without their suffixes, resemble that of ``name``."""
    by_last: dict[str, str] = {}
    for uri in uris:
        by_last.setdefault(uri.rpartition("/")[2].partition(".")[0], uri)
    wanted = name.rpartition("/")[2].partition(".")[0]
    close = difflib.get_close_matches(wanted, list(by_last), n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, wanted, last).ratio() for last in close]
    return [by_last[last] for last, ratio in zip(close, likeness, strict=True) if ratio >= max(likeness) - 0.1]
