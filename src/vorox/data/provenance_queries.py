"""Provenance queries: the documents behind a step (``where``), the steps of a document (``when``).

A run's plan and caches go in; no database, engine or network is needed. ``where`` returns documents with their files,
bytes and tokens; ``when`` returns steps, slots and epochs, with the state of each step (``core.attempts``). Nothing is
recorded per row: the plan is evaluated or inverted, and the chunk lists the documents of a row. Invariant: the two
queries are inverse; ``when`` finds every position whose ``where`` names the document.
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

__all__ = ["DocumentOrigin", "Occurrence", "RowOrigin", "RunDataIndex", "rows_at", "when", "when_text", "where"]

_MAX_NAMES = 8

State = Literal["kept", "skipped", "rolled_back", "open", "planned", "beyond"]
Granularity = Literal["byte", "record", "row group", "file"]
"""What a row is known to contain: the byte itself; tokens of its record or (Parquet) row group; tokens of the file."""

Positions = npt.NDArray[np.int64]
_Place = tuple[int, str, str, int, Granularity]
"""Position, file, source, row of the cache, and how precisely it is known."""


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """The tokens of one document in a row.

    Attributes:
        uri: File of the document.
        version: Identifier of the file's content.
        ordinal: Index of the record in the file, from 0.
        byte_offset: First byte of the record in the (decompressed) file.
        byte_length: Bytes of the record.
        first_token: Index, within the document, of the first token in the row.
        num_tokens: Number of the document's tokens in the row.
        document_tokens: Tokens of the whole document, including its end-of-text token.
        row_token: Index, within the row, of the first token.
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
    """The row in one slot of a step, with its documents.

    Attributes:
        step: The step, from 1.
        slot: Index in the global batch, from 0.
        position: Index in the run's data order, from 0.
        source: Name of the source.
        source_index: Index into the plan's sources.
        epoch: Epoch of the source, from 0.
        row: Row number in the source's cache.
        num_tokens: Number of tokens that are not padding.
        padding_tokens: Number of padding tokens.
        documents: The documents in row order.
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
    """One step that trains on tokens of a document.

    Attributes:
        uri: File of the document.
        source: Name of the source.
        step: The step, from 1.
        slot: Index in the global batch, from 0.
        position: Index in the run's data order, from 0.
        epoch: Epoch of the source, from 0.
        row: Row number in the source's cache.
        state: ``kept``; ``skipped`` (executed, but the update was not applied); ``rolled_back`` (executed by an
            attempt whose later steps were lost); ``open`` (executed, not in a checkpoint yet); ``planned`` (not
            executed); ``beyond`` (in the plan, after the end of the run).
        attempt: The attempt that executed the step; ``None`` if none did.
        granularity: How precisely the row is known to match the query.
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
        step: The step, from 1.
        slot: Only this slot of the global batch; ``None`` for all slots, in order.

    Raises:
        ConfigError: The step or slot does not exist.
        DataError: A chunk is missing or damaged.
    """
    positions = run_data.positions_of_step(step)
    if slot is not None and not 0 <= slot < len(positions):
        raise ConfigError(f"Slot {slot} does not exist: a step has slots 0 to {len(positions) - 1}", where="--slot")
    chosen = positions if slot is None else positions[slot : slot + 1]
    return tuple(rows_at(run_data, np.array(chosen, np.int64)))


def rows_at(run_data: RunDataIndex, positions: Positions) -> Iterator[RowOrigin]:
    """Yield the rows at some positions, in the order given, with their documents."""
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
    """Return the cache's row number of a row of a source, which may be a bucket of the cache."""
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
    """Return every step that trains on a file, or on one of its documents, by step and slot.

    A step executed by several attempts is listed once per attempt; a document in several rows or epochs, once for each.

    Args:
        run_data: The run.
        uri: The file, or a unique ending of its name.
        byte: Only the document whose record contains this byte; in Parquet, the documents of its row group. If a
            document spans several rows, only the rows that contain the byte, as far as tokens reveal it (see
            ``granularity``).
        ordinal: Only the document with this index in the file, from 0.

    Raises:
        ConfigError: No file matches, or several do.
        DataError: A chunk is missing or damaged.
    """
    places: list[_Place] = []
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
    return _occurrences(run_data, places)


def when_text(run_data: RunDataIndex, text_hashes: Sequence[int]) -> tuple[Occurrence, ...]:
    """Return every step that trains on documents with some texts, from any file, by step and slot.

    Args:
        run_data: The run.
        text_hashes: The xxh3-64 of the whole texts, as packed: after transforms and chat templates.
    """
    places: list[_Place] = []
    for index, reader in enumerate(run_data.readers):
        source = run_data.plan.sources[index].name
        for row in reader.rows_of_text(text_hashes).tolist():
            uris = {span.uri: None for span in reader.documents_of(row) if span.text_xxh3 in text_hashes}
            positions, cache_row = run_data.plan.positions_of(index, row, reader).tolist(), _cache_row(reader, row)
            places.extend((position, uri, source, cache_row, "record") for position in positions for uri in uris)
    return _occurrences(run_data, places)


def _occurrences(run_data: RunDataIndex, places: Sequence[_Place]) -> tuple[Occurrence, ...]:
    history = intervals(read_attempts(run_data.directory))
    lengths = attempt_notes(run_data.directory, "total_steps")
    total_steps = next((steps for steps in lengths if type(steps) is int), None)
    epochs = run_data.plan.locate(np.array([position for position, *_ in places], np.int64)).epoch
    found: list[Occurrence] = []
    for (position, full_uri, source, cache_row, known), epoch in zip(places, epochs.tolist(), strict=True):
        step, slot = run_data.step_and_slot(position)
        found += [
            Occurrence(full_uri, source, step, slot, position, epoch, cache_row, state, attempt, known)
            for state, attempt in _executions(history, step, total_steps, run_data.is_skipped(step))
        ]
    return tuple(sorted(found, key=lambda one: (one.position, one.attempt or 0)))


def _rows_with_byte(run_data: RunDataIndex, cache: CacheReader, file_index: int, byte: int) -> dict[int, Granularity]:
    """Return the rows of a cache that contain a byte of a file, and how precisely that is known.

    No row with the byte is omitted: if the byte cannot be traced to a token, all rows of its record are returned.
    """
    rows = cache.rows_of_document(file_index, byte).tolist()
    format_name = cache.recipe.source.get("format")
    if format_name is not None and has_row_groups(format_name):
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
    """Return the token of a document that contains a byte; ``None`` if the text is not the bytes of the record.

    The tokens are trusted only if they decode to the text that was packed and that text is as long as the record: true
    for txt, false if a record wraps its text (jsonl, csv) or a transform changed it.
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


def _executions(
    history: Sequence[StepInterval], step: int, total_steps: int | None, is_skipped: bool
) -> list[tuple[State, int | None]]:
    """Return the state of a step for each attempt that executed it."""
    done: list[tuple[State, int | None]] = [
        ("skipped" if is_skipped and part.outcome != "rolled_back" else part.outcome, part.attempt)
        for part in history
        if part.first_step <= step <= part.last_step
    ]
    if any(state != "rolled_back" for state, _ in done):
        return done
    return [*done, ("planned" if total_steps is None or step <= total_steps else "beyond", None)]


def _files(run_data: RunDataIndex, name: str) -> list[tuple[int, int]]:
    """Return (source index, file index) of every file that matches a name; all have the same URI.

    Raises:
        ConfigError: No file matches, or files with different URIs do.
    """
    found = matching_files(run_data, name)
    uris = sorted({uri for _, _, uri in found})
    if len(uris) == 1:
        return [(index, number) for index, number, _ in found]
    if uris:
        more = f" and {len(uris) - _MAX_NAMES:,} more" if len(uris) > _MAX_NAMES else ""
        raise ConfigError(
            f"{name} matches {len(uris):,} files: {', '.join(uris[:_MAX_NAMES])}{more}",
            where="--source", hint="give more of the name",
        )  # fmt: skip
    if is_held_out(run_data, name):
        return []
    listed = {uri for _, _, uri in _listed(run_data)}
    near = _nearest(name, sorted(listed))
    hint = f"did you mean {' or '.join(near)}?" if near else "`vorox data peek` shows the names of files"
    what = f"No file matches {name} among the {len(listed):,} files of this run"
    raise ConfigError(what, where="--source", hint=hint)


def matching_files(run_data: RunDataIndex, name: str) -> list[tuple[int, int, str]]:
    """Return source index, file index and URI of every file with a name, or else of those whose names end with it."""
    names, listed = {name, canonical_uri(name)} if "://" not in name else {name}, _listed(run_data)
    ends = "/" + name.lstrip("./").replace("\\", "/")
    return [entry for entry in listed if entry[2] in names] or [
        entry for entry in listed if ("/" + entry[2].replace("\\", "/").replace(":", "/")).endswith(ends)
    ]


def _listed(run_data: RunDataIndex) -> list[tuple[int, int, str]]:
    places = ((index, number) for index, reader in enumerate(run_data.readers) for number in range(len(reader.files)))
    return [(index, number, run_data.readers[index].files[number].uri) for index, number in places]


def is_held_out(run_data: RunDataIndex, name: str) -> bool:
    """Return whether a file, by the end of its name, is in ``data.validation.sources``, so no step trains on it."""
    names, ends = {name, canonical_uri(name)} if "://" not in name else {name}, "/" + name.lstrip("./")
    directories = [
        Path(path)
        for paths in attempt_notes(run_data.directory, "validation_caches")
        for path in cast("list[str]", paths)
    ]
    files = (file.uri for path in dict.fromkeys(directories) if path.is_dir() for file in CacheReader.open(path).files)
    return any(uri in names or uri.endswith(ends) for uri in files)


def _nearest(name: str, uris: Sequence[str]) -> list[str]:
    """Return up to three URIs whose file names, without suffixes, are similar to that of ``name``."""
    by_last: dict[str, str] = {}
    for uri in uris:
        by_last.setdefault(uri.rpartition("/")[2].partition(".")[0], uri)
    wanted = name.rpartition("/")[2].partition(".")[0]
    close = difflib.get_close_matches(wanted, list(by_last), n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, wanted, last).ratio() for last in close]
    return [by_last[last] for last, ratio in zip(close, likeness, strict=True) if ratio >= max(likeness) - 0.1]
